"""Smaller networks compute what the masked ones do; what can't go stays, and is said."""

import copy
from pathlib import Path

import numpy as np
import odd_models
import pytest
import torch
from torch import Tensor, nn

from prunex_mpi import standalone
from prunex_mpi.coupling import Coupling, find_coupling
from prunex_mpi.errors import UserError
from prunex_mpi.export_files import write_network
from prunex_mpi.models import build_model, describe
from prunex_mpi.shrink import (
    describe_removed,
    judge,
    shrink,
    smaller_sizes,
    smaller_tensors,
    zeros_that_stay,
)

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
