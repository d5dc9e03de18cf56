"""What a run tells of itself: lines in each outer iteration, and the table that ends it.

Neither torch nor MPI is needed.
"""

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import log
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import LOSS, SPEED, measure_of, reached
from prunex_mpi.base.tables import format_lines
from prunex_mpi.base.units import MIB
from prunex_mpi.config.resolve import BY_NAME

# Between two looks at the heartbeat, and two lines within an outer iteration.
LOOK_S, LINE_S = 5.0, 30.0
# What the last outer iteration counts in the mean that tells the time that is left.
SMOOTHING = 0.3
NAMES = {"test": "test", "val": "held-out"}


class Progress:
    """Lines on standard error, by rank 0 alone and where `enabled`; `heartbeat` is its own.

    The run has so many outer `iterations` and local `steps`, with `count` data (`unit`) of all
    ranks in a step. A thread looks at the heartbeat, so that steps have nothing to do with it.
    """

    def __init__(
        self,
        iterations: int,
        steps: int,
        count: int,
        unit: str,
        enabled: bool,
        heartbeat: Heartbeat,
    ) -> None:
        self.iterations, self.steps_in_all, self.count, self.unit = iterations, steps, count, unit
        self.heartbeat, self.enabled = heartbeat, enabled
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
            self.iterations,
            record["train_loss"],
            judged(record),
            record["density"],
            record["bytes"]["payload"] / MIB,
            seconds["total"],
            f"{taken * self.count / trained_s:,.0f} {self.unit}/s",
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
        iteration = max(1, heartbeat.iteration), self.iterations
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
        steps = self.steps_in_all - self.steps - done
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


def add_up(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the seconds and the bytes of all records together, by phase and by kind."""
    return {
        key: {name: sum(r[key][name] for r in records) for name in records[-1][key]}
        for key in ("seconds", "bytes")
    }


def mean_speed(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tokens per second of all records together, where they have them."""
    if SPEED not in records[-1]:
        return {}
    taken = [r["seconds"]["total"] - r["seconds"]["evaluate"] for r in records]
    trained = sum(r[SPEED] * s for r, s in zip(records, taken, strict=True))
    return {SPEED: trained / max(sum(taken), 1e-9)}


def _in_all(summary: dict[str, Any]) -> str:
    """Return how long a run took; earlier jobs are counted by their outer iterations alone."""
    last = f"{summary['seconds_total']:.1f}"
    if not summary.get("resumed"):
        return last
    trained = f"{summary['seconds']['total']:.1f} in the outer iterations of all jobs"
    return f"{trained}; {last} in the last job, its start and end included"


def closing_table(summary: dict[str, Any], run_dir: Path) -> str:
    """Return the table that ends a run."""
    return format_lines([*closing_rows(summary), ("results", str(run_dir))])


def closing_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what stands in the table that ends a run: names and values."""
    judged, measure = reached(summary, "test"), measure_of(summary)
    sent, seconds = summary["bytes"], summary["seconds"]
    each_step = BY_NAME[summary["method"]].per_step
    whole = f"{sent['dense'] / MIB:.2f} MiB, once per {'step' if each_step else 'outer iteration'}"
    share = f"{100 * sent['payload'] / sent['dense']:.1f} % of that"
    # Of all its jobs: the last one alone may have had one node.
    if not sent["sent"]:
        share += "; one node: none of it leaves the machine"
    pruned = [("parameters", f"{summary['parameters']:,}")]
    if summary["prunable"]:
        kept = f"{summary['prunable_kept']:,} of {summary['prunable']:,}"
        pruned = [
            ("parameters", f"{pruned[0][1]} before, {summary['parameters_kept']:,} after pruning"),
            ("prunable weights kept", f"{kept} (density {summary['density']:.3f})"),
        ]
    phases = ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if k != "total")
    before = []
    if initial := summary.get("initial"):
        which = "test" if reached(initial, "test") else "val"
        name = f"{NAMES[which]} {measure.label} before training"
        before.append((name, reached(initial, which)))
    if best := summary.get("validation"):
        value = f"{measure.text(best[measure.key])}, of outer iteration {best['iteration']}"
        before.append((f"{NAMES['val']} {measure.label}", value))
    speed = [("tokens per second", f"{summary[SPEED]:,.0f}")] if SPEED in summary else []
    once = f"{seconds['setup']:.2f} s, {sent['setup'] / MIB:.2f} MiB"
    setup = [("set-up of the method", once)] if seconds["setup"] else []
    return [
        ("status", f"{summary['status']} after {summary['iterations']} outer iterations"),
        *before,
        (
            f"test {measure.label} of the {'pruned ' if summary['prunable'] else ''}model",
            judged or "not evaluated",
        ),
        *pruned,
        ("payload of a leader, whole network", whole),
        ("payload of a leader", f"{sent['payload'] / MIB:.2f} MiB ({share})"),
        ("  mask agreement", f"{sent['mask'] / MIB:.2f} MiB"),
        ("  loss, norms, digests", f"{sent['control'] / MIB:.2f} MiB"),
        ("  evaluation", f"{sent['evaluate'] / MIB:.2f} MiB"),
        *setup,
        ("sent by a node, by ring algorithms", f"{sent['sent'] / MIB:.2f} MiB"),
        *([("  to other racks", f"{sent['racks'] / MIB:.2f} MiB")] if sent.get("racks") else []),
        ("inside a node, per leader", f"{sent['intra'] / MIB:.2f} MiB"),
        ("seconds per phase", phases),
        *speed,
        ("seconds in all", _in_all(summary)),
    ]
