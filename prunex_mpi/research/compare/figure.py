"""Draw a comparison: accuracy against the bytes that left a node, and against time."""

import math
from collections.abc import Mapping
from statistics import mean
from typing import TYPE_CHECKING

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import UserError
from prunex_mpi.research.compare.outcomes import Comparison, by_row, ended, to_dict
from prunex_mpi.tools.drawing import new_figure, refuse_other_kinds, save, styled
from prunex_mpi.tools.report.comparisons import THIS_MACHINE, curves_of, draw_bytes, draw_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES, HEIGHT_INCHES, LEGEND_INCHES = 4.2, 4.0, 2.6
# What a row takes of the legend's height; the layout makes no room for a legend that is too high.
ROW_INCHES = 0.19
# More panels than these would be too small beside each other in a page of text.
IN_A_ROW = 3
# Bytes of a step that differ by no more are those of one method: stages are whole iterations.
SAME_BYTES = 0.05


def refuse_impossible(path: str) -> None:
    """Raise UserError where no figure can be drawn; "" asks for none."""
    if not path:
        return
    refuse_other_kinds("--figure", path)
    require_packages("--figure", "report", "matplotlib")


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
    curves = curves_of(to_dict(found)["outcomes"])
    if not curves:
        raise UserError("--figure: no run was evaluated, so there is nothing to draw")
    paces = {name: seconds_of(found, other) for name, other in times.items()}
    paces = paces or {THIS_MACHINE: {curve.row: curve.train_s for curve in curves}}
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
