"""Learning rate, keep ramp and the moment of the freeze."""

import itertools
import math

import pytest

from prunex_mpi.core.schedule import learning_rate, settled, strictness


def rates(schedule: str, total: int = 100, warmup: float = 0.0, final: float = 0.01) -> list[float]:
    return [
        learning_rate(k, total, base=0.2, schedule=schedule, warmup=warmup, final=final)
        for k in range(total)
    ]


def test_constant_stays_and_warmup_rises_linearly_to_the_base() -> None:
    assert rates("constant") == [0.2] * 100
    found = rates("constant", warmup=0.05)
    assert found[:5] == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.2])
    assert found[5:] == [0.2] * 95


def test_step_divides_by_ten_at_half_and_three_quarters() -> None:
    assert rates("step") == pytest.approx([0.2] * 50 + [0.02] * 25 + [0.002] * 25)


def test_cosine_runs_from_the_base_to_the_final_share() -> None:
    found = rates("cosine", warmup=0.05)
    assert found[5] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(found[5:]))
    # The middle of the 95 steps after the warm-up lies between steps 52 and 53.
    assert (found[52] + found[53]) / 2 == pytest.approx(0.2 * (1 + 0.01) / 2, rel=1e-3)
    # One step past the run would be the end itself.
    end = learning_rate(100, 100, base=0.2, schedule="cosine", warmup=0.05, final=0.01)
    assert end == pytest.approx(0.002)
    # The rate does not rise again after it.
    past = learning_rate(150, 100, base=0.2, schedule="cosine", warmup=0.05, final=0.01)
    assert past == end
    assert found[-1] == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 1.0])
def test_rates_of_the_shortest_runs_are_positive_and_at_most_the_base(
    schedule: str, total: int, warmup: float
) -> None:
    assert all(0 < rate <= 0.2 for rate in rates(schedule, total, warmup))


def test_keep_ramp_is_dense_then_cubic_then_at_its_target() -> None:
    found = [strictness(k, warmup=3, ramp=4) for k in range(1, 11)]
    cubic = [1 - (1 - t) ** 3 for t in (0.25, 0.5, 0.75)]
    assert found == pytest.approx([0, 0, 0, *cubic, 1, 1, 1, 1])
    # Exactly one, since the drift trigger compares with it.
    assert found[6:] == [1.0] * 4


@pytest.mark.parametrize(("warmup", "ramp"), [(0, 0), (0, 1), (2, 0), (2, 1), (5, 3)])
def test_target_is_reached_in_the_iteration_that_ends_the_ramp(warmup: int, ramp: int) -> None:
    found = [strictness(k, warmup, ramp) for k in range(1, 12)]
    first = found.index(1.0) + 1
    assert first == warmup + max(1, ramp)
    assert found[:warmup] == [0.0] * warmup
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("drifts", "threshold", "window", "expected"),
    [
        ([0.0, 0.0, 0.0], 0.0, 3, True),
        ([0.0, 0.0], 0.0, 3, False),
        ([0.5, 0.1, 0.1], 0.1, 2, True),
        ([0.1, 0.1, 0.5], 0.1, 2, False),
        ([0.1, 0.5, 0.1], 0.1, 2, False),
        ([0.1, 0.1, 0.1 + 1e-12], 0.1, 3, False),
        ([0.0, 0.0, 0.0], -1.0, 3, False),
        ([], 0.0, 1, False),
        ([math.inf], 1.0, 1, False),
    ],
)
def test_masks_settle_after_a_whole_window_of_small_drifts(
    drifts: list[float], threshold: float, window: int, expected: bool
) -> None:
    assert settled(drifts, threshold, window) is expected
