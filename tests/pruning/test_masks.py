"""Packing by a mask and back is multiplying by it, and payloads have the size counted by hand."""

import itertools

import numpy as np
import pytest
import torch
from masking import convolutions, plan_of, prepare, project
from pretended import GPU, pretended_gpu
from reference import groups_of
from torch import nn

from prunex_mpi.models import batchnorm
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.groups import Groups, find_groups
from prunex_mpi.pruning.masks import count_kept, cut_plan, make_mask, pack_, unpack_
from prunex_mpi.pruning.projection import select

ORDERS = [o for n in (1, 2) for o in itertools.permutations(("filter", "channel", "shape"), n)]
ORDERS += [("filter", "channel", "shape"), ("shape", "channel", "filter")]
INSIDE = [("pattern",), ("kernel",), ("kernel", "pattern"), ("pattern", "kernel")]
INSIDE += [o for kind in ("filter", "channel") for o in ((kind, "pattern"), ("pattern", kind))]
INSIDE += [("shape", "pattern", "kernel"), ("channel", "kernel", "filter", "pattern")]
CPU = torch.device("cpu")


def masks(groups: Groups, seed: int) -> list[np.ndarray]:
    """Return a mask of exactly alpha groups, a union of two, all, one group each, and any bits."""
    random = np.random.default_rng(seed)

    def drawn(schedule_progress: float) -> np.ndarray:
        mask = np.zeros(groups.total, dtype=bool)
        for selections in groups.kinds:
            start, stop = selections[0].start, selections[-1].stop
            mask[start:stop] = select(random.random(stop - start), selections, schedule_progress)
        return mask

    return [
        drawn(1.0),
        drawn(1.0) | drawn(1.0),
        np.ones(groups.total, dtype=bool),
        # More than 1 is below every keep ratio: what is left is the one group that must stay.
        drawn(1.6),
        random.random(groups.total) < 0.5,
    ]


@pytest.mark.parametrize("kinds", [("channel", "shape"), ("channel", "kernel")], ids="+".join)
def test_a_mask_goes_to_a_gpu_in_few_copies(kinds):
    """However many layers there are: one of the mask's, and one of the plan's."""
    layout, groups = prepare(kinds)
    for mask in masks(groups, seed=len(kinds)):
        flat = torch.randn(layout.numel)
        with pretended_gpu() as copies:
            there = flat.to(GPU)
            plan = plan_of(layout, groups, mask, GPU)
            pack_(there, plan, payload := torch.empty(plan.numel, device=GPU))
            make_mask(layout, groups, mask, there).apply_(there)
            found, masked = payload.cpu(), there.cpu()
        # Three more are of the vectors, and one wait is for the number of what is kept.
        assert copies.pop("aten.nonzero", 1) == 1
        assert set(copies) == {"to"} and 3 <= copies["to"] <= 5
        pack_(flat, plan_of(layout, groups, mask, CPU), expected := torch.empty(plan.numel))
        make_mask(layout, groups, mask, flat).apply_(flat)
        assert torch.equal(found, expected) and torch.equal(masked, flat)


def walked(layout: Layout, groups: Groups, mask: np.ndarray) -> torch.Tensor:
    """Return the 0/1 vector of a mask by walking over the kernels and slices of all groups."""
    support = torch.ones(layout.numel, dtype=torch.float64)
    for s in itertools.chain(*groups.kinds):
        layer = groups.layers[s.layer]
        segment = layout.segments[layer.segment]
        weight = support[segment.place].view(segment.shape)
        kept = torch.zeros_like(weight)
        members = itertools.chain(*groups_of(weight, s.kind, layer.blocks))
        for bit, member in zip(mask[s.start : s.stop].tolist(), members, strict=True):
            kept[member] += bit
        weight *= kept > 0
    return support


@pytest.mark.parametrize("kinds", [*ORDERS, *INSIDE], ids="+".join)
def test_masks_payloads_and_counts_are_those_of_walking(kinds):
    layout, groups = prepare(kinds)
    torch.manual_seed(0)
    flat = torch.randn(layout.numel, dtype=torch.float64)
    # What a projection of it keeps, on the ramp and behind it, and others.
    projected = [project(flat, layout, groups, progress)[1] for progress in (0.6, 1.0)]
    for mask in (*projected, *masks(groups, seed=len(kinds))):
        expected = flat * walked(layout, groups, mask)
        found = flat.clone()
        make_mask(layout, groups, mask, found).apply_(found)
        assert torch.equal(found, expected)
        plan = plan_of(layout, groups, mask, CPU)
        # Random weights are never zero themselves.
        assert plan.numel == int(expected.count_nonzero())
        assert plan.numel == count_kept(layout, groups, mask)
        payload = torch.full((plan.numel + 5,), 17, dtype=flat.dtype)
        pack_(flat, plan, payload)
        # What lies behind the parameters belongs to others.
        assert torch.equal(payload[plan.numel :], torch.full((5,), 17, dtype=flat.dtype))
        assert torch.equal(payload[: plan.numel], expected[expected != 0])
        result = torch.full_like(flat, torch.nan)
        unpack_(payload, plan, result)
        assert torch.equal(result, expected)
        # A sum is packed as if it had been taken before.
        total, both = flat + expected, torch.empty_like(payload)
        pack_(total, plan, payload)
        pack_(flat, plan, both, expected)
        assert torch.equal(both[: plan.numel], payload[: plan.numel])
        pack_(flat, plan, both, expected, 0.3)
        assert torch.equal(both[: plan.numel], payload[: plan.numel] * 0.3)


@pytest.mark.parametrize("count", [1, 3, 50])
def test_parts_of_a_plan_are_the_whole_one_after_the_other(count):
    layout, groups = prepare(("filter", "channel"))
    flat, other = torch.randn(2, layout.numel)
    for mask in masks(groups, seed=0):
        whole = plan_of(layout, groups, mask, CPU)
        wanted, found = torch.full((2, whole.numel), 17.0)
        pack_(flat, whole, wanted, other, 0.3)
        places, back, spread = [], *torch.full((2, layout.numel), torch.nan)
        for place, start, part in cut_plan(whole, count, 8):
            assert part.digest == whole.digest
            assert start % 8 == 0 or start == whole.numel
            pack_(flat, part, found[start:], other, 0.3)
            unpack_(found[start:], part, spread)
            places += range(place.start, place.stop)
        assert places == list(range(layout.numel)) and torch.equal(found, wanted)
        unpack_(wanted, whole, back)
        assert torch.equal(spread, back)


def test_digests_tell_masks_and_layouts_apart():
    layout, groups = prepare(("channel",))
    mask = masks(groups, seed=0)[0]
    digests = [plan_of(layout, groups, mask, CPU).digest]
    assert plan_of(layout, groups, mask.copy(), CPU).digest == digests[0]
    for bit in range(groups.total):
        flipped = mask.copy()
        flipped[bit] ^= True
        digests.append(plan_of(layout, groups, flipped, CPU).digest)
    assert len(set(digests)) == groups.total + 1
    assert all(0 <= digest < 2**64 for digest in digests)

    other = convolutions()
    other[-1] = nn.Linear(3, 4)
    other_layout = build_layout(other)
    other_groups = find_groups(other, other_layout, ["channel"], [0.4])
    assert other_groups == groups
    assert plan_of(other_layout, other_groups, mask, CPU).digest != digests[0]


def test_the_payload_of_a_real_network_is_the_count_by_hand():
    """With half of the input channels of all convolutions but the first, block by block."""
    # Of which only the shapes exist.
    with torch.device("meta"):
        model = build_model("resnet18", Images(32, 10), stem="cifar")
    layout = build_layout(model)
    groups = find_groups(model, layout, ["channel"], [0.5])
    # Means and second moments of all BatchNorm channels.
    assert batchnorm.numel(batchnorm.find(model)) == 9_600
    dense, half = 11_173_962, 5_595_210
    squared_norms = np.random.default_rng(0).random(groups.total)
    for schedule_progress, expected in ((0.0, dense), (1.0, half)):
        mask = select(squared_norms, groups.kinds[0], schedule_progress)
        assert count_kept(layout, groups, mask) == expected
    # What is never pruned travels whole.
    assert dense - half == groups.prunable_numel // 2
