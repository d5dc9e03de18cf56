"""Zeros of filter, channel and shape masks: what can go, what stays and what is said of it."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from odd_models import randomise_
from torch import nn

from prunex_mpi.models import standalone
from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.removable import describe_removed, find_removable, zeros_that_stay
from prunex_mpi.pruning.shrink import shrink

IMAGES = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def plain(activation: nn.Module | None = None) -> nn.Sequential:
    """Two convolutions of 4 channels, BatchNorm between them, and a classifier."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        activation or nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    randomise_(model)
    return model.eval()


class Added(nn.Module):
    """Two convolutions whose outputs are added, then read by two more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.c, self.d = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x) + self.b(x))
        return (self.c(x) + self.d(x)).mean(dim=(2, 3))


@torch.no_grad()
def assert_same_outputs(*models: nn.Module) -> None:
    """Compare in float64: what float32 costs differs between processors."""
    outputs = [copy.deepcopy(model).eval().double()(IMAGES.double()) for model in models]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


@torch.no_grad()
def judged(model: nn.Module) -> tuple[list[int], tuple[str, ...], nn.Module]:
    """Return which channels of the first set go, what is said, and the smaller network.

    The outputs of both are compared, in float64.
    """
    coupling = find_coupling(model, Images(4))
    verdict = find_removable(model, coupling, IMAGES)
    smaller = shrink(model, coupling, verdict.removed)
    assert_same_outputs(model, smaller)
    first = coupling.sets[0]
    gone = np.flatnonzero(verdict.removed[first.start : first.start + first.count])
    return gone.tolist(), verdict.stays, smaller


def test_a_channel_that_nobody_reads_goes():
    model = plain()
    model[3].weight[:, 2] = 0
    gone, stays, smaller = judged(model)
    assert (gone, stays) == ([2], ())
    assert smaller[0].weight.shape == (3, 3, 3, 3)
    assert smaller[3].weight.shape == (4, 3, 3, 3)
    assert smaller[1].running_var.tolist() == model[1].running_var[[0, 1, 3]].tolist()
    assert model[0].weight.shape == (4, 3, 3, 3)


def test_a_zero_filter_goes_only_where_its_constant_does_not_pass():
    model = plain()
    model[0].weight[:2] = 0
    model[0].bias.zero_()
    model[1].running_mean.zero_()
    model[1].bias.copy_(torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    gone, stays, _ = judged(model)
    assert gone == [0]
    assert stays == (
        "1 channel of 0: the filters are zero, but BatchNorm or a bias passes a constant",
    )


def test_a_constant_of_either_sign_stays_without_relu():
    model = plain(nn.Identity())
    model[0].weight[:2] = 0
    model[0].bias.zero_()
    model[1].running_mean.zero_()
    model[1].bias.copy_(torch.tensor([-0.5, 0.0, 0.0, 0.0]))
    assert judged(model)[0] == [1]


def test_one_channel_stays_where_none_is_needed():
    model = plain()
    model[3].weight.zero_()
    gone, stays, smaller = judged(model)
    assert gone == [1, 2, 3]
    assert stays[0] == "1 channel of 0: all of the set could be removed, but one must stay"
    assert smaller[0].out_channels == 1


def test_a_silent_channel_whose_input_is_alive_stays():
    """These images do not show it, others may."""
    model = plain()
    model[1].bias[1] = -1e3
    assert judged(model)[:2] == ([], ())


def test_channels_that_are_added_go_together():
    model = Added().eval()
    randomise_(model)
    for layer in (model.a, model.b):
        layer.bias[:3] = 0
        layer.weight[0] = 0
    model.a.weight[1] = 0
    assert judged(model)[:2] == (
        [0],
        ("1 channel of a: the filters are zero in some but not all of its layers",),
    )


def test_channels_with_several_readers_go_when_none_reads_them():
    model = Added().eval()
    randomise_(model)
    for layer in (model.c, model.d):
        layer.weight[:, 3] = 0
    model.c.weight[:, :2] = 0
    assert judged(model)[:2] == ([3], ("2 channels of a: ignored by some but not all layers",))


def test_zeros_inside_channels_stay_and_are_counted():
    model = plain()
    model[3].weight[:, 0, :2] = 0
    gone, stays, smaller = judged(model)
    assert (gone, stays) == ([], ())
    assert zeros_that_stay(smaller.state_dict()) == [
        "24 of 260 weights are zeros inside kept channels: dense kernels gain nothing by them"
    ]
    assert zeros_that_stay(plain().state_dict()) == []


@pytest.mark.parametrize(("bias", "gone"), [(0.0, [0]), (0.5, [])])
def test_a_head_of_zero_filters_goes_without_a_bias(bias, gone):
    model = standalone.build(
        {"name": "vit_tiny", "num_classes": 2, "image_size": 4, "stem": ""}
    ).eval()
    randomise_(model)
    coupling = find_coupling(model, Images(4))
    attention = model.encoder.layers[0].self_attention
    with torch.no_grad():
        for part in (attention.in_proj_weight, attention.in_proj_bias):
            part.view(3, 3, 64, -1)[:, 0] = 0
        attention.in_proj_bias.view(3, 3, 64)[2, 0] = bias
        verdict = find_removable(model, coupling, IMAGES)
        smaller = shrink(model, coupling, verdict.removed)
        assert_same_outputs(model, smaller)
    described = describe_removed(coupling, verdict.removed)
    heads = next(s for s in coupling.sets if s.unit == 64)
    assert np.flatnonzero(verdict.removed).tolist() == [heads.start + g for g in gone]
    assert described[coupling.sets.index(heads)] == {
        "set": "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
        "groups": 3,
        "removed": len(gone),
        "unit": 64,
    }
    assert (
        len(verdict.stays) == 1 and verdict.stays[0].startswith("1 group of 64 channels of ")
    ) == bool(bias)


class Divided(nn.Module):
    """Four channels are divided by their length at each place before a ReLU and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)
        randomise_(self)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.normalize(self.norm(self.first(x)), dim=1)
        return self.last(torch.relu(x).mean(dim=(2, 3)))


def test_a_channel_that_no_weight_reads_stays_where_all_are_divided_by_their_length():
    model = Divided()
    model.last.weight[:, 2] = 0
    gone, stays, _ = judged(model)
    assert gone == []
    assert stays == ("1 channel of first: read by no weight, but by a norm of all channels",)
    model.first.weight[2] = model.first.bias[2] = 0
    model.norm.weight[2] = model.norm.bias[2] = 0
    gone, stays, _ = judged(model)
    assert (gone, stays) == ([2], ())


def test_a_constant_that_only_a_length_is_made_of_stays():
    model = Divided()
    model.first.weight[1] = model.first.bias[1] = model.norm.running_mean[1] = 0
    # Nothing of it is left behind the ReLU.
    model.norm.bias[1] = -3
    gone, stays, _ = judged(model)
    assert gone == []
    assert stays == (
        "1 channel of first: the filters are zero, but BatchNorm or a bias passes a constant",
    )
