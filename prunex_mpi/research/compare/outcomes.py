"""What runs of a comparison measured, and the whole of it as JSON, of which tables are made."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UNREADABLE, UserError, quote

# What a run reached, higher is better. A run that diverged reached nothing.
Score = tuple[float, float]
NOTHING: Score = (-math.inf, -math.inf)
# How many standard errors above guessing an accuracy has to be to count.
ERRORS = 3.0


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

    def reaches(self, target: float) -> bool:
        """Return whether it is at or above the accuracy `target`, or at or below that loss."""
        return self.loss <= target if self.accuracy is None else self.accuracy >= target


@dataclass(frozen=True)
class Point:
    """Where a run was when it was evaluated: bytes that had left a node, seconds of training.

    `compute_s` are those without messages; files of before have none.
    """

    iteration: int
    sent_bytes: int
    train_s: float
    accuracy: float | None
    loss: float | None = None
    compute_s: float | None = None

    @property
    def quality(self) -> Quality:
        """How good the network was."""
        return Quality(self.accuracy, self.loss)


@dataclass(frozen=True)
class Measured:
    """What one run measured, as world rank 0 saw it; all sums are over the run.

    `accuracy`, a fraction, and `loss` are on the images held out, of the network that is delivered
    (on the test images in files of before). `samples` are those that steps were taken on,
    `extra_samples` those that the method looked at besides, to decide what to prune.
    `payload_bytes` are operands that one worker hands to collectives between nodes, masks included,
    `metadata_bytes` the part of them that says where values belong; `sent_bytes` leave a node for
    them by ring algorithms. `sync_s` is waiting for messages, `own_s` the method's own work,
    `local_s` forward, backward and step. Of `weights`, the elements of matrices and kernels in the
    delivered model, `zeros` are 0 and `line_zeros` of these fill whole rows or columns. A forward
    pass of the exported network takes `forward_s`, of a dense one `dense_forward_s`; their ratio
    has the relative `forward_spread`; of a trial all three are 0. `operations` is what it calls to
    send between nodes. Exchanges run behind a part `hidden` of the computing.
    """

    accuracy: float | None
    loss: float
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
    weights: int
    zeros: int
    line_zeros: int
    forward_s: float
    dense_forward_s: float
    speakers: int
    ranks: int
    operations: str
    curve: tuple[Point, ...] = ()
    forward_spread: float = 0.0
    hidden: float = 0.0

    @property
    def quality(self) -> Quality:
        """How good the delivered network is, by the images held out."""
        return Quality(self.accuracy, self.loss)


@dataclass(frozen=True)
class Outcome:
    """One run of a row: `measured` is None where it diverged or `failed`; `problem` then says how.

    `point` is what it had of the row's grid, by the keys of a plan; `settings` a digest of the
    row's settings, which files of before lack. `test` is how good its network is on test images,
    once the plan is revealed.
    """

    row: str
    seed: int
    lr: float
    measured: Measured | None
    problem: str = ""
    settings: str = ""
    point: Mapping[str, float | str] = field(default_factory=dict)
    test: Quality | None = None
    failed: bool = False

    @property
    def score(self) -> Score:
        """What a choice goes by."""
        return self.measured.quality.score if self.measured else NOTHING

    @property
    def quality(self) -> Quality | None:
        """How good it is on test images where that is known, else on those held out."""
        return self.test or (self.measured.quality if self.measured else None)


@dataclass(frozen=True)
class Tuning:
    """The trials of a row, in the order of its grid, and whether the best only guesses."""

    row: str
    runs: tuple[Outcome, ...]
    chance: bool

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


def at_chance(quality: Quality, classes: int, images: int) -> bool:
    """Return whether guessing among `classes` may reach that accuracy on so many images."""
    if quality.accuracy is None:
        return False
    guess = 1 / classes
    return quality.accuracy <= guess + ERRORS * math.sqrt(guess * (1 - guess) / images)


@dataclass(frozen=True)
class Comparison:
    """All that tables and figures are made of.

    `plan` is a digest of the plan, `protocol` what it says of tuning and seeds, `revealed` when the
    test images were looked at, or "" where they were not; files of before have none of these, and
    are of test images. `data` tells other images apart, as far as it is known.
    """

    title: str
    machine: Mapping[str, str]
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    tunings: tuple[Tuning, ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    data: str = ""
    plan: str = ""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    revealed: str = ""
    # The rows that may be trained on another number of samples.
    own_length: tuple[str, ...] = ()


def outcome_from(found: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `asdict` made this; raise KeyError or TypeError otherwise."""
    measured = found["measured"]
    if measured is not None:
        curve = tuple(Point(**point) for point in measured["curve"])
        measured = Measured(**{**measured, "curve": curve})
    test = found.get("test")
    return Outcome(**{**found, "measured": measured, "test": test and Quality(**test)})


def comparison_from(found: Mapping[str, Any]) -> Comparison:
    """Return the comparison of which `asdict` made this; raise KeyError or TypeError otherwise."""
    tunings = tuple(
        Tuning(**{**tuning, "runs": tuple(map(outcome_from, tuning["runs"]))})
        for tuning in found["tunings"]
    )
    lists = {key: tuple(found.get(key, ())) for key in ("rows", "seeds", "notes", "own_length")}
    made = {"tunings": tunings, "outcomes": tuple(map(outcome_from, found["outcomes"]))}
    return Comparison(**{**found, **lists, **made})


def read_comparison(path: str) -> Comparison:
    """Return the comparison that a file of `--from` holds; raise UserError."""
    where = f"--from {quote(path, 250)}"
    try:
        return comparison_from(json.loads(Path(path).read_text(encoding="utf-8"))["comparison"])
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}", UNREADABLE) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise UserError(f"{where} is not what --json of a comparison writes", UNREADABLE) from None


def join(parts: Sequence[Comparison]) -> Comparison:
    """Return comparisons of other rows, or of other seeds of the same ones, as one, in their order.

    Raises UserError unless they are of one plan, which is revealed in all or none of them, of one
    title, the same machine and MPI, no run is in two, all rows have the same seeds, and a row has
    one learning rate. Hosts may be others, and are then left out.
    """
    if len({part.machine.get("ranks") for part in parts}) > 1:
        parts = [replace(part, machine=without_hosts(part.machine)) for part in parts]
    first = parts[0]
    for part in parts[1:]:
        for what in ("plan", "revealed", "title", "machine"):
            mine, other = getattr(first, what), getattr(part, what)
            if mine != other:
                raise UserError(f"--from: the files differ in {what}: {mine} and {other}")
    data = {part.data for part in parts} - {""}
    if len(data) > 1:
        raise UserError("--from: the files are of other images; leave some away")
    rows = tuple(dict.fromkeys(row for part in parts for row in part.rows))
    seeds = tuple(dict.fromkeys(seed for part in parts for seed in part.seeds))
    tunings = {t.row: t for part in reversed(parts) for t in part.tunings}
    outcomes = [run for part in parts for run in part.outcomes]
    _refuse_gaps(outcomes, rows, seeds)
    outcomes.sort(key=lambda run: seeds.index(run.seed))
    joined = replace(
        first,
        rows=rows,
        seeds=seeds,
        tunings=tuple(tunings[row] for row in rows if row in tunings),
        outcomes=tuple(outcomes),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        data=next(iter(data), ""),
        own_length=tuple(dict.fromkeys(row for part in parts for row in part.own_length)),
    )
    try:
        require_same_work(outcomes, joined.own_length)
    except UserError as error:
        raise UserError(f"--from: {error}") from None
    return joined


def _refuse_gaps(outcomes: Sequence[Outcome], rows: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise UserError unless each row has one run of each seed, all of them with one setup."""
    runs = by_row(outcomes)
    for row in rows:
        mine = runs.get(row, [])
        where = f"--from: row {row!r}"
        for seed in seeds:
            count = sum(run.seed == seed for run in mine)
            if count > 1:
                raise UserError(
                    f"{where} with seed {seed} is in two of the files; leave one of them away"
                )
            if not count:
                raise UserError(f"{where} has no run with seed {seed}, as others have")
        rates = sorted({run.lr for run in mine})
        if len(rates) > 1:
            text = " and ".join(f"{lr:g}" for lr in rates)
            raise UserError(f"{where} was trained at learning rates of {text}")
        if len({run.settings for run in mine} - {""}) > 1:
            raise UserError(f"{where} had other settings in one of the files")


def without_hosts(machine: Mapping[str, str]) -> dict[str, str]:
    """Return what a comparison names its machine by, but for the names of hosts."""
    return {**machine, "ranks": re.sub(r" ranks on [^ ]+ \(", " ranks (", machine.get("ranks", ""))}


def by_row(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each row, both in the order of `outcomes`."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.row, []).append(outcome)
    return found


def ended(runs: Sequence[Outcome]) -> list[Measured]:
    """Return what those runs measured that ended."""
    return [run.measured for run in runs if run.measured is not None]


def shown(runs: Sequence[Outcome]) -> list[float]:
    """Return how good the networks of those runs are that ended, as tables show it."""
    return [run.quality.shown for run in runs if run.measured is not None]


def require_same_work(outcomes: Sequence[Outcome], apart: Collection[str] = ()) -> None:
    """Raise UserError unless runs that ended were trained on the same number of samples.

    All but those of the rows that are set `apart`.
    """
    measured = {o.row: o.measured for o in outcomes if o.measured is not None}
    trained = {row: m.samples for row, m in measured.items() if row not in apart}
    if len(set(trained.values())) > 1:
        counts = ", ".join(f"{row} {samples:,}" for row, samples in trained.items())
        raise UserError(
            f"rows were not trained on the same number of samples ({counts}); change steps or "
            "batch-size, or give one own-length = true"
        )
