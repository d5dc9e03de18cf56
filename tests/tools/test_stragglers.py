"""Ranks that the others waited for are found in records of jobs with an injected delay."""

from dataclasses import replace

import numpy as np
import pytest
from recorded import Delay, rank_lines

from prunex_mpi.base.record_keys import RANK_PHASES
from prunex_mpi.tools.drawing import styled
from prunex_mpi.tools.report import stragglers
from prunex_mpi.tools.report.read_runs import rank_record
from prunex_mpi.tools.report.run_pictures import lost_seconds, rank_seconds
from prunex_mpi.tools.report.stragglers import RankRecord, find_stragglers, ranges, split_exchange

LAYOUTS = [(2, 2), (1, 1), (4, 4), (2, 1), (2, 2, 2), (3, 3)]
TRIALS, RIGHT = 50, 48


def record(
    iteration: int,
    node: list[int],
    work: dict[str, list[float]],
    met: tuple[str, ...] = RANK_PHASES,
) -> RankRecord:
    """Return an outer iteration in which ranks meet in the phases of `met`."""
    seconds = {phase: np.array(values, dtype=float) for phase, values in work.items()}
    exchange = {phase: np.full(len(node), 0.001 * (phase in met)) for phase in RANK_PHASES}
    hosts = ("alpha", "beta") if iteration == 1 else ()
    return RankRecord(iteration, np.array(node), seconds, exchange, {}, np.zeros(len(node)), hosts)


def charged(*records: RankRecord) -> dict[tuple[str, int], float]:
    """Return what was charged, rounded to microseconds."""
    found = find_stragglers(records)
    assert found is not None
    return {(s.phase, s.rank): round(s.seconds, 6) for s in found.stragglers}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_culprit_of_a_drawn_delay_is_the_first_or_second_suspect(seed):
    rng = np.random.default_rng(seed)
    missed = []
    for _ in range(TRIALS):
        nodes = LAYOUTS[rng.integers(len(LAYOUTS))]
        delay = Delay(
            int(rng.integers(sum(nodes))),
            str(rng.choice(RANK_PHASES)),
            float(rng.uniform(5, 50)),
            float(rng.choice([1.0, 0.3])),
        )
        found = find_stragglers(map(rank_record, rank_lines(rng, nodes, 25, delay)))
        assert found is not None
        if (delay.phase, delay.rank) not in [(s.phase, s.rank) for s in found.stragglers[:2]]:
            missed.append((nodes, delay))
    assert len(missed) <= TRIALS - RIGHT, missed


def test_a_job_without_a_delay_blames_nobody_for_much():
    rng = np.random.default_rng(0)
    found = find_stragglers(map(rank_record, rank_lines(rng, (2, 2), 40)))
    delayed = find_stragglers(map(rank_record, rank_lines(rng, (2, 2), 40, Delay(1, "local", 30))))
    assert found is not None and delayed is not None
    assert delayed.stragglers[0].seconds > 0.9 * 40 * 0.03
    assert found.stragglers[0].seconds < delayed.stragglers[0].seconds / 3


def test_delays_between_meetings_add_up():
    work = {"local": [3.0, 1.0], "project": [1.0, 1.0], "dual": [1.0, 2.0]}
    assert charged(record(1, [0, 1], work)) == {("local", 0): 2.0, ("dual", 1): 1.0}


def test_without_a_meeting_between_them_delays_of_two_ranks_do_not_add_up():
    work = {"local": [3.0, 1.0], "dual": [1.0, 2.0]}
    assert charged(record(1, [0, 1], work, met=("evaluate",))) == {("local", 0): 2.0}
    work = {"local": [3.0, 1.0], "dual": [1.0, 4.0]}
    assert charged(record(1, [0, 1], work, met=("evaluate",))) == {("dual", 1): 3.0}


def test_leaders_are_held_against_leaders():
    # All leaders pack, which is no fault of theirs; that rank 2 packs for longer is.
    work = {"inter": [5.0, 1.0, 7.0, 1.0]}
    assert charged(record(1, [0, 0, 1, 1], work)) == {("inter", 2): 2.0}


def test_the_only_leader_is_held_against_its_usual_time():
    records = [
        record(k, [0, 0, 0], {"project": [9.0 if k == 4 else 5.0, 1, 1]}) for k in range(1, 8)
    ]
    found = find_stragglers(records)
    assert found is not None
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.seconds, straggler.iterations) == (0, 4.0, (4,))


def test_a_job_that_goes_on_with_other_ranks_is_walked_as_well(monkeypatch):
    monkeypatch.setattr(stragglers, "BLOCK", 2)
    few = [record(k, [0, 1], {"local": [1.0, 2.0]}) for k in (1, 2, 3)]
    many = [record(k, [0, 0, 1], {"local": [1.0, 1.0, 4.0]}) for k in (4, 5)]
    found = find_stragglers([*few, *many])
    assert found is not None
    assert (found.ranks, found.iterations, found.hosts) == (3, 5, ("alpha", "alpha", "beta"))
    assert {(s.rank, round(s.seconds, 6)) for s in found.stragglers} == {(2, 6.0), (1, 3.0)}
    assert found.places == ((0, "alpha"), (1, "beta"), (1, "alpha"), (2, "beta"))
    assert found.work["local"].tolist() == [5.0, 6.0, 2.0, 8.0]


def test_after_a_loss_numbers_that_others_have_taken_blame_nobody_else():
    before = [record(k, [0, 1, 2], {"local": [1.0, 4.0, 1.0]}) for k in (1, 2)]
    before[0] = replace(before[0], hosts=("alpha", "beta", "gamma"))
    # Without beta: gamma is the second node now.
    after = [record(k, [0, 1], {"local": [3.0, 1.0]}) for k in (3, 4)]
    after[0] = replace(after[0], hosts=("alpha", "gamma"))
    found = find_stragglers([*before, *after])
    assert found is not None
    assert [(s.rank, s.host, s.seconds) for s in found.stragglers] == [
        (1, "beta", 6.0),
        (0, "alpha", 4.0),
    ]
    assert (found.node, found.hosts) == ((0, 1, 2), ("alpha", "beta", "gamma"))
    work = dict(zip(found.places, found.work["local"].tolist(), strict=True))
    assert work[1, "beta"] == 8.0 and work[1, "gamma"] == work[2, "gamma"] == 2.0
    (rest,) = find_stragglers([*before[:1], *after]).stragglers[1:]
    assert (rest.rank, rest.host) == (1, "beta")
    with styled():
        assert len(rank_seconds(found).axes[0].get_yticklabels()) == len(found.places)
        assert lost_seconds(found) is not None


def test_waiting_is_what_the_least_in_a_collective_is_exceeded_by():
    waiting, transmitting = split_exchange(np.array([[0.5, 2.0, 0.75]]))
    assert waiting.tolist() == [[0.0, 1.5, 0.25]]
    assert transmitting.tolist() == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((4,), "4"), ((1, 2, 3, 7), "1-3, 7"), ((1, 3, 5, 7, 8), "1, 3 and 3 more")],
)
def test_iterations_are_said_as_ranges(numbers, text):
    assert ranges(numbers, most=4 if len(numbers) < 5 else 2) == text
