"""The pictures of one run, each a figure; None where the run has nothing to show in it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.units import GIB, KIB, MIB
from prunex_mpi.tools.drawing import COLOURS, legend_above, new_figure
from prunex_mpi.tools.report.read_runs import RESIDUALS, Run
from prunex_mpi.tools.report.thinning import COLUMNS, binned, means, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OF_PHASE = {
    "local": "#0072B2",
    "intra": "#56B4E9",
    "project": "#009E73",
    "inter": "#D55E00",
    "dual": "#CC79A7",
    "evaluate": "#E69F00",
    "setup": "#000000",
}
PHASE_WORDS = {
    "local": "1 local steps",
    "intra": "2 in the node",
    "project": "3 projection",
    "inter": "4 between nodes",
    "dual": "5 corrections",
    "evaluate": "evaluation",
    "setup": "set-up",
}
OF_KIND = {"payload": "#D55E00", "mask": "#009E73", "evaluate": "#E69F00", "setup": "#000000"}
RESIDUAL_WORDS = {
    "intra_primal": "in nodes, primal",
    "intra_dual": "in nodes, dual",
    "inter_primal": "between nodes, primal",
    "inter_dual": "between nodes, dual",
}
GREY = "#555555"
# Fewer points are marked one by one, of more about so many.
MARKED, SOME = 40, 12
# A loss that spans more is drawn on a logarithmic scale.
WIDE_SPAN = 20
AXES = ("iterations", "seconds", "bytes")


def unit_of_bytes(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` bytes, and its name."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if most >= size:
            return size, name
    return 1, "bytes"


def unit_of_seconds(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` seconds, and its name."""
    for size, name in ((2 * 3600, "hours"), (300, "minutes"), (0.5, "seconds")):
        if most >= size:
            return {"hours": 3600, "minutes": 60, "seconds": 1}[name], name
    return 1e-3, "milliseconds"


def trained_seconds(run: Run) -> np.ndarray:
    """Return the seconds of training until the end of each outer iteration, without evaluation."""
    total, evaluation = run.column("seconds.total"), run.column("seconds.evaluate")
    return np.cumsum(np.nan_to_num(total) - np.nan_to_num(evaluation))


def sent_bytes(run: Run) -> np.ndarray:
    """Return the bytes between nodes until the end of each outer iteration.

    Those that left a node, or on one node those that a leader would have handed over.
    """
    sent = np.nan_to_num(run.column("bytes.sent"))
    return np.cumsum(sent if sent.any() else np.nan_to_num(run.column("bytes.payload")))


def along(run: Run, axis: str) -> np.ndarray:
    """Return where each outer iteration lies on one of AXES, in its unit of one."""
    if axis == "iterations":
        return run.iterations
    return trained_seconds(run) if axis == "seconds" else sent_bytes(run)


def axis_unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """Return the unit of an axis that holds all runs, and what is written at it."""
    most = max(float(along(run, axis)[-1]) for run in runs)
    if axis == "iterations":
        return 1, "outer iteration"
    if axis == "seconds":
        size, name = unit_of_seconds(most)
        return size, f"{name} of training, evaluation left out"
    size, name = unit_of_bytes(most)
    left = any(np.nan_to_num(run.column("bytes.sent")).any() for run in runs)
    return size, f"{name} that left a node" if left else f"{name} that a leader handed over"


def plot(
    panel: "Axes",
    x: np.ndarray,
    y: np.ndarray,
    mark: str = "",
    columns: int = COLUMNS,
    **look: object,
) -> None:
    """Draw a curve, thinned out; few points get the mark each, of many some."""
    x, y = thin(x, y, columns)
    if len(x) == 1 and not mark:
        mark = "o"
    marks = {"marker": mark, "markersize": 3.5} if mark else {}
    if mark and len(x) > MARKED:
        marks["markevery"] = len(x) // SOME
    panel.plot(x, y, **marks, **look)


def count_iterations(panel: "Axes") -> None:
    """Count outer iterations along the panel, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(
        MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )
    panel.set_xlabel("outer iteration")


def widen(panel: "Axes", columns: Sequence[np.ndarray], span: float = WIDE_SPAN) -> None:
    """Take a logarithmic scale where positive numbers span more than so many times the least."""
    values = np.concatenate([c[np.isfinite(c)] for c in columns])
    if len(values) and values.min() > 0 and values.max() > span * values.min():
        panel.set_yscale("log")


def freeze_iteration(run: Run) -> float | None:
    """Return the first outer iteration with fixed masks, None where masks are never fixed."""
    frozen = np.flatnonzero(run.column("frozen") == 1)
    return float(run.iterations[frozen[0]]) if len(frozen) else None


def mark_freeze(panel: "Axes", run: Run, axis: str = "iterations") -> None:
    """Draw where the masks were fixed, if not from the start."""
    first = freeze_iteration(run)
    if first is None or first == run.iterations[0]:
        return
    size, _ = axis_unit([run], axis)
    at = float(along(run, axis)[np.flatnonzero(run.iterations == first)[0]]) / size
    panel.axvline(at, color=GREY, linestyle="-.", linewidth=1, label="masks fixed")


def learning(run: Run, axis: str) -> "Figure | None":
    """Draw loss and accuracy along one of AXES."""
    which, images = run.judged_on
    accuracy = f"{which}_accuracy"
    losses = {"training": "train_loss", images: f"{which}_loss"}
    if not any(run.has(name) for name in (*losses.values(), accuracy)):
        return None
    figure = new_figure(4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    size, label = axis_unit([run], axis)
    x = along(run, axis) / size
    for number, (word, name) in enumerate(losses.items()):
        if run.has(name):
            look = {"color": COLOURS[number], "linestyle": ("-", "--")[number], "label": word}
            plot(upper, x, run.column(name), "os"[number], **look)
    widen(upper, [run.column(name) for name in losses.values()])
    upper.set_ylabel("loss")
    if run.has(accuracy):
        look = {"color": COLOURS[1], "linestyle": "--"}
        plot(lower, x, 100 * run.column(accuracy), "s", **look)
    else:
        _say(lower, "never evaluated")
    lower.set_ylabel(f"{images} accuracy %")
    if axis == "iterations":
        count_iterations(lower)
    lower.set_xlabel(label)
    for panel in (upper, lower):
        mark_freeze(panel, run, axis)
    legend_above(upper)
    return figure


def _say(panel: "Axes", text: str) -> None:
    """Write into an empty panel why it is empty."""
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color=GREY)
    panel.set_yticks([])


def pile_up(panel: "Axes", edges: np.ndarray, parts: Sequence[tuple[np.ndarray, str, str]]) -> None:
    """Draw columns on top of each other; each part is heights, colour and label.

    A higher one reaches down behind the lower ones, which takes half of the points.
    """
    top = np.zeros(len(edges) - 1)
    for number, (heights, colour, label) in enumerate(parts):
        top = top + heights
        look = {"facecolor": colour, "linewidth": 0, "zorder": 2 - 0.01 * number}
        panel.stairs(top, edges, fill=True, label=label, **look)


def stack(panel: "Axes", run: Run, look: dict[str, tuple[str, str]], size: float) -> None:
    """Draw columns of a run on top of each other, in a unit of `size`; long runs as means.

    `look` is colour and label of each, by name.
    """
    edges, starts = binned(run.iterations)
    parts = [(means(run.column(name), starts) / size, *words) for name, words in look.items()]
    pile_up(panel, edges, parts)
    panel.set_ylim(bottom=0)
    panel.margins(x=0)


def traffic(run: Run) -> "Figure | None":
    """Draw the bytes of each outer iteration by kind: between nodes, and inside them."""
    kinds = [k for k in OF_KIND if np.nan_to_num(run.column(f"bytes.{k}")).any()]
    if not kinds:
        return None
    inside = bool(np.nan_to_num(run.column("bytes.intra")).any())
    figure = new_figure(4.6 if inside else 3.2)
    panels = figure.subplots(
        1 + inside, 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + inside]
    )[:, 0]
    look = {f"bytes.{k}": (OF_KIND[k], k) for k in kinds}
    size, unit = unit_of_bytes(float(np.nanmax([run.column(n).max() for n in look])))
    stack(panels[0], run, look, size)
    dense = run.column("bytes.dense")
    if np.nan_to_num(dense).any():
        plot(
            panels[0], run.iterations, dense / size, color="black", linestyle="--", label="if dense"
        )
        panels[0].set_ylim(bottom=0)
    mark_freeze(panels[0], run)
    panels[0].set_ylabel(f"{unit} per leader,\nbetween nodes")
    legend_above(panels[0], 5)
    if inside:
        size, unit = unit_of_bytes(float(run.column("bytes.intra").max()))
        stack(panels[1], run, {"bytes.intra": ("#56B4E9", "inside")}, size)
        panels[1].set_ylabel(f"{unit} per leader,\ninside the node")
    count_iterations(panels[-1])
    return figure


def phases_of(run: Run) -> list[str]:
    """Return the phases that took time, in their order."""
    return [p for p in OF_PHASE if np.nan_to_num(run.column(f"seconds.{p}")).any()]


def duration(run: Run) -> "Figure | None":
    """Draw the seconds of each outer iteration by phase."""
    phases = phases_of(run)
    if not phases:
        return None
    figure = new_figure(3.4)
    panel = figure.subplots()
    look = {f"seconds.{p}": (OF_PHASE[p], PHASE_WORDS[p]) for p in phases}
    totals = sum(np.nan_to_num(run.column(name)) for name in look)
    size, unit = unit_of_seconds(float(np.max(totals)))
    stack(panel, run, look, size)
    panel.set_ylabel(f"{unit} of rank 0")
    count_iterations(panel)
    legend_above(panel, 4)
    return figure


def pruning(run: Run) -> "Figure | None":
    """Draw the density and the mask drift, and where masks were fixed."""
    if not run.has("density"):
        return None
    drift = run.has("mask_drift")
    figure = new_figure(4.0 if drift else 2.8)
    panels = figure.subplots(1 + drift, 1, sharex=True, squeeze=False)[:, 0]
    plot(panels[0], run.iterations, run.column("density"), "o", color=COLOURS[0], label="density")
    panels[0].set_ylim(0, 1.05)
    panels[0].set_ylabel("kept share of\nprunable weights")
    if drift:
        look = {"color": COLOURS[1], "linestyle": "--", "label": "mask drift"}
        plot(panels[1], run.iterations, run.column("mask_drift"), "s", **look)
        panels[1].set_ylim(bottom=0)
        panels[1].set_ylabel("mask drift: changed\nover kept groups")
    for panel in panels:
        mark_freeze(panel, run)
    count_iterations(panels[-1])
    legend_above(panels[0])
    return figure


def residuals(run: Run) -> "Figure | None":
    """Draw how far ranks and nodes disagree."""
    there = [name for name in RESIDUALS if run.has(f"residuals.{name}")]
    if not there:
        return None
    figure = new_figure(3.4)
    panel = figure.subplots()
    for number, name in enumerate(there):
        look = {"color": COLOURS[number], "linestyle": ("-", "--", ":", "-.")[number]}
        column = run.column(f"residuals.{name}")
        positive = np.where(column > 0, column, np.nan)
        plot(panel, run.iterations, positive, "os^D"[number], label=RESIDUAL_WORDS[name], **look)
    panel.set_yscale("log")
    panel.set_ylabel("norm over all layers")
    count_iterations(panel)
    legend_above(panel, 2)
    return figure


def penalties(run: Run) -> "Figure | None":
    """Draw the mean penalties and the learning rate."""
    rhos = [name for name in ("rho1", "rho2") if run.has(name)]
    lines = [*([rhos] if rhos else []), *([["lr"]] if run.has("lr") else [])]
    if not lines:
        return None
    figure = new_figure(1.2 + 1.6 * len(lines))
    panels = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    words = {"rho1": "ρ1, in nodes", "rho2": "ρ2, between nodes", "lr": "learning rate"}
    for panel, names in zip(panels, lines, strict=True):
        for number, name in enumerate(names):
            look = {"color": COLOURS[number], "linestyle": ("-", "--")[number]}
            plot(panel, run.iterations, run.column(name), "os"[number], label=words[name], **look)
        if names == rhos:
            widen(panel, [run.column(name) for name in names], span=2)
        panel.set_ylabel("penalty, mean" if names == rhos else "learning rate")
        if names == rhos:
            legend_above(panel)
    count_iterations(panels[-1])
    return figure
