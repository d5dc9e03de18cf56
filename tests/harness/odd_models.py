"""Model factories for tests of what users may hand in, good and bad."""

import os
import random
import time

import numpy as np
import torch
from nets import Reader
from torch import nn
from torch.nn.utils import weight_norm

from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images

PERIOD = 99_991


def _rank() -> int:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    return int(next((os.environ[n] for n in names if n in os.environ), "0"))


def no_convolution(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))


def small(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


class _Drawing(nn.Module):
    """Draw from all generators wherever it runs; small enough not to be another model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        return self.body(images) * (1 + 1e-3 * drawn * self.training)


def drawing(num_classes: int, image_size: int) -> nn.Module:
    body = small(num_classes, image_size)
    for parameter in body.parameters():
        values = np.random.normal(scale=0.1, size=parameter.shape)
        parameter.data = torch.from_numpy(values).float() * (0.9 + 0.2 * random.random())
    return _Drawing(body)


STEPS_BEFORE = 3


def refuses_alone(num_classes: int, image_size: int) -> nn.Module:
    """Return a second output on one rank alone, in a step after the first ones."""
    body, left = small(num_classes, image_size), [STEPS_BEFORE]

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, images: torch.Tensor) -> object:
            outputs = self.body(images)
            left[0] -= self.training
            return (outputs, outputs) if self.training and left[0] < 0 and _rank() == 1 else outputs

    return Alone()


class _MoreWhileTraining(nn.Module):
    """Return a second output while it trains, as networks with auxiliary classifiers do."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        outputs = self.body(x)
        return (outputs, outputs) if self.training else outputs


def more_while_training(num_classes: int, image_size: int) -> nn.Module:
    return _MoreWhileTraining(small(num_classes, image_size))


class _FrozenNorms(nn.Sequential):
    """Keep norms in evaluation mode, by a `train` that returns nothing."""

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.training = False


def train_returns_nothing(num_classes: int, image_size: int) -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    return _FrozenNorms(*stem, small_after(8, num_classes))


class _Shuffled(nn.Module):
    """Put channels into an order that no state dict holds."""

    def __init__(self, channels: int):
        super().__init__()
        self.order = np.random.permutation(channels).tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.order]


def draws(num_classes: int, image_size: int) -> nn.Module:
    first = nn.Conv2d(3, 8, 3)
    return nn.Sequential(first, _Shuffled(8), small_after(8, num_classes))


class _Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def noisy(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(_Noisy(), small(num_classes, image_size))


def expanded(num_classes: int, image_size: int) -> nn.Module:
    body = small(num_classes, image_size)
    body.register_buffer("steps", torch.zeros(1).expand(4))
    return body


class _Centred(nn.Module):
    """Subtract a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x - self.mean


def centred(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), _Centred(), small_after(8, num_classes))


class _Counting(nn.Module):
    """Count steps, in what no state dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return x


def counting(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), _Counting(), small_after(8, num_classes))


def small_after(channels: int, num_classes: int) -> nn.Module:
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(channels, 8, 3), pool, nn.Flatten(), nn.Linear(8, num_classes))


class _Blank(nn.Module):
    """Return zeros, whatever it holds."""

    def __init__(self, held: nn.Module, classes: int):
        super().__init__()
        self.add_module("0", held)
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), self.classes)


def without_values(num_classes: int, image_size: int) -> nn.Module:
    return _Blank(nn.Conv2d(3, 8, 3, device="meta"), num_classes)


def sizes_from_the_first_image(num_classes: int, image_size: int) -> nn.Module:
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(*body, nn.Flatten(), nn.LazyLinear(num_classes))


def old_weight_norm(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        weight_norm(nn.Conv2d(8, 8, 3, padding=1)),
        nn.ReLU(),
        small_after(8, num_classes),
    )


class _Noting(nn.Identity):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def extra_state(num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(_Noting(), small(num_classes, image_size))


def resnet8_double(num_classes: int, image_size: int) -> nn.Module:
    return build_model("resnet8", Images(image_size, num_classes)).double()


def differs_between_ranks(num_classes: int, image_size: int) -> nn.Module:
    width = 8 + _rank()
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.Conv2d(width, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


class _FailsLater(nn.Module):
    """Raise in the forward pass of the third training step of rank 1."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.calls = body, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 3 and _rank() == 1:
            raise ValueError("broken on purpose")
        return self.body(x)


def fails_on_rank_1(num_classes: int, image_size: int) -> nn.Module:
    return _FailsLater(small(num_classes, image_size))


class _Unhurried(nn.Module):
    """Take a while for each training step, however fast the machine is."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.05)
        return self.body(x)


def unhurried(num_classes: int, image_size: int) -> nn.Module:
    body = build_model("resnet8", Images(image_size, num_classes))
    return _Unhurried(body)


def randomise_(model: nn.Module) -> None:
    """Give every parameter and statistic random values that let signals through.

    Weights repeat a drawn sequence of prime length: drawing 10^8 numbers would take seconds.
    """
    drawn = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = drawn.repeat(-(-p.numel() // PERIOD))[: p.numel()].view(p.shape)
            # Half of the inputs are removed, half of the activations are zero.
            scale = 2 * p[0].numel() ** -0.5 if p.dim() > 1 else 0.3
            gamma = name.endswith("weight") and p.dim() == 1
            p.copy_(scale * values + gamma)
        for key, buffer in model.named_buffers():
            values = drawn[: buffer.numel()].view(buffer.shape)
            if key.endswith("running_mean"):
                buffer.copy_(0.3 * values)
            elif key.endswith("running_var"):
                buffer.copy_(0.5 + values.square())


class _WithEmpty(nn.Module):
    """Hold parameters of no element: on its own, inside a layer, and of a layer of no output."""

    def __init__(self, body: nn.Module, num_classes: int):
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 3))
        self.body = body
        self.body[0].register_parameter("extra", nn.Parameter(torch.empty(0)))
        self.none = nn.Linear(num_classes, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.body(x)
        outputs = outputs + self.first.sum() + self.body[0].extra.sum()
        return torch.cat([outputs, self.none(outputs)], dim=1)


def with_empty_parameters(num_classes: int, image_size: int) -> nn.Module:
    return _WithEmpty(small(num_classes, image_size), num_classes)


def reads_with_empty_parameters(num_classes: int, image_size: int) -> nn.Module:
    return _WithEmpty(nn.Sequential(Reader(num_classes, image_size)), num_classes)
