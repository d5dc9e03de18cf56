"""Learning rate, keep ramp, the freeze, the length of rounds, and steps on other ranks."""

import itertools
import math
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest

from prunex_mpi.config.resolve import make
from prunex_mpi.core.loop import is_due, rounds
from prunex_mpi.core.schedule import (
    Stage,
    asynchronous_steps,
    local_steps,
    may_stop,
    note_drift_,
    quadratic_interval,
    quadratic_rounds,
    rate_at,
    rate_now,
    rounds_left,
    schedule_progress,
    settled,
    steps_with,
    total_steps,
)
from prunex_mpi.core.state import Position


def rates(schedule: str, total: int = 100, warmup: float = 0.0) -> list[float]:
    settings = make(lr=0.2, lr_schedule=schedule, warmup_ratio=warmup, min_lr_ratio=0.01)
    return [rate_at(settings, k, total) for k in range(total)]


def test_constant_stays_and_warmup_rises_linearly_to_the_base():
    assert rates("constant") == [0.2] * 100
    found = rates("constant", warmup=0.05)
    assert found[:5] == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.2])
    assert found[5:] == [0.2] * 95


def test_step_divides_by_ten_at_half_and_three_quarters():
    assert rates("step") == pytest.approx([0.2] * 50 + [0.02] * 25 + [0.002] * 25)


def test_cosine_runs_from_the_base_to_the_final_share():
    found = rates("cosine", warmup=0.05)
    assert found[5] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(found[5:]))
    # The middle of the 95 steps after the warm-up lies between steps 52 and 53.
    assert (found[52] + found[53]) / 2 == pytest.approx(0.2 * (1 + 0.01) / 2, rel=1e-3)
    # One step past the run would be the end itself.
    settings = make(lr=0.2, lr_schedule="cosine", warmup_ratio=0.05, min_lr_ratio=0.01)
    end = rate_at(settings, 100, 100)
    assert end == pytest.approx(0.002)
    # The rate does not rise again after it.
    assert rate_at(settings, 150, 100) == end
    assert found[-1] == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 0.999])
def test_rates_of_the_shortest_runs_are_positive_and_at_most_the_base(schedule, total, warmup):
    assert all(0 < rate <= 0.2 for rate in rates(schedule, total, warmup))


def test_keep_ramp_is_dense_then_cubic_then_at_its_target():
    found = [schedule_progress(k, warmup=3, ramp=4) for k in range(1, 11)]
    cubic = [1 - (1 - t) ** 3 for t in (0.25, 0.5, 0.75)]
    assert found == pytest.approx([0, 0, 0, *cubic, 1, 1, 1, 1])
    # Exactly one, since the drift trigger compares with it.
    assert found[6:] == [1.0] * 4


@pytest.mark.parametrize(("warmup", "ramp"), [(0, 0), (0, 1), (2, 0), (2, 1), (5, 3)])
def test_target_is_reached_in_the_iteration_that_ends_the_ramp(warmup, ramp):
    found = [schedule_progress(k, warmup, ramp) for k in range(1, 12)]
    first = found.index(1.0) + 1
    assert first == warmup + max(1, ramp)
    assert found[:warmup] == [0.0] * warmup
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("drifts", "threshold", "expected"),
    [
        ([0.0, 0.0, 0.0], 0.0, True),
        ([0.0, 0.0], 0.0, False),
        ([0.5, 0.1, 0.1, 0.1], 0.1, True),
        ([0.1, 0.1, 0.5], 0.1, False),
        ([0.1, 0.1, 0.1 + 1e-12], 0.1, False),
        ([0.0, 0.0, 0.0], -1.0, False),
        ([math.inf] * 3, 1.0, False),
    ],
)
def test_masks_settle_after_a_whole_window_of_small_drifts(drifts, threshold, expected):
    assert settled(drifts, threshold) is expected


@pytest.mark.parametrize("strict", [0.0, 0.5, 1.0])
def test_masks_settle_and_runs_stop_once_the_keep_ratio_is_reached(strict):
    settings, position = make(freeze_drift=0.0), Position(drifts=[0.0] * 2)
    stage, reached = Stage(strict, True, True, False, False), strict == 1.0
    note_drift_(position, stage, settings, drift=0.0)
    assert position.freeze_next == reached
    assert may_stop(stage, settings, frozen=True) == reached
    assert not may_stop(stage, settings, frozen=False)
    assert may_stop(stage, make(freeze_iteration=0), frozen=False) == reached


@pytest.mark.parametrize(
    ("rate", "alpha", "least", "left", "wanted"),
    [
        # The paper's Local AdamW on ViT-B: H_base 4, alpha 0.0175, peak rate 0.008.
        (0.008, 0.0175, 4, 10**6, 4),
        (0.004, 0.0175, 4, 10**6, 19),
        (0.001, 0.0175, 4, 10**6, 306),
        # The run ends with the last round, and a rate of nothing asks for all that is left.
        (0.001, 0.0175, 4, 100, 100),
        (0.008, 0.0175, 4, 3, 3),
        (0.0, 0.2, 4, 50, 50),
        (1e-300, 1e200, 4, 50, 50),
    ],
)
def test_the_interval_is_that_of_the_paper(rate, alpha, least, left, wanted):
    assert quadratic_interval(rate, alpha, least, left) == wanted


def work_of(settings, steps, done=0, iteration=1):
    position = Position(iteration=iteration, steps_done=done)
    return SimpleNamespace(
        settings=settings,
        problem=SimpleNamespace(steps=steps, test=(), rate=None),
        state=SimpleNamespace(position=position, frozen=False, mask=SimpleNamespace(bits=None)),
        heartbeat=SimpleNamespace(),
    )


def test_the_rate_is_that_of_the_step_that_comes_next():
    settings = make(outer_iterations=8, lr_schedule="cosine")
    context = work_of(settings, 4, done=12)
    context.state.position.step = 1
    assert rate_now(context) == rate_at(settings, 13, 32)


def lengths(settings, steps):
    """Return the steps of all rounds, as the driver goes through them."""
    context, found = work_of(settings, steps), []
    for this in rounds(context):
        found.append(local_steps(context))
        assert rounds_left(context) == quadratic_rounds(settings, steps, sum(found[:-1]))
        context.state.position.iteration += 1
        context.state.position.steps_done += found[-1]
        assert this.k == len(found)
        assert this.last == (sum(found) == total_steps(settings, steps))
    return found


def test_rounds_grow_as_the_rate_falls_and_end_with_the_run():
    settings = make(method="qsr", outer_iterations=40, lr=0.2, qsr_alpha=0.301)
    found = lengths(settings, 4)
    assert sum(found) == total_steps(settings, 4) == 160
    assert len(found) == quadratic_rounds(settings, 4) < 40
    assert found[0] == 4
    assert all(a <= b for a, b in pairwise(found[:-1]))
    # By hand: a cosine from 0.2 to 0.002 after 8 steps of warm-up.
    for done, length in zip(accumulate(found[:-1], initial=0), found[:-1], strict=False):
        part = max(0, done - 8) / 152
        rate = 0.002 + 0.198 * 0.5 * (1 + math.cos(math.pi * part))
        assert length == max(4, math.floor((0.301 / rate) ** 2))
    assert max(found) > 20
    # A rate that stands still: (0.3 / 0.1)^2 = 9, and what is left of 160.
    constant = make(
        method="qsr", outer_iterations=40, lr=0.1, qsr_alpha=0.3001, lr_schedule="constant"
    )
    assert lengths(constant, 4) == [9] * 17 + [7]


def test_the_warm_up_has_the_interval_that_follows_it():
    """A rate that still rises would ask for long rounds at first."""
    settings = make(method="qsr", outer_iterations=10, lr=0.1, qsr_alpha=0.25, warmup_ratio=0.5)
    assert lengths(settings, 2)[:2] == [6, 6]


def test_evaluations_come_after_as_many_steps_as_those_of_local_sgd():
    settings = make(
        method="qsr", evaluate_every=3, lr=0.05, qsr_alpha=0.301, lr_schedule="constant"
    )

    def due(settings, done, k=1):
        return is_due(work_of(settings, 4, done), SimpleNamespace(k=k, last=False))

    # Rounds of 36 steps; the others are evaluated after 12, 24, 36 ...
    assert due(settings, 0)
    less = make(method="qsr", evaluate_every=10, lr=0.05, qsr_alpha=0.301, lr_schedule="constant")
    found = [due(less, done) for done in (0, 36, 72, 108)]
    # 40 and 80 and 120 lie in the second, third and fourth.
    assert found == [False, True, True, True]
    even = make(method="qsr", evaluate_every=2, lr_schedule="constant", qsr_alpha=1e-3)
    assert [due(even, 4 * k, k + 1) for k in range(4)] == [False, True] * 2


def test_an_exchange_runs_behind_as_many_steps_of_a_round_of_any_length():
    settings = make(
        method="qsr",
        local_steps=4,
        overlap_steps=1,
        evaluate_every=4,
        lr=0.05,
        qsr_alpha=0.301,
        lr_schedule="constant",
    )
    context = work_of(settings, 4)
    assert (local_steps(context), asynchronous_steps(context)) == (36, 1)


@pytest.mark.parametrize(("samples", "steps"), [(1000, 35), (128, 5), (50, 5), (0, 5)])
def test_ranks_with_fewer_samples_than_a_batch_have_an_epoch_of_one_step(samples, steps):
    settings = make(dataset="synthetic", batch_size=128, local_epochs="5", outer_iterations=2)
    assert steps_with(settings, samples) == steps
