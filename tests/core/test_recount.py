"""Steps of a run that goes on with other ranks, whose epochs have another number of steps."""

import pytest

from prunex_mpi.config.resolve import make
from prunex_mpi.core.schedule import quadratic_rounds, recount_steps_, total_steps
from prunex_mpi.core.state import Position

COMMON = {"dataset": "synthetic", "train_samples": 64, "test_samples": 16, "lr": 0.05}


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (6, 4), (3, 3)])
def test_the_share_of_the_run_that_is_done_stays(before: int, now: int) -> None:
    settings = make(**COMMON, outer_iterations=8)
    for iteration in range(1, 10):
        position = Position(iteration=iteration, steps_done=(iteration - 1) * before)
        recount_steps_(position, settings, before, now)
        assert position.steps_done == (iteration - 1) * now


@pytest.mark.parametrize("iterations", [3, 4, 7])
def test_steps_after_the_freeze_keep_the_number_of_their_own(iterations: int) -> None:
    settings = make(
        **COMMON,
        outer_iterations=8,
        warmup_iterations=1,
        keep_ramp_iterations=2,
        freeze_iteration=4,
        frozen_local_steps=5,
    )
    until, after = min(iterations, 4), max(0, iterations - 4)
    position = Position(iteration=iterations + 1, steps_done=2 * until + 5 * after)
    recount_steps_(position, settings, 2, 6)
    assert position.steps_done == 6 * until + 5 * after


def test_qsr_has_outer_iterations_left_on_more_ranks() -> None:
    settings = make(**COMMON, method="qsr", outer_iterations=8, qsr_alpha=0.07)
    position = Position(iteration=4, steps_done=total_steps(settings, 2) // 2)
    recount_steps_(position, settings, 2, 1)
    assert position.steps_done == total_steps(settings, 1) // 2
    assert quadratic_rounds(settings, 1, position.steps_done) > 0
