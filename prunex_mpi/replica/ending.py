"""How a job of one's own loop ends: all ranks together, or at once with a line that says why.

Ranks whose loops take the same steps tell their left neighbours in a ring which step they take, and
at last that they have left. A rank that has left watches its right neighbour: where that takes a
step more, it would wait in a collective for this rank. Of ranks that stop at different steps one at
least has such a neighbour.
"""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.signals import abort_job

TAG = 0
# Before a rank that has left looks again.
PAUSE_S = 0.01


def end_all_on_exceptions(world: MPI.Comm) -> None:
    """End the whole job when an exception leaves this rank: the others would wait for it.

    A UserError that all ranks raise alike is told by rank 0, and every rank ends by itself. What a
    program of the caller's own catches is not touched.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if isinstance(value, UserError) and value.together:
            if world.rank == 0:
                before(kind, value, trace)
            return
        before(kind, value, trace)
        abort(world, f"{kind.__name__} on rank {world.rank} ends the job of all")

    if world.size > 1:
        sys.excepthook = hook


def abort(world: MPI.Comm, reason: str) -> None:
    """Say why, and end all ranks of the job now."""
    print(f"prunex_mpi: {reason}", file=sys.stderr, flush=True)
    abort_job(world)


def leave_at_exit(world: MPI.Comm, leave: Callable[[], None]) -> None:
    """Call `leave` when the program ends: before MPI does, whose end would wait for all ranks."""

    def at_exit() -> None:
        try:
            leave()
        except UserError as error:
            abort(world, f"error: {error}")
        except Exception:
            traceback.print_exc()
            abort(world, f"rank {world.rank} could not leave its loop")

    process = os.getpid()
    # Workers of a DataLoader are copies of this process, and no ranks.
    atexit.register(lambda: at_exit() if os.getpid() == process else None)


class Lockstep:
    """The place of this rank and of its neighbour in their loops, on a communicator of its own."""

    def __init__(self, world: MPI.Comm) -> None:
        self.comm = world.Dup()
        self.left = (self.comm.rank - 1) % self.comm.size
        self.right = (self.comm.rank + 1) % self.comm.size
        self.step = 0
        # Of the neighbour: the last step that it has begun, and whether it has left since.
        self.theirs, self.gone = 0, False
        self.sent: list[tuple[MPI.Request, np.ndarray]] = []

    def enter(self) -> None:
        """Begin the next step; raise UserError where the neighbour has left its loop before it."""
        self.step += 1
        if self.comm.size > 1:
            self._tell(left=False)
            self._listen()
            # It may have left after this very step, which this rank has yet to take.
            if self.gone and self.theirs < self.step:
                raise UserError(self._describe(self.right, self.theirs, self.comm.rank, self.step))

    def leave(self) -> None:
        """Have left the loop; return once the neighbour has too, after as many steps.

        Raises UserError where it goes on, or has left after another number.
        """
        if self.comm.size == 1:
            return
        self._tell(left=True)
        while not self.gone:
            self._listen()
            if self.theirs > self.step:
                raise UserError(self._describe(self.comm.rank, self.step, self.right, self.theirs))
            if not self.gone:
                time.sleep(PAUSE_S)
        if self.theirs != self.step:
            ours, theirs = (self.comm.rank, self.step), (self.right, self.theirs)
            first, last = sorted((ours, theirs), key=lambda pair: pair[1])
            raise UserError(self._describe(*first, *last))

    def close(self) -> None:
        """Free the communicator. Collective on it."""
        MPI.Request.Waitall([request for request, _ in self.sent])
        self.comm.Free()

    @staticmethod
    def _describe(rank: int, step: int, other: int, beyond: int) -> str:
        return (
            f"rank {rank} left its loop after {step} steps, and rank {other} is at step {beyond}: "
            "let all ranks take as many steps, as by a sampler that deals out equal shards"
        )

    def _tell(self, left: bool) -> None:
        message = np.array([self.step, left], dtype=np.int64)
        self.sent = [(request, kept) for request, kept in self.sent if not request.Test()]
        self.sent.append((self.comm.Isend(message, dest=self.left, tag=TAG), message))

    def _listen(self) -> None:
        message = np.empty(2, dtype=np.int64)
        while not self.gone and self.comm.Iprobe(source=self.right, tag=TAG):
            self.comm.Recv(message, source=self.right, tag=TAG)
            self.theirs, self.gone = int(message[0]), bool(message[1])
