"""Mask agreement: what the nodes choose together is the choice by what all of them hold; scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from driving import assert_alike_on_all_ranks, comms_of
from nodes import NODE_SHAPES, nodes_of
from torch import nn

from prunex_mpi.config.resolve import BY_NAME, make
from prunex_mpi.core.mask_choice import (
    SENSITIVITY,
    agree_by_or,
    agree_by_vote,
    project_locally,
    watch_,
)
from prunex_mpi.core.state import State, build_state
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.masks import find_pruned
from prunex_mpi.pruning.projection import group_squared_norms, select

ORDERS = [("channel",), ("filter", "shape")]


def prepare(kinds: tuple[str, ...]) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, (1, 2)), nn.Conv2d(6, 4, 1, groups=2), nn.Linear(4, 2)
    )
    model.double()
    layout = build_layout(model)
    return build_state(model, layout, find_groups(model, layout, kinds, [0.4]), make())


def candidate(state: State, node: int) -> np.ndarray:
    """Return what node `node` would project."""
    return np.random.default_rng(node).standard_normal(state.layout.numel)


def best_shared_mask(state: State, flats: list[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
    """Return what keeps the most of sum_i P_i |z~_i,g|^2, kind after kind."""
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        pruned = find_pruned(mask, state.layout, state.groups, torch.device("cpu"))
        norms = sum(
            p
            * group_squared_norms(
                torch.from_numpy(flat), state.layout, state.groups, selections, pruned
            )
            for p, flat in zip(sizes, flats, strict=True)
        )
        mask[selections[0].start : selections[-1].stop] = select(norms.numpy(), selections, 1.0)
    return mask


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
@pytest.mark.parametrize("kinds", ORDERS, ids="+".join)
def test_vote_is_the_best_shared_support_for_nodes_of_any_size(kinds, ranks_per_node):
    state = prepare(kinds)
    with nodes_of(ranks_per_node) as topology:
        comms = comms_of(topology)
        traffic = comms.node.traffic
        flats = [candidate(state, node) for node in range(topology.num_nodes)]
        mask = np.zeros(state.groups.total, dtype=bool)
        if topology.is_leader:
            mine = torch.from_numpy(flats[topology.node_index])
            own = project_locally(mine, state, 1.0)
            assert np.array_equal(own, best_shared_mask(state, [mine.numpy()], (1,)))
            mask = agree_by_vote(comms.workers, mine, state, 1.0, topology.node_size)
        mask = comms.node.broadcast_bits(mask)
        expected = best_shared_mask(state, flats, topology.node_sizes)
        node_size, is_leader = topology.node_size, topology.is_leader
    assert mask.dtype == bool
    assert np.array_equal(mask, expected)
    assert_alike_on_all_ranks(torch.from_numpy(mask))
    counts = [selections[-1].stop - selections[0].start for selections in state.groups.kinds]
    voted = sum(8 * count + -(-count // 8) for count in counts)
    assert traffic.mask == (voted if is_leader else 0)
    assert traffic.intra == (-(-state.groups.total // 8) if node_size > 1 else 0)
    assert traffic.payload == traffic.evaluate == 0


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_or_is_the_union_of_the_leaders_masks(ranks_per_node):
    # 21 groups: the last byte is only partly used.
    random = np.random.default_rng(0)
    with nodes_of(ranks_per_node) as topology:
        comms = comms_of(topology)
        traffic = comms.node.traffic
        masks = random.random((topology.num_nodes, 21)) < 0.3
        mask = np.zeros(21, dtype=bool)
        if topology.is_leader:
            mask = agree_by_or(comms.workers, masks[topology.node_index])
            assert traffic.mask == 3
        mask = comms.node.broadcast_bits(mask)
        assert traffic.intra == (3 if topology.node_size > 1 else 0)
    assert mask.dtype == bool
    assert np.array_equal(mask, masks.any(axis=0))
    assert_alike_on_all_ranks(torch.from_numpy(mask))


def totals(method: str, once: int = 0, warmup: int = 0) -> list[float]:
    """Return how many steps are in the sums after each of 8 outer iterations of 2 steps.

    An epoch has 7 steps. Each adds 3^2 to both groups: 3 weights read a channel.
    """
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1))
    layout = build_layout(model)
    groups = find_groups(
        model, layout, ("coupled",), (0.5,), coupling=find_coupling(model, Images(2))
    )
    ones = torch.ones(layout.numel)
    state = SimpleNamespace(memory={SENSITIVITY: torch.zeros(2)}, frozen=False, groups=groups)
    state.grad, state.theta, state.layout = ones, ones, layout
    state.position = SimpleNamespace(iteration=0, step=0)
    context = SimpleNamespace(
        state=state,
        settings=SimpleNamespace(
            method=BY_NAME[method],
            score="gates",
            warmup_iterations=warmup,
            options=SimpleNamespace(prune_iteration=once),
        ),
        problem=SimpleNamespace(train=SimpleNamespace(steps_per_epoch=7), steps=2),
    )
    found = []
    for state.position.iteration in range(1, 9):
        for state.position.step in range(2):
            watch_(context)
        first, second = (state.memory[SENSITIVITY] / 9).tolist()
        assert first == second
        found.append(first)
    return found


@pytest.mark.parametrize(
    ("once", "wanted"), [(6, [0, 0, 2, 4, 6, 8, 8, 8]), (2, [2, 4, 4, 4, 4, 4, 4, 4]), (1, [2] * 8)]
)
def test_a_single_choice_is_made_by_the_epoch_before_it(once, wanted):
    assert totals("one-shot", once=once) == wanted


def test_each_choice_is_made_by_its_own_outer_iteration():
    assert totals("prunex", warmup=3) == [0, 0, 0, 2, 2, 2, 2, 2]
