"""The paper's values beside those of runs: a few lines below each figure."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunex_mpi.base.tables import Table
from prunex_mpi.tools.drawing import plain
from prunex_mpi.tools.report import several_runs as several
from prunex_mpi.tools.report.read_runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "-"
# Letters of the text below that fill an inch, and the inches of a line.
LETTERS, LINE_INCHES = 17.0, 0.155
PAYLOAD_WHY = (
    "40 % is not what the paper's stated setting gives: half of the input channels of ResNet-152 "
    "leave 50.3 %"
)


@dataclass(frozen=True)
class Beside:
    """One value of the runs and the paper's, "-" where there is none; `why` they differ."""

    what: str
    here: str
    paper: str = NONE
    why: str = ""


@dataclass(frozen=True)
class Drawn:
    """A figure and what stands below it."""

    figure: "Figure"
    rows: Sequence[Beside]
    notes: Sequence[str] = ()


def table_of(number: str, title: str, drawn: Drawn) -> Table:
    """Return what is printed: the values side by side."""
    rows = tuple((row.what, row.here, row.paper, row.why) for row in drawn.rows)
    return Table(
        f"Figure {number}: {title}",
        ("what", "here", "paper", "why they differ"),
        rows,
        tuple(drawn.notes),
    )


def write_below(drawn: Drawn) -> None:
    """Write the values below the figure, which becomes as much higher."""
    width, height = drawn.figure.get_size_inches()
    lines: list[str] = []
    for row in drawn.rows:
        text = f"{row.what}: {row.here}"
        if row.paper != NONE:
            text += f"; paper: {row.paper}"
        if row.why:
            text += f" ({row.why})"
        lines += _wrapped(text, width)
    for note in drawn.notes:
        lines += _wrapped(note, width)
    if not lines:
        return
    below = LINE_INCHES * len(lines) + 0.12
    whole = height + below
    drawn.figure.set_size_inches(width, whole)
    engine = drawn.figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, below / whole, 1, 1 - below / whole))
    text = "\n".join(lines)
    drawn.figure.text(0.012, (below - 0.06) / whole, text, va="top", fontsize=7.5)


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(plain(text), int(LETTERS * width), subsequent_indent=" " * 4)


def unequal(runs: Sequence[Run]) -> list[str]:
    """Return a note on what runs differ in that should be alike where they are compared."""
    keys = ("model", "dataset", "outer-iterations", "batch-size", "train-samples")
    named = several.differing(runs, keys)
    return [f"The runs differ in {', '.join(named)} as well."] if named else []


def setup_words(run: Run, ranks: int) -> str:
    """Say what was trained here and what in the paper."""
    model, dataset = run.setting("model", "?"), run.setting("dataset", "?")
    many = f"{ranks} rank{'s' if ranks != 1 else ''}" if ranks else "unknown ranks"
    return f"{model} on {dataset} with {many}, not ResNet-152 on CIFAR-10 with 64 GPUs"


def differing(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return in which settings runs differ; what a run of before does not know tells nothing."""
    known = {key: [value_of(run, key) for run in runs if key in run.config] for key in keys}
    return [key for key, values in known.items() if len(set(values)) > 1]


def value_of(run: Run, key: str) -> str:
    """Return a setting in words; in paths the run's seed, which stands for any, as {seed}."""
    value = str(run.setting(key))
    if key not in ("init-from", "teacher"):
        return value
    return re.sub(rf"(?<!\d){run.setting('seed')}(?!\d)", "{seed}", value)
