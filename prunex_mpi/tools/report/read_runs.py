"""Read the files of runs, however long they are and however a run ended; thin out what is long.

Nothing is held but columns of numbers. What a job is writing just now may end in half a line; any
other line that can't be read is refused.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
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
    open_regular,
    read_text,
    tomllib,
)
from prunex_mpi.base.record_keys import ACCURACY, LOSS, RESIDUALS, Measure, flat_table
from prunex_mpi.run.directory import COMPLETE, read_summary
from prunex_mpi.settings.fields import TEXT
from prunex_mpi.tools.report.stragglers import RankRecord

CONFIG = "config.toml"
OF_LAYERS = ("density", "rho1", "rho2", *RESIDUALS)
# A job that is well gives a sign of life every five seconds.
ALIVE_S = 60.0
ENDS = {
    "running": "it is still going",
    "broken off": "it was broken off",
    "diverged": "it diverged",
    "preempted": "it was preempted",
}
BEGIN = b'{"iteration": '
# Columns of points over the width of a picture; each keeps its lowest and its highest.
COLUMNS = 260


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
    def judged_on(self) -> tuple[str, str]:
        """Which data the run was evaluated on as it went: how columns begin, and in words."""
        return ("val", "held-out") if self.has("val_loss") else ("test", "test")

    @property
    def measure(self) -> Measure:
        """What networks of the run are judged by."""
        return LOSS if self.config.get("dataset") == TEXT else ACCURACY

    @property
    def judged(self) -> np.ndarray:
        """The measure as it went, on the data in `judged_on`, as shown; NaN: not evaluated."""
        measure = self.measure
        return measure.scale * self.column(f"{self.judged_on[0]}_{measure.key}")

    @property
    def final(self) -> float:
        """The last of the measure, on the data in `final_on`; NaN: none.

        A run with held-out data tests its best network when it ends.
        """
        return self._end[0]

    @property
    def final_on(self) -> str:
        """Which data `final` is of, in words: the test data where it was tested on them."""
        return self._end[1]

    @property
    def _end(self) -> tuple[float, str]:
        # A run of a comparison knows its best network by the data held out alone.
        validation = self.summary.get("validation") or {}
        for best, where in (
            (self.summary.get(f"test_{self.measure.key}"), "test"),
            (validation.get(self.measure.key), "held-out"),
        ):
            if isinstance(best, int | float):
                return self.measure.scale * float(best), where
        known = self.judged[np.isfinite(self.judged)]
        return (float(known[-1]) if len(known) else float("nan")), self.judged_on[1]

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Return what config.toml says."""
        return self.config.get(key, otherwise)

    def sizes(self) -> list[int]:
        """Return how many ranks the nodes have, as far as it is known."""
        return self.summary.get("nodes", [])


@dataclass(frozen=True)
class Layers:
    """Some outer iterations of layers.jsonl: [iterations, layers] by column, NaN for null."""

    names: tuple[str, ...]
    iterations: np.ndarray
    values: Mapping[str, np.ndarray]


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
        # As many folders above as it takes to tell them apart.
        most = max(len(path.parts) for path in whole)
        for depth in range(2, most + 1):
            names = [shown(Path(*run.path.resolve().parts[-depth:])) for run in runs]
            if len(set(names)) == len(names):
                break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def read_run(path: Path) -> Run:
    """Return the run in the folder `path`; raise UserError in a line where there is none."""
    where = quote(shown(path), 250)
    try:
        if not path.is_dir():
            raise UserError(f"there is no run in {where}; give the folder of --run-dir", UNREADABLE)
        config = read_text(path / CONFIG)
    except FileNotFoundError:
        raise UserError(
            f"{where} is not the folder of a run: it has no {CONFIG}", UNREADABLE
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{where}: {CONFIG} can't be read: {reason}", UNREADABLE) from None
    try:
        table = tomllib.loads(config)
    except (ValueError, RecursionError):
        raise UserError(
            f"{where}: {CONFIG} is not TOML; put back what the run wrote", UNREADABLE
        ) from None
    summary = read_summary(path)
    status, reason = how_it_ended(path, summary)
    columns, cut = read_metrics(path, status, reason)
    notes = [f"The last line of {METRICS} is not complete and is left out."] if cut else []
    versions = table.pop("versions", {})
    # The settings that stand there are those that the run had.
    table.pop("asked", None)
    return Run(
        path=path,
        name=shown(path.resolve().name) or where,
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
        found = json.loads(read_text(path / DIVERGED))
        return "diverged", str(found["reason"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "diverged", ""
    return ("running" if time.time() - last_sign(path) < ALIVE_S else "broken off"), ""


def read_changes(path: Path) -> list[dict[str, Any]]:
    """Return who was lost and who joined, as far as the lines of a run tell; raise UserError."""
    if not (path / NODES).exists():
        return []
    return [record for _, record in records_of(path / NODES) if record is not None]


def last_sign(path: Path) -> float:
    """Return when a run without an end last wrote of itself, in seconds since 1970; 0 for never.

    A row of a comparison has no heartbeats: of it the last line counts.
    """
    signs = [0.0]
    for file in (path / METRICS, *(path / "heartbeats").glob("*")):
        with contextlib.suppress(OSError):
            signs.append(file.stat().st_mtime)
    return max(signs)


def lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield number, bytes and whether it is whole of each line; raise UserError."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line, line.endswith(b"\n")
    except OSError as error:
        reason = f"{quote(shown(path), 250)} can't be read: {error.strerror}"
        raise UserError(reason, UNREADABLE) from None


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the record of a line; raise UserError where it is none."""
    try:
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("iteration")) is int:
            return record
    except (ValueError, RecursionError):
        pass
    raise damaged(path, number)


def damaged(path: Path, number: int) -> UserError:
    """Return the error of a line that no run has written."""
    where = quote(shown(path), 250)
    return UserError(f"{where}, line {number} is damaged; put back what the run wrote", UNREADABLE)


def records_of(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number and record of each line, None for a last one that is cut; raise UserError."""
    for number, line, whole in lines_of(path):
        try:
            yield number, parse_line(path, number, line)
        except UserError:
            if whole:
                raise
            yield number, None


def read_metrics(path: Path, status: str, reason: str) -> tuple[dict[str, np.ndarray], bool]:
    """Return the columns of metrics.jsonl, and whether its last line is cut."""
    file, where = path / METRICS, quote(shown(path), 250)
    columns: dict[str, list[float]] = {"iteration": []}
    cut, count = False, 0
    if file.exists():
        for number, record in records_of(file):
            if record is None:
                cut = True
                break
            try:
                numbers = flattened(record)
            except OverflowError:
                raise damaged(file, number) from None
            if count and not numbers["iteration"] > columns["iteration"][-1]:
                raise damaged(file, number)
            for name in numbers.keys() - columns.keys():
                columns[name] = [np.nan] * count
            for name, column in columns.items():
                column.append(numbers.get(name, np.nan))
            count += 1
    if not count:
        text = f"{where} has no finished outer iteration: {ENDS.get(status, status)}"
        raise NothingYet(f"{text}, {reason}" if reason else text, UNREADABLE)
    # In the order of the run's files, whatever came first.
    order = [*dict.fromkeys([*flattened(record or {"iteration": 0}), *columns])]
    known = [name for name in order if name in columns]
    return {name: np.array(columns[name], dtype=np.float64) for name in known}, cut


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


def read_layers(path: Path, wanted: Sequence[int]) -> Layers | None:
    """Return what layers.jsonl says of the iterations `wanted`; None where there is nothing.

    Lines of others are passed over unread. Raises UserError.
    """
    file = path / LAYERS
    if not file.exists():
        return None
    chosen = set(wanted)
    rows: dict[int, dict[str, tuple[float, ...]]] = {}
    # As a line says it: the lines of an outer iteration lie together.
    passed = b""
    for number, line, whole in lines_of(file):
        if line.startswith(BEGIN):
            text = line[len(BEGIN) : line.find(b",")]
            if text == passed:
                continue
            if text.isdigit() and int(text) not in chosen:
                passed = text
                continue
        try:
            record = parse_line(file, number, line)
        except UserError:
            if whole:
                raise
            break
        if record["iteration"] in chosen:
            layer, numbers = str(record.get("layer")), flattened(record)
            values = tuple(numbers.get(name, np.nan) for name in OF_LAYERS)
            rows.setdefault(record["iteration"], {})[layer] = values
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
    if not file.exists():
        return
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
# Long runs: no more than a screen can show, and nothing that sticks out is lost
# --------------------------------------------------------------------------------------------------


def thin(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most two points per column, its extremes in their order, first and last kept.

    x rises. Points without a finite y are left out first.
    """
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) <= 2 * columns or x[-1] <= x[0]:
        return x, y
    column = np.minimum(((x - x[0]) / (x[-1] - x[0]) * columns).astype(int), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    kept = {0, len(x) - 1}
    for begin, end in zip(starts, [*starts[1:], len(x)], strict=True):
        kept.add(begin + int(np.argmin(y[begin:end])))
        kept.add(begin + int(np.argmax(y[begin:end])))
    places = np.array(sorted(kept))
    return x[places], y[places]


def starts_of(size: int, columns: int) -> np.ndarray:
    """Return where each of at most so many columns of `size` points begins."""
    count = min(size, columns)
    return np.unique((np.arange(count) * size / count).astype(int))


def binned(iterations: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Return the borders of at most `columns` columns of iterations, and where each begins.

    The borders lie half an iteration before the first and after the last of a column.
    """
    starts = starts_of(len(iterations), columns)
    edges = np.append(iterations[starts], iterations[-1] + 1) - 0.5
    return edges, starts


def means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of each column, which begins at `starts`; NaN counts as 0."""
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(np.nan_to_num(values), starts) / counts
