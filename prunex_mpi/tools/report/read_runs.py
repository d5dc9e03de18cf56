"""Read run directories, however long a run is and however it ended.

Nothing is held but columns of numbers. What a job is writing just now may end in half a line; any
other line that can't be read is refused.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import (
    DIVERGED,
    LAYERS,
    METRICS,
    NODES,
    RANKS,
    loads,
    open_regular,
    read_json,
)
from prunex_mpi.base.record_keys import (
    ACCURACY,
    LOSS,
    RESIDUALS,
    Measure,
    flat_table,
    is_number,
)
from prunex_mpi.config.cli import load_saved
from prunex_mpi.run.directory import COMPLETE, read_summary
from prunex_mpi.settings.fields import TEXT

OF_CHANGES = ("ranks", "seconds", "lost_seconds")
OF_LAYERS = ("density", *RESIDUALS)
# A job that is well gives a sign of life every five seconds.
ALIVE_S = 60.0
ENDS = {
    "running": "is still going, or was broken off in the last minute,",
    "broken off": "was broken off",
    "diverged": "diverged",
    "preempted": "was preempted (--resume goes on with it)",
}
BEGIN = b'{"iteration": '
# The phases in which leaders have other work than the ranks that they lead.
BY_ROLE = ("intra", "project", "inter")


class NothingYet(UserError):
    """A run has nothing to show yet."""


@dataclass(frozen=True)
class Run:
    """A run as its files tell it.

    `columns` are float64 [outer iterations], a nested key as "seconds.local", NaN for null. The
    `status` is the summary's, else "diverged", "running" or "broken off"; `reason` is why.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    status: str
    reason: str
    summary: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the run has come to its end."""
        return self.status in COMPLETE

    @property
    def iterations(self) -> np.ndarray:
        """The numbers of the outer iterations."""
        return self.columns["iteration"]

    def column(self, name: str) -> np.ndarray:
        """Return a column, NaN where the run has none."""
        found = self.columns.get(name)
        return np.full(len(self.iterations), np.nan) if found is None else found

    def filled(self, name: str) -> np.ndarray:
        """Return a column, 0 where it has no number."""
        return np.nan_to_num(self.column(name))

    def total(self, name: str) -> float:
        """Return the sum of a column."""
        return float(self.filled(name).sum())

    def has(self, name: str) -> bool:
        """Return whether any outer iteration has such a number."""
        return bool(np.isfinite(self.column(name)).any())

    @property
    def evaluated_on(self) -> tuple[str, str]:
        """Which data the run was evaluated on as it went: how columns begin, and in words."""
        return ("val", "held-out") if self.has("val_loss") else ("test", "test")

    @property
    def measure(self) -> Measure:
        """What networks of the run are evaluated by."""
        return LOSS if self.config.get("dataset") == TEXT else ACCURACY

    @property
    def quality(self) -> np.ndarray:
        """The measure as it went, on the data in `evaluated_on`, as shown; NaN: not evaluated."""
        measure = self.measure
        return measure.scale * self.column(f"{self.evaluated_on[0]}_{measure.key}")

    @property
    def final(self) -> tuple[float, str]:
        """The last of the measure, NaN for none, and on which data, in words.

        A run with held-out data tests its best network when it ends.
        """
        # A run of a comparison knows its best network by the data held out alone.
        validation = self.summary.get("validation") or {}
        for best, where in (
            (self.summary.get(f"test_{self.measure.key}"), "test"),
            (validation.get(self.measure.key), "held-out"),
        ):
            if isinstance(best, int | float):
                return self.measure.scale * float(best), where
        known = self.quality[np.isfinite(self.quality)]
        return (float(known[-1]) if len(known) else float("nan")), self.evaluated_on[1]

    def along(self, axis: str) -> np.ndarray:
        """Return where each outer iteration ends: iteration, seconds, or a kind of bytes.

        Seconds are of training, without evaluation.
        """
        if axis == "iteration":
            return self.iterations
        if axis == "seconds":
            return np.cumsum(self.filled("seconds.total") - self.filled("seconds.evaluate"))
        return np.cumsum(self.filled(axis))

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Return what config.toml says."""
        return self.config.get(key, otherwise)


@dataclass(frozen=True)
class Layers:
    """Some outer iterations of layers.jsonl: [iterations, layers] by column, NaN for null."""

    names: tuple[str, ...]
    iterations: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class RankRecord:
    """One outer iteration of all ranks: each one's node, and seconds float64 [ranks] by phase.

    `exchange` is what collectives took, waiting and transmitting; `broadcast` [ranks] is the part
    of phase 4's exchange that was the broadcast in the node; `hosts` are the nodes' names, where a
    job begins.
    """

    iteration: int
    node: np.ndarray
    work: Mapping[str, np.ndarray]
    exchange: Mapping[str, np.ndarray]
    residuals: Mapping[str, np.ndarray]
    broadcast: np.ndarray
    hosts: tuple[str, ...] = ()

    @property
    def is_leader(self) -> np.ndarray:
        """Whether each rank is the first of its node; bool [ranks]."""
        return np.array([place not in self.node[:rank] for rank, place in enumerate(self.node)])


@dataclass(frozen=True)
class Straggler:
    """A rank that worked longer in a phase than its peers, in an outer iteration on average."""

    phase: str
    rank: int
    host: str
    seconds: float


def shown(path: Path | str) -> str:
    """Return a name as text that any file takes, whatever bytes it is made of."""
    return os.fsencode(path).decode("utf-8", "replace")


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in these folders, each under a name of its own; raise UserError.

    Of several, those that have nothing to show are left out, with a line that says so.
    """
    whole = [path.resolve() for path in paths]
    for i, path in enumerate(whole):
        if path in whole[:i]:
            raise UserError(f"{quote(shown(paths[i]), 250)} is given twice; give it once")
    runs: list[Run] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except NothingYet as error:
            if len(paths) == 1:
                raise
            print(f"left out: {error}", flush=True)
    if not runs:
        raise UserError("none of these runs has a finished outer iteration to show", UNREADABLE)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        return [replace(run, name=shown(run.path)) for run in runs]
    return runs


def read_run(path: Path) -> Run:
    """Return the run in the folder `path`; raise UserError in a line where there is none."""
    table, summary = load_saved(str(path)), read_summary(path)
    status, reason = how_it_ended(path, summary)
    columns, cut = read_metrics(path, status, reason)
    notes = [f"The last line of {METRICS} is not complete and is left out."] if cut else []
    versions = table.pop("versions", {})
    # The settings that stand there are those that the run had.
    table.pop("asked", None)
    return Run(
        path=path,
        name=shown(path.resolve().name) or shown(path),
        config=flat_table(table),
        versions=versions if isinstance(versions, dict) else {},
        status=status,
        reason=reason,
        summary=summary,
        columns=columns,
        notes=tuple(notes),
    )


def how_it_ended(path: Path, summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status of a run and why it is so, "" where that is not known."""
    if summary:
        return summary["status"], str(summary.get("reason", ""))
    try:
        found = read_json(path / DIVERGED)
        return "diverged", str(found["reason"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return "diverged", ""
    return ("running" if time.time() - last_sign(path) < ALIVE_S else "broken off"), ""


def read_changes(path: Path) -> list[dict[str, Any]]:
    """Return who was lost and who joined; raise UserError."""
    found = []
    for number, record in records_of(path / NODES):
        if record is not None:
            if not all(is_number(record.get(key, 0)) for key in OF_CHANGES):
                raise damaged(path / NODES, number)
            found.append(record)
    return found


def last_sign(path: Path) -> float:
    """Return when a run without an end last wrote of itself, in seconds since 1970; 0 for never.

    A row of a comparison has no heartbeats: of it the last line counts.
    """
    signs = [0.0]
    for file in (path / METRICS, *(path / "heartbeats").glob("*")):
        with contextlib.suppress(OSError):
            signs.append(file.stat().st_mtime)
    return max(signs)


def damaged(path: Path, number: int) -> UserError:
    """Return the error of a line that no run has written."""
    where = quote(shown(path), 250)
    return UserError(f"{where}, line {number} is damaged; put back what the run wrote", UNREADABLE)


def records_of(
    path: Path, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number and record of each line, None for a last one that is cut.

    Nothing where there is no such file. Lines of iterations that are not `wanted`, if that is
    given, are passed over unread. Raises UserError.
    """
    heads = None if wanted is None else {b"%s%d" % (BEGIN, k) for k in wanted}
    try:
        if not path.exists():
            return
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if heads is None or line[: line.find(b",")] in heads or not line.startswith(BEGIN):
                    yield number, parse_line(path, number, line)
    except OSError as error:
        reason = f"{quote(shown(path), 250)} can't be read: {error.strerror}"
        raise UserError(reason, UNREADABLE) from None


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None where it is cut; raise UserError where it is none."""
    try:
        record = loads(line)
        if isinstance(record, dict) and type(record.get("iteration")) is int:
            return record
    except ValueError:
        pass
    if line.endswith(b"\n"):
        raise damaged(path, number)
    return None


def read_metrics(path: Path, status: str, reason: str) -> tuple[dict[str, np.ndarray], bool]:
    """Return the columns of metrics.jsonl, and whether its last line is cut."""
    file, where = path / METRICS, quote(shown(path), 250)
    columns: dict[str, list[float]] = {"iteration": []}
    cut, count = False, 0
    for number, record in records_of(file):
        if record is None:
            cut = True
            break
        numbers = flattened(record)
        if count and not numbers["iteration"] > columns["iteration"][-1]:
            raise damaged(file, number)
        for name in numbers.keys() - columns.keys():
            columns[name] = [np.nan] * count
        for name, column in columns.items():
            column.append(numbers.get(name, np.nan))
        count += 1
    if not count:
        text = f"{where} has no finished outer iteration ({status})"
        raise NothingYet(f"{text}, {reason}" if reason else text, UNREADABLE)
    return {name: np.array(column) for name, column in columns.items()}, cut


def flattened(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, those of nested ones as "key.key"; null is NaN."""
    found = {key: np.nan if value is None else value for key, value in flat_table(record).items()}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def spread_out(iterations: np.ndarray, most: int) -> list[int]:
    """Return at most `most` of the iterations, evenly, the last one included."""
    if len(iterations) <= most:
        return [int(k) for k in iterations]
    places = np.linspace(0, len(iterations) - 1, most).round().astype(int)
    return [int(k) for k in iterations[np.unique(places)]]


def read_layers(path: Path, wanted: Collection[int]) -> Layers | None:
    """Return what layers.jsonl says of these iterations, None for nothing; raise UserError."""
    rows: dict[int, dict[str, tuple[float, ...]]] = {}
    for _, record in records_of(path / LAYERS, wanted):
        if record is not None and record["iteration"] in wanted:
            numbers = flattened(record)
            values = tuple(numbers.get(name, np.nan) for name in OF_LAYERS)
            rows.setdefault(record["iteration"], {})[str(record.get("layer"))] = values
    if not rows:
        return None
    iterations = sorted(rows)
    names = tuple(dict.fromkeys(name for k in iterations for name in rows[k]))
    empty = (np.nan,) * len(OF_LAYERS)
    block = np.array([[rows[k].get(name, empty) for name in names] for k in iterations])
    values = {name: block[:, :, i] for i, name in enumerate(OF_LAYERS)}
    return Layers(names, np.array(iterations), values)


def read_ranks(path: Path) -> Iterator[RankRecord]:
    """Yield the records of ranks.jsonl, nothing where there is none; raise UserError."""
    file = path / RANKS
    for number, record in records_of(file):
        if record is None:
            return
        try:
            yield rank_record(record)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise damaged(file, number) from None


def rank_record(record: Mapping[str, Any]) -> RankRecord:
    """Return a line of ranks.jsonl as arrays; raise KeyError, TypeError or ValueError."""
    node = np.array(record["node"], dtype=np.int64)
    if node.ndim != 1 or not len(node):
        raise ValueError("no ranks")

    def array(numbers: object) -> np.ndarray:
        found = np.array(numbers, dtype=np.float64)
        if found.shape != node.shape:
            raise ValueError("not as many numbers as ranks")
        return found

    parts = (
        {name: array(numbers) for name, numbers in (record.get(key) or {}).items()}
        for key in ("work", "exchange", "residuals")
    )
    hosts = tuple(str(host) for host in record.get("hosts") or ())
    return RankRecord(record["iteration"], node, *parts, array(record["broadcast"]), hosts)


# --------------------------------------------------------------------------------------------------
# Ranks that the others waited for
# --------------------------------------------------------------------------------------------------


def find_stragglers(records: Iterable[RankRecord]) -> list[Straggler]:
    """Return the ranks that worked longer than their peers, by phase, the worst first.

    What a rank waits for is another one's work, so work counts, as the excess of its sum over that
    of the peers. Ranks may become more or fewer, and move, where a run goes on in another job.
    """
    found: dict[tuple[str, int, str], float] = {}
    names: tuple[str, ...] = ()
    count = 0
    sums: dict[str, np.ndarray] = {}
    before: RankRecord | None = None

    def settle() -> None:
        """Charge each rank of the records since the last change with its excess."""
        for phase, work in sums.items():
            for rank, seconds in enumerate(excess(work, phase, before.is_leader)):
                node = before.node[rank]
                host = names[node] if 0 <= node < len(names) else ""
                found[phase, rank, host] = found.get((phase, rank, host), 0.0) + float(seconds)

    for record in records:
        if before is not None and (record.hosts or not np.array_equal(record.node, before.node)):
            settle()
            sums = {}
        names, before, count = record.hosts or names, record, count + 1
        for phase, work in record.work.items():
            sums[phase] = sums.get(phase, 0.0) + np.nan_to_num(work)
    if before is not None:
        settle()
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0][1]))
    return [Straggler(*place, seconds / count) for place, seconds in ranked if seconds > 0]


def excess(work: np.ndarray, phase: str, is_leader: np.ndarray) -> np.ndarray:
    """Return how much longer each rank worked than its peers, float64 [ranks].

    The lower median stands for these, so that of two ranks the faster one does. Where leaders have
    work of their own, peers have the same role; what the only leader does is its task.
    """
    late = work - lower_median(work)
    if phase in BY_ROLE and not is_leader.all():
        late[is_leader] = work[is_leader] - lower_median(work[is_leader])
        # One that does not lead and has no peer works no longer than a leader.
        if (~is_leader).sum() > 1:
            late[~is_leader] = work[~is_leader] - lower_median(work[~is_leader])
    return late


def lower_median(work: np.ndarray) -> float:
    """Return what half of the ranks take at most."""
    return float(np.sort(work)[(len(work) - 1) // 2])
