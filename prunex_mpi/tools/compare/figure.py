"""Draw a comparison: accuracy against the bytes that left a node, and against time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.units import MIB
from prunex_mpi.tools.compare.outcomes import Comparison, Outcome, by_row, ended
from prunex_mpi.tools.drawing import (
    look_of,
    marker_of,
    new_figure,
    plain,
    refuse_other_kinds,
    save,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES, HEIGHT_INCHES, LEGEND_INCHES = 4.2, 4.0, 2.6
# What a row takes of the legend's height; the layout makes no room for a legend that is too high.
ROW_INCHES = 0.19
# More panels than these would be too small beside each other in a page of text.
IN_A_ROW = 3
# Of more rows the courses can't be told apart, and their ends alone are drawn.
MOST_COURSES = 8
# From so many decades on, ticks at their ends are enough.
WIDE = 2.0
TIMES = "this machine"
# Some weights of a whole network may happen to be 0; budgets are spent to a few weights.
SAME_SIZE = 0.95
# Bytes of a step that differ by no more are those of one method: stages are whole iterations.
SAME_BYTES = 0.05


@dataclass(frozen=True)
class Curve:
    """A row's course, means over its seeds; accuracies in percent, `spread` that of the end.

    `share` is that of the seconds of training, in which outer iterations differ.
    """

    row: str
    sent_mib: tuple[float, ...]
    share: tuple[float, ...]
    accuracy: tuple[float, ...]
    train_s: float
    spread: float
    parameters_left: float


def refuse_impossible(path: str) -> None:
    """Raise UserError where no figure can be drawn; "" asks for none."""
    if not path:
        return
    refuse_other_kinds("--figure", path)
    require_packages("--figure", "report", "matplotlib")


def curves_of(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Return the course of every row of which a run was evaluated, the best one first."""
    found = []
    for row, runs in by_row(outcomes).items():
        done = [m for m in ended(runs) if m.curve]
        if not done:
            continue
        # Where all seeds were evaluated: one may have ended sooner than the others.
        places = [{point.iteration: point for point in m.curve} for m in done]
        shared = sorted(set.intersection(*map(set, places)))
        if not shared:
            continue
        points = [[of[iteration] for of in places] for iteration in shared]
        train_s = mean(m.train_s for m in done)
        ends = [100 * m.curve[-1].accuracy for m in done]
        found.append(
            Curve(
                row,
                tuple(mean(p.sent_bytes for p in at) / MIB for at in points),
                tuple(mean(p.train_s for p in at) / train_s for at in points),
                tuple(mean(100 * p.accuracy for p in at) for at in points),
                train_s,
                stdev(ends) if len(ends) > 1 else 0.0,
                mean(m.parameters_left for m in done),
            )
        )
    return sorted(found, key=lambda curve: -curve.accuracy[-1])


def seconds_of(found: Comparison, times: Comparison) -> dict[str, float]:
    """Return what the runs of `found` take at the pace of `times`, by row.

    The same rows, perhaps shorter: stages that are shares of a run are as large a share of both. A
    row whose step sends something else there has another pace, and is left out.
    """
    whole, paced = _per_step(found), _per_step(times)
    return {
        row: paced[row][1] * steps
        for row, (sent, _, steps) in whole.items()
        if row in paced and math.isclose(sent, paced[row][0], rel_tol=SAME_BYTES)
    }


def _per_step(found: Comparison) -> dict[str, tuple[float, float, int]]:
    """Return of each row that ended bytes and seconds of a step, and its steps."""
    return {
        row: (
            mean(m.sent_bytes / m.steps for m in ended(runs)),
            mean(m.train_s / m.steps for m in ended(runs)),
            ended(runs)[0].steps,
        )
        for row, runs in by_row(found.outcomes).items()
        if ended(runs)
    }


def draw(found: Comparison, times: Mapping[str, Comparison], path: str) -> None:
    """Write the figure of a comparison, as `make_figure` makes it; raise UserError."""
    with styled():
        save(make_figure(found, times), path, "--figure")


def make_figure(found: Comparison, times: Mapping[str, Comparison]) -> "Figure":
    """Return a panel over bytes, and one over seconds for each of `times`, by the names there.

    Without `times` the seconds are those of the comparison itself. Raises UserError.
    """
    curves = curves_of(found.outcomes)
    if not curves:
        raise UserError("--figure: no run was evaluated, so there is nothing to draw")
    paces = {name: seconds_of(found, other) for name, other in times.items()}
    paces = paces or {TIMES: {curve.row: curve.train_s for curve in curves}}
    count = 1 + len(paces)
    columns = count if count <= IN_A_ROW else 2
    lines = math.ceil(count / columns)
    height = max(HEIGHT_INCHES * lines, ROW_INCHES * (len(curves) + 1))
    figure = new_figure(height, PANEL_INCHES * columns + LEGEND_INCHES)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    draw_bytes(panels[0], curves)
    for panel in panels[::columns]:
        panel.set_ylabel("test accuracy %")
    for panel, (name, pace) in zip(panels[1:], paces.items(), strict=False):
        draw_seconds(panel, curves, pace, name)
    for panel in panels[count:]:
        panel.remove()
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    return figure


def draw_bytes(panel: "Axes", curves: Sequence[Curve]) -> None:
    """Draw the rows over the bytes that left a node."""
    _draw(panel, curves, [curve.sent_mib for curve in curves])
    panel.set_xlabel("MiB that left a node")


def draw_seconds(
    panel: "Axes", curves: Sequence[Curve], pace: Mapping[str, float], name: str = TIMES
) -> None:
    """Draw those rows over seconds whose whole run takes what `pace` says."""
    scaled = (
        [share * pace[curve.row] for share in curve.share] if curve.row in pace else None
        for curve in curves
    )
    _draw(panel, curves, list(scaled))
    panel.set_xlabel(f"seconds, {plain(name)}")


def _spread_out(panel: "Axes") -> None:
    """Make the horizontal axis logarithmic, with plain numbers at a few ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    low, high = panel.get_xlim()
    decades = math.log10(high / low)
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < WIDE else (1.0,)))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _draw(panel: "Axes", curves: Sequence[Curve], places: Sequence[Sequence[float] | None]) -> None:
    """Draw each row that has places on the horizontal axis; the spread of the seeds at its end.

    Hollow ends are those of networks that are smaller than the largest one. Many rows are their
    ends alone, numbered, and a line joins those that no other surpasses for less.
    """
    many = len(curves) > MOST_COURSES
    whole = max(curve.parameters_left for curve in curves)
    for number, (curve, x) in enumerate(zip(curves, places, strict=True)):
        if x is None:
            continue
        look = look_of(number)
        if not many:
            panel.plot(x, curve.accuracy, linewidth=1.2, alpha=0.6, **look)
        panel.errorbar(
            x[-1:],
            curve.accuracy[-1:],
            yerr=[curve.spread],
            fmt=marker_of(number),
            color=look["color"],
            markerfacecolor=look["color"] if curve.parameters_left > SAME_SIZE * whole else "white",
            markersize=6,
            capsize=3,
            label=plain(f"{number + 1}  {curve.row}" if many else curve.row),
        )
        if many:
            panel.annotate(
                str(number + 1),
                (x[-1], curve.accuracy[-1]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
    if many:
        ends = [(x[-1], c.accuracy[-1]) for c, x in zip(curves, places, strict=True) if x]
        panel.plot(*zip(*front(ends), strict=True), color="#999999", linewidth=1, zorder=1)
    _spread_out(panel)


def front(ends: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return those (cost, accuracy) that no other surpasses at the same cost or less."""
    found: list[tuple[float, float]] = []
    for cost, accuracy in sorted(ends, key=lambda end: (end[0], -end[1])):
        if not found or accuracy > found[-1][1]:
            found.append((cost, accuracy))
    return found
