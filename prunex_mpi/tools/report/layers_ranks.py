"""The pictures of one run that tell its layers and its ranks apart."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.tools.drawing import (
    COLOURS,
    DASHES,
    SHADES,
    edges_of,
    legend_above,
    look_of,
    name_bars,
    new_figure,
    plain,
)
from prunex_mpi.tools.report.read_runs import RESIDUALS, Layers
from prunex_mpi.tools.report.run_pictures import (
    OF_PHASE,
    PHASE_WORDS,
    RESIDUAL_WORDS,
    count_iterations,
    pile_up,
    plot,
    unit_of_seconds,
)
from prunex_mpi.tools.report.stragglers import PHASES, Blame, RankRecord
from prunex_mpi.tools.report.thinning import COLUMNS, binned, means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# So many names of layers can be read beside a picture, so many bars of ranks in one.
MOST_NAMES, MOST_BARS = 40, 24
# So many ranks get a curve each.
MOST_RANK_CURVES = 8
WAITING, TRANSMITTING, REST = "#e4e4e4", "#777777", "#b8b8b8"


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


def layer_density(layers: Layers) -> "Figure | None":
    """Draw the kept share of each layer that was ever pruned, over the outer iterations."""
    density = layers.values["density"]
    pruned = np.flatnonzero((density < 1).any(axis=0))
    if not len(pruned):
        return None
    from matplotlib import colormaps

    figure = new_figure(_height(len(pruned)))
    panel = figure.subplots()
    shades = colormaps[SHADES].with_extremes(bad="#ffffff")
    mesh = panel.pcolormesh(
        edges_of(list(layers.iterations)),
        range(len(pruned) + 1),
        density[:, pruned].T,
        cmap=shades,
        vmin=0,
        vmax=1,
        rasterized=True,
    )
    panel.grid(False)
    _names(panel, [layers.names[i] for i in pruned])
    count_iterations(panel)
    figure.colorbar(mesh, ax=panel, label="kept share of the weights", fraction=0.05, pad=0.02)
    return figure


def layer_residuals(layers: Layers) -> "Figure | None":
    """Draw the residuals of each layer, over the outer iterations that have any."""
    there = [n for n in RESIDUALS if (layers.values[n] > 0).any()]
    if not there:
        return None
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    some = np.array([(layers.values[n] > 0).any(axis=1) for n in there]).any(axis=0)
    iterations = layers.iterations[some]
    blocks = {n: np.where(layers.values[n] > 0, layers.values[n], np.nan)[some] for n in there}
    values = np.concatenate([b[np.isfinite(b)] for b in blocks.values()])
    norm = LogNorm(values.min(), max(values.max(), values.min() * 1.01))
    shades = colormaps[SHADES].with_extremes(bad="#ffffff")
    figure = new_figure(_height(len(layers.names)))
    panels = figure.subplots(1, len(there), sharey=True, squeeze=False)[0]
    mesh = None
    for panel, name in zip(panels, there, strict=True):
        mesh = panel.pcolormesh(
            edges_of(list(iterations)),
            range(len(layers.names) + 1),
            blocks[name].T,
            cmap=shades,
            norm=norm,
            rasterized=True,
        )
        panel.grid(False)
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
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(8, len(names)))
    return figure


def shown_ranks(blame: Blame) -> list[int]:
    """Return which ranks get a bar: all, or those that were suspected most and some that waited."""
    if blame.ranks <= MOST_BARS:
        return list(range(blame.ranks))
    half = MOST_BARS // 2
    worst = list(dict.fromkeys(suspect.rank for suspect in blame.suspects))[:half]
    waited = sum(blame.waiting.values())
    rest = [int(r) for r in np.argsort(-waited) if int(r) not in worst]
    return sorted([*worst, *rest[: MOST_BARS - len(worst)]])


def rank_name(blame: Blame, rank: int) -> str:
    """Return a rank with its machine, as far as it is known."""
    host = blame.hosts[rank]
    return f"rank {rank}, {host}" if host else f"rank {rank}"


def rank_seconds(blame: Blame) -> "Figure":
    """Draw where the time of each rank went: work by phase, waiting, transmitting."""
    ranks = shown_ranks(blame)
    figure = new_figure(1.3 + 0.24 * max(3, len(ranks)))
    panel = figure.subplots()
    parts = [
        (PHASE_WORDS[p], blame.work[p], {"color": OF_PHASE[p]})
        for p in PHASES
        if np.any(blame.work.get(p, 0))
    ]
    waited, sent = sum(blame.waiting.values()), sum(blame.transmitting.values())
    light = {"facecolor": WAITING, "edgecolor": "#888888", "hatch": "////", "linewidth": 0}
    parts.append(("transmitting", sent, {"color": TRANSMITTING}))
    parts.append(("waiting for others", waited, light))
    parts = [(word, seconds, look) for word, seconds, look in parts if np.any(seconds)]
    size, unit = unit_of_seconds(float(np.max(sum(seconds for _, seconds, _ in parts))))
    base = np.zeros(len(ranks))
    for word, seconds, look in parts:
        width = np.asarray(seconds)[ranks] / size
        panel.barh(range(len(ranks)), width, left=base, height=0.8, label=word, **look)
        base += width
    name_bars(panel, [rank_name(blame, rank) for rank in ranks])
    panel.set_xlabel(f"{unit}, all outer iterations")
    legend_above(panel, 4)
    return figure


def lost_seconds(blame: Blame) -> "Figure | None":
    """Draw what the others lost in each outer iteration through the first two suspects and all."""
    if not blame.charges:
        return None
    named = blame.suspects[:2]
    numbers = sorted({charge.iteration for charge in blame.charges})
    iterations = np.arange(numbers[0], numbers[-1] + 1, dtype=np.float64)
    rows = np.zeros((len(named) + 1, len(iterations)))
    place = {(s.phase, s.rank): i for i, s in enumerate(named)}
    for charge in blame.charges:
        row = place.get((charge.phase, charge.rank), len(named))
        rows[row, charge.iteration - numbers[0]] += charge.seconds
    edges, starts = binned(iterations)
    size, unit = unit_of_seconds(float(rows.sum(axis=0).max()))
    figure = new_figure(3.0)
    panel = figure.subplots()
    words = [f"rank {s.rank}, {PHASE_WORDS[s.phase]}" for s in named] + ["all others"]
    colours = (COLOURS[1], COLOURS[0], REST)
    heights = [means(row, starts) / size for row in rows]
    pile_up(panel, edges, list(zip(heights, (*colours[: len(named)], REST), words, strict=True)))
    panel.set_ylim(bottom=0)
    panel.margins(x=0)
    panel.set_ylabel(f"{unit} lost")
    count_iterations(panel)
    legend_above(panel, 3)
    return figure
