"""Kernels and patterns of 3x3 kernels: brute force over all patterns, packing, what is refused."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from masking import prepare, project
from reference import PATTERNS
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.masks import kept_numel

CPU = torch.device("cpu")


THREE_BY_THREE = ["2.weight", "3.weight", "7.weight"]


def kernels_of(flat: Tensor, layout: Layout, names: Sequence[str]) -> list[np.ndarray]:
    """Return the kernels of the named weights, each of its own shape."""
    views = dict(zip([s.name for s in layout.segments], layout.views(flat), strict=True))
    return [k for n in names for k in views[n].flatten(0, 1).numpy()]


def covered(patterns: Sequence[int]) -> np.ndarray:
    """Return the 0/1 weights of a kernel that any of `patterns` keeps."""
    kept = np.zeros((3, 3))
    for place in itertools.chain(*(PATTERNS[number] for number in patterns)):
        kept[place] = 1
    return kept


def test_ties_go_to_the_first_pattern_and_the_ramp_to_what_the_best_have_together():
    layout, groups = prepare(["pattern"])
    for value in (0.0, 1.0):
        _, mask = project(torch.full((layout.numel,), value), layout, groups)
        assert mask.reshape(-1, 4).tolist() == [[True, False, False, False]] * 66
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(5))
    kernels = kernels_of(flat, layout, THREE_BY_THREE)
    for schedule_progress, count in ((0.0, 4), (0.3, 4), (0.4, 3), (0.7, 2), (1.0, 1)):
        result, mask = project(flat, layout, groups, schedule_progress)
        kept = []
        for kernel, after in zip(kernels, kernels_of(result, layout, THREE_BY_THREE), strict=True):
            squared_norms = [float((kernel**2 * covered([p])).sum()) for p in range(4)]
            best = sorted(range(4), key=lambda p: -squared_norms[p])[:count]
            assert np.array_equal(after, kernel * covered(best).astype(np.float32))
            kept.append(int(covered(best).sum()))
        assert set(kept) <= {4: {9}, 3: {8}, 2: {6, 7}, 1: {4}}[count]
        assert sum(kept_numel(mask, groups)) == sum(kept)


def test_a_composition_goes_on_with_what_is_left():
    """Channels go first, so patterns of kernels in them have nothing; and the other way round."""
    for kinds in itertools.permutations(("channel", "pattern")):
        layout, groups = prepare(kinds, ratio=0.5)
        flat = torch.randn(
            layout.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        left = layout.views(flat)[4].clone()
        for kind in kinds:
            if kind == "channel":
                best = left.square().sum((0, 2, 3)).argsort(descending=True)[:4]
                keep = torch.zeros(8, dtype=left.dtype)
                keep[best] = 1
                left *= keep.view(1, -1, 1, 1)
            else:
                for kernel in left.flatten(0, 1):
                    kept = [kernel * torch.from_numpy(covered([p])) for p in range(4)]
                    kernel.copy_(max(kept, key=lambda k: float(k.square().sum())))
        result, _ = project(flat, layout, groups)
        assert torch.equal(layout.views(result)[4], left)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 5), nn.Conv2d(4, 4, 1), nn.Linear(4, 2)), "not 3x3"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2)), "image's"),
    ],
)
def test_networks_without_3x3_kernels_are_refused(model, reason):
    with pytest.raises(UserError, match=reason):
        find_groups(model, build_layout(model), ["pattern"], [0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_ratio": 0.3}, "keep-ratio means nothing with groups pattern"),
        ({"remove_dropped": True}, "remove-dropped is for coupled groups alone"),
        ({"keep_by": "parameters"}, "keep-by is for coupled groups alone"),
        ({"score": "gates"}, "score is for coupled groups alone"),
        (
            {"groups": ("kernel", "pattern"), "keep_ratio": (0.5, 0.5)},
            "keep-ratio has 2 values for 1 groups.*none for pattern",
        ),
    ],
)
def test_what_patterns_have_no_use_for_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make(**{"groups": ("pattern",), **changes})
    make(groups=("kernel", "pattern", "filter"), keep_ratio=(0.5, 0.25))
