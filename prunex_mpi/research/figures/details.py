"""Figures 10, 11 and 13: residuals of each rank and layer, patterns of zeros."""

from collections.abc import Sequence

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, meant, quote
from prunex_mpi.base.files import STATE
from prunex_mpi.checks.findings import listed
from prunex_mpi.research.figures.beside import Beside, Drawn
from prunex_mpi.research.figures.run_figures import lacking
from prunex_mpi.tools.drawing import SHADES, new_figure, plain
from prunex_mpi.tools.report import layers_ranks
from prunex_mpi.tools.report.one_run import wanted_iterations
from prunex_mpi.tools.report.read_runs import RESIDUALS, Run, read_layers, read_ranks, shown
from prunex_mpi.tools.report.run_pictures import RESIDUAL_WORDS, plot
from prunex_mpi.tools.report.thinning import starts_of

DECAY = "from 1e0 to 1e-2"
DECAY_WHY = "norms grow with the network and with what local steps move"
# Of figure 13.
PATTERNS, MOST_PATTERNS = 4, 12
# Cells of a pattern that a screen can show.
CELLS = 480


def of_ranks(run: Run) -> Drawn:
    """Draw figure 10: the residuals of each rank."""
    found = layers_ranks.RankResiduals()
    for _ in found.watch(read_ranks(run.path)):
        pass
    figure = layers_ranks.rank_residuals(found)
    if figure is None:
        raise lacking("10", run, "residuals of each rank in ranks.jsonl (--residuals every)")
    rows = []
    for name in RESIDUALS:
        known = [row for row in found.values.get(name, []) if np.isfinite(row).any()]
        if known:
            ends = f"{np.nanmax(known[0]):.1e} to {np.nanmax(known[-1]):.1e} on the worst rank"
            rows.append(Beside(RESIDUAL_WORDS[name], f"from {ends}", DECAY, DECAY_WHY))
    return Drawn(figure, rows)


def of_layers(run: Run) -> Drawn:
    """Draw figure 11: the residuals of each layer, coloured by depth."""
    layers = read_layers(run.path, wanted_iterations(run))
    there = [] if layers is None else [n for n in RESIDUALS if (layers.values[n] > 0).any()]
    if layers is None or not there:
        raise lacking("11", run, "residuals in layers.jsonl (--residuals every)")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(1.4 + 1.6 * ((len(there) + 1) // 2))
    panels = layers_ranks.residual_panels(figure, there, "norm of the layer")
    depth, shades = Normalize(1, max(2, len(layers.names))), colormaps[SHADES]
    rows = []
    for panel, name in zip(panels, there, strict=False):
        block = np.where(layers.values[name] > 0, layers.values[name], np.nan)
        for i in range(len(layers.names)):
            look = {"color": shades(depth(i + 1)), "linewidth": 0.8}
            plot(panel, layers.iterations, block[:, i], **look)
        known = block[np.isfinite(block).any(axis=1)]
        ends = f"{np.nanmedian(known[0]):.1e} to {np.nanmedian(known[-1]):.1e}"
        what = f"{RESIDUAL_WORDS[name]}, median layer"
        rows.append(Beside(what, f"from {ends}", DECAY, DECAY_WHY))
    scale = ScalarMappable(depth, shades)
    label = f"layer, of {len(layers.names)} from the input on"
    bar = figure.colorbar(scale, ax=list(panels), label=label, fraction=0.04, pad=0.02)
    bar.locator = MaxNLocator(nbins=6, integer=True)
    return Drawn(figure, rows)


def patterns(run: Run, wanted: Sequence[str]) -> Drawn:
    """Draw figure 13: which weights of convolutions are zero, as C_out x (C_in kh kw)."""
    weights = read_weights(run, wanted)
    figure = new_figure(0.6 + 1.25 * len(weights))
    panels = figure.subplots(len(weights), 1, squeeze=False)[:, 0]
    rows = []
    for panel, (name, weight) in zip(panels, weights.items(), strict=True):
        kept = weight.reshape(len(weight), -1) != 0
        panel.imshow(
            shrunk(kept),
            cmap="gray_r",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
            extent=(0, kept.shape[1], kept.shape[0], 0),
        )
        panel.grid(False)
        panel.set_title(plain(name), loc="left", fontsize=8)
        panel.set_ylabel("C_out", fontsize=8)
        gone = (~kept.any(axis=1)).sum(), (~kept.any(axis=0)).sum()
        rows.append(
            Beside(
                name,
                f"{100 * kept.mean():.1f} % kept; whole rows of zeros {gone[0]} of {len(kept)}, "
                f"columns {gone[1]} of {kept.shape[1]}",
                "stripes",
            )
        )
    panels[-1].set_xlabel("C_in x kernel places; black: kept, white: zero")
    return Drawn(figure, rows)


def read_weights(run: Run, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the convolutions of a run that were asked for, or some that have zeros."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = run.path / STATE
    where = quote(shown(path), 250)
    if not path.exists():
        raise lacking("13", run, f"{STATE} (a run writes it at its end)")
    try:
        tensors = load_file(path)
    except OSError as error:
        raise UserError(f"{where} can't be read: {error.strerror}", UNREADABLE) from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise UserError(f"{where} is damaged or not of plain numbers", UNREADABLE) from None
    found = {name: value for name, value in tensors.items() if value.ndim == 4}
    if not found:
        raise lacking("13", run, "a convolution")
    if not wanted:
        pruned = [name for name, value in found.items() if (value == 0).any()]
        if not pruned:
            raise lacking("13", run, "a convolution with zeros")
        places = np.unique(np.linspace(0, len(pruned) - 1, PATTERNS).round().astype(int))
        return {pruned[i]: found[pruned[i]] for i in places}
    if len(wanted) > MOST_PATTERNS:
        raise UserError(f"--layers: at most {MOST_PATTERNS} fit into a figure")
    chosen = {}
    for word in wanted:
        name = word if word in found else f"{word}.weight"
        if name not in found:
            guess = meant(name, found, f"; there are {listed(found)}")
            raise UserError(f"--layers: no convolution {quote(word)}{guess}")
        chosen[name] = found[name]
    return chosen


def shrunk(kept: np.ndarray) -> np.ndarray:
    """Return the share of kept weights in cells, so few that all can be shown; float64."""
    values = kept.astype(np.float64)
    for axis in (0, 1):
        size = values.shape[axis]
        if size > CELLS:
            starts = starts_of(size, CELLS)
            counts = np.diff(np.append(starts, size))
            shape = (-1, 1) if axis == 0 else (1, -1)
            values = np.add.reduceat(values, starts, axis=axis) / counts.reshape(shape)
    return values
