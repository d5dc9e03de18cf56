"""What all ranks do together or one does for all; what they tell each other; clocks."""

import os
import time
from pathlib import Path

import pytest
from beats import PAUSE_S, Noted, count_closely
from nodes import WORLD

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm import agreement
from prunex_mpi.comm.agreement import (
    broadcast_json,
    count_same,
    run_collectively_while,
    run_on_root,
)

pytestmark = pytest.mark.mpi


LAST = WORLD.size - 1


def works(steps: int, file: Path = Path(os.devnull)) -> int:
    """Write on the last rank, a KiB after each pause; return this rank."""
    WORLD.Barrier()
    for _ in range(steps if WORLD.rank == LAST else 0):
        time.sleep(PAUSE_S)
        file.write_bytes(bytes(1024))
    return WORLD.rank


def test_who_is_done_goes_on_while_another_writes(monkeypatch):
    count_closely(monkeypatch)
    heartbeat = Noted()
    heartbeat.check(
        lambda: run_collectively_while(WORLD, lambda: works(20), heartbeat) == WORLD.rank
    )


def test_steps_that_read_nothing_are_progress_where_they_are_counted(monkeypatch):
    count_closely(monkeypatch)
    heartbeat = Noted()

    def counts() -> None:
        for _ in range(20 if WORLD.rank == LAST else 0):
            time.sleep(PAUSE_S)
            heartbeat.go_on()

    heartbeat.check(lambda: run_collectively_while(WORLD, counts, heartbeat))


@pytest.mark.parametrize("level", [MPI.THREAD_MULTIPLE, MPI.THREAD_FUNNELED])
def test_all_stand_still_while_one_does(monkeypatch, level):
    """Their own messages are no progress; nor is there any without threads, and it ends as well."""
    count_closely(monkeypatch)
    monkeypatch.setattr(agreement.MPI, "Query_thread", lambda: level)
    heartbeat = Noted()

    def stalls() -> None:
        if works(0) == LAST:
            time.sleep(20 * PAUSE_S)

    heartbeat.last = time.monotonic()
    run_collectively_while(WORLD, stalls, heartbeat)
    heartbeat.go_on()
    assert heartbeat.longest > 10 * PAUSE_S


def test_no_round_goes_around_all_ranks_that_sleep():
    """As Iallreduce does where the programs have Open MPI sum by a ring."""

    class Trees(MPI.Intracomm):
        def Iallreduce(self, *_: object, **options: object) -> MPI.Request:
            raise AssertionError(options)

    assert run_collectively_while(Trees(WORLD), lambda: works(1), Heartbeat()) == WORLD.rank


@pytest.mark.parametrize("ranks", [[LAST], range(WORLD.size)])
def test_what_goes_wrong_on_some_ranks_ends_all(ranks):
    def fails() -> None:
        if works(1) in ranks:
            raise UserError("no such file", 3)

    with pytest.raises(UserError, match="no such file") as caught:
        run_collectively_while(WORLD, fails, Heartbeat())
    assert caught.value.exit_code == 3
    # Nothing is left of it that what comes next could meet.
    assert run_collectively_while(WORLD, lambda: works(1), Heartbeat()) == WORLD.rank


def test_the_first_does_it_and_what_goes_wrong_is_raised_on_all():
    done = []
    found = run_on_root(WORLD, lambda: done.append(WORLD.rank) or "done")
    assert (found, done) == ((None, []) if WORLD.rank else ("done", [0]))

    def fails() -> None:
        raise UserError(f"no such file on {WORLD.rank}", 3)

    with pytest.raises(UserError, match="no such file on 0") as caught:
        run_on_root(WORLD, fails)
    assert caught.value.exit_code == 3


def test_every_rank_gets_what_one_has_as_json_has_it():
    for root in {0, LAST}:
        # What others have is not looked at.
        mine = {"θ": (root, None), "path": "\udcff"} if WORLD.rank == root else object()
        assert broadcast_json(WORLD, mine, root) == {"θ": [root, None], "path": "\udcff"}


def test_who_says_the_same_is_counted():
    assert count_same(WORLD, "all") == WORLD.size
    assert count_same(WORLD, f"{WORLD.rank == 0}") == (WORLD.size - 1 if WORLD.rank else 1)
