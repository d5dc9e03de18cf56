"""Count the progress of one rank, for whoever watches it."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path

from prunex_mpi.base.record_keys import RANK_PHASES
from prunex_mpi.base.units import MIB

# In the order in which a run comes to them.
PHASES = ("start", "data", "model", "trial", *RANK_PHASES, "record", "checkpoint", "finish")
# The name of the thread that the main one may wait for begins like this.
HELPER = "exchange"
# Threads whose own reading and writing is no progress of the rank, and what is one for the others:
# less than MPI and the terminal move in an hour.
WATCHERS = ("watchdog", "progress", "rounds")
COUNTED_BYTES = MIB


@dataclass
class Heartbeat:
    """Count what the main thread gets done; plain assignments, so that the hot loop may call it."""

    phase: str = "start"
    iteration: int = 0
    step: int = 0
    beats: int = 0

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """Note that `phase` of an outer iteration begins."""
        self.phase, self.step = phase, 0
        if iteration is not None:
            self.iteration = iteration
        self.beats += 1

    def beat(self, step: int) -> None:
        """Note that the phase has come to `step`."""
        self.step = step
        self.beats += 1

    def go_on(self) -> None:
        """Note progress that is no step; only where the end is nearer than before."""
        self.beats += 1

    def describe(self) -> str:
        """Return where the rank is, in words."""
        place = f"phase {self.phase}"
        if self.iteration:
            place += f" of outer iteration {self.iteration}"
        return f"{place}, step {self.step}" if self.step else place


def read_and_written() -> int:
    """Return how much this process has read and written, in COUNTED_BYTES; 0 if nobody counts.

    Waiting in MPI, through shared memory or TCP, moves nothing.
    """
    watchers = [t.native_id for t in threading.enumerate() if t.name.startswith(WATCHERS)]
    try:
        own = sum(_bytes_moved(Path(f"/proc/self/task/{thread}/io")) for thread in watchers)
        return (_bytes_moved(Path("/proc/self/io")) - own) // COUNTED_BYTES
    except OSError:
        return 0


def _bytes_moved(file: Path) -> int:
    return sum(map(int, re.findall(r"^[rw]char: (\d+)", file.read_text(), re.MULTILINE)))
