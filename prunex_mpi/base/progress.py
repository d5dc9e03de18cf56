"""The progress of a run as rank 0 shows it: a bar, or lines.

A thread looks at the heartbeat, so that the steps themselves have nothing to do with it.
"""

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.base.record_keys import LOSS, measure_of
from prunex_mpi.base.units import MIB

# Between two looks at the heartbeat, with a bar and without; between two lines within an iteration.
BAR_S, LOOK_S, LINE_S = 0.5, 5.0, 30.0
# What the last outer iteration counts in the mean that tells the time that is left.
SMOOTHING = 0.3
BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


@dataclass(frozen=True)
class Length:
    """How long a run is: outer iterations, local steps in all, data (`unit`) of all in a step."""

    iterations: int
    steps: int
    count: int
    unit: str = "images"


class Bar(tqdm):
    """A bar without tqdm's own thread, which would outlive the run: `Progress` has one."""

    monitor_interval = 0


class Progress:
    """A bar or lines on standard error, by rank 0 alone; `heartbeat` is its own.

    `mode` auto: a bar on a terminal, else a line per outer iteration, and one every half minute
    within; on: a bar in any case; off: nothing.
    """

    def __init__(self, length: Length, mode: str, rank: int, heartbeat: Heartbeat) -> None:
        self.length, self.heartbeat = length, heartbeat
        self.enabled = rank == 0 and mode != "off"
        self.iterations, self.steps, self.now_steps = 0, 0, 0
        self.seconds_per_step = 0.0
        self.began = self.said = time.monotonic()
        # Where a look has first seen the steps of an outer iteration: which, the step, when.
        self.seen = (0, 0, self.began)
        self.text = ""
        self.bar: Bar | None = None
        self.watcher: threading.Thread | None = None
        self.exits = ExitStack()
        self.ended = threading.Event()
        if not self.enabled:
            return
        if mode == "on" or sys.stderr.isatty():
            options = {"bar_format": BAR_FORMAT, "mininterval": BAR_S}
            self.bar = Bar(total=length.iterations, file=sys.stderr, **options)
            # A terminal that tells no width, as in some containers, would show nothing.
            if self.bar.ncols is not None and self.bar.ncols <= 0:
                self.bar.ncols = self.bar.nrows = None
            # What is logged meanwhile goes above the bar.
            self.exits.enter_context(logging_redirect_tqdm([log]))
        self.watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
        self.watcher.start()

    def start(self, iterations: int, steps: int, now_steps: int) -> None:
        """Set what is done, and the number of local steps of the outer iteration under way."""
        self.iterations, self.steps, self.now_steps = iterations, steps, now_steps
        self.began = self.said = time.monotonic()
        if self.bar is not None:
            self.bar.n = iterations
            self.bar.refresh()

    def update(self, record: dict[str, Any], steps: int, now_steps: int) -> None:
        """Show the metrics of an outer iteration, after `steps` of the run; `now_steps` follow."""
        if not self.enabled:
            return
        taken, now = steps - self.steps, time.monotonic()
        if taken > 0:
            latest = (now - self.began) / taken
            before = self.seconds_per_step or latest
            self.seconds_per_step = before + SMOOTHING * (latest - before)
        self.iterations, self.steps, self.now_steps = record["iteration"], steps, now_steps
        self.began = self.said = now
        seconds = record["seconds"]
        shown = judged(record)
        text = f"loss {record['train_loss']:.4f}, {shown}, density {record['density']:.3f}"
        pace = [self._speed(taken, seconds["total"] - seconds["evaluate"])]
        pace += self._left(0, self.seconds_per_step)
        if self.bar is not None:
            self.text = text
            self.bar.set_postfix_str(", ".join([*pace, text]), refresh=False)
            self.bar.update(self.iterations - self.bar.n)
        else:
            log.info(
                "iteration %d/%d: %s, payload %.2f MiB, %.2f s, %s%s",
                self.iterations,
                self.length.iterations,
                text,
                record["bytes"]["payload"] / MIB,
                seconds["total"],
                ", ".join(pace),
                ", frozen" if record["frozen"] else "",
            )

    def look(self) -> None:
        """Show where the outer iteration under way has come to, where that is due."""
        heartbeat, now = self.heartbeat, time.monotonic()
        phase, step, iteration = heartbeat.phase, heartbeat.step, heartbeat.iteration
        local = phase == "local"
        if local and self.seen[0] != iteration:
            self.seen = iteration, step, now
        if self.bar is None and now - self.said < LINE_S:
            return
        parts = [f"phase {phase}"]
        if local:
            # The one under way.
            parts = [f"local step {min(step + 1, self.now_steps)} of {self.now_steps}"]
        first, since = self.seen[1:]
        pace = self.seconds_per_step
        if local and step > first:
            parts += [self._speed(step - first, now - since)]
            pace = pace or (now - since) / (step - first)
        parts += self._left(step if local else self.now_steps, pace)
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join([*parts, *filter(None, [self.text])]), refresh=False)
            self.bar.refresh()
            return
        self.said = now
        place = max(1, iteration), self.length.iterations
        log.info("iteration %d/%d: %s", *place, ", ".join(parts))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.ended.set()
        if self.watcher is not None:
            self.watcher.join()
        if self.bar is not None:
            self.bar.close()
        self.exits.close()

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_S if self.bar is None else BAR_S):
            self.look()

    def _speed(self, steps: int, seconds: float) -> str:
        """Return the data of all ranks per second."""
        return f"{steps * self.length.count / max(seconds, 1e-9):,.0f} {self.length.unit}/s"

    def _left(self, step: int, seconds_per_step: float) -> list[str]:
        """Return the time that is left, nothing where that is not known or there is none."""
        steps = self.length.steps - self.steps - step
        if steps <= 0 or not seconds_per_step:
            return []
        return [f"{tqdm.format_interval(steps * seconds_per_step)} left"]


def judged(record: dict[str, Any]) -> str:
    """Return what the evaluation of an outer iteration came to, on held-out data if there are."""
    measure = measure_of(record)
    which = "val" if f"val_{measure.key}" in record else "test"
    value = record[f"{which}_{measure.key}"]
    # Beside the loss of training.
    name = f"{which} loss" if measure is LOSS else measure.label
    return f"{name} {'-' if value is None else measure.text(value)}"
