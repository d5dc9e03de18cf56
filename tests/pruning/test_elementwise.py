"""Operations that work element by element are followed without a rule for each."""

import pytest
import torch
import torch.nn.functional as F
from masking import draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.removable import attempt

SIDE, WIDTH = 8, 16


class Doing(nn.Module):
    """A step of the user's own code."""

    def __init__(self, step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class Turned(nn.Linear):
    """A product with a transposed weight, over channels, as in Falcon."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1) @ self.weight.T + self.bias).permute(0, 3, 1, 2)


class Cast(nn.Conv2d):
    """An input of the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight))


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(*first, middle, nn.Conv2d(WIDTH, 8, 3, padding=1), nn.ReLU(), *last)


def find(step) -> tuple[nn.Module, Coupling]:
    model = network(step if isinstance(step, nn.Module) else Doing(step)).eval()
    return model, find_coupling(model, Images(SIDE))


def padded(mode: str):
    return lambda x: F.pad(x, (1, 1, 1, 1), mode=mode)


def along_channels(x: Tensor) -> Tensor:
    wide = F.pad(x.flatten(2).transpose(1, 2), (1, 1), mode="reflect")
    return wide[..., 2:].transpose(1, 2).unflatten(2, (SIDE, SIDE))


FOLLOWED = {
    "requires_grad_": lambda x: x.requires_grad_(),
    "detach_": lambda x: x.detach_(),
    "half": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16().float(),
    "cpu": lambda x: x.cpu(),
    "plus": lambda x: +x,
    "data": lambda x: x.data,
    "clip": lambda x: x.clip(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp between tensors": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(6.0)),
    "maximum": lambda x: torch.maximum(x, -x),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "rrelu": nn.RReLU(),
    "threshold": nn.Threshold(0.1, 0.0),
    "hardshrink": nn.Hardshrink(),
    "softshrink": nn.Softshrink(),
    "tanhshrink": nn.Tanhshrink(),
    "logsigmoid": lambda x: x * F.logsigmoid(x),
    "sin": torch.sin,
    "atan": torch.atan,
    "erf": torch.erf,
    "sqrt": lambda x: x * (x + 1e-3).sqrt(),
    "log1p": torch.log1p,
    "sign": torch.sign,
    "nan_to_num": torch.nan_to_num,
    "expm1": torch.expm1,
    "round": torch.round,
    "x > 0": lambda x: x * (x > 0),
    "x >= 0": lambda x: x * (x >= 0).float(),
    "logical_not": lambda x: x * torch.logical_not(x > 1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1),
    "div": lambda x: x / (x + 1),
    "remainder": lambda x: x % 2,
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "to": Cast(WIDTH, WIDTH, 1),
    "reflect": padded("reflect"),
    "replicate": padded("replicate"),
    "circular": padded("circular"),
    "padding_mode": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="reflect"),
    "weight.T": Turned(WIDTH, WIDTH),
    "checkpoint": lambda x: checkpoint(torch.sin, x.requires_grad_(), use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x.requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_channels_pass_what_works_element_by_element(name):
    model, coupling = find(FOLLOWED[name])
    assert (coupling.rows["0.weight"] >= 0).all()
    assert attempt(model, coupling, draw(coupling), Images(SIDE)) is None


NO_NUMBER = "of zeros is no number, or has no slope"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        # A gradient of zero through it would be 0 times infinity.
        (torch.sqrt, f"sqrt {NO_NUMBER}"),
        (torch.log, f"log {NO_NUMBER}"),
        (lambda x: x / x, NO_NUMBER),
        (lambda x: torch.hypot(x, 2 * x), f"hypot {NO_NUMBER}"),
        (torch.cos, "reads what isn't zero without it"),
        # Not as x + x.
        (lambda x: (x + x) + torch.cos(x), "reads what isn't zero without it"),
        (lambda x: x.triu(), "triu mixes it with others"),
        (lambda x: x.cumsum(1), "cumsum mixes it with others"),
        (lambda x: x.sort(1)[0], "sort mixes it with others"),
        (lambda x: x * torch.rand_like(x), "rand_like mixes it with others"),
        (along_channels, "padding by reflect mixes it with others"),
    ],
)
def test_channels_stay_where_others_or_gradients_would_feel_it(step, reason):
    _, coupling = find(step)
    (why,) = (line for line in coupling.excluded if line.startswith("0.weight "))
    assert reason in why
