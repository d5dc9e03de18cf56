"""The pictures of one run, each a figure; None where the run has nothing to show in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.record_keys import LABELS, RANK_PHASES, RESIDUALS
from prunex_mpi.base.units import GIB, KIB, MIB
from prunex_mpi.tools.drawing import (
    COLOURS,
    DASHES,
    PHASE_COLOURS,
    SHADES,
    legend_above,
    legend_on_top,
    look_of,
    marker_of,
    new_figure,
    new_panel,
    plain,
    stack_bars,
)
from prunex_mpi.tools.report.read_runs import COLUMNS, Layers, Run, binned, means, thin
from prunex_mpi.tools.report.stragglers import RankRecord, RankTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

# Bytes by kind: those of an exchange in the colour of its phase.
OF_KIND = {
    "payload": PHASE_COLOURS["inter"],
    "mask": PHASE_COLOURS["project"],
    "evaluate": PHASE_COLOURS["evaluate"],
    "setup": PHASE_COLOURS["setup"],
}
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
# So many names of layers can be read beside a picture, so many bars of ranks in one.
MOST_NAMES, MOST_BARS = 40, 24
# So many ranks get a curve each.
MOST_RANK_CURVES = 8
WAITING, TRANSMITTING, REST = "#e4e4e4", "#777777", "#b8b8b8"


def unit_of_bytes(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` bytes, and its name."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((unit for unit in units if most >= unit[0]), (1, "bytes"))


def unit_of_seconds(most: float) -> tuple[float, str]:
    """Return the unit that suits numbers up to `most` seconds, and its name."""
    units = ((7200, (3600, "hours")), (300, (60, "minutes")), (0.5, (1, "seconds")))
    return next((unit for least, unit in units if most >= least), (1e-3, "milliseconds"))


def trained_seconds(run: Run) -> np.ndarray:
    """Return the seconds of training until the end of each outer iteration, without evaluation."""
    return np.cumsum(run.filled("seconds.total") - run.filled("seconds.evaluate"))


def left_a_node(runs: Sequence[Run]) -> bool:
    """Return whether the bytes of these runs are those that left a node, which some did.

    Else, as where all had one node, they are those that a leader handed over.
    """
    known = all(run.has("bytes.sent") for run in runs)
    return known and any(run.total("bytes.sent") for run in runs)


def sent_bytes(run: Run, runs: Sequence[Run]) -> np.ndarray:
    """Return the bytes until the end of each outer iteration, of the same kind for all `runs`."""
    return np.cumsum(run.filled("bytes.sent" if left_a_node(runs) else "bytes.payload"))


def along(run: Run, axis: str, runs: Sequence[Run]) -> np.ndarray:
    """Return where each outer iteration lies: in iterations, seconds or bytes, by `axis`.

    `runs` are all that are drawn on it.
    """
    if axis == "iterations":
        return run.iterations
    return trained_seconds(run) if axis == "seconds" else sent_bytes(run, runs)


def axis_unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """Return the unit of an axis that holds all runs, and what is written at it."""
    most = max(float(along(run, axis, runs)[-1]) for run in runs)
    if axis == "iterations":
        return 1, "outer iteration"
    if axis == "seconds":
        size, name = unit_of_seconds(most)
        return size, f"{name} of training, evaluation left out"
    size, name = unit_of_bytes(most)
    return size, f"{name} that {'left a node' if left_a_node(runs) else 'a leader handed over'}"


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


def plot_each(panel: "Axes", x: np.ndarray, lines: Mapping[str, np.ndarray]) -> None:
    """Draw curves over the same x by their labels, each in a look of its own."""
    for number, (label, y) in enumerate(lines.items()):
        look = {"color": COLOURS[number], "linestyle": DASHES[number], "label": label}
        plot(panel, x, y, marker_of(number), **look)


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
    at = float(along(run, axis, [run])[np.flatnonzero(run.iterations == first)[0]]) / size
    panel.axvline(at, color=GREY, linestyle="-.", linewidth=1, label="masks fixed")


def learning(run: Run, axis: str) -> "Figure | None":
    """Draw the losses, and what the run is judged by, along an axis of `along`."""
    which, images = run.judged_on
    measure, accuracy = run.measure, run.judged
    losses = {"training": "train_loss", images: f"{which}_loss"}
    evaluated = bool(np.isfinite(accuracy).any())
    if not evaluated and not any(run.has(name) for name in losses.values()):
        return None
    figure = new_figure(4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    size, label = axis_unit([run], axis)
    x = along(run, axis, [run]) / size
    plot_each(upper, x, {w: run.column(name) for w, name in losses.items() if run.has(name)})
    widen(upper, [run.column(name) for name in losses.values()])
    upper.set_ylabel("loss")
    if evaluated:
        look = {"color": COLOURS[1], "linestyle": "--"}
        plot(lower, x, accuracy, "s", **look)
    else:
        where = {"transform": lower.transAxes, "ha": "center", "va": "center"}
        lower.text(0.5, 0.5, "never evaluated", color=GREY, **where)
        lower.set_yticks([])
    lower.set_ylabel(f"{images} {measure.label} {measure.short}")
    if axis == "iterations":
        count_iterations(lower)
    lower.set_xlabel(label)
    for panel in (upper, lower):
        mark_freeze(panel, run, axis)
    legend_above(upper)
    return figure


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
    kinds = [k for k in OF_KIND if run.filled(f"bytes.{k}").any()]
    if not kinds:
        return None
    inside = bool(run.filled("bytes.intra").any())
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
        stack(panels[1], run, {"bytes.intra": (PHASE_COLOURS["intra"], "inside")}, size)
        panels[1].set_ylabel(f"{unit} per leader,\ninside the node")
    count_iterations(panels[-1])
    return figure


def phases_of(run: Run) -> list[str]:
    """Return the phases that took time, in their order."""
    return [p for p in PHASE_COLOURS if run.filled(f"seconds.{p}").any()]


def duration(run: Run) -> "Figure | None":
    """Draw the seconds of each outer iteration by phase."""
    phases = phases_of(run)
    if not phases:
        return None
    figure, panel = new_panel(3.4)
    look = {f"seconds.{p}": (PHASE_COLOURS[p], LABELS[p]) for p in phases}
    totals = sum(run.filled(name) for name in look)
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
    figure, panel = new_panel(3.4)
    columns = {name: run.column(f"residuals.{name}") for name in there}
    lines = {RESIDUAL_WORDS[n]: np.where(c > 0, c, np.nan) for n, c in columns.items()}
    plot_each(panel, run.iterations, lines)
    panel.set_yscale("log")
    panel.set_ylabel("norm over all layers")
    count_iterations(panel)
    legend_above(panel, 2)
    return figure


def penalties(run: Run) -> "Figure | None":
    """Draw the mean penalties and the learning rate."""
    words = {"rho1": "ρ1, in nodes", "rho2": "ρ2, between nodes"}
    parts = {
        "penalty, mean": {words[name]: run.column(name) for name in words if run.has(name)},
        "learning rate": {"learning rate": run.column("lr")} if run.has("lr") else {},
    }
    parts = {word: lines for word, lines in parts.items() if lines}
    if not parts:
        return None
    figure = new_figure(1.2 + 1.6 * len(parts))
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (word, lines) in zip(panels, parts.items(), strict=True):
        plot_each(panel, run.iterations, lines)
        panel.set_ylabel(word)
        if word != "learning rate":
            widen(panel, [*lines.values()], span=2)
            legend_above(panel)
    count_iterations(panels[-1])
    return figure


# --------------------------------------------------------------------------------------------------
# Layers and ranks apart
# --------------------------------------------------------------------------------------------------


@dataclass
class RankResiduals:
    """The residuals of each rank, float32 [ranks] for each outer iteration that has any."""

    iterations: list[int] = field(default_factory=list)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def watch(self, records: Iterable[RankRecord]) -> Iterator[RankRecord]:
        """Hand the records on and keep their residuals."""
        for record in records:
            if record.residuals:
                self.iterations.append(record.iteration)
                for name in RESIDUALS:
                    found = record.residuals.get(name, np.full(len(record.node), np.nan))
                    self.values.setdefault(name, []).append(found.astype(np.float32))
            yield record


def _names(panel: "Axes", names: Sequence[str]) -> None:
    """Write the names of layers at a panel, as many as can be read."""
    step = -(-len(names) // MOST_NAMES)
    places = range(0, len(names), step)
    panel.set_yticks([i + 0.5 for i in places])
    panel.set_yticklabels([plain(names[i].removesuffix(".weight")) for i in places], fontsize=6)
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(names), 0)


def _height(count: int) -> float:
    return float(np.clip(1.1 + 0.12 * count, 2.2, 6.5))


def paint(panel: "Axes", iterations: np.ndarray, block: np.ndarray, **look: object) -> "QuadMesh":
    """Paint numbers [iterations, rows]: each column reaches to the next of these iterations."""
    from matplotlib import colormaps

    edges = np.append(iterations, iterations[-1] + 1) - 0.5
    look |= {"cmap": colormaps[SHADES].with_extremes(bad="#ffffff"), "rasterized": True}
    panel.grid(False)
    return panel.pcolormesh(edges, range(block.shape[1] + 1), block.T, **look)


def layer_density(layers: Layers) -> "Figure | None":
    """Draw the kept share of each layer that was ever pruned, over the outer iterations."""
    density = layers.values["density"]
    pruned = np.flatnonzero((density < 1).any(axis=0))
    if not len(pruned):
        return None
    figure, panel = new_panel(_height(len(pruned)))
    mesh = paint(panel, layers.iterations, density[:, pruned], vmin=0, vmax=1)
    _names(panel, [layers.names[i] for i in pruned])
    count_iterations(panel)
    figure.colorbar(mesh, ax=panel, label="kept share of the weights", fraction=0.05, pad=0.02)
    return figure


def layer_residuals(layers: Layers) -> "Figure | None":
    """Draw the residuals of each layer, over the outer iterations that have any."""
    blocks = {n: np.where(b > 0, b, np.nan) for n, b in layers.values.items() if n in RESIDUALS}
    blocks = {name: block for name, block in blocks.items() if np.isfinite(block).any()}
    if not blocks:
        return None
    from matplotlib.colors import LogNorm

    whole = np.stack([*blocks.values()])
    some = np.isfinite(whole).any(axis=(0, 2))
    least = np.nanmin(whole)
    norm = LogNorm(least, max(np.nanmax(whole), least * 1.01))
    figure = new_figure(_height(len(layers.names)))
    panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
    for panel, (name, block) in zip(panels, blocks.items(), strict=True):
        mesh = paint(panel, layers.iterations[some], block[some], norm=norm)
        panel.set_title(RESIDUAL_WORDS[name].replace(", ", ",\n"), fontsize=8)
        panel.locator_params(axis="x", nbins=4, integer=True)
        panel.tick_params(axis="y", length=0)
    _names(panels[0], layers.names)
    figure.supxlabel("outer iteration", fontsize=9)
    figure.colorbar(mesh, ax=list(panels), label="norm", fraction=0.05, pad=0.02)
    return figure


def residual_panels(figure: "Figure", there: Sequence[str], word: str) -> np.ndarray:
    """Return empty panels in two columns, one for each residual, and hidden ones to fill them."""
    panels = figure.subplots((len(there) + 1) // 2, 2, sharex=True, squeeze=False).flatten()
    for panel, name in zip(panels, there, strict=False):
        panel.set_yscale("log")
        panel.set_title(RESIDUAL_WORDS[name], loc="left", fontsize=8)
    for panel in panels[len(there) :]:
        panel.set_visible(False)
    for panel in panels[-2:]:
        count_iterations(panel)
    for panel in panels[::2]:
        panel.set_ylabel(word)
    return panels


def rank_residuals(found: RankResiduals) -> "Figure | None":
    """Draw the residuals of each rank; of many ranks the median, between the least and the most."""
    there = [n for n in RESIDUALS if any(np.nan_to_num(v).any() for v in found.values.get(n, []))]
    if not there:
        return None
    iterations = np.array(found.iterations)
    figure = new_figure(1.4 + 1.5 * ((len(there) + 1) // 2))
    panels = residual_panels(figure, there, "norm on the rank")
    for panel, name in zip(panels, there, strict=False):
        widest = max(map(len, found.values[name]))
        block = np.full((len(iterations), widest), np.nan)
        for i, row in enumerate(found.values[name]):
            block[i, : len(row)] = row
        block = np.where(block > 0, block, np.nan)
        if widest <= MOST_RANK_CURVES:
            for rank in range(widest):
                look = {**look_of(rank), "linestyle": DASHES[rank % len(DASHES)], "linewidth": 1}
                look = {**look, "label": f"rank {rank}", "columns": COLUMNS // 2}
                plot(panel, iterations, block[:, rank], **look)
        else:
            rows = np.isfinite(block).any(axis=1)
            shares = np.nanquantile(block[rows], (0, 0.5, 1), axis=1)
            for word, dash, values in zip(("least", "median", "most"), ":-:", shares, strict=True):
                look = {"color": COLOURS[0], "linestyle": dash, "label": f"{word} of the ranks"}
                plot(panel, iterations[rows], values, columns=COLUMNS // 2, **look)
    legend_on_top(panels[0], 8)
    return figure


def shown_places(times: RankTimes) -> list[int]:
    """Return which places get a bar: all, or the most suspected and some that waited."""
    if len(times.places) <= MOST_BARS:
        return list(range(len(times.places)))
    half = MOST_BARS // 2
    worst = list(dict.fromkeys(times.places.index((s.rank, s.host)) for s in times.stragglers))
    worst = worst[:half]
    waited = sum(times.waiting.values())
    rest = [int(r) for r in np.argsort(-waited) if int(r) not in worst]
    return sorted([*worst, *rest[: MOST_BARS - len(worst)]])


def rank_name(rank: int, host: str) -> str:
    """Return a rank with its machine, as far as it is known."""
    return f"rank {rank}, {host}" if host else f"rank {rank}"


def rank_seconds(times: RankTimes) -> "Figure":
    """Draw where the time of each rank went: work by phase, waiting, transmitting."""
    chosen = shown_places(times)
    figure, panel = new_panel(1.3 + 0.24 * max(3, len(chosen)))
    parts = [
        (LABELS[p], times.work[p], {"color": PHASE_COLOURS[p]})
        for p in RANK_PHASES
        if np.any(times.work.get(p, 0))
    ]
    waited, sent = sum(times.waiting.values()), sum(times.transmitting.values())
    light = {"facecolor": WAITING, "edgecolor": "#888888", "hatch": "////", "linewidth": 0}
    parts.append(("transmitting", sent, {"color": TRANSMITTING}))
    parts.append(("waiting for others", waited, light))
    parts = [(word, seconds, look) for word, seconds, look in parts if np.any(seconds)]
    size, unit = unit_of_seconds(float(np.max(sum(seconds for _, seconds, _ in parts))))
    bars = [(word, np.asarray(seconds)[chosen] / size, look) for word, seconds, look in parts]
    stack_bars(panel, [rank_name(*times.places[i]) for i in chosen], bars)
    panel.set_xlabel(f"{unit}, all outer iterations")
    legend_above(panel, 4)
    return figure


def lost_seconds(times: RankTimes) -> "Figure | None":
    """Draw what the others lost in each outer iteration to the first two stragglers and to all."""
    if not times.delays:
        return None
    named = times.stragglers[:2]
    numbers = sorted({delay.iteration for delay in times.delays})
    iterations = np.arange(numbers[0], numbers[-1] + 1, dtype=np.float64)
    rows = np.zeros((len(named) + 1, len(iterations)))
    place = {(s.phase, s.rank, s.host): i for i, s in enumerate(named)}
    for delay in times.delays:
        row = place.get((delay.phase, delay.rank, delay.host), len(named))
        rows[row, delay.iteration - numbers[0]] += delay.seconds
    edges, starts = binned(iterations)
    size, unit = unit_of_seconds(float(rows.sum(axis=0).max()))
    figure, panel = new_panel(3.0)
    words = [f"rank {s.rank}, {LABELS[s.phase]}" for s in named] + ["all others"]
    colours = (COLOURS[1], COLOURS[0], REST)
    heights = [means(row, starts) / size for row in rows]
    pile_up(panel, edges, list(zip(heights, (*colours[: len(named)], REST), words, strict=True)))
    panel.set_ylim(bottom=0)
    panel.margins(x=0)
    panel.set_ylabel(f"{unit} lost")
    count_iterations(panel)
    legend_above(panel, 3)
    return figure
