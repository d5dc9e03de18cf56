"""Where a network begins and ends: by what runs, not by what is defined first."""

import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.models.dummy_input import Ends, find_ends
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import find_groups

CLASSES, SIDE = 10, 8


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, CLASSES, 1)
        self.body, self.stem = nn.Conv2d(8, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(torch.relu(self.stem(x))))).mean((2, 3))


class TwoStems(nn.Module):
    """Two convolutions of the image, and a layer that evaluation does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)
        self.head, self.beside = nn.Linear(8, CLASSES), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.near(x) + self.far(x)).mean((2, 3)))


class Shifted(nn.Module):
    """The first convolution gets what the model has made of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(2 * x - 1)).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "stems", "head"),
    [
        (HeadFirst, {"stem.weight"}, "head.weight"),
        (TwoStems, {"near.weight", "far.weight"}, "head.weight"),
        (Shifted, {"stem.weight"}, "head.weight"),
    ],
)
def test_ends_are_what_runs_first_and_last(model: type, stems: set[str], head: str) -> None:
    network = model().train()
    network.get_submodule(head.removesuffix(".weight")).eval()
    assert find_ends(network, SIDE) == Ends(frozenset(stems), head)
    assert network.training
    assert not network.get_submodule(head.removesuffix(".weight")).training


def test_neither_classes_nor_the_image_s_channels_are_pruned() -> None:
    model = HeadFirst()
    ends = find_ends(model, SIDE)
    groups = find_groups(model, build_layout(model), ["filter", "channel"], [0.5], ends=ends)
    assert groups.excluded == (
        "head.weight [filter]: its outputs are the classes",
        "stem.weight [channel]: its input channels are the image's",
    )
    # Without them the order of definition counts.
    by_order = find_groups(model, build_layout(model), ["filter", "channel"], [0.5])
    assert by_order.excluded == (
        "head.weight [channel]: its input channels are the image's",
        "stem.weight [filter]: its outputs are the classes",
    )
