"""Count the progress of one rank, for whoever watches it."""

from dataclasses import dataclass

from prunex_mpi.base.record_keys import RANK_PHASES

# In the order in which a run comes to them.
PHASES = ("start", "data", "model", "trial", *RANK_PHASES, "record", "checkpoint", "finish")
# The name of the thread that the main one may wait for begins like this.
HELPER = "exchange"


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
