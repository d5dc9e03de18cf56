"""Masks drawn at random, networks with zeros where they say, and the projection of vectors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.models import standalone
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.groups import Groups, find_groups
from prunex_mpi.pruning.masks import Plan, build_plan, find_pruned, make_mask
from prunex_mpi.pruning.projection import group_squared_norms, select
from prunex_mpi.pruning.shrink import smaller_sizes, smaller_tensors
from prunex_mpi.tools.export_run import write_network


def convolutions() -> nn.Module:
    """Convolutions of every sort; what lies between them is never pruned."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 6, 3),
        nn.Conv2d(4, 6, 3, groups=2, dilation=2),
        nn.Conv3d(2, 2, (1, 3, 3)),
        nn.Conv2d(6, 8, 1, bias=False),
        nn.Conv2d(8, 12, (3, 2), groups=4),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(4, 8, 1, groups=2),
        nn.Conv1d(5, 4, 3),
        nn.Linear(4, 3),
    )


def prepare(kinds: Sequence[str], ratio: float = 0.4) -> tuple[Layout, Groups]:
    """Return layout and groups of these convolutions."""
    model = convolutions()
    layout = build_layout(model)
    return layout, find_groups(model, layout, kinds, [ratio])


def plan_of(layout: Layout, groups: Groups, bits: np.ndarray, device: torch.device) -> Plan:
    """Return the plan of the mask of `bits`."""
    return build_plan(layout, make_mask(layout, groups, bits, torch.empty(0, device=device)))


def draw(coupling: Coupling, seed: int = 0) -> np.ndarray:
    """Remove about half of the groups, but not all of a set."""
    removed = np.random.default_rng(seed).random(coupling.total) < 0.5
    for s in coupling.sets:
        if removed[s.start : s.start + s.count].all():
            removed[s.start] = False
    return removed


@torch.no_grad()
def mask_(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> None:
    """Set all slices of the removed groups to zero, gamma and beta included."""
    for name, p in model.named_parameters():
        for dim, ids in coupling.slices(name):
            gone = np.flatnonzero((ids >= 0) & removed[ids])
            p.index_fill_(dim, torch.from_numpy(gone), 0)


def exported(
    folder: Path, network: nn.Module, coupling: Coupling, removed: np.ndarray, **plan: Any
) -> nn.Module:
    """Write what is left of a network as export does, and load it; `plan` has its model's words.

    And the sizes of its layers, where it was smaller already.
    """
    folder.mkdir(exist_ok=True)
    plan = {"layers": smaller_sizes(network, coupling, removed), **plan}
    write_network(folder, smaller_tensors(network, coupling, removed), json.loads(json.dumps(plan)))
    return standalone.load(folder)


def project(
    flat: Tensor, layout: Layout, groups: Groups, progress: float = 1.0
) -> tuple[Tensor, np.ndarray]:
    """Return the projection of `flat` and its mask: kinds one after the other."""
    mask, result = np.ones(groups.total, dtype=bool), flat.clone()
    for selections in groups.kinds:
        # What the kinds before have left of `flat` is what `result` is.
        pruned = find_pruned(mask, layout, groups, flat.device)
        found = group_squared_norms(flat, layout, groups, selections, pruned).numpy()
        same = group_squared_norms(result, layout, groups, selections).numpy()
        np.testing.assert_allclose(found, same, rtol=1e-6)
        mask[selections[0].start : selections[-1].stop] = select(same, selections, progress)
        make_mask(layout, groups, mask, flat).apply_(result)
    return result, mask
