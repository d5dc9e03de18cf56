"""Leave in time: signals and time limits set a flag, and all ranks agree on the step to stop at.

The agreement is one Iallreduce MAX of two numbers that is started at one safe point and completed
at the next, about a second later, so that no rank waits for another; all ranks learn of a request
at the same local step.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.signals import ReceivedSignal

# Between two safe points; a request takes at most two such periods to be agreed.
PERIOD_S = 1.0
GROWTH = 8  # of the steps between two, at a time: the first steps may be untypical
# What leaving takes besides the checkpoint: the next safe points, the files that end the run.
MARGIN_S = 10.0
# SIGUSR1 this near the end is its herald: batch/*.sbatch have it sent two minutes before, and by
# Slurm's clock it comes up to one sooner.
HERALD_S = 180.0
TIME_LIMIT, FAILED = 1000, 2000  # beyond every signal's number
END_OF_JOB = "SLURM_JOB_END_TIME"
REASONS = {TIME_LIMIT: "the time limit", FAILED: "an error on some rank"}


class StopAgreement:
    """Agree with the other ranks on whether to stop, and where.

    `reached` is collective on `comm`. `reason` is "" until all ranks have agreed to stop, then says
    why. `reserve_s` is the time to keep for the checkpoint. A rank that `failed` asks to stop, and
    raises afterwards.
    """

    def __init__(self, comm: MPI.Comm, received: ReceivedSignal, deadline: float | None) -> None:
        self.comm = comm
        self.received = received
        self.deadline = deadline
        self.reserve_s = 0.0
        self.reason = ""
        self.failed = False
        self.interval, self.calls = 1, 0
        self.went_on = False
        self.last = time.perf_counter()
        self.longest_s = 0.0
        self.mine, self.all = np.zeros(2), np.zeros(2)
        self.request: MPI.Request | None = None

    def reached(self) -> bool:
        """Return whether all ranks stop here. Call at the same steps on every rank.

        Raises UserError on every rank where the time limit was too near from the beginning.
        """
        self.calls += 1
        if self.calls < self.interval:
            return False
        now = time.perf_counter()
        # What lies before the first safe point is no measure of training.
        elapsed = now - self.last if self.request is not None else 0.0
        if self.request is not None:
            self.request.Wait()
            self.request = None
            request, seconds_per_call = int(self.all[0]), float(self.all[1])
            if request == TIME_LIMIT and not self.went_on:
                raise UserError(self._too_late())
            self.went_on = True
            if request:
                self.reason = REASONS.get(request) or signal.Signals(request).name
                return True
            wanted = int(PERIOD_S / seconds_per_call) if seconds_per_call else 1
            self.interval = max(1, min(wanted, GROWTH * self.interval))
        self.longest_s = max(self.longest_s, elapsed)
        self.mine[:] = self._wanted(), elapsed / self.calls
        self.request = self.comm.Iallreduce(self.mine, self.all, op=MPI.MAX)
        self.calls, self.last = 0, now
        return False

    def _wanted(self) -> int:
        if self.failed:
            return FAILED
        if self.deadline is None:
            return self.received.number
        if number := self.received.number:
            herald = number == signal.SIGUSR1 and time.time() + HERALD_S > self.deadline
            return TIME_LIMIT if herald and not self.went_on else number
        return TIME_LIMIT if time.time() + self._needed() > self.deadline else 0

    def _needed(self) -> float:
        # Two safe points from now the phases between them may lie in the way.
        return MARGIN_S + 2 * max(self.longest_s, PERIOD_S) + self.reserve_s

    def _too_late(self) -> str:
        return (
            f"the time limit leaves no time to train: {self._needed():.0f} s of it are kept for "
            "leaving with a checkpoint, and no more was left after what comes before training; "
            "give the job more time (--time-limit, or that of Slurm)"
        )


@contextmanager
def stop_agreement(
    world: MPI.Comm,
    received: ReceivedSignal,
    deadline: float | None,
    made: list[MPI.Comm] | None = None,
) -> Iterator[StopAgreement]:
    """Make an agreement with a communicator of its own, put into `made`, for the time of the block.

    Collective on `world`, at both ends.
    """
    stop = StopAgreement(world.Dup(), received, deadline)
    if made is not None:
        made.append(stop.comm)

    def release() -> None:
        if stop.request is not None:
            stop.request.Wait()
        stop.comm.Free()

    try:
        yield stop
    except UserError:
        release()
        raise
    release()


def find_deadline(time_limit_s: float, started: float) -> float | None:
    """Return when the job has to be over (Unix time), None when nobody has set a limit.

    `time_limit_s` counts from `started`; 0 takes the end of the Slurm job, unless that was before,
    as in a shell that outlives it.
    """
    if time_limit_s:
        return started + time_limit_s
    text = os.environ.get(END_OF_JOB, "")
    end = float(text) if text.isdecimal() else 0.0
    return end if end > started else None
