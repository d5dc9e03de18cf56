"""How a job of one's own loop ends: all ranks together, or at once with a line that says why."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.signals import abort_job


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
