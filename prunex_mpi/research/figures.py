"""The paper's figures from runs: `python -m prunex_mpi.bench figure`, its values beside ours.

How communication time is split (8), residuals of each rank and layer (10, 11), patterns of zeros
(13). What figures 5 to 7 and 12 show, accuracy over time, bytes and the parameters that are left,
bytes and synchronisation, is on the page of `report`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import RANKS, STATE, open_regular
from prunex_mpi.base.imports import require_packages
from prunex_mpi.base.record_keys import RESIDUALS
from prunex_mpi.base.tables import Table, format_table
from prunex_mpi.config.cli import Parser, program_parser
from prunex_mpi.tools.report import curves
from prunex_mpi.tools.report.curves import (
    COLOURS,
    DPI,
    MOST_CURVES,
    PHASE_COLOURS,
    RESIDUAL_WORDS,
    Named,
    new_figure,
    plain,
    styled,
)
from prunex_mpi.tools.report.read_runs import (
    Run,
    read_layers,
    read_ranks,
    read_runs,
    shown,
    spread_out,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png", ".pdf")
FIGURES = {
    "8": "how communication time is split",
    "10": "residuals of each rank",
    "11": "residuals of each layer",
    "13": "sparsity patterns of layers",
}
NONE = "-"
PAPER = "The paper's values are of ResNet-152 on CIFAR-10 with 64 GPUs, unless they say otherwise."
DECAY = "from 1e0 to 1e-2"
# Of the time of communication: words, the paper's shares and colours, by phase; the broadcast is
# phase 4's.
PARTS = {
    "inter": ("between nodes", "68.4 %", PHASE_COLOURS["inter"]),
    "broadcast": ("broadcast in the node", "13.8 %", COLOURS[4]),
    "intra": ("inside the node, gradients included", "17.8 %", PHASE_COLOURS["intra"]),
    "local": ("agreement in the local steps", NONE, PHASE_COLOURS["local"]),
    "project": ("mask agreement", NONE, PHASE_COLOURS["project"]),
    "dual": ("loss and norms", NONE, PHASE_COLOURS["dual"]),
}
# Iterations of a curve of a layer, and how many layers figures 11 and 13 show.
LAYER_COLUMNS, TOP_LAYERS, PATTERNS = 240, 5, 4


@dataclass(frozen=True)
class Drawn:
    """A figure, and what is printed with it: rows of what, our value, and the paper's or "-"."""

    figure: "Figure"
    rows: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()


def build_parser() -> Parser:
    """Return the parser of the flags of figure."""
    parser = program_parser(
        "bench figure",
        "Draw one of the figures of the PruneX paper from runs, and print the paper's values "
        "beside those of the runs. No MPI is started.",
        "Figures: " + "; ".join(f"{number} {what}" for number, what in FIGURES.items()) + ".",
    )
    add = parser.add_argument
    add("number", metavar="N", help=", ".join(FIGURES))
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    add("--output", default="", metavar="FILE", help=".svg, .png or .pdf [figure-N.svg]")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    if given.number not in FIGURES:
        raise UserError(f"there is no figure {quote(given.number)}; there are {', '.join(FIGURES)}")
    given.output = given.output or f"figure-{given.number}.svg"
    if Path(given.output).suffix not in KINDS:
        where = quote(given.output, 250)
        raise UserError(f"--output {where}: give a name that ends in .svg, .png or .pdf")
    return given


def figure(options: argparse.Namespace) -> None:
    """Write the figure and print the values beside the paper's; raise UserError."""
    require_packages("bench figure", "report", "matplotlib")
    number = options.number
    if number in OF_ONE_RUN and len(options.runs) > 1:
        raise UserError(f"figure {number} is of one run; give one")
    if len(options.runs) > MOST_CURVES:
        raise UserError(f"at most {MOST_CURVES} runs can be told apart; give fewer")
    runs = read_runs(options.runs)
    with styled():
        alone = OF_ONE_RUN.get(number)
        drawn = alone(runs[0]) if alone else split(by_name(runs))
        try:
            drawn.figure.savefig(options.output, dpi=DPI)
        except OSError as error:
            where = quote(options.output, 250)
            raise UserError(f"--output {where}: {error.strerror}; choose another") from None
    title, columns = f"Figure {number}: {FIGURES[number]}", ("what", "here", "paper")
    print(format_table(Table(title, columns, tuple(drawn.rows), (*drawn.notes, PAPER))))
    print(f"written to {shown(options.output)}", flush=True)


def by_name(runs: Sequence[Run]) -> Named:
    """Return the runs by their names in pictures: the method, and the folder where it is shared."""
    methods = [str(run.setting("method", "?")) for run in runs]
    return {
        method if methods.count(method) == 1 else f"{method} ({run.name})": run
        for method, run in zip(methods, runs, strict=True)
    }


def lacking(number: str, run: Run, what: str) -> UserError:
    """Return the error of a run that lacks what a figure needs."""
    where = quote(shown(run.path), 250)
    return UserError(f"figure {number} needs {what}, which {where} does not have", UNREADABLE)


def split(named: Named) -> Drawn:
    """Draw figure 8: how the time of communication is split."""
    rows, shares = [], []
    for name, run in named.items():
        seconds = communication(run)
        whole = sum(seconds.values())
        if not whole:
            raise lacking("8", run, f"any communication in {RANKS}")
        shares.append({part: 100 * value / whole for part, value in seconds.items()})
        for part, (word, paper, _) in PARTS.items():
            if share := shares[-1][part]:
                known = paper if run.setting("method") == "prunex" else NONE
                rows.append((f"{name}, {word}", f"{share:.1f} %", known))
    widths = {part: np.array([share[part] for share in shares]) for part in PARTS}
    bars = [(PARTS[part][0], w, PARTS[part][2]) for part, w in widths.items() if w.any()]
    figure = curves.stacked([*named], bars)
    figure.axes[0].set_xlim(0, 100)
    figure.axes[0].set_xlabel("% of the time of communication")
    return Drawn(figure, rows, ["Of the leaders of the nodes, which the others wait for."])


def communication(run: Run) -> dict[str, float]:
    """Return the seconds that leaders spent in collectives by part.

    What comes behind the local steps counts as far as it is waited for.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for record in read_ranks(run.path):
        for part, taken in record.exchange.items():
            if part in PARTS:
                seconds[part] += float(np.nan_to_num(taken[record.is_leader]).mean())
        handed = float(np.nan_to_num(record.broadcast[record.is_leader]).mean())
        seconds["inter"] -= handed
        seconds["broadcast"] += handed
    return seconds


# --------------------------------------------------------------------------------------------------
# Residuals and zeros
# --------------------------------------------------------------------------------------------------


def of_ranks(run: Run) -> Drawn:
    """Draw figure 10: the residuals of each rank; of too many ranks the least and the most."""
    records = [record for record in read_ranks(run.path) if record.residuals]
    lines, rows = {}, []
    for name in RESIDUALS:
        some = [r for r in records if name in r.residuals]
        x = np.array([record.iteration for record in some])
        widest = max((len(record.node) for record in some), default=0)
        block = np.full((len(some), widest), np.nan)
        for i, record in enumerate(some):
            block[i, : len(record.node)] = record.residuals[name]
        if widest > len(COLOURS):
            block = np.stack([np.nanmin(block, axis=1), np.nanmax(block, axis=1)], axis=1)
            labels = ["least of the ranks", "most of the ranks"]
        else:
            labels = [f"rank {rank}" for rank in range(widest)]
        lines[name] = [(label, x, block[:, i]) for i, label in enumerate(labels)]
        if len(block) and np.nansum(block):
            ends = f"from {np.nanmax(block[0]):.1e} to {np.nanmax(block[-1]):.1e} on the worst rank"
            rows.append((RESIDUAL_WORDS[name], ends, DECAY if name.endswith("primal") else NONE))
    figure = curves.residual_panels(lines, "norm on the rank")
    if figure is None:
        raise lacking("10", run, "residuals of each rank in ranks.jsonl (--residuals every)")
    return Drawn(figure, rows)


def of_layers(run: Run) -> Drawn:
    """Draw figure 11: the residuals of the few layers that begin farthest apart."""
    has = np.any([np.isfinite(run.column(f"residuals.{name}")) for name in RESIDUALS], axis=0)
    layers = read_layers(run.path, spread_out(run.iterations[has], LAYER_COLUMNS))
    if layers is None or not any((layers.values[name] > 0).any() for name in RESIDUALS):
        raise lacking("11", run, "residuals in layers.jsonl (--residuals every)")
    primal = [name for name in RESIDUALS if name.endswith("primal")]
    first = sum(np.nan_to_num(layers.values[name][0]) ** 2 for name in primal)
    chosen = sorted(int(i) for i in np.argsort(-first, kind="stable")[:TOP_LAYERS])
    words = {i: layers.names[i].removesuffix(".weight") for i in chosen}
    lines = {
        name: [(words[i], layers.iterations, layers.values[name][:, i]) for i in chosen]
        for name in RESIDUALS
    }
    rows = [
        (f"{word}, {RESIDUAL_WORDS[name]}", f"from {y[0]:.1e} to {y[-1]:.1e}", DECAY)
        for name in primal
        for word, y in ((word, y[np.isfinite(y)]) for word, _, y in lines[name])
        if y.any()
    ]
    note = f"The {len(chosen)} of {len(layers.names)} layers that begin farthest apart."
    figure = curves.residual_panels(lines, "norm of the layer")
    return Drawn(figure, rows, [note])


def patterns(run: Run) -> Drawn:
    """Draw figure 13: which weights of convolutions are zero, as C_out x (C_in kh kw)."""
    weights = read_weights(run)
    figure = new_figure(0.6 + 1.25 * len(weights))
    panels = figure.subplots(len(weights), 1, squeeze=False)[:, 0]
    rows = []
    for panel, (name, weight) in zip(panels, weights.items(), strict=True):
        kept = weight.reshape(len(weight), -1) != 0
        extent = (0, kept.shape[1], kept.shape[0], 0)
        panel.imshow(kept * 1.0, cmap="gray_r", vmin=0, vmax=1, aspect="auto", extent=extent)
        panel.grid(False)
        # Zeros are as white as what is around them.
        panel.spines[:].set_visible(True)
        panel.set_title(plain(name), loc="left", fontsize=8)
        panel.set_ylabel("C_out", fontsize=8)
        gone = (~kept.any(axis=1)).sum(), (~kept.any(axis=0)).sum()
        here = f"{100 * kept.mean():.1f} % kept; whole rows of zeros {gone[0]} of {len(kept)}, "
        rows.append((name, f"{here}columns {gone[1]} of {kept.shape[1]}", "stripes"))
    panels[-1].set_xlabel("C_in x kernel places; black: kept, white: zero")
    return Drawn(figure, rows)


def read_weights(run: Run) -> dict[str, np.ndarray]:
    """Return some convolutions of a run that have zeros."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = run.path / STATE
    where = quote(shown(path), 250)
    if not path.exists():
        raise lacking("13", run, f"{STATE} (a run writes it at its end)")
    try:
        with open_regular(path) as file:
            tensors = load(file.read())
    except OSError as error:
        raise UserError(f"{where} can't be read: {error.strerror}", UNREADABLE) from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise UserError(f"{where} is damaged or not of plain numbers", UNREADABLE) from None
    pruned = {k: v for k, v in tensors.items() if v.ndim == 4 and (v == 0).any()}
    if not pruned:
        raise lacking("13", run, "a convolution with zeros")
    names = [*pruned]
    return {names[i]: pruned[names[i]] for i in spread_out(np.arange(len(names)), PATTERNS)}


OF_ONE_RUN = {"10": of_ranks, "11": of_layers, "13": patterns}
