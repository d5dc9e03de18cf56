"""A comparison: what its runs came to, read from their folders, and all of it from its JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import EXPORTED, read_json
from prunex_mpi.base.record_keys import ACCURACY, CONSENSUS_PHASES, LOSS, Measure
from prunex_mpi.tools.report.read_runs import Run, read_ranks, read_run, shown

# What a run reached, higher is better. A run that diverged reached nothing.
Score = tuple[float, float]
NOTHING: Score = (-math.inf, -math.inf)
PHASES = ("local", *CONSENSUS_PHASES)
# Of an exported network, as `models.standalone` names it, which needs torch.
PLAN = "plan.json"


@dataclass(frozen=True)
class Quality:
    """How good a network is: the mean loss, and the accuracy as a fraction where it has one."""

    accuracy: float | None
    loss: float

    @property
    def score(self) -> Score:
        """What is compared: accuracy, then how low the loss is; the loss alone without one."""
        first = -self.loss if self.accuracy is None else self.accuracy
        return first, -self.loss

    @property
    def shown(self) -> float:
        """What tables show: the accuracy in percent, or the loss."""
        return self.loss if self.accuracy is None else 100 * self.accuracy


@dataclass(frozen=True)
class Point(Quality):
    """How good a run's network was when it was evaluated on data held out, and where it was.

    `sent_bytes` had left a node, in `train_s` seconds of training; `compute_s` are those without
    messages; files of before have none.
    """

    iteration: int
    sent_bytes: int
    train_s: float
    compute_s: float | None = None


@dataclass(frozen=True)
class Measured(Quality):
    """What one run measured, as world rank 0 saw it; all sums are over the run.

    `accuracy` and `loss` are on the data held out, of the network that is delivered (on the test
    images in files of before). `samples` are those that steps were taken on, `extra_samples` those
    that the method looked at besides, to decide what to prune. `payload_bytes` are operands that
    one worker hands to collectives between nodes, masks included, `metadata_bytes` the part of them
    that says where values belong; `sent_bytes` leave a node for them by ring algorithms. `sync_s`
    is waiting for messages, `own_s` the method's own work, `local_s` forward, backward and step.
    Exchanges run behind a part `hidden` of the computing. `forward_s` is what the exported network
    takes for a batch, `dense_forward_s` that of full size beside it; None where none was measured.
    """

    samples: int
    extra_samples: int
    epochs: float
    steps: int
    payload_bytes: int
    sent_bytes: int
    metadata_bytes: int
    sync_s: float
    own_s: float
    local_s: float
    train_s: float
    parameters: int
    parameters_left: int
    curve: tuple[Point, ...] = ()
    hidden: float = 0.0
    forward_s: float | None = None
    dense_forward_s: float | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the network of full size the exported one is."""
        return self.dense_forward_s / self.forward_s if self.forward_s else None


@dataclass(frozen=True)
class Outcome:
    """One run of a row: `measured` is None where it diverged or `failed`; `problem` then says how.

    `point` is what it had of the row's grid, by the keys of a plan; `test` how good its network is
    on test data, once the plan is revealed.
    """

    row: str
    seed: int
    lr: float
    measured: Measured | None
    problem: str = ""
    point: Mapping[str, float | str] = field(default_factory=dict)
    test: Quality | None = None
    failed: bool = False

    @property
    def ending(self) -> str:
        """How a run ended that measured nothing, in a word."""
        return "failed" if self.failed else "diverged"

    @property
    def score(self) -> Score:
        """What a choice goes by."""
        return self.measured.score if self.measured else NOTHING

    @property
    def quality(self) -> Quality | None:
        """How good it is on test data where that is known, else on those held out."""
        return self.test or self.measured


@dataclass(frozen=True)
class Tuning:
    """The trials of a row, in the order of its grid."""

    row: str
    runs: tuple[Outcome, ...]

    @property
    def best(self) -> int | None:
        """The number of the best trial, of equal ones the first; None where all diverged."""
        trained = [i for i, run in enumerate(self.runs) if run.score > NOTHING]
        return max(trained, key=lambda i: self.runs[i].score, default=None)

    @property
    def at_edge(self) -> list[str]:
        """What of the best trial is the lowest or the highest number that was tried."""
        if self.best is None:
            return []
        best, found = self.runs[self.best].point, []
        for key in best:
            tried = {number_of(run.point[key]) for run in self.runs}
            ends = () if None in tried or len(tried) == 1 else (min(tried), max(tried))
            if number_of(best[key]) in ends:
                found.append(key)
        return found


def number_of(value: float | str) -> float | None:
    """Return the number that a value of a grid is, such as 1/4; None for words."""
    with suppress(ValueError, ZeroDivisionError):
        return float(Fraction(value))
    return None


@dataclass(frozen=True)
class Comparison:
    """All that tables and pictures are made of.

    `plan` is a digest of the plan, `protocol` what it says of tuning and seeds, `revealed` when the
    test data were looked at, or "" where they were not; files of before have none of these, and
    are of test images.
    """

    title: str
    machine: Mapping[str, str]
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    tunings: tuple[Tuning, ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    plan: str = ""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    revealed: str = ""

    @property
    def by_row(self) -> dict[str, list[Outcome]]:
        """The outcomes of each row, both in their order."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.row, []).append(outcome)
        return found

    @property
    def measure(self) -> Measure:
        """What networks are compared by: accuracy, unless one that was measured has none."""
        return LOSS if any(m.accuracy is None for m in ended(self.outcomes)) else ACCURACY

    @property
    def held_out(self) -> str:
        """Which data the networks were evaluated on as they were trained, in a word."""
        return "validation" if self.plan else "test"


def together(found: Mapping[str, Comparison]) -> Comparison | None:
    """Return the rows of several comparisons, by name, as one; None where measures differ.

    A row that several have gets the name of its comparison.
    """
    first, *rest = found.values()
    if any((one.measure, one.held_out) != (first.measure, first.held_out) for one in rest):
        return None
    rows = Counter(row for one in found.values() for row in one.rows)
    outcomes = [
        replace(run, row=run.row if rows[run.row] == 1 else f"{run.row} ({name})")
        for name, one in found.items()
        for run in one.outcomes
    ]
    return replace(first, outcomes=tuple(outcomes))


def ended(runs: Sequence[Outcome]) -> list[Measured]:
    """Return what those runs measured that ended."""
    return [run.measured for run in runs if run.measured is not None]


@dataclass(frozen=True)
class RowCurve:
    """Means of a row over those of its seeds that ended, at the evaluations that all of them have.

    `values` are what tables show; `parameters_left` and the standard deviation `spread` are of the
    end. `whole`: every seed ended.
    """

    row: str
    whole: bool
    sent_bytes: tuple[float, ...]
    train_s: tuple[float, ...]
    values: tuple[float, ...]
    parameters_left: tuple[float, ...]
    spread: float


def curves_of(found: Comparison) -> list[RowCurve]:
    """Return the curve of each row of which a run was evaluated, the best one first."""
    curves = []
    for row, runs in found.by_row.items():
        measured = [m for m in ended(runs) if m.curve]
        by_iteration = [{point.iteration: point for point in m.curve} for m in measured]
        shared = sorted(set.intersection(*map(set, by_iteration))) if measured else []
        if shared:
            points = [[of[iteration] for of in by_iteration] for iteration in shared]
            ends = [m.curve[-1].shown for m in measured]
            curves.append(
                RowCurve(
                    row,
                    len(measured) == len(runs),
                    tuple(mean(point.sent_bytes for point in at) for at in points),
                    tuple(mean(point.train_s for point in at) for at in points),
                    tuple(mean(point.shown for point in at) for at in points),
                    (mean(m.parameters_left for m in measured),),
                    stdev(ends) if len(ends) > 1 else 0.0,
                )
            )
    return sorted(curves, key=lambda c: c.values[-1], reverse=found.measure.higher_is_better)


# --------------------------------------------------------------------------------------------------
# From the folder of a run
# --------------------------------------------------------------------------------------------------


def read_measured(path: Path) -> Measured:
    """Return what a complete run measured; raise UserError where its files can't be read."""
    run = read_run(path)
    try:
        return replace(measured_from(run), **_forward_seconds(path))
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not of a run that can be compared ({error}); remove it to do it again",
            UNREADABLE,
        ) from None


def measured_from(run: Run) -> Measured:
    """Return what a complete run measured; raise KeyError or TypeError where it does not tell.

    Messages are those of phases 1 to 5, votes and losses too, waiting for the slowest rank
    included; what phases 2 to 5 do besides, coding too, is the method's own work.
    """
    summary, work, best = run.summary, run.summary["work"], run.summary["validation"]
    messages = message_seconds(run)
    rest = np.array([run.filled(f"seconds.{phase}") for phase in PHASES]) - messages
    seconds, sent, compute = run.along("seconds"), run.along("bytes.sent"), rest.sum(0).cumsum()
    accuracy = run.column("val_accuracy")
    curve = tuple(
        Point(
            accuracy=None if np.isnan(accuracy[i]) else float(accuracy[i]),
            loss=float(loss),
            iteration=int(run.iterations[i]),
            sent_bytes=int(sent[i]),
            train_s=float(seconds[i]),
            compute_s=float(compute[i]),
        )
        for i, loss in enumerate(run.column("val_loss"))
        if np.isfinite(loss)
    )
    overlap, steps = int(run.setting("overlap-steps", 0)), work["steps"] / len(run.iterations)
    return Measured(
        accuracy=best.get("accuracy"),
        loss=best["loss"],
        **_known(Measured, work),
        payload_bytes=summary["bytes"]["payload"] + summary["bytes"]["mask"],
        sent_bytes=summary["bytes"]["sent"],
        sync_s=float(messages.sum()),
        own_s=float(rest[1:].sum()),
        local_s=float(rest[0].sum()),
        train_s=float(seconds[-1]),
        parameters=summary["parameters"],
        parameters_left=summary["parameters_kept"],
        curve=curve,
        hidden=min(1.0, max(0, overlap) / steps),
    )


def _forward_seconds(path: Path) -> dict[str, float]:
    """Return the seconds that the export of a run measured, by field; {} where there are none."""
    try:
        found = read_json(path / EXPORTED / PLAN)["forward_s"]
    except (FileNotFoundError, KeyError):
        return {}
    return {"dense_forward_s": float(found[0]), "forward_s": float(found[1])}


def message_seconds(run: Run) -> np.ndarray:
    """Return the seconds that rank 0 spent in messages, float64 [PHASES, outer iterations].

    Where not every outer iteration has these, as of very many ranks, those of the last one count.
    """
    known = {
        record.iteration: [float(record.exchange.get(phase, [0.0])[0]) for phase in PHASES]
        for record in read_ranks(run.path)
    }
    found, last = [], [0.0] * len(PHASES)
    for iteration in map(int, run.iterations):
        last = known.get(iteration, last)
        found.append(last)
    return np.array(found).T


# --------------------------------------------------------------------------------------------------
# From JSON
# --------------------------------------------------------------------------------------------------


def read_comparison(path: Path) -> Comparison:
    """Return what --json of a comparison wrote, now or before; raise UserError."""
    where = quote(shown(path), 250)
    try:
        return comparison_from(json.loads(path.read_text(encoding="utf-8"))["comparison"])
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}", UNREADABLE) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise UserError(f"{where} is not what --json of a comparison writes", UNREADABLE) from None


def comparison_from(found: Mapping[str, Any]) -> Comparison:
    """Return the comparison of which `asdict` made this; raise KeyError or TypeError otherwise."""
    tunings = tuple(
        Tuning(tuning["row"], tuple(map(outcome_from, tuning["runs"])))
        for tuning in found["tunings"]
    )
    made = {key: tuple(found.get(key, ())) for key in ("rows", "seeds", "notes")}
    made |= {"tunings": tunings, "outcomes": tuple(map(outcome_from, found["outcomes"]))}
    return Comparison(**{**_known(Comparison, found), **made})


def outcome_from(found: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `asdict` made this; raise KeyError or TypeError otherwise."""
    measured, test = found["measured"], found.get("test")
    if measured is not None:
        curve = tuple(Point(**{"loss": math.nan, **point}) for point in measured["curve"])
        measured = Measured(**{**_known(Measured, measured), "curve": curve})
    made = {"measured": measured, "test": test and Quality(**test)}
    return Outcome(**{**_known(Outcome, found), **made})


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries that a dataclass has fields for: files of before have more."""
    return {one.name: found[one.name] for one in fields(kind) if one.name in found}
