"""What runs of a comparison measured, and the whole of it as JSON, of which tables are made."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UNREADABLE, UserError, quote

# How a note ends that is not of all rows.
OF_ROWS = re.compile(r" \(of .*\)$")
# How one begins that says how learning rates were chosen.
OF_RATES = "learning rates: "
# What a run reached: accuracy, then how low the loss is. A run that diverged reached nothing.
Score = tuple[float, float]
NOTHING: Score = (-1.0, -math.inf)


@dataclass(frozen=True)
class Point:
    """Where a run was when it was evaluated: bytes that had left a node, seconds of training."""

    iteration: int
    sent_bytes: int
    train_s: float
    accuracy: float


@dataclass(frozen=True)
class Measured:
    """What one run measured, as world rank 0 saw it; all sums are over the run.

    `accuracy` is a fraction. `samples` are those that steps were taken on, `extra_samples` those
    that the method looked at besides, to decide what to prune. `payload_bytes` are operands that
    one worker hands to collectives between nodes, masks included, `metadata_bytes` the part of them
    that says where values belong; `sent_bytes` leave a node for them by ring algorithms. `sync_s`
    is waiting for messages, `own_s` the method's own work, `local_s` forward, backward and step. Of
    `weights`, the elements of matrices and kernels in the delivered model, `zeros` are 0 and
    `line_zeros` of these fill whole rows or columns. A forward pass of the exported network takes
    `forward_s`, of a dense one `dense_forward_s`; their ratio has the relative `forward_spread`.
    `operations` is what it calls to send between nodes.
    """

    accuracy: float
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


@dataclass(frozen=True)
class Outcome:
    """One run of a row: `measured` is None where it diverged, and `problem` then says how.

    `settings` is a digest of the row's settings; files of before have none.
    """

    row: str
    seed: int
    lr: float
    measured: Measured | None
    problem: str = ""
    settings: str = ""

    @property
    def score(self) -> Score:
        """What the search of a learning rate goes by."""
        return (self.measured.accuracy, -self.measured.loss) if self.measured else NOTHING


@dataclass(frozen=True)
class Tuning:
    """The runs that chose a row's learning rate, and whether the best was better than guessing."""

    row: str
    runs: tuple[Outcome, ...]
    chance: bool

    @property
    def scores(self) -> dict[float, Score]:
        """What each rate reached."""
        return {run.lr: run.score for run in self.runs}

    @property
    def lr(self) -> float | None:
        """The rate chosen; None where every run diverged."""
        return best_rate(self.scores)


def best_rate(scores: Mapping[float, Score]) -> float | None:
    """Return the rate of the highest score, of equal ones the lowest; None if none trained."""
    trained = {rate: score for rate, score in scores.items() if score > NOTHING}
    return min(trained, key=lambda rate: (tuple(-x for x in trained[rate]), rate), default=None)


def lies_inside(scores: Mapping[float, Score]) -> bool:
    """Return whether rates on either side of the best one were tried."""
    best = best_rate(scores)
    return best is not None and min(scores) < best < max(scores)


@dataclass(frozen=True)
class Comparison:
    """All that tables and figures are made of.

    `outcomes` are of rows as they are given, `equal` of those cut to the "bytes" or the "time" that
    the row `reference` names for it has spent, and `equal_tunings` have chosen their learning
    rates. `data` tells other images apart, as far as it is known. `notes` say first how those of
    whole runs were chosen; where files were joined, one of some rows alone ends with their names.
    """

    title: str
    machine: Mapping[str, str]
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    tunings: tuple[Tuning, ...]
    outcomes: tuple[Outcome, ...]
    equal: Mapping[str, tuple[Outcome, ...]]
    reference: Mapping[str, str]
    notes: tuple[str, ...]
    # Files of before have neither.
    equal_tunings: Mapping[str, tuple[Tuning, ...]] = field(default_factory=dict)
    data: str = ""


def to_dict(value: Comparison | Outcome) -> dict[str, Any]:
    """Return a comparison or an outcome as what JSON holds."""
    return asdict(value)


def outcome_from(found: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `to_dict` was given; raise KeyError or TypeError otherwise."""
    measured = found["measured"]
    if measured is not None:
        curve = tuple(Point(**point) for point in measured["curve"])
        measured = Measured(**{**measured, "curve": curve})
    return Outcome(**{**found, "measured": measured})


def comparison_from(found: Mapping[str, Any]) -> Comparison:
    """Return the comparison that `to_dict` was given; raise KeyError or TypeError otherwise."""
    tunings = tuple(map(_tuning_from, found["tunings"]))
    equal_tunings = {
        key: tuple(map(_tuning_from, some)) for key, some in found.get("equal_tunings", {}).items()
    }
    lists = {key: tuple(found[key]) for key in ("rows", "seeds", "notes")}
    equal = {key: tuple(map(outcome_from, runs)) for key, runs in found["equal"].items()}
    outcomes = tuple(map(outcome_from, found["outcomes"]))
    made = {"tunings": tunings, "outcomes": outcomes, "equal": equal}
    return Comparison(**{**found, **lists, **made, "equal_tunings": equal_tunings})


def _tuning_from(found: Mapping[str, Any]) -> Tuning:
    return Tuning(**{**found, "runs": tuple(map(outcome_from, found["runs"]))})


def read_comparison(flag: str, path: str) -> Comparison:
    """Return the comparison that a file holds, which a flag may name; raise UserError."""
    where = f"{flag} {quote(path, 250)}".strip()
    try:
        return comparison_from(json.loads(Path(path).read_text(encoding="utf-8"))["comparison"])
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}", UNREADABLE) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise UserError(f"{where} is not what --json of a comparison writes", UNREADABLE) from None


def join(parts: Sequence[Comparison]) -> Comparison:
    """Return comparisons of other rows, or of other seeds of the same ones, as one, in their order.

    Rows at equal bytes or time are kept of those that have them. Raises UserError unless they are
    of one title, the same machine and MPI, no run is in two, all rows have the same seeds, and a
    row has one learning rate. Hosts may be others, and are then left out.
    """
    if len({part.machine.get("ranks") for part in parts}) > 1:
        parts = [replace(part, machine=without_hosts(part.machine)) for part in parts]
    first = parts[0]
    for part in parts[1:]:
        for what in ("title", "machine"):
            mine, other = getattr(first, what), getattr(part, what)
            if mine != other:
                raise UserError(f"--from: the files differ in {what}: {mine} and {other}")
    data = {part.data for part in parts} - {""}
    if len(data) > 1:
        raise UserError("--from: the files are of other images; leave some away")
    rows = tuple(dict.fromkeys(row for part in parts for row in part.rows))
    seeds = tuple(dict.fromkeys(seed for part in parts for seed in part.seeds))
    tunings = {t.row: t for part in reversed(parts) for t in part.tunings}
    references = [part.reference for part in parts if part.equal]
    if any(reference != references[0] for reference in references):
        raise UserError("--from: the files have rows equal to different ones; leave some away")
    equal: dict[str, list[Outcome]] = {}
    equal_tunings: dict[str, dict[str, Tuning]] = {}
    for part in parts:
        for what, runs in part.equal.items():
            equal.setdefault(what, []).extend(runs)
        for what, some in part.equal_tunings.items():
            equal_tunings[what] = {t.row: t for t in some} | equal_tunings.get(what, {})
    outcomes = [run for part in parts for run in part.outcomes]
    _refuse_gaps(outcomes, rows, seeds)
    for runs in equal.values():
        _refuse_mixtures(by_row(runs), seeds)
    outcomes.sort(key=lambda run: seeds.index(run.seed))
    joined = replace(
        first,
        rows=rows,
        seeds=seeds,
        tunings=tuple(tunings[row] for row in rows if row in tunings),
        outcomes=tuple(outcomes),
        equal={what: tuple(runs) for what, runs in equal.items()},
        equal_tunings={what: tuple(some.values()) for what, some in equal_tunings.items()},
        reference=references[0] if references else first.reference,
        notes=_join_notes(parts),
        data=next(iter(data), ""),
    )
    try:
        require_same_work(outcomes)
    except RuntimeError as error:
        raise UserError(f"--from: {error}") from None
    return joined


def _join_notes(parts: Sequence[Comparison]) -> tuple[str, ...]:
    """Return the notes of all; those of some of them say of which rows, and seeds, they are."""
    found = []
    for note in dict.fromkeys(note for part in parts for note in part.notes):
        some = [part for part in parts if note in part.notes]
        others = [part for part in parts if note not in part.notes]
        rows, elsewhere = (dict.fromkeys(r for p in of for r in p.rows) for of in (some, others))
        # Files that were joined before say it already.
        if others and not OF_ROWS.search(note):
            note += f" (of {', '.join(rows)}"
            if any(row in elsewhere for row in rows):
                seeds = dict.fromkeys(str(seed) for part in some for seed in part.seeds)
                note += f"; seed {', '.join(seeds)}"
            note += ")"
        found.append(note)
    return tuple(found)


def _refuse_gaps(outcomes: Sequence[Outcome], rows: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise UserError unless each row has one run of each seed, all of them with one setup."""
    runs = by_row(outcomes)
    _refuse_mixtures(runs, seeds)
    for row in rows:
        mine = [run.seed for run in runs.get(row, [])]
        for seed in seeds:
            if seed not in mine:
                raise UserError(f"--from: row {row!r} has no run with seed {seed}, as others have")
        if len({run.settings for run in runs[row]} - {""}) > 1:
            raise UserError(f"--from: row {row!r} had other settings in one of the files")


def _refuse_mixtures(runs: Mapping[str, Sequence[Outcome]], seeds: Sequence[int]) -> None:
    """Raise UserError where a row has two runs of a seed, or runs of two learning rates."""
    for row, some in runs.items():
        for seed in seeds:
            if sum(run.seed == seed for run in some) > 1:
                where = f"row {row!r} with seed {seed} is in two of the files"
                raise UserError(f"--from: {where}; leave one of them away")
        rates = sorted({run.lr for run in some})
        if len(rates) > 1:
            text = " and ".join(f"{lr:g}" for lr in rates)
            raise UserError(f"--from: row {row!r} was trained at learning rates of {text}")


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


def require_same_work(outcomes: Sequence[Outcome]) -> None:
    """Raise RuntimeError unless all runs that ended were trained on the same number of samples."""
    measured = {o.row: o.measured for o in outcomes if o.measured is not None}
    trained = {row: m.samples for row, m in measured.items()}
    if len(set(trained.values())) > 1:
        raise RuntimeError(f"rows were not trained on the same number of samples: {trained}")
    if any(m.extra_samples < 0 for m in measured.values()):
        raise RuntimeError(f"methods have drawn fewer samples than they report: {measured}")
