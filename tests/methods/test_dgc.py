"""DGC over MPI: what equals plain SGD, what travels in the warm-up, and what may not go on."""

from math import log
from types import SimpleNamespace

import pytest
from driving import COMMON, SHAPES, STEPS, assert_alike_on_all_ranks, run_driver
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from torch import float64

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import dgc
from prunex_mpi.methods.dgc import ratio_of, warmup_steps

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]


def run(topology, **changes):
    """Return the records and the last state of a run in float64."""
    settings = make(**{**COMMON, **changes})
    stream = RandomStream(WORLD.rank, float64)
    records, states = zip(*run_driver(topology, settings, new_net(), stream), strict=True)
    return records, states[-1]


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_sending_everything_is_sgd_with_momentum(aggregation, ranks_per_node):
    """Nothing is compressed then, as in the authors' code; the decay's momentum is apart."""
    with nodes_of(ranks_per_node) as topology:
        changes = {"aggregation": aggregation, "weight_decay": 0.1}
        _, found = run(topology, method="dgc", dgc_ratio=1.0, **changes)
        _, wanted = run(topology, method="dense", **changes)
    assert (found.z - wanted.z).abs().max() < 1e-13
    assert not found.memory["residual"].any()
    assert found.optimizer.first_moment is None
    assert_alike_on_all_ranks(found.theta)


def test_the_warm_up_sends_more_and_then_the_share(monkeypatch):
    """Two epochs of two steps: 0.001 to the power of 1/5, 2/5, 3/5 and 4/5."""
    monkeypatch.setattr(dgc, "SAMPLE", 1.0)
    with nodes_of(1) as topology:
        sample = {"dgc_ratio": 0.001, "dgc_warmup_epochs": 2}
        records, _ = run(topology, method="dgc", **sample)
    # Per step all 69 biases, gammas and betas, and what is told: how many elements there are.
    rest = 8 * 69 + 8
    # Of 216, 288, 72, 96 and 60 weights 25.1, 6.3, 1.6 and 0.4 %, then the share.
    counts = [55 + 73 + 19 + 25 + 16, 14 + 19 + 5 + 7 + 4, 4 + 5 + 2 + 2 + 1, 1 + 2 + 1 + 1 + 1]
    counts += [5, 5]
    for record, mine in zip(records, (counts[:STEPS], counts[STEPS:]), strict=True):
        statistics = 8 * 2 * (8 + 8 + 12)
        assert record["bytes"]["payload"] == sum(12 * c + rest for c in mine) + statistics


@pytest.mark.parametrize(
    ("outer_iterations", "steps", "wanted"),
    [(800, 25, 400), (1600, 25, 400), (64, 25, 40), (4, 25, 2), (4, 4, 0)],
)
def test_the_warm_up_is_four_epochs_but_a_small_part_of_the_run(outer_iterations, steps, wanted):
    """An epoch has 100 steps; 5 of 200 epochs are the authors'."""
    settings = make(method="dgc", outer_iterations=outer_iterations, dgc_ratio=0.001)
    train = SimpleNamespace(steps_per_epoch=100)
    position = SimpleNamespace(steps_done=0, step=0)
    context = SimpleNamespace(
        settings=settings,
        problem=SimpleNamespace(train=train, steps=steps),
        state=SimpleNamespace(position=position),
    )
    assert warmup_steps(context) == wanted
    shares = {}
    for position.step in range(wanted + 1):
        shares.setdefault(round(-5 * log(ratio_of(context), 1000), 6), position.step)
    # Equally long parts, as far as there are steps.
    parts = range(5) if wanted >= 4 else [0, 2] if wanted else []
    assert shares == {float(p + 1): p * wanted // 4 for p in parts} | {5.0: wanted}
