"""Smaller networks compute what the masked ones do; what can't go stays, and is said."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from prunex_mpi import standalone
from prunex_mpi.coupling import Coupling, find_coupling
from prunex_mpi.errors import UserError
from prunex_mpi.export_files import write_network
from prunex_mpi.models import describe
from prunex_mpi.removable import describe_removed, judge, zeros_that_stay
from prunex_mpi.shrink import shrink, smaller_sizes, smaller_tensors

# What half of the groups at most can leave of the parameters: hidden widths of transformers stay.
NETWORKS = {
    "resnet20": 0.4,
    "vit_tiny": 0.6,
    "resnet18": 0.4,
    "resnet50": 0.4,
    "wide_resnet50_2": 0.4,
    "vgg16_bn": 0.4,
    "mobilenet_v2": 0.4,
    "mobilenet_v3_small": 0.4,
    "mnasnet0_5": 0.4,
    "densenet121": 0.4,
    "shufflenet_v2_x0_5": 0.6,
    "vit_b_16": 0.6,
}
SIDE = 32
PERIOD = 99_991


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


def draw(coupling: Coupling) -> np.ndarray:
    """Remove about half of the groups, but not all of a set."""
    removed = np.random.default_rng(0).random(coupling.total) < 0.5
    for s in coupling.sets:
        if removed[s.start : s.start + s.count].all():
            removed[s.start] = False
    return removed


@torch.no_grad()
def mask_(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> None:
    """Set all slices of the removed groups to zero, gamma and beta included."""
    for name, p in model.named_parameters():
        for dim, known in enumerate((coupling.rows, coupling.columns)):
            if name in known:
                ids = known[name]
                gone = np.flatnonzero((ids >= 0) & removed[ids])
                p.index_fill_(dim, torch.from_numpy(gone), 0)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_removing_coupled_groups_changes_no_output(name: str, tmp_path: Path) -> None:
    what = {"num_classes": 10, "image_size": SIDE}
    with torch.device("meta"):
        description = describe(name, **what)
        model = standalone.build(description)
    model = model.to_empty(device="cpu").eval()
    randomise_(model)
    coupling = find_coupling(model, SIDE)
    removed = draw(coupling)
    mask_(model, coupling, removed)
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    verdict = judge(model, coupling, images)
    assert np.array_equal(verdict.removed, removed)
    assert verdict.stays == ()

    wanted = model(images)
    assert bool((wanted[0] - wanted[1]).abs().max() > 1e-3)
    tensors = smaller_tensors(model, coupling, removed)
    layers = smaller_sizes(model, coupling, removed)
    before = sum(p.numel() for p in model.parameters())
    del model
    write_network(tmp_path, tensors, {"model": description, "layers": layers})
    smaller = standalone.load(tmp_path)
    assert sum(p.numel() for p in smaller.parameters()) < NETWORKS[name] * before
    torch.testing.assert_close(
        smaller(images), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
    )


# --------------------------------------------------------------------------------------------------
# Zeros of filter, channel and shape masks
# --------------------------------------------------------------------------------------------------

IMAGES = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))


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
def judged(model: nn.Module) -> tuple[list[int], tuple[str, ...], nn.Module]:
    """Return which channels of the first set go, what is said, and the smaller network.

    The outputs of both are compared.
    """
    coupling = find_coupling(model, 4)
    verdict = judge(model, coupling, IMAGES)
    smaller = shrink(model, coupling, verdict.removed)
    torch.testing.assert_close(smaller.eval()(IMAGES), model.eval()(IMAGES), rtol=0, atol=1e-6)
    first = coupling.sets[0]
    gone = np.flatnonzero(verdict.removed[first.start : first.start + first.count])
    return gone.tolist(), verdict.stays, smaller


@torch.no_grad()
def test_a_channel_that_nobody_reads_goes() -> None:
    model = plain()
    model[3].weight[:, 2] = 0
    gone, stays, smaller = judged(model)
    assert (gone, stays) == ([2], ())
    assert smaller[0].weight.shape == (3, 3, 3, 3)
    assert smaller[3].weight.shape == (4, 3, 3, 3)
    assert smaller[1].running_var.tolist() == model[1].running_var[[0, 1, 3]].tolist()
    assert model[0].weight.shape == (4, 3, 3, 3)


@torch.no_grad()
def test_a_zero_filter_goes_only_where_its_constant_does_not_pass() -> None:
    model = plain()
    model[0].weight[:2] = 0
    model[0].bias.zero_()
    model[1].running_mean.zero_()
    model[1].bias.copy_(torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    gone, stays, _ = judged(model)
    assert gone == [0]
    assert stays == (
        "1 channel of 0: the filters are zero, but BatchNorm or a bias passes a constant to 3",
    )


@torch.no_grad()
def test_a_constant_of_either_sign_stays_without_relu() -> None:
    model = plain(nn.Identity())
    model[0].weight[:2] = 0
    model[0].bias.zero_()
    model[1].running_mean.zero_()
    model[1].bias.copy_(torch.tensor([-0.5, 0.0, 0.0, 0.0]))
    assert judged(model)[0] == [1]


@torch.no_grad()
def test_one_channel_stays_where_none_is_needed() -> None:
    model = plain()
    model[3].weight.zero_()
    gone, stays, smaller = judged(model)
    assert gone == [1, 2, 3]
    assert stays[0] == "1 channel of 0: nothing is left of them, but one must stay"
    assert smaller[0].out_channels == 1


@torch.no_grad()
def test_a_silent_channel_whose_input_is_alive_stays() -> None:
    """These images do not show it, others may."""
    model = plain()
    model[1].bias[1] = -1e3
    assert judged(model)[:2] == ([], ())


@torch.no_grad()
def test_channels_that_are_added_go_together() -> None:
    model = Added().eval()
    randomise_(model)
    for layer in (model.a, model.b):
        layer.bias[:3] = 0
        layer.weight[0] = 0
    model.a.weight[1] = 0
    assert judged(model)[:2] == (
        [0],
        ("1 channel of a: the filters are zero in some but not all of a and b",),
    )


@torch.no_grad()
def test_channels_with_several_readers_go_when_none_reads_them() -> None:
    model = Added().eval()
    randomise_(model)
    for layer in (model.c, model.d):
        layer.weight[:, 3] = 0
    model.c.weight[:, :2] = 0
    assert judged(model)[:2] == ([3], ("2 channels of a: ignored by some but not all of c and d",))


@torch.no_grad()
def test_zeros_inside_channels_stay_and_are_counted() -> None:
    model = plain()
    model[3].weight[:, 0, :2] = 0
    gone, stays, smaller = judged(model)
    assert (gone, stays) == ([], ())
    assert zeros_that_stay(smaller.state_dict()) == [
        "24 of 260 weights are zeros inside kept channels: dense kernels gain nothing by them"
    ]
    assert zeros_that_stay(plain().state_dict()) == []


@torch.no_grad()
def test_zero_filters_that_belong_to_no_group_are_said() -> None:
    model = plain(nn.Softmax(dim=1))
    model[0].weight[1] = 0
    (line,) = judged(model)[1]
    assert line.startswith("1 zero filter of 0: ")
    assert "softmax" in line


@pytest.mark.parametrize(("bias", "gone"), [(0.0, [0]), (0.5, [])])
def test_a_head_of_zero_filters_goes_without_a_bias(bias: float, gone: list[int]) -> None:
    model = standalone.build(
        {"name": "vit_tiny", "num_classes": 2, "image_size": 4, "stem": ""}
    ).eval()
    randomise_(model)
    coupling = find_coupling(model, 4)
    attention = model.encoder.layers[0].self_attention
    with torch.no_grad():
        for part in (attention.in_proj_weight, attention.in_proj_bias):
            part.view(3, 3, 64, -1)[:, 0] = 0
        attention.in_proj_bias.view(3, 3, 64)[2, 0] = bias
        verdict = judge(model, coupling, IMAGES)
        smaller = shrink(model, coupling, verdict.removed)
        torch.testing.assert_close(smaller(IMAGES), model(IMAGES), rtol=0, atol=1e-5)
    assert np.flatnonzero(verdict.removed).tolist() == gone
    described = describe_removed(coupling, verdict.removed)
    assert described[0] == {
        "set": "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
        "groups": 3,
        "removed": len(gone),
        "unit": 64,
    }
    assert (len(verdict.stays) == 1 and verdict.stays[0].startswith("1 head of ")) == bool(bias)


class Tied(nn.Module):
    """One convolution under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.same = self.first
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.same(x))).mean(dim=(2, 3))


@torch.no_grad()
def test_a_module_with_two_names_is_cut_under_both() -> None:
    model = Tied().eval()
    model.last.weight[:, 1] = 0
    gone, _, smaller = judged(model)
    assert gone == [1]
    assert smaller.same is smaller.first
    assert smaller.state_dict()["same.weight"].shape == (3, 3, 1, 1)


class OwnLinear(nn.Module):
    """A product with a parameter of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def test_a_module_of_unknown_sizes_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), OwnLinear(48, 4), nn.Linear(4, 2)).eval()
    coupling = find_coupling(model, 4)
    removed = np.zeros(coupling.total, dtype=bool)
    shrink(model, coupling, removed)
    removed[0] = True
    with pytest.raises(UserError, match=r"1\.weight: a OwnLinear can't be made smaller"):
        shrink(model, coupling, removed)
