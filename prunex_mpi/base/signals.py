"""Handle signals for the time of a block, which programs do before slow imports; end a job."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from prunex_mpi.base.errors import FAILURE

# What schedulers send before they kill (some SIGUSR2, or SIGXCPU), and Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT)
INTERRUPTED = b"\nprunex_mpi: leaving with a checkpoint; Ctrl-C again ends at once\n"
# A launcher may drop what was said just before an abort, or be unable to abort.
FLUSH_S, ABORT_LIMIT_S = 0.5, 5


@dataclass
class ReceivedSignal:
    """The number of the last signal that asked this rank to stop, 0 for none.

    `training` says that there is something to keep: before, Ctrl-C ends the job as anywhere else.
    A rank that is not `quiet` tells the user of Ctrl-C.
    """

    number: int = 0
    training: bool = False
    quiet: bool = False


@contextmanager
def catching() -> Iterator[ReceivedSignal]:
    """Note the SIGNALS that ask a job to stop; a second INT ends this process at once."""
    received = ReceivedSignal()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if not received.training:
                signal.default_int_handler(number, frame)
            signal.signal(number, signal.SIG_DFL)
            if not received.quiet:
                # No log or print, which may be what was interrupted.
                os.write(2, INTERRUPTED)
        received.number = number

    with handling(SIGNALS, note):
        yield received


def abort_job(world: Any) -> None:
    """End all ranks of `world`, a communicator, now; may be called from any thread."""
    time.sleep(FLUSH_S)
    # Where the library can't, the system ends this rank and the launcher the others.
    signal.alarm(ABORT_LIMIT_S)
    world.Abort(FAILURE)


@contextmanager
def asked_to_end() -> Iterator[list[int]]:
    """Collect the SIGNALS that come in the time of the block."""
    asked: list[int] = []
    with handling(SIGNALS, lambda number, _: asked.append(number)):
        yield asked


@contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Have `handler` called for the signals `numbers`; then again what was called before."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
