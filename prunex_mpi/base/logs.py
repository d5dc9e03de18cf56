"""Log records that name the rank, and the progress of a run as rank 0 logs it.

That is a line per outer iteration, and some within: a thread looks at the heartbeat, so that the
steps themselves have nothing to do with it.
"""

import logging
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prunex_mpi.base.errors import printable
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import LOSS, measure_of
from prunex_mpi.base.units import MIB

# Between two looks at the heartbeat, and two lines within an outer iteration.
LOOK_S, LINE_S = 5.0, 30.0
# What the last outer iteration counts in the mean that tells the time that is left.
SMOOTHING = 0.3

log = logging.getLogger("prunex_mpi")


class _OneLine(logging.Formatter):
    """Format a record as one line, whatever names of files and classes are in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def set_up_logging(rank: int, size: int) -> None:
    """Send records to standard error; ranks other than 0 say warnings and worse only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"[{rank}/{size}] %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)


@dataclass(frozen=True)
class Length:
    """How long a run is: outer iterations, local steps in all, data (`unit`) of all in a step."""

    iterations: int
    steps: int
    count: int
    unit: str = "images"


class Progress:
    """Lines on standard error, by rank 0 alone and where `enabled`; `heartbeat` is its own."""

    def __init__(self, length: Length, enabled: bool, heartbeat: Heartbeat) -> None:
        self.length, self.heartbeat, self.enabled = length, heartbeat, enabled
        self.steps, self.now_steps = 0, 0
        self.seconds_per_step = 0.0
        self.began = self.said = time.monotonic()
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
        if enabled:
            self.watcher.start()

    def start(self, steps: int, now_steps: int) -> None:
        """Set the steps that are done, and those of the outer iteration under way."""
        self.steps, self.now_steps = steps, now_steps
        self.began = self.said = time.monotonic()

    def update(self, record: dict[str, Any], steps: int, now_steps: int) -> None:
        """Log the metrics of an outer iteration, after `steps` of the run; `now_steps` follow."""
        if not self.enabled:
            return
        taken, seconds = steps - self.steps, record["seconds"]
        if taken > 0:
            latest = (time.monotonic() - self.began) / taken
            before = self.seconds_per_step or latest
            self.seconds_per_step = before + SMOOTHING * (latest - before)
        self.start(steps, now_steps)
        trained_s = max(seconds["total"] - seconds["evaluate"], 1e-9)
        log.info(
            "iteration %d/%d: loss %.4f, %s, density %.3f, payload %.2f MiB, %.2f s, %s%s%s",
            record["iteration"],
            self.length.iterations,
            record["train_loss"],
            judged(record),
            record["density"],
            record["bytes"]["payload"] / MIB,
            seconds["total"],
            f"{taken * self.length.count / trained_s:,.0f} {self.length.unit}/s",
            self._left(0),
            ", frozen" if record["frozen"] else "",
        )

    def look(self) -> None:
        """Log where the outer iteration under way has come to, where that is due."""
        heartbeat, now = self.heartbeat, time.monotonic()
        if now - self.said < LINE_S:
            return
        self.said, place, done = now, f"phase {heartbeat.phase}", self.now_steps
        if heartbeat.phase == "local":
            done = heartbeat.step
            place = f"local step {min(done + 1, self.now_steps)} of {self.now_steps}"
        iteration = max(1, heartbeat.iteration), self.length.iterations
        log.info("iteration %d/%d: %s%s", *iteration, place, self._left(done))

    def close(self) -> None:
        """Stop looking."""
        self.ended.set()
        if self.enabled:
            self.watcher.join()

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_S):
            self.look()

    def _left(self, done: int) -> str:
        """Return the time that is left, "" where that is not known or there is none."""
        steps = self.length.steps - self.steps - done
        if steps <= 0 or not self.seconds_per_step:
            return ""
        return f", {timedelta(seconds=round(steps * self.seconds_per_step))} left"


def judged(record: dict[str, Any]) -> str:
    """Return what the evaluation of an outer iteration came to, on held-out data if there are."""
    measure = measure_of(record)
    which = "val" if f"val_{measure.key}" in record else "test"
    value = record[f"{which}_{measure.key}"]
    # Beside the loss of training.
    name = f"{which} loss" if measure is LOSS else measure.label
    return f"{name} {'-' if value is None else measure.text(value)}"
