"""DGC over MPI: what equals plain SGD, and how much travels in the warm-up."""

import pytest
from driving import COMMON, SHAPES, STEPS, assert_alike_on_all_ranks, run_driver
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from torch import float64

from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.models.layout import build_layout
from prunex_mpi.settings.resolve import make

pytestmark = pytest.mark.mpi


def run(topology, **changes):
    """Return the records and the last state of a run in float64."""
    settings = make(**{**COMMON, **changes})
    stream = RandomStream(WORLD.rank, float64)
    records, states = zip(*run_driver(topology, settings, new_net(), stream), strict=True)
    return records, states[-1]


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES)
def test_sending_everything_is_sgd_without_momentum(aggregation, ranks_per_node) -> None:
    """Momentum factor masking forgets what was sent; weight decay counts the same."""
    everything = {"method": "dgc", "compress_ratio": 1.0, "dgc_sample": 1.0, "dgc_warmup_epochs": 0}
    with nodes_of(ranks_per_node) as topology:
        changes = {"aggregation": aggregation, "weight_decay": 0.1}
        _, found = run(topology, **everything, **changes)
        _, wanted = run(topology, method="dense", momentum=0.0, **changes)
    assert (found.z - wanted.z).abs().max() < 1e-13
    assert not found.memory["own.residual"].any()
    assert "momentum_buffer" not in found.optimizer.state[found.theta]
    assert_alike_on_all_ranks(found.theta)


def test_the_warm_up_sends_more_and_then_the_share() -> None:
    """Two epochs of two steps: 1/4 and 1/16, then 1/64 and 1/256, then the share."""
    layout = build_layout(new_net())
    with nodes_of(1) as topology:
        sample = {"dgc_sample": 1.0, "compress_ratio": 0.001, "dgc_warmup_epochs": 2}
        records, _ = run(topology, method="dgc", **sample)
    statistics = 8 * 2 * (8 + 8 + 12)
    shares = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 0.001, 0.001]
    counts = [sum(kept_per_layer(layout, share)) for share in shares]
    for record, mine in zip(records, (counts[:STEPS], counts[STEPS:]), strict=True):
        assert record["bytes"]["payload"] == sum(8 + 12 * c for c in mine) + statistics
    assert records[0]["bytes"]["payload"] > 2 * records[1]["bytes"]["payload"]
