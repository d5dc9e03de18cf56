"""The page of several runs: their curves drawn together, and a table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.errors import enumerated
from prunex_mpi.base.record_keys import LABELS, LOSS
from prunex_mpi.base.tables import Cell, LossCell, Table
from prunex_mpi.base.units import MIB
from prunex_mpi.settings.values import in_words
from prunex_mpi.tools.drawing import (
    PHASE_COLOURS,
    legend_above,
    named_look,
    new_figure,
    new_panel,
    stack_bars,
)
from prunex_mpi.tools.report import run_pictures
from prunex_mpi.tools.report.one_run import (
    duration_words,
    ending,
    learning_pictures,
)
from prunex_mpi.tools.report.page import Page, Section, pictures_of
from prunex_mpi.tools.report.read_runs import Run, read_ranks, shown
from prunex_mpi.tools.report.run_pictures import along, axis_unit, plot, widen
from prunex_mpi.tools.report.stragglers import RankTimes, find_stragglers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Column = Callable[[Run], np.ndarray]
# Where a run lies is told elsewhere.
UNTOLD = ("run-dir", "resume", "dry-run")


def page_of(runs: Sequence[Run]) -> Page:
    """Return the page of several runs; raise UserError."""
    density = curves(runs, "kept share of prunable weights", lambda run: run.column("density"))
    learning = learning_pictures(lambda axis: learned(runs, axis))
    cost = pictures_of(
        ("payload", "Bytes of each outer iteration", payload(runs), ""),
        ("seconds", "Seconds of an outer iteration, by phase", durations(runs), MEAN),
    )
    inside = pictures_of(
        ("density", "Density", density, ""),
        ("residuals", "Primal residual between nodes", residual(runs), ""),
    )
    sections = [
        Section("Side by side", (), [table_of(runs)]),
        Section("Did they learn?", learning),
        Section("What they cost", cost),
        Section("What was pruned, and how far nodes agree", inside),
        Section("Settings", (), [settings_table(runs)]),
    ]
    # Who says well that a run ended badly: its number leads to its name.
    bad = [f"{label(i, run)}: {ending(run)}" for i, run in enumerate(runs) if not run.complete]
    notes = [f"{label(i, run)}: {note}" for i, run in enumerate(runs) for note in run.notes]
    source = " · ".join(shown(run.path) for run in runs)
    return Page(f"{len(runs)} runs", source, lead(runs), sections, [*bad, *notes])


HELD_OUT = "Runs with held-out data (--val-split) were evaluated on those as they went; "
TESTED = "what they reached at the end is that of their best network on the test data"
NOT_TESTED = "at the end, too, what {} reached is of held-out data"
MEAN = "Means over the outer iterations of a run, as rank 0 took them."


def label(number: int, run: Run) -> str:
    """Return how pictures call a run: a number, should its name not be drawn."""
    return f"{number + 1}: {run.name}"


def look_and_label(number: int, run: Run) -> dict[str, str]:
    """Return how the curve of a run looks, and what it is called."""
    return named_look(number, label(number, run))


def differing(
    runs: Sequence[Run],
    keys: Sequence[str],
    value: Callable[[Run, str], str] = lambda run, key: str(run.setting(key)),
) -> list[str]:
    """Return in which of these settings the runs differ, as `value` tells them."""
    return [key for key in keys if len({value(run, key) for run in runs}) > 1]


def lead(runs: Sequence[Run]) -> list[str]:
    """Return the first paragraph: what was best, cheapest and fastest."""
    whole = sum(run.complete for run in runs)
    of_these = "; what follows is of these" if 0 < whole < len(runs) else ""
    text = [f"{len(runs)} runs, {whole} of them complete{of_these}."]
    # What was broken off early has cost little.
    judged = [run for run in runs if run.complete] or runs
    reached = {run.name: run.final for run in judged}
    sizes = {run.name: float(run_pictures.sent_bytes(run, judged)[-1]) for run in judged}
    seconds = {run.name: float(run_pictures.trained_seconds(run)[-1]) for run in judged}
    known = {name: value for name, value in reached.items() if np.isfinite(value)}
    measure = judged[0].measure
    if known and all(run.measure is measure for run in judged):
        best = list(known)[measure.best(list(known.values()))]
        text.append(f"The {measure.superlative} is {best} ({measure.shown(known[best])}).")
    least, fastest = min(sizes, key=lambda n: sizes[n]), min(seconds, key=lambda n: seconds[n])
    went = "went between nodes" if run_pictures.left_a_node(judged) else "a leader handed over"
    text.append(f"The fewest bytes {went} in {least} ({sizes[least] / MIB:.2f} MiB).")
    text.append(f"The least time took {fastest} ({duration_words(seconds[fastest])}).")
    unequal = differing(runs, ("model", "dataset", "outer-iterations", "seed"))
    if unequal:
        text.append(f"They differ in {enumerated(unequal)}, which a comparison has to allow for.")
    return text


def last(run: Run, name: str) -> float:
    """Return the last number of a column, NaN where there is none."""
    column = run.column(name)
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else float("nan")


def named(runs: Sequence[Run]) -> str:
    """Return what the runs are judged by, in words."""
    found = {f"{run.measure.label} {run.measure.short}".rstrip() for run in runs}
    return " or ".join(sorted(found))


def judged_on(runs: Sequence[Run]) -> str:
    """Return which data runs were judged on as they went, in words."""
    return " or ".join(sorted({run.judged_on[1] for run in runs}, reverse=True))


def held_out(runs: Sequence[Run]) -> list[str]:
    """Return a note where any run was judged on held-out data."""
    held = [run for run in runs if run.judged_on[0] == "val"]
    untested = [run.name for run in held if run.final_on != "test"]
    parts = [TESTED] if len(untested) < len(held) else []
    parts += [NOT_TESTED.format(enumerated(untested))] if untested else []
    return [f"{HELD_OUT}{'; '.join(parts)}."] if held else []


def ended_on(runs: Sequence[Run]) -> str:
    """Return which data runs were judged on at their end, in words."""
    return " or ".join(sorted({run.final_on for run in runs}, reverse=True))


def learned(runs: Sequence[Run], axis: str) -> "Figure | None":
    """Draw loss and accuracy of all runs along one axis."""
    if not any(run.has("train_loss") or np.isfinite(run.judged).any() for run in runs):
        return None
    figure = new_figure(4.6 + 0.18 * ((len(runs) + 2) // 3))
    upper, lower = figure.subplots(2, 1, sharex=True)
    size, word = axis_unit(runs, axis)
    for number, run in enumerate(runs):
        look = look_and_label(number, run)
        x = along(run, axis, runs) / size
        plot(upper, x, run.column("train_loss"), **look)
        plot(lower, x, run.judged, **look)
    widen(upper, [run.column("train_loss") for run in runs])
    upper.set_ylabel("training loss")
    lower.set_ylabel(f"{judged_on(runs)} {named(runs)}")
    if axis == "iterations":
        run_pictures.count_iterations(lower)
    lower.set_xlabel(word)
    legend_above(upper, 3)
    return figure


def curves(
    runs: Sequence[Run], word: str, column: Column, scale: str = "linear"
) -> "Figure | None":
    """Draw a column of all runs along their outer iterations."""
    if not any(np.isfinite(column(run)).any() for run in runs):
        return None
    figure, panel = new_panel(3.2 + 0.18 * ((len(runs) + 2) // 3))
    for number, run in enumerate(runs):
        plot(panel, run.iterations, column(run), **look_and_label(number, run))
    panel.set_yscale(scale)
    if scale == "linear":
        panel.set_ylim(bottom=0)
    panel.set_ylabel(word)
    run_pictures.count_iterations(panel)
    legend_above(panel, 3)
    return figure


def payload(runs: Sequence[Run]) -> "Figure | None":
    """Draw what a leader hands over in each outer iteration."""
    most = max(float(run.filled("bytes.payload").max()) for run in runs)
    size, unit = run_pictures.unit_of_bytes(most)
    word = f"{unit} per leader, between nodes"
    return curves(runs, word, lambda run: run.column("bytes.payload") / size)


def residual(runs: Sequence[Run]) -> "Figure | None":
    """Draw how far the nodes are apart."""

    def positive(run: Run) -> np.ndarray:
        column = run.column("residuals.inter_primal")
        return np.where(column > 0, column, np.nan)

    return curves(runs, "norm over all layers", positive, "log")


def durations(runs: Sequence[Run]) -> "Figure | None":
    """Draw a bar of each run: the mean seconds of an outer iteration by phase."""
    found = {phase for run in runs for phase in run_pictures.phases_of(run)}
    phases = [phase for phase in PHASE_COLOURS if phase in found]
    if not phases:
        return None
    rows = {p: np.array([run.filled(f"seconds.{p}").mean() for run in runs]) for p in phases}
    size, unit = run_pictures.unit_of_seconds(float(sum(rows.values()).max()))
    figure, panel = new_panel(1.5 + 0.3 * max(3, len(runs)))
    bars = [(LABELS[p], rows[p] / size, {"color": PHASE_COLOURS[p]}) for p in rows]
    stack_bars(panel, [label(number, run) for number, run in enumerate(runs)], bars)
    panel.set_xlabel(unit)
    legend_above(panel, 4)
    return figure


def table_of(runs: Sequence[Run]) -> Table:
    """Return the figures of the runs, a row each."""
    rows: list[tuple[Cell, ...]] = []
    for number, run in enumerate(runs):
        times = find_stragglers(read_ranks(run.path))
        reached, dense = run.final, run.total("bytes.dense")
        sent = run.total("bytes.payload")
        rows.append(
            (
                label(number, run),
                run.status,
                str(run.setting("method", "")),
                len(run.iterations),
                _cell(LossCell(reached) if run.measure is LOSS else reached),
                _cell(last(run, "density")),
                float(sent / MIB),
                float(100 * sent / dense) if dense else None,
                run.total("seconds.total"),
                straggler(times),
            )
        )
    columns = (
        *("run", "status", "method", "iterations", named(runs), "density"),
        *("payload MiB", "of dense %", "seconds", "waited for most"),
    )
    note = f"{named(runs)} and density: the last; payload: what a leader handed over between nodes"
    return Table("", columns, tuple(rows), (note, *held_out(runs)))


def _cell(number: float) -> float | None:
    return None if np.isnan(number) else number


def straggler(times: RankTimes | None) -> str | None:
    """Return the rank that the others of a run waited for most."""
    if times is None or not times.stragglers or times.ranks == 1:
        return None
    worst = times.stragglers[0]
    return f"rank {worst.rank}, {worst.phase}, {duration_words(worst.seconds)}"


def settings_table(runs: Sequence[Run]) -> Table:
    """Return the settings and versions in which the runs differ, a column per run."""
    tables = [
        {**run.config, **{f"{k} (version)": v for k, v in run.versions.items()}} for run in runs
    ]
    keys = dict.fromkeys(key for table in tables for key in table if key not in UNTOLD)
    rows = []
    for key in keys:
        cells = [in_words(table[key]) if key in table else "-" for table in tables]
        if len(set(cells)) > 1:
            rows.append((shown(key), *cells))
    columns = ("setting", *(label(number, run) for number, run in enumerate(runs)))
    notes = () if rows else ("None.",)
    return Table("Settings and versions in which they differ", columns, tuple(rows), notes)
