"""Pictures of runs and comparisons: how they look, and the curves that pages and figures share.

`named` are runs by what a picture calls them. A picture is None where no run has anything to show.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.record_keys import ACCURACY, LABELS, RESIDUALS
from prunex_mpi.base.units import GIB, KIB, MIB
from prunex_mpi.tools.report.comparison import Comparison, RowCurve, curves_of
from prunex_mpi.tools.report.read_runs import Layers, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Named = Mapping[str, Run]
# A label, where the points lie, and their values.
Line = tuple[str, np.ndarray, np.ndarray]

# Okabe and Ito's, told apart by those who cannot see red and green; then other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Of the phases of an outer iteration.
PHASE_COLOURS = {
    "local": COLOURS[0],
    "intra": COLOURS[5],
    "project": COLOURS[2],
    "inter": COLOURS[1],
    "dual": COLOURS[3],
    "evaluate": COLOURS[4],
    "setup": COLOURS[6],
}
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
# So many curves can be told apart.
MOST_CURVES = len(COLOURS) * len(DASHES)
RESIDUAL_WORDS = {
    "intra_primal": "in nodes, primal",
    "intra_dual": "in nodes, dual",
    "inter_primal": "between nodes, primal",
    "inter_dual": "between nodes, dual",
}
GREY = "#555555"
DPI = 150
# The inches of a picture that fills a column of the page, and the letters that a legend has room
# for beside each other.
WIDTH, LETTERS = 7.0, 116
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.6,
}
# Fewer points are marked one by one, of more about so many.
MARKED, SOME = 40, 12
# What spans more is drawn on a logarithmic scale.
WIDE_SPAN = 20
# So many names of layers can be read in one picture.
MOST_NAMES = 40

# Of a row of a comparison: the unit of each cost and what is written at it.
COSTS = {
    "sent_bytes": (MIB, "MiB that left a node"),
    "train_s": (1, "seconds, this machine"),
    "parameters_left": (1, "parameters left"),
}


# --------------------------------------------------------------------------------------------------
# How a picture looks
# --------------------------------------------------------------------------------------------------


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, whatever the user's own is."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name in letters that the font lacks is still told by its number, and by the tables.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """Return an empty figure of so many inches, which lays itself out."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panel(height: float = 3.2) -> "tuple[Figure, Axes]":
    """Return a figure of so many inches with one panel, and the panel."""
    figure = new_figure(height)
    return figure, figure.subplots()


def plain(text: str) -> str:
    """Return a name as matplotlib shows it letter by letter: no mathematics, nothing left out."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("$", r"\$")
    # A label that begins with an underscore is left out of legends.
    return f" {text}" if text.startswith("_") else text


def look_of(number: int) -> dict[str, str]:
    """Return colour, dash and mark of the curve of this number."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def add_legend(figure: "Figure") -> None:
    """Name what the panels show above them, each name once, as many in a row as fit."""
    handles: dict[str, object] = {}
    for panel in figure.axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        fitting = LETTERS // (max(map(len, handles)) + 8)
        columns = max(1, min(len(handles), 4, fitting))
        rows = -(-len(handles) // columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 1))
        figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=columns)


def count_iterations(panel: "Axes") -> None:
    """Count outer iterations along the panel, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(
        MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )
    panel.set_xlabel("outer iteration")


def widen(panel: "Axes", values: np.ndarray) -> None:
    """Take a logarithmic scale where positive numbers span more than WIDE_SPAN."""
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > WIDE_SPAN * values.min():
        panel.set_yscale("log")


def unit_of_bytes(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` bytes, and its name."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((unit for unit in units if most >= unit[0]), (1, "bytes"))


def unit_of_seconds(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` seconds, and its name."""
    units = ((7200, (3600, "h")), (300, (60, "min")), (0.1, (1, "s")))
    return next((unit for least, unit in units if most >= least), (1e-3, "ms"))


def duration_words(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    size, unit = unit_of_seconds(seconds)
    return f"{seconds / size:.3g} {unit}"


# --------------------------------------------------------------------------------------------------
# Curves and bars
# --------------------------------------------------------------------------------------------------


def plot(panel: "Axes", x: np.ndarray, y: np.ndarray, label: str, **look: object) -> None:
    """Draw the finite points of a curve; few get the mark each, of many some."""
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    every = 1 if len(x) <= MARKED else len(x) // SOME
    panel.plot(x, y, label=plain(label), **{"markevery": every, **look})


def draw(panel: "Axes", lines: Iterable[Line], first: int = 0) -> None:
    """Draw curves, each in a look of its own, from the `first` one on."""
    for number, (label, x, y) in enumerate(lines, first):
        plot(panel, x, y, label, **look_of(number))


def name_bars(panel: "Axes", names: Sequence[str]) -> None:
    """Name horizontal bars, of which the first stands on top."""
    panel.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(False, axis="y")


def stacked(names: Sequence[str], parts: Iterable[tuple[str, np.ndarray, str]]) -> "Figure":
    """Draw a horizontal bar for each name; parts are label, widths [names] and colour."""
    figure, panel = new_panel(1.5 + 0.3 * max(2, len(names)))
    base = np.zeros(len(names))
    for label, widths, colour in parts:
        panel.barh(range(len(names)), widths, left=base, height=0.8, label=label, color=colour)
        base = base + widths
    name_bars(panel, names)
    add_legend(figure)
    return figure


# --------------------------------------------------------------------------------------------------
# Of runs
# --------------------------------------------------------------------------------------------------


def sent_bytes(runs: Iterable[Run]) -> str:
    """Return which bytes of runs to show: those that left a node, where all runs sent some.

    Else, as where one of them had a single node, those that a leader handed over.
    """
    return "bytes.sent" if all(run.total("bytes.sent") for run in runs) else "bytes.payload"


def scale_of(runs: Iterable[Run], axis: str) -> tuple[float, str]:
    """Return the unit of an axis that holds all runs, and what is written at it."""
    if axis == "iteration":
        return 1, "outer iteration"
    most = max(float(run.along(axis)[-1]) for run in runs)
    if axis == "seconds":
        size, name = unit_of_seconds(most)
        return size, f"{name} of training, evaluation left out"
    size, name = unit_of_bytes(most)
    return size, f"{name} that {'left a node' if axis == 'bytes.sent' else 'a leader handed over'}"


def named_measure(runs: Iterable[Run]) -> str:
    """Return on which data runs were evaluated as they went, and by what, in words."""
    data = " or ".join(sorted({run.evaluated_on[1] for run in runs}, reverse=True))
    found = {f"{run.measure.label} {run.measure.short}" for run in runs}
    return f"{data} {' or '.join(sorted(found))}"


def draw_measure(panel: "Axes", named: Named, axis: str, first: int = 0) -> None:
    """Draw the measure of runs along an axis of `along`, in looks from the `first` one on."""
    size, word = scale_of(named.values(), axis)
    draw(panel, ((name, run.along(axis) / size, run.quality) for name, run in named.items()), first)
    panel.set_xlabel(word)
    panel.set_ylabel(named_measure(named.values()))
    if axis == "iteration":
        count_iterations(panel)


def mark_freeze(panel: "Axes", named: Named, axis: str = "iteration") -> None:
    """Draw where the masks of a run that is alone were fixed, if not from the start."""
    (run, *others) = named.values()
    fixed = np.flatnonzero(run.column("frozen") == 1)
    if not others and len(fixed) and fixed[0]:
        at = run.along(axis)[fixed[0]] / scale_of([run], axis)[0]
        panel.axvline(at, color=GREY, linestyle="-.", linewidth=1, label="masks fixed")


def learning(named: Named, axis: str) -> "Figure | None":
    """Draw the losses, and what runs are evaluated by, along an axis of `along`."""
    runs = list(named.values())
    evaluated = any(np.isfinite(run.quality).any() for run in runs)
    if not evaluated and not any(run.has("train_loss") for run in runs):
        return None
    figure = new_figure(4.8 if evaluated else 3.2)
    panels = figure.subplots(1 + evaluated, 1, sharex=True, squeeze=False)[:, 0]
    size, word = scale_of(runs, axis)
    lines = [(name, r.along(axis) / size, r.column("train_loss")) for name, r in named.items()]
    panels[0].set_ylabel("training loss")
    if len(runs) == 1 and evaluated and runs[0].measure is ACCURACY:
        which, data = runs[0].evaluated_on
        lines = [("training", *lines[0][1:]), (data, lines[0][1], runs[0].column(f"{which}_loss"))]
        panels[0].set_ylabel("loss")
    draw(panels[0], lines)
    widen(panels[0], np.concatenate([y for _, _, y in lines]))
    panels[0].set_xlabel("" if evaluated else word)
    if evaluated:
        draw_measure(panels[1], named, axis, first=len(lines) - len(runs))
    for panel in panels:
        mark_freeze(panel, named, axis)
    add_legend(figure)
    return figure


def curves(
    named: Named,
    word: str,
    column: Callable[[Run], np.ndarray],
    dense: Callable[[Run], np.ndarray] | None = None,
) -> "Figure | None":
    """Draw a column of runs along their outer iterations, from zero on, and if it were `dense`."""
    if not any(np.isfinite(column(run)).any() for run in named.values()):
        return None
    figure, panel = new_panel()
    draw(panel, ((name, run.iterations, column(run)) for name, run in named.items()))
    for number, run in enumerate(named.values() if dense else ()):
        look = {"color": look_of(number)["color"], "linestyle": (0, (1, 3)), "linewidth": 1}
        plot(panel, run.iterations, dense(run), "if dense (dotted)", **look)
    panel.set_ylim(bottom=0)
    panel.set_ylabel(word)
    count_iterations(panel)
    mark_freeze(panel, named)
    add_legend(figure)
    return figure


def payload(named: Named) -> "Figure | None":
    """Draw what a leader hands over in each outer iteration, and if it were dense."""
    size, unit = unit_of_bytes(max(float(r.filled("bytes.dense").max()) for r in named.values()))
    return curves(
        named,
        f"{unit} per leader,\nbetween nodes",
        lambda run: run.column("bytes.payload") / size,
        lambda run: run.column("bytes.dense") / size,
    )


def synchronisation(named: Named) -> "Figure | None":
    """Draw the seconds of synchronisation of each outer iteration, as rank 0 took them."""
    word = "s, inside nodes\nand between them"
    return curves(named, word, lambda r: r.filled("seconds.intra") + r.filled("seconds.inter"))


def density(named: Named) -> "Figure | None":
    """Draw the kept share of the prunable weights."""
    return curves(named, "kept share of\nprunable weights", lambda run: run.column("density"))


def drift(named: Named) -> "Figure | None":
    """Draw how many groups the masks changed."""
    word = "mask drift: changed\nover kept groups"
    return curves(named, word, lambda run: run.column("mask_drift"))


def durations(named: Named) -> "Figure | None":
    """Draw a bar of each run: the mean seconds of an outer iteration by phase, as of rank 0."""
    seconds = {
        phase: np.array([run.filled(f"seconds.{phase}").mean() for run in named.values()])
        for phase in PHASE_COLOURS
    }
    if not any(widths.any() for widths in seconds.values()):
        return None
    size, unit = unit_of_seconds(float(sum(seconds.values()).max()))
    parts = [(LABELS[p], w / size, PHASE_COLOURS[p]) for p, w in seconds.items() if w.any()]
    figure = stacked([*named], parts)
    figure.axes[0].set_xlabel(f"{unit} of an outer iteration, mean")
    return figure


def residual_panels(lines: Mapping[str, Sequence[Line]], word: str) -> "Figure | None":
    """Draw curves of residuals on logarithmic scales, a panel for each that has any."""
    there = {
        name: [(label, x, np.where(y > 0, y, np.nan)) for label, x, y in some]
        for name, some in lines.items()
        if any((y > 0).any() for _, _, y in some)
    }
    if not there:
        return None
    rows = (len(there) + 1) // 2
    figure = new_figure(1.4 + 1.6 * rows)
    panels = figure.subplots(rows, 2, squeeze=False).flatten()
    for panel in panels[len(there) :]:
        panel.remove()
    for panel, (name, some) in zip(panels, there.items(), strict=False):
        draw(panel, some)
        panel.set_yscale("log")
        panel.set_title(RESIDUAL_WORDS[name], loc="left", fontsize=8)
        count_iterations(panel)
    for panel in panels[::2]:
        panel.set_ylabel(word)
    add_legend(figure)
    return figure


def residuals(named: Named) -> "Figure | None":
    """Draw how far ranks and nodes disagree."""
    lines = {
        key: [(name, r.iterations, r.column(f"residuals.{key}")) for name, r in named.items()]
        for key in RESIDUALS
    }
    return residual_panels(lines, "norm over all layers")


def layer_density(layers: Layers) -> "Figure | None":
    """Draw the kept share of the layers that are pruned, in the last of these iterations."""
    shares = layers.values["density"][-1]
    pruned = np.flatnonzero(shares < 1)
    if not len(pruned):
        return None
    # Of many those that lost most, in their order.
    pruned = np.sort(pruned[np.argsort(shares[pruned], kind="stable")[:MOST_NAMES]])
    names = [layers.names[i].removesuffix(".weight") for i in pruned]
    figure = stacked(names, [("", shares[pruned], COLOURS[0])])
    figure.set_figheight(1.0 + 0.16 * len(names))
    figure.axes[0].set_xlim(0, 1)
    figure.axes[0].set_xlabel("kept share of the weights")
    return figure


# --------------------------------------------------------------------------------------------------
# Of comparisons
# --------------------------------------------------------------------------------------------------


def compared(found: Comparison, axis: str) -> "Figure | None":
    """Draw the rows of a comparison over one of COSTS, the best one first.

    Ends are numbered, with the spread of the seeds, the ways to them pale. Where no row with less
    reached more there is the Pareto frontier.
    """
    rows = curves_of(found)
    if not rows:
        return None
    figure, panel = new_panel(4.2)
    size, word = COSTS[axis]
    for number, row in enumerate(rows):
        look, x = look_of(number), np.array(getattr(row, axis)) / size
        name = row.row if row.whole else f"{row.row} (without the seeds that did not end)"
        way = row.values[-len(x) :]
        panel.plot(x, way, color=look["color"], linewidth=0.8, alpha=0.35)
        end = {"color": look["color"], "marker": look["marker"], "markersize": 6, "capsize": 3}
        label = plain(f"{number + 1}: {name}")
        panel.errorbar(x[-1:], row.values[-1:], yerr=[row.spread], label=label, ls="", **end)
        where = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
        panel.annotate(str(number + 1), (x[-1], row.values[-1]), **where)
    x, y = frontier(rows, axis)
    look = {"color": GREY, "linestyle": "--", "linewidth": 1, "label": "Pareto frontier"}
    panel.step(np.array(x) / size, y, where="post", **look)
    panel.set_xscale("log")
    panel.set_xlabel(word)
    panel.set_ylabel(f"{found.held_out} {found.measure.label}, {found.measure.unit}")
    add_legend(figure)
    return figure


def frontier(rows: Sequence[RowCurve], axis: str) -> tuple[list[float], list[float]]:
    """Return costs and values of the ends of `rows`, the best first, that no cheaper one reaches.

    Rows of which a seed did not end are left out.
    """
    ends = [(getattr(row, axis)[-1], row.values[-1]) for row in rows if row.whole]
    # What is as good or better stands before a row.
    best = [end for i, end in enumerate(ends) if all(end[0] < other[0] for other in ends[:i])]
    return [x for x, _ in reversed(best)], [y for _, y in reversed(best)]
