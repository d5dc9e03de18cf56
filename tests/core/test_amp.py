"""What an overflow in float16 leaves behind: nothing."""

import pytest
import torch
from driving import COMMON, assert_alike_on_all_ranks, run_driver
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of

from prunex_mpi.config.resolve import make

pytestmark = pytest.mark.mpi
# The largest number of float16 is 65,504.
TOO_LARGE = 1e7


class Flare:
    """Batches of which one rank's last of the first outer iteration does not fit into float16."""

    waited = 0.0

    def __init__(self, rank, step):
        self.stream = RandomStream(rank, torch.float32)
        self.step, self.drawn = step, 0

    def next(self):
        images, labels = self.stream.next()
        self.drawn += 1
        return (images * TOO_LARGE if self.drawn == self.step else images), labels


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "dense", "aggregation": "hierarchical"},
        {"method": "local-sgd"},
        {"node_sync": "outer", "bn": "average"},
        {
            "overlap_steps": 1,
            "payload": "int8",
            "bn": "average",
            "evaluate_every": 4,
            "residuals": "off",
        },
    ],
    ids=str,
)
def test_statistics_of_a_step_that_overflows_are_undone(changes):
    settings = make(amp="fp16", **{**COMMON, **changes})
    with nodes_of(2) as topology:
        stream = Flare(WORLD.rank, 3 if WORLD.rank == WORLD.size - 1 else 0)
        for _, state in run_driver(topology, settings, new_net(torch.float32), stream):
            for module in state.bn_modules:
                assert module.running_mean.isfinite().all()
                assert module.running_var.isfinite().all()
                assert module.running_mean.abs().max() < 100
            assert state.z.isfinite().all()
        # What is exchanged behind the next round has arrived with the last one.
        assert_alike_on_all_ranks(state.z)
        assert_alike_on_all_ranks(state.stats)
