"""GossipGraD over MPI: nodes that drift apart, each like its oracle, and their mean."""

import numpy as np
import pytest
import torch
from driving import (
    COMMON,
    STEPS,
    assert_alike_on_all_ranks,
    assert_statistics,
    by_name,
    difference,
    run_driver,
    simulated,
)
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_rivals import simulate_gossip

from prunex_mpi.config.resolve import make
from prunex_mpi.methods.gossip import make_circles, neighbours

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

CHANGES = {**COMMON, "method": "gossip", "outer_iterations": 3, "weight_decay": 0.01}


def run(topology, **changes):
    """Yield the records and states of a run in float64."""
    stream = RandomStream(WORLD.rank, torch.float64)
    yield from run_driver(topology, make(**{**CHANGES, **changes}), new_net(), stream)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_nodes_and_their_mean_equal_the_oracle(ranks_per_node):
    wanted = {**vars(make(**CHANGES)), "steps": STEPS}
    history = simulated(simulate_gossip, new_net(), wanted, ranks_per_node)
    size = 8 * sum(p.numel() for p in new_net().parameters())
    with nodes_of(ranks_per_node) as topology:
        nodes = topology.num_nodes
        for (record, state), wanted in zip(run(topology), history, strict=True):
            mine = wanted.thetas[WORLD.rank]
            for flat, expected in ((state.theta, mine), (state.z_node, mine), (state.z, wanted.z)):
                assert difference(by_name(flat, state), expected) < 1e-11
            assert_alike_on_all_ranks(state.z)
            found = record["replica_distance"]
            assert found == pytest.approx(wanted.distance, rel=1e-9, abs=1e-15)
            # Two nodes meet at each step.
            assert (found > 1e-6) == (nodes > 2)
            assert record["train_loss"] == pytest.approx(wanted.loss, rel=1e-11)
            # The mean over the nodes is no part of training.
            assert record["seconds"]["evaluate"] > 0
            assert_statistics(state, wanted.statistics)
            if not topology.is_leader:
                continue
            # A message a step, and nothing more, leaves the node; the mean is for evaluation.
            statistics = 8 * 2 * (8 + 8 + 12)
            shifted = STEPS * size if nodes > 1 else 0
            ring = 2 * (nodes - 1) * statistics // nodes
            counted = record["bytes"]
            assert counted["payload"] == shifted + statistics
            assert counted["sent"] == shifted + ring
            assert counted["dense"] == STEPS * size + statistics
            assert counted["evaluate"] == size


def test_two_nodes_of_one_size_are_dense():
    if WORLD.size % 2:
        pytest.skip("an odd number of ranks makes no two nodes of one size")
    with nodes_of(WORLD.size // 2) as topology:
        *_, (_, found) = run(topology)
        *_, (_, wanted) = run(topology, method="dense", aggregation="hierarchical")
    assert_alike_on_all_ranks(found.theta)
    assert (found.z - wanted.z).abs().max() < 1e-13


@pytest.mark.parametrize("nodes", range(2, 10))
def test_all_nodes_hear_of_each_other_in_a_period(nodes):
    circles, period = make_circles(3, nodes), int(np.ceil(np.log2(nodes)))
    assert len(circles) == nodes and all(sorted(c) == list(range(nodes)) for c in circles)
    for start in range(0, 2 * nodes * period, period):
        known = {node: {node} for node in range(nodes)}
        for step in range(start, start + period):
            pairs = {node: neighbours(circles, node, step) for node in known}
            for node, (to, source) in pairs.items():
                assert to != node != source
                assert pairs[to][1] == node and pairs[source][0] == node
            known = {node: known[node] | known[pairs[node][1]] for node in known}
        assert all(len(heard) == nodes for heard in known.values())
    # The orders change from one period to the next, and come again after as many as there are.
    orders = [[neighbours(circles, n, p * period) for n in range(nodes)] for p in range(2 * nodes)]
    assert orders[:nodes] == orders[nodes:]
    assert nodes < 4 or len({tuple(order) for order in orders}) > 1
