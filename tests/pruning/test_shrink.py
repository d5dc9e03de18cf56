"""Smaller networks compute what the masked ones do."""

import numpy as np
import pytest
import torch
from coupled_nets import timm_vit, vit
from masking import draw, exported, mask_
from odd_models import randomise_
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models import standalone
from prunex_mpi.models.build import describe
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.slim import CALLS
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.removable import find_removable, find_tried
from prunex_mpi.pruning.shrink import shrink, smaller_sizes
from prunex_mpi.tools.export_proof import EXACT, ROUNDINGS

# What half of the groups at most can leave of the parameters.
NETWORKS = dict.fromkeys(
    (
        *("resnet20", "resnet18-w16", "resnet50", "wide_resnet50_2", "vgg16_bn", "vgg19_small"),
        *("mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "densenet121"),
    ),
    0.4,
)
NETWORKS |= {"vit_tiny": 0.35, "vit_b_16": 0.35, "shufflenet_v2_x0_5": 0.6}
SIDE = 32
# Large ones, and one of the blocks of mobilenet_v2.
LARGE = ["wide_resnet50_2", "resnet50", "vgg16_bn", "vgg19_small", "vit_b_16", "densenet121"]
LARGE += ["mnasnet0_5"]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LARGE else ()) for n in NETWORKS]
)
def test_removing_coupled_groups_changes_no_output(name, tmp_path):
    with torch.device("meta"):
        description = describe(name, Images(SIDE, 10))
        model = standalone.build(description)
    model = model.to_empty(device="cpu").eval()
    randomise_(model)
    coupling = find_coupling(model, Images(SIDE))
    removed = draw(coupling)
    mask_(model, coupling, removed)
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    verdict = find_removable(model, coupling, images)
    assert np.array_equal(verdict.removed, removed)
    assert verdict.stays == ()

    wanted = model(images)
    exactly = model.double()(images.double())
    assert bool((wanted[0] - wanted[1]).abs().max() > 1e-3)
    model.float()
    before = sum(p.numel() for p in model.parameters())
    smaller = exported(tmp_path, model, coupling, removed, model=description)
    assert sum(p.numel() for p in smaller.parameters()) < NETWORKS[name] * before
    # How much float32 costs is the processor's affair; what is computed is not.
    cost = float((wanted - exactly).abs().max())
    largest = float(wanted.abs().max())
    torch.testing.assert_close(smaller(images), wanted, rtol=0, atol=ROUNDINGS * cost)
    found = smaller.double()(images.double())
    torch.testing.assert_close(found, exactly, rtol=0, atol=EXACT * largest)


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
def test_a_module_with_two_names_is_cut_under_both():
    model = Tied().eval().double()
    model.last.weight[:, 1] = 0
    removed = np.array([False, True, False, False])
    smaller = shrink(model, find_coupling(model, Images(4)), removed)
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(smaller(images), model(images), rtol=0, atol=1e-12)
    assert smaller.same is smaller.first
    assert smaller.state_dict()["same.weight"].shape == (3, 3, 1, 1)


class OwnLinear(nn.Module):
    """A product with a parameter of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


@torch.no_grad()
def test_a_parameter_of_a_users_own_module_becomes_smaller():
    model = nn.Sequential(nn.Flatten(), OwnLinear(48, 4), nn.Linear(4, 2)).eval()
    coupling = find_tried(model, Images(4))
    smaller = shrink(model, coupling, np.arange(coupling.total) == 1)
    assert smaller[1].weight.shape == (3, 48)


class Wrong(Tied):
    """Do to a channel what depends on how many there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(self.first.out_channels):
            x = x + x
        return x


def test_channels_that_cannot_be_missed_are_refused_before_training():
    model = Wrong()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"the outputs differ by .* choose another --model"):
        find_tried(model, Images(4))
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


class AlmostRight(Tied):
    """Wrong by less than float32 would show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(self.first.out_channels):
            x = x + 1e-8
        return x


class Single(Tied):
    """Compute in float32 whatever comes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class SingleAtLast(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


def test_channels_are_tried_in_float64():
    with pytest.raises(UserError, match="the outputs differ by 2e-08"):
        find_tried(AlmostRight(), Images(4))


@pytest.mark.parametrize("kind", [Tied, Single, SingleAtLast])
def test_channels_that_can_be_missed_pass(kind):
    model = kind()
    find_tried(model, Images(4))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_model_that_needs_its_channels_is_refused_in_its_own_dtype():
    class Both(Single, Wrong):
        pass

    with pytest.raises(UserError, match="the outputs differ by"):
        find_tried(Both(), Images(4))


@pytest.mark.parametrize(("factory", "number"), [(vit, "hidden_dim"), (timm_vit, "num_heads")])
def test_numbers_that_a_module_keeps_are_set_where_they_say_all(factory, number):
    model = factory(num_classes=10, image_size=16).eval()
    coupling = find_coupling(model, Images(16))
    removed = draw(coupling)
    found = smaller_sizes(model, coupling, removed)
    assert not any(stated.get(CALLS) for stated in found.values())
    before = smaller_sizes(model, coupling, np.zeros_like(removed))
    counting = [name for name in found if number in found[name]]
    assert counting
    assert all(found[name][number] < before[name][number] for name in counting)
