"""What every part of the benchmark shares: fair timing, the machine's description, plain tables."""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.settings.values import quote

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """One result: `rows` hold a cell per column, None where nothing could be measured."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


class Action(NamedTuple):
    """What is timed, and what prepares it without being timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def min_seconds(actions: dict[str, Action], repeat: int, device: torch.device) -> dict[str, float]:
    """Return the shortest of `repeat` wall times of each action, in seconds; see `wall_times`."""
    return {name: min(times) for name, times in wall_times(actions, repeat, device).items()}


def wall_times(
    actions: dict[str, Action], repeat: int, device: torch.device
) -> dict[str, list[float]]:
    """Return `repeat` wall times of each action, in seconds.

    The actions take turns, so that whatever else the machine does hits all of them alike; the first
    round is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeat + 1):
        for name, action in actions.items():
            action.prepare()
            synchronize(device)
            start = time.perf_counter()
            action.run()
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def synchronize(device: torch.device) -> None:
    """Wait for the kernels queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_machine(device: torch.device) -> str:
    """Return processor, cores, device, threads and versions of this rank in one line."""
    cores = len(os.sched_getaffinity(0))
    where = [
        processor_name(),
        f"{cores} usable cores",
        f"{torch.get_num_threads()} threads per rank",
    ]
    if device.type == "cuda":
        where.append(torch.cuda.get_device_name(device))
    return ", ".join([*where, f"torch {torch.__version__}", f"Python {platform.python_version()}"])


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def format_table(table: Table) -> str:
    """Return title, header, rows and notes as aligned text; numbers stand on the right."""
    cells = [list(table.columns), *([_format(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    numeric = [
        all(not isinstance(row[i], str) for row in table.rows) for i in range(len(table.columns))
    ]
    lines = [table.title]
    for row in cells:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  " + "  ".join(parts).rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in table.notes)])


def as_json(machine: dict[str, str], tables: list[Table]) -> dict:
    """Return what --json writes: the machine, and each table with its columns and rows."""
    return {"machine": machine, "tables": [asdict(table) for table in tables]}


def prepare_file(flag: str, path: str) -> None:
    """Raise UserError unless the file that `--flag` names can be written; "" names none."""
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UserError(f"--{flag} {quote(path, 250)}: {error.strerror}; choose another") from None


def write_json(path: str, machine: dict[str, str], tables: list[Table]) -> None:
    """Write what `as_json` returns to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(as_json(machine, tables), file, indent=2)
        file.write("\n")


def _format(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return (
            f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if cell < 0.1 else f"{cell:.2f}"
        )
    return f"{cell:,}" if isinstance(cell, int) else cell
