"""Code that works at full size alone: what it touches stays, all else is pruned."""

import pytest
import torch
import torch.nn.functional as F
from masking import draw
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning.channel_trace import Rules, rules_of
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.removable import attempt, find_rules

SIDE, CLASSES = 8, 5


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


class Mapped(Chain):
    """Through a transform, which hides from everyone what it does."""

    def between(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda y: 2 * y)(x)


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
        (Mapped, {"layers.1.weight", LAST}),
        (Assembled, {FIRST, "layers.1.weight", LAST}),
    ],
)
def test_what_cannot_be_followed_stays_and_all_else_is_pruned(model, pruned):
    torch.manual_seed(0)
    network = model()
    rules = find_rules(network, Images(SIDE))
    assert rules_of(rules.text()) == rules
    coupling = find_coupling(network, Images(SIDE), rules)
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
        find_rules(Stated(), Images(SIDE))


def test_an_assignment_keeps_what_it_writes_without_a_trial():
    assert find_rules(Assigned(), Images(SIDE)) == Rules()
