"""How long the rounds of qsr are, and when they are evaluated."""

import math
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest

from prunex_mpi.config.resolve import make
from prunex_mpi.core.loop import falls_due, rounds
from prunex_mpi.core.schedule import (
    local_steps,
    quadratic_interval,
    quadratic_rounds,
    rounds_left,
    steps_behind,
    total_steps,
)
from prunex_mpi.core.state import Position


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
        problem=SimpleNamespace(steps=steps, test=(), lr_scale=1.0),
        state=SimpleNamespace(position=position, frozen=False, mask=None),
        heartbeat=SimpleNamespace(),
    )


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


def test_other_methods_have_rounds_of_one_length():
    for method in ("local-sgd", "diloco", "sparseloco", "dense"):
        assert lengths_of_others(make(method=method, outer_iterations=3)) == [5, 5, 5]


def lengths_of_others(settings):
    context, found = work_of(settings, 5), []
    for this in rounds(context):
        found.append(local_steps(context))
        assert this.last == (this.k == 3)
        context.state.position.iteration += 1
    return found


def test_evaluations_come_after_as_many_steps_as_those_of_local_sgd():
    settings = make(
        method="qsr", evaluate_every=3, lr=0.05, qsr_alpha=0.301, lr_schedule="constant"
    )
    # Rounds of 36 steps; the others are evaluated after 12, 24, 36 ...
    assert falls_due(work_of(settings, 4), 1)
    less = make(method="qsr", evaluate_every=10, lr=0.05, qsr_alpha=0.301, lr_schedule="constant")
    found = [falls_due(work_of(less, 4, done), 1) for done in (0, 36, 72, 108)]
    # 40 and 80 and 120 lie in the second, third and fourth.
    assert found == [False, True, True, True]
    even = make(method="qsr", evaluate_every=2, lr_schedule="constant", qsr_alpha=1e-3)
    assert [falls_due(work_of(even, 4, 4 * k), k + 1) for k in range(4)] == [False, True] * 2


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
    assert (local_steps(context), steps_behind(context)) == (36, 1)
