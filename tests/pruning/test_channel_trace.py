"""Code that works at full size alone: what it touches stays, all else is pruned."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from masking import draw
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.removable import attempt, find_tried

SIDE, WIDTH, CLASSES = 8, 16, 5


class Viewed(nn.Module):
    """What every tutorial begins with: the size of what is flattened is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.view(-1, 16 * 4 * 4))))


class Inside(nn.Module):
    """The same as a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Viewed()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).log_softmax(1)


class Chain(nn.Module):
    """Four layers of 8 channels, of which `between` gets the second one's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layers[0](F.relu(self.stem(x))))
        x = F.relu(self.layers[2](F.relu(self.layers[1](self.between(x)))))
        return self.head(x.mean((2, 3)))


class Assigned(Chain):
    """Written into a part of a tensor that is there already."""

    def between(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 8, *x.shape[2:])
        out[:, :8] = x
        return out


class Assembled(Chain):
    """Put together out of sizes that are written down, twice in a row."""

    def between(self, x: Tensor) -> Tensor:
        x = torch.full((1, 8, 1, 1), 0.5) * x
        return x.reshape(len(x), 2, 4, SIDE, SIDE).flip(1).reshape(len(x), 8, SIDE, SIDE)


FIRST, LAST = "stem.weight", "layers.2.weight"


@pytest.mark.parametrize(
    ("model", "pruned"),
    [
        (Viewed, {"conv1.weight", "conv2.weight", "fc1.weight"}),
        (Inside, {"net.conv1.weight", "net.conv2.weight", "net.fc1.weight"}),
        (Assigned, {FIRST, "layers.1.weight", LAST}),
        (Assembled, {FIRST, "layers.1.weight", LAST}),
    ],
)
def test_what_cannot_be_followed_stays_and_all_else_is_pruned(model, pruned):
    torch.manual_seed(0)
    network = model()
    coupling = find_tried(network, Images(SIDE))
    assert {s.name for s in coupling.sets} == pruned
    for seed in range(3):
        assert attempt(network, coupling, draw(coupling, seed), Images(SIDE)) is None


def test_what_nothing_helps_is_refused_in_one_line():
    class Stated(Chain):
        def between(self, x: Tensor) -> Tensor:
            if x.shape[1] != 8:
                raise ValueError("eight channels are expected")
            return x

    with pytest.raises(UserError, match="eight channels are expected"):
        find_tried(Stated(), Images(SIDE))


# --------------------------------------------------------------------------------------------------
# Functions that work element by element
# --------------------------------------------------------------------------------------------------


class Doing(nn.Module):
    """A step of the user's own code."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
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


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(*first, *middle, nn.Conv2d(WIDTH, 8, 3, padding=1), nn.ReLU(), *last)


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
    "half": lambda x: x.half().float(),
    "cpu": lambda x: x.cpu(),
    "data": lambda x: x.data,
    "clip": lambda x: x.clip(-1, 1),
    "clamp between tensors": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(6.0)),
    "maximum": lambda x: torch.maximum(x, -x),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "rrelu": nn.RReLU(),
    "threshold": nn.Threshold(0.1, 0.0),
    "logsigmoid": lambda x: x * F.logsigmoid(x),
    "x > 0": lambda x: x * (x > 0),
    "logical_not": lambda x: x * torch.logical_not(x > 1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "to": Cast(WIDTH, WIDTH, 1),
    "reflect": padded("reflect"),
    "replicate": padded("replicate"),
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
        (lambda x: x.sort(1)[0], "sort mixes it with others"),
        (lambda x: x * torch.rand_like(x), "rand_like mixes it with others"),
        (along_channels, "padding by reflect mixes it with others"),
    ],
)
def test_channels_stay_where_others_or_gradients_would_feel_it(step, reason):
    _, coupling = find(step)
    (why,) = (line for line in coupling.excluded if line.startswith("0.weight "))
    assert reason in why


# --------------------------------------------------------------------------------------------------
# What a reason tells to write lets the channels go that it was given for
# --------------------------------------------------------------------------------------------------


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
    coupling = find_tried(model, Images(SIDE))
    assert (coupling.rows["0.weight"] >= 0).all()
    for seed in range(3):
        assert attempt(model, coupling, draw(coupling, seed), Images(SIDE)) is None


def summed(x: Tensor) -> Tensor:
    return torch.einsum("bchw,bcij->bchw", x, x)


def filled(value: float) -> nn.Module:
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
    ("padding that isn't zero; pad with zeros", filled(1.0), filled(0.0)),
    (
        "a computed weight is no parameter; leave weight_norm and its like away",
        *(weight_norm(conv(padding=1)), conv(padding=1)),
    ),
]


@pytest.mark.parametrize(("reason", "kept", "other"), CASES, ids=range(len(CASES)))
def test_what_is_to_be_written_instead_lets_channels_go(reason, kept, other):
    name = "3.qkv.weight" if isinstance(kept, Attention) else "0.weight"
    models = network(kept), network(other)
    stays, goes = (find_tried(m, Images(SIDE)) for m in models)
    (line,) = (line for line in stays.excluded if line.startswith(f"{name} [coupled]: {reason}"))
    # And in which module.
    assert re.search(r"in 3(\.norm)?\)$", line), line
    assert (goes.rows[name] >= 0).all()
