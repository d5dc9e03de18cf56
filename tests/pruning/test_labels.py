"""What a reason tells to write lets the channels go that it was given for."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from masking import draw
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning.channel_trace import Rules
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.removable import attempt, find_rules

SIDE, WIDTH = 8, 16


class Doing(nn.Module):
    """A step of the user's own code."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class Attention(nn.Module):
    """Heads of attention, over tokens, by code of the user's own."""

    def __init__(self, *, products: bool) -> None:
        super().__init__()
        self.products, self.heads, self.size = products, 4, WIDTH // 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        cut = self.qkv(tokens).unflatten(-1, (3, self.heads, self.size))
        q, k, v = cut.permute(2, 0, 3, 1, 4)
        if self.products:
            found = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            found = torch.einsum("bhij,bhjd->bhid", scores, v)
        return self.out(found.transpose(1, 2).flatten(2)).transpose(1, 2)[..., None]


class Bare(nn.Module):
    """A norm without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))


class OfTokens(nn.Module):
    """A norm over the channels of tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(*first, *middle, nn.Conv2d(WIDTH, 8, 3, padding=1), nn.ReLU(), *last)


def step(action: Callable[[Tensor], Tensor]) -> nn.Module:
    return network(Doing(action))


def shuffled(*sizes: int) -> nn.Module:
    return step(lambda x: x.view(1, *sizes, 8, 8).transpose(1, 2).flatten(1, 2))


def spread(channels: int) -> nn.Module:
    return step(lambda x: x * x.mean((2, 3), keepdim=True).expand(1, channels, 8, 8))


# Code that counts channels, and gets other numbers where some are gone.
COUNTING = [
    shuffled(2, 8),
    step(lambda x: x.view(1, 16, -1)[..., None]),
    step(lambda x: x.reshape(1, 16, 64, 1)),
    spread(16),
    step(lambda x: x.unflatten(1, (2, 8)).flatten(1, 2)),
    step(lambda x: torch.cat([x[:, :4], x[:, 4:-2], x[:, -2:]], 1)),
    step(lambda x: torch.cat([x.narrow(1, 0, 5), x.narrow(1, 5, 11)], 1)),
    step(lambda x: torch.cat(x.split([4, 12], 1), 1)),
    step(lambda x: torch.cat(x.tensor_split(3, dim=1), 1)),
    step(lambda x: x * x.shape[1] ** -0.5),
]


@pytest.mark.parametrize("model", COUNTING, ids=range(len(COUNTING)))
def test_numbers_in_code_follow_the_channels_that_are_left(model):
    assert find_rules(model, Images(SIDE)) == Rules()
    coupling = find_coupling(model, Images(SIDE), Rules())
    assert (coupling.rows["0.weight"] >= 0).all()
    for seed in range(3):
        assert attempt(model, coupling, draw(coupling, seed), Images(SIDE)) is None


def summed(x: Tensor) -> Tensor:
    return torch.einsum("bchw,bcij->bchw", x, x)


def padded(value: float) -> nn.Module:
    return Doing(lambda x: F.pad(x, (1, 1, 1, 1), value=value))


def conv(kind: type[nn.Module] = nn.Conv2d, size: int = 3, **options: int) -> nn.Module:
    return kind(WIDTH, WIDTH, size, **options)


EINSUM = "einsum mixes it with others; take matmul or a product instead"
# What stays and why, what to write; it is about the channels of 0.weight, or of attention's.
CASES = [
    (EINSUM, Attention(products=False), Attention(products=True)),
    (EINSUM, Doing(summed), Doing(lambda x: x * x.sum((2, 3), keepdim=True))),
    (
        "rms_norm mixes it with others; take nn.RMSNorm instead",
        *(OfTokens(Bare()), OfTokens(nn.RMSNorm(WIDTH))),
    ),
    (
        "group_norm mixes it with others; take as many groups as each has channels, or more",
        *(nn.GroupNorm(2, WIDTH), nn.GroupNorm(4, WIDTH)),
    ),
    (
        "local_response_norm mixes it with others; take nn.BatchNorm2d instead",
        *(nn.LocalResponseNorm(3), nn.BatchNorm2d(WIDTH)),
    ),
    (
        "lp_pool2d mixes it with others; take nn.AvgPool2d instead",
        *(nn.LPPool2d(2, 2), nn.AvgPool2d(2)),
    ),
    (
        "conv_transpose2d mixes it with others; take nn.Upsample and nn.Conv2d instead",
        *(conv(nn.ConvTranspose2d, 2, stride=2), nn.Sequential(nn.Upsample(None, 2), conv(size=1))),
    ),
    (
        "a BatchNorm without gamma and beta passes a constant; give it affine=True",
        *(nn.BatchNorm2d(WIDTH, affine=False), nn.BatchNorm2d(WIDTH)),
    ),
    (
        "instance_norm mixes it with others; take nn.BatchNorm2d instead",
        *(nn.InstanceNorm2d(WIDTH, affine=True), nn.BatchNorm2d(WIDTH)),
    ),
    ("padding that isn't zero; pad with zeros", padded(1.0), padded(0.0)),
    (
        "a computed weight is no parameter; leave weight_norm and its like away",
        *(weight_norm(conv(padding=1)), conv(padding=1)),
    ),
]


@pytest.mark.parametrize(("reason", "kept", "other"), CASES, ids=range(len(CASES)))
def test_what_is_to_be_written_instead_lets_channels_go(reason, kept, other):
    name = "3.qkv.weight" if isinstance(kept, Attention) else "0.weight"
    models = network(kept), network(other)
    stays, goes = (find_coupling(m, Images(SIDE), find_rules(m, Images(SIDE))) for m in models)
    (line,) = (line for line in stays.excluded if line.startswith(f"{name} [coupled]: {reason}"))
    # And in which module.
    assert re.search(r"in 3(\.norm)?\)$", line), line
    assert (goes.rows[name] >= 0).all()
