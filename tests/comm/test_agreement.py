"""What all ranks do together or one does for all; what they tell each other; clocks."""

import itertools
import time

import pytest
from nodes import WORLD

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.agreement import (
    broadcast_json,
    count_same,
    run_collectively_while,
    run_on_first,
)

pytestmark = pytest.mark.mpi


STEPS, STEP_S = 20, 0.01
LAST = WORLD.size - 1


def context(going, steps: int = STEPS, pause_s: float = 0.0) -> int:
    """Take long on the last rank: many steps, and a pause in which it says nothing."""
    WORLD.Barrier()
    if WORLD.rank == LAST:
        for _ in range(steps):
            time.sleep(STEP_S)
            going()
        time.sleep(pause_s)
    return WORLD.rank


def test_who_is_done_goes_on_while_the_others_do():
    beats = []
    found = run_collectively_while(WORLD, context, lambda: beats.append(time.monotonic()))
    assert found == WORLD.rank
    # A round takes several steps, between which nobody looks idle for long.
    assert len(beats) >= STEPS / 5
    assert max(b - a for a, b in itertools.pairwise(beats)) < 0.5 * STEPS * STEP_S


@pytest.mark.mpi(min_size=2)
def test_who_is_done_stands_still_while_another_does():
    pause_s = 0.5
    beats = [time.monotonic()]

    def stalls(going) -> int:
        return context(going, 2, pause_s)

    run_collectively_while(WORLD, stalls, lambda: beats.append(time.monotonic()))
    beats.append(time.monotonic())
    assert max(b - a for a, b in itertools.pairwise(beats)) > 0.5 * pause_s


def test_no_round_goes_around_all_ranks_that_sleep():
    """As Iallreduce does where the programs have Open MPI sum by a ring."""

    class Trees(MPI.Intracomm):
        def Iallreduce(self, *_: object, **options: object) -> MPI.Request:
            raise AssertionError(options)

    assert run_collectively_while(Trees(WORLD), context, lambda: None) == WORLD.rank


def test_what_goes_wrong_on_one_rank_ends_all():
    def fails(going) -> int:
        if context(going, 3) == LAST:
            raise UserError("no such file", 3)
        return 0

    with pytest.raises(UserError, match="no such file") as caught:
        run_collectively_while(WORLD, fails, lambda: None)
    assert caught.value.exit_code == 3


@pytest.mark.mpi(min_size=2)
def test_the_others_are_stopped_where_one_fails():
    """Two steps in, while they have hundreds before them and rank 0 is done."""
    steps = []

    def fails(going) -> None:
        WORLD.Barrier()
        for step in range(500 if WORLD.rank else 0):
            time.sleep(STEP_S)
            going()
            steps.append(step)
            if WORLD.rank == LAST and step == 1:
                raise UserError("damaged", 3)

    with pytest.raises(UserError, match="damaged"):
        run_collectively_while(WORLD, fails, lambda: None)
    assert len(steps) < 250
    # Nothing is left of it that what comes next could meet.
    assert run_collectively_while(WORLD, context, lambda: None) == WORLD.rank


def test_all_may_fail_at_once():
    def fails(going) -> None:
        going()
        raise UserError("damaged", 3)

    with pytest.raises(UserError, match="damaged"):
        run_collectively_while(WORLD, fails, lambda: None)


def test_the_first_does_it_and_what_goes_wrong_is_raised_on_all():
    done = []
    found = run_on_first(WORLD, lambda: done.append(WORLD.rank) or "done")
    assert (found, done) == ((None, []) if WORLD.rank else ("done", [0]))

    def fails() -> None:
        raise UserError(f"no such file on {WORLD.rank}", 3)

    with pytest.raises(UserError, match="no such file on 0") as caught:
        run_on_first(WORLD, fails)
    assert caught.value.exit_code == 3


def test_every_rank_gets_what_one_has_as_json_has_it():
    for root in {0, LAST}:
        # What others have is not looked at.
        mine = {"θ": (root, None), "path": "\udcff"} if WORLD.rank == root else object()
        assert broadcast_json(WORLD, mine, root) == {"θ": [root, None], "path": "\udcff"}


def test_who_says_the_same_is_counted():
    assert count_same(WORLD, "all") == WORLD.size
    assert count_same(WORLD, f"{WORLD.rank == 0}") == (WORLD.size - 1 if WORLD.rank else 1)
