"""What SparseLoCo hands over, and that all ranks hold the same."""

import pytest
import torch
from driving import assert_alike_on_all_ranks, run_driver
from nets import RandomStream, new_net
from nodes import NODE_SHAPES, WORLD, nodes_of

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import sparseloco

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

COMMON = {"outer_iterations": 3, "lr": 0.05, "lr_schedule": "constant", "bn": "average"}


@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_bytes_are_those_that_are_foretold_and_all_ranks_hold_the_same(ranks_per_node):
    settings = make(method="sparseloco", sparseloco_ratio=1e-3, **COMMON)
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        for record, state in run_driver(topology, settings, new_net(torch.float32), stream, 2):
            assert_alike_on_all_ranks(state.z)
            assert_alike_on_all_ranks(state.stats)
            for module in state.bn_modules:
                assert_alike_on_all_ranks(module.running_var)
            each, _ = sparseloco.SparseLoco.payload(settings, state.layout, 4, state.stats.numel())
            counted = record["bytes"]
            if topology.is_leader:
                assert counted["payload"] == each
            nodes = topology.num_nodes
            if WORLD.rank == 0:
                # Each message goes around the ring once.
                assert counted["sent"] == (nodes - 1) * each
            if topology.node_size > 1:
                assert counted["intra"] > nodes * each
            left = state.memory[sparseloco.NOT_SENT]
            assert bool(left.any()) == topology.is_leader
