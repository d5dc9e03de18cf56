"""DGC: how long its warm-up is, and what travels in it."""

from math import log
from types import SimpleNamespace

import pytest

from prunex_mpi.config.resolve import make
from prunex_mpi.methods.dgc import ratio_of, warmup_steps


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
