"""ClickTrain against a simulation of its authors' code, its bytes, and what it refuses."""

import pytest
import torch
from driving import (
    SHAPES,
    STEPS,
    assert_like_oracle,
    by_name,
    difference,
    element_masks,
    run_driver,
    simulated,
)
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_clicktrain import simulate_clicktrain
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.mask_choice import make_groups
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout

# Chosen in the second of five iterations, pruned after the third.
COMMON = {"method": "clicktrain", "outer_iterations": 5, "keep_ratio": (0.25,), "lr": 0.05}
COMMON |= {"clicktrain_choose_iteration": 1, "clicktrain_prune_iteration": 3}
COMMON |= {"lr_schedule": "constant", "warmup_ratio": 0.0}
# So that the penalty is felt within six steps.
LASSO = {"clicktrain_lasso": 0.02}


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_program_equals_oracle(aggregation, ranks_per_node):
    settings = make(aggregation=aggregation, **COMMON, **LASSO)
    model = new_net()
    wanted = {**vars(settings), "steps": STEPS}
    history = simulated(simulate_clicktrain, model, wanted, ranks_per_node)
    assert [expected.hard for expected in history] == [False, False, True, True, True]
    with nodes_of(ranks_per_node) as topology:
        runs = run_driver(topology, settings, model, RandomStream(WORLD.rank, torch.float64))
        for (record, state), expected in zip(runs, history, strict=True):
            assert_like_oracle(record, state, expected)
            assert record["frozen"] == expected.hard
            if not expected.hard:
                assert record["density"] == 1.0 and state.theta.all()
                continue
            kept = element_masks(state)
            assert kept.keys() == expected.kept.keys()
            for name, mask in kept.items():
                assert torch.equal(mask, expected.kept[name]), name
            # Of 32, 8 and 96 kernels a quarter, 4 of 9 weights of each of the 3x3.
            assert record["density"] == (8 * 4 + 2 * 4 + 24) / (32 * 9 + 8 * 9 + 96)
            momentum = by_name(state.optimizer.first_moment, state)
            assert not any(momentum[name][~mask].any() for name, mask in kept.items())
    assert record["status"] == "completed"
    if aggregation == "flat":
        # Without the penalty other weights are reached.
        without = {**wanted, "options": make(**COMMON).options}
        other = simulated(simulate_clicktrain, new_net(), without, ranks_per_node)
        assert difference(other[2].z, history[2].z) > 1e-4


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_bytes_are_counted_by_hand(aggregation, ranks_per_node):
    settings = make(aggregation=aggregation, **COMMON)
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        runs = run_driver(topology, settings, new_net(torch.float32), stream)
        found = [record["bytes"] for record, _ in runs]
        nodes, inside = topology.num_nodes, topology.node_size > 1
        if not topology.is_leader:
            return
    workers = WORLD.size if aggregation == "flat" else nodes
    # 801 parameters, of which 456 can be pruned and 64 of these are kept; 56 statistics.
    whole, packed = 4 * (STEPS * 801 + 56), 4 * (STEPS * (801 - 456 + 64) + 56)
    for k, counted in enumerate(found, 1):
        payload = whole if k <= 3 else packed
        # Of one rank statistics stay where they are.
        payload -= 4 * 56 if WORLD.size == 1 else 0
        # 136 kernels, and 4 patterns of 40 of them: a bit each, once.
        mask = 37 if k == 2 else 0
        assert (counted["dense"], counted["payload"], counted["mask"]) == (whole, payload, mask)
        # Inside a node gradients are dense.
        assert counted["intra"] == (2 * whole if aggregation == "hierarchical" and inside else 0)
        sent = 2 * payload * (workers - 1) / workers if nodes > 1 else 0
        if k != 2:
            assert sent - 4 * STEPS <= counted["sent"] <= sent


@pytest.mark.skipif(WORLD.size > 1, reason="groups are found on each rank alike")
def test_networks_without_convolutions_are_refused_with_what_to_do():
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    with pytest.raises(UserError, match=r"no convolution.*: choose another --method"):
        make_groups(make(**COMMON), model, build_layout(model), Images(6))
