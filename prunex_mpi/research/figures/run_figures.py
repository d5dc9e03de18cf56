"""The paper's figures of runs as they are: 5 to 8, 10, 11 and 13, and its values beside ours.

What training reaches and costs in bytes and time (5 to 8), residuals of each rank and layer (10,
11), patterns of zeros (13).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, listed, meant, quote
from prunex_mpi.base.files import STATE
from prunex_mpi.base.record_keys import ACCURACY, RESIDUALS
from prunex_mpi.config.resolve import BY_NAME
from prunex_mpi.tools.drawing import (
    COLOURS,
    PHASE_COLOURS,
    legend_above,
    legend_on_top,
    name_bars,
    named_look,
    new_figure,
    new_panel,
    plain,
    stack_bars,
)
from prunex_mpi.tools.report import run_pictures, several_runs
from prunex_mpi.tools.report.one_run import duration_words, size_words, wanted_iterations
from prunex_mpi.tools.report.read_runs import (
    RANKS,
    Layers,
    Run,
    read_layers,
    read_ranks,
    shown,
    spread_out,
)
from prunex_mpi.tools.report.run_pictures import (
    RESIDUAL_WORDS,
    plot,
    trained_seconds,
    unit_of_bytes,
    unit_of_seconds,
)
from prunex_mpi.tools.report.several_runs import held_out, judged_on, last
from prunex_mpi.tools.report.stragglers import roles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "-"
PAYLOAD_WHY = (
    "40 % is not what the paper's stated setting gives: half of the input channels of ResNet-152 "
    "leave 50.3 %"
)
OF_METHOD = {
    "prunex": {"5": "70 % in 8 min", "7": "0.10 s"},
    "dense": {"5": "65 % in 14 min", "7": "0.50 s (DDP)"},
    "topk": {"5": "50 % in 14 min"},
    "prunex-flat": {"7": "spikes"},
}
VOLUMES = {
    "resnet18": "2.53 → 1.01 GB",
    "wide_resnet50_2": "14.88 → 5.97 GB",
    "resnet152": "13.00 → 5.21 GB",
}
# Of the time of communication: words and the paper's shares, by phase; the broadcast is phase 4's.
PARTS = {
    "inter": ("between nodes", "68.4 %"),
    "broadcast": ("broadcast in the node", "13.8 %"),
    "intra": ("inside the node, gradients included", "17.8 %"),
    "local": ("agreement in the local steps", NONE),
    "project": ("mask agreement", NONE),
    "dual": ("loss and norms", NONE),
}
PART_COLOURS = {**PHASE_COLOURS, "broadcast": COLOURS[4]}
DECAY = "from 1e0 to 1e-2"
# Curves of layers that can be told apart, and how many the paper has.
MOST_LAYERS, TOP_LAYERS = 10, 5
DECAY_WHY = "norms grow with the network and with what local steps move"
# Of figure 13.
PATTERNS, MOST_PATTERNS = 4, 12


@dataclass(frozen=True)
class Beside:
    """One value of the runs and the paper's, "-" where there is none; `why` they differ."""

    what: str
    here: str
    paper: str = NONE
    why: str = ""


@dataclass(frozen=True)
class Drawn:
    """A figure, and what is printed with it."""

    figure: "Figure"
    rows: Sequence[Beside]
    notes: Sequence[str] = ()


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return what pictures call the runs: the method, and the folder where several have it."""
    methods = [str(run.setting("method", "?")) for run in runs]
    return [
        method if methods.count(method) == 1 else f"{method} ({run.name})"
        for method, run in zip(methods, runs, strict=True)
    ]


def looks_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return how the curve of each run looks, and what it is called."""
    return [named_look(number, name) for number, name in enumerate(names_of(runs))]


def as_in_the_paper(run: Run) -> bool:
    """Return whether a run prunes as the paper's main configuration does: input channels."""
    return run.setting("method") == "prunex" and run.setting("groups") == ["channel"]


def unequal(runs: Sequence[Run]) -> list[str]:
    """Return a note on what runs differ in that should be alike where they are compared."""
    keys = ("model", "dataset", "outer-iterations", "batch-size", "train-samples")
    named = several_runs.differing(runs, keys)
    return [f"The runs differ in {', '.join(named)} as well."] if named else []


def setup_words(run: Run, ranks: int) -> str:
    """Return what was trained here and what in the paper."""
    model, dataset = run.setting("model", "?"), run.setting("dataset", "?")
    many = f"{ranks} rank{'s' if ranks != 1 else ''}" if ranks else "unknown ranks"
    return f"{model} on {dataset} with {many}, not ResNet-152 on CIFAR-10 with 64 GPUs"


def value_of(run: Run, key: str) -> str:
    """Return a setting in words; in paths the run's seed, which stands for any, as {seed}."""
    value = str(run.setting(key))
    if key not in ("init-from", "teacher"):
        return value
    return re.sub(rf"(?<!\d){run.setting('seed')}(?!\d)", "{seed}", value)


# --------------------------------------------------------------------------------------------------
# Accuracy, bytes and time
# --------------------------------------------------------------------------------------------------


def ranks_of(run: Run) -> int:
    """Return how many ranks a run had, 0 where its files do not say."""
    for record in read_ranks(run.path):
        return len(record.node)
    return sum(run.sizes())


def lacking(number: str, run: Run, what: str) -> UserError:
    """Return the error of a run that lacks what a figure needs."""
    where = quote(shown(run.path), 250)
    return UserError(f"figure {number} needs {what}, which {where} does not have", UNREADABLE)


def require(number: str, runs: Sequence[Run], column: str, what: str) -> None:
    """Raise UserError for a run that lacks a column of metrics.jsonl which a figure needs."""
    for run in runs:
        if not run.has(column):
            raise lacking(number, run, what)


def paper_of(run: Run, number: str) -> str:
    """Return what the paper has for the method of a run."""
    return OF_METHOD.get(str(run.setting("method")), {}).get(number, NONE)


def beside(run: Run, what: str, here: str, paper: str) -> Beside:
    """Return a value of a run beside the paper's, if it has one, with what was trained instead."""
    return Beside(what, here, paper, setup_words(run, ranks_of(run)) if paper != NONE else "")


def accuracy(runs: Sequence[Run]) -> Drawn:
    """Draw figure 5: accuracy against time and against bytes between nodes."""
    for run in runs:
        if run.measure is not ACCURACY:
            raise lacking("5", run, "an accuracy (of text report shows the loss)")
        if not np.isfinite(run.judged).any():
            raise lacking("5", run, "an accuracy (train with --evaluate-every)")
    figure = new_figure(3.4, 7.6)
    panels = figure.subplots(1, 2, sharey=True)
    handed = [np.cumsum(run.filled("bytes.payload")) for run in runs]
    seconds = [trained_seconds(run) for run in runs]
    size, unit = unit_of_seconds(max(float(x[-1]) for x in seconds))
    kib, bytes_unit = unit_of_bytes(max(float(x[-1]) for x in handed))
    for panel, columns, scale, word in (
        (panels[0], seconds, size, f"(a) {unit} of training, evaluation left out"),
        (panels[1], handed, kib, f"(b) {bytes_unit} per leader between nodes"),
    ):
        for run, x, look in zip(runs, columns, looks_of(runs), strict=True):
            plot(panel, x / scale, run.judged, **look)
        panel.set_xlabel(word)
    panels[0].set_ylabel(f"{judged_on(runs)} accuracy %")
    legend_on_top(panels[0])
    rows = []
    for run, name, taken, sent in zip(runs, names_of(runs), seconds, handed, strict=True):
        cost = f"{duration_words(float(taken[-1]))}, {size_words(sent[-1])}"
        rows.append(beside(run, name, f"{run.final:.1f} % in {cost}", paper_of(run, "5")))
    return Drawn(figure, rows, [*held_out(runs), *unequal(runs)])


def payload(runs: Sequence[Run]) -> Drawn:
    """Draw figure 6a: what a leader hands over in each outer iteration, and if it were dense."""
    require("6a", runs, "bytes.payload", "bytes")
    figure, panel = new_panel(3.6)
    size, unit = unit_of_bytes(max(float(run.filled("bytes.dense").max()) for run in runs))
    rows = []
    for run, name, look in zip(runs, names_of(runs), looks_of(runs), strict=True):
        plot(panel, run.iterations, run.column("bytes.payload") / size, **look)
        dense = {"color": look["color"], "linestyle": (0, (1, 3)), "linewidth": 1}
        word = {"label": "if dense (dotted)"} if run is runs[-1] else {}
        plot(panel, run.iterations, run.column("bytes.dense") / size, **dense, **word)
        first, end = run.column("bytes.dense")[0], last(run, "bytes.payload")
        share = end / last(run, "bytes.dense")
        here = f"dense {size_words(first)}, at the end {size_words(end)}: {100 * share:.1f} %"
        pruned = run.setting("method") == "prunex"
        paper = "about 220 MB falling to about 40 %" if pruned else NONE
        rows.append(Beside(name, here, paper, PAYLOAD_WHY if as_in_the_paper(run) else ""))
    panel.set_ylim(bottom=0)
    panel.set_ylabel(f"{unit} per leader,\nbetween nodes")
    run_pictures.count_iterations(panel)
    legend_above(panel, 3)
    return Drawn(figure, rows)


def volume(runs: Sequence[Run]) -> Drawn:
    """Draw figure 6b: the bytes of whole runs, and if they were dense."""
    require("6b", runs, "bytes.payload", "bytes")
    dense = np.array([run.total("bytes.dense") for run in runs])
    sent = np.array([run.total("bytes.payload") for run in runs])
    size, unit = unit_of_bytes(float(max(dense.max(), sent.max())))
    figure, panel = new_panel(1.5 + 0.55 * max(2, len(runs)))
    places = np.arange(len(runs))
    at_each_step = np.array([BY_NAME[str(run.setting("method"))].per_step for run in runs])
    light = {"facecolor": "#e4e4e4", "edgecolor": "#555555", "linewidth": 0.6}
    for which, word, hatch in (
        (~at_each_step, "OUTER iteration", ""),
        (at_each_step, "STEP", "////"),
    ):
        if which.any():
            look = {"label": f"dense: one full model per {word}", "hatch": hatch, **light}
            panel.barh(places[which] - 0.2, dense[which] / size, 0.38, **look)
    panel.barh(places + 0.2, sent / size, 0.38, color=COLOURS[1], label="sent")
    names = names_of(runs)
    name_bars(panel, names)
    panel.set_xlabel(f"{unit} per leader between nodes, whole run")
    legend_above(panel, 2)
    rows = []
    for number, run in enumerate(runs):
        known = VOLUMES if run.setting("method") == "prunex" else {}
        paper = known.get(str(run.setting("model")), NONE)
        what = f"{names[number]}, {len(run.iterations)} outer iterations"
        here = f"{size_words(dense[number])} → {size_words(sent[number])}"
        why = PAYLOAD_WHY if paper != NONE and as_in_the_paper(run) else ""
        rows.append(Beside(what, here, f"{paper} in 60" if paper != NONE else NONE, why))
    notes = [
        "The paper's dense figure, and ours of methods that exchange once per outer iteration, is "
        "one full model per outer iteration; DDP sends a full gradient at each step."
    ]
    return Drawn(figure, rows, notes)


def waiting(runs: Sequence[Run]) -> Drawn:
    """Draw figure 7: the seconds of synchronisation of each outer iteration."""
    require("7", runs, "seconds.inter", "seconds by phase")
    inside = [run.filled("seconds.intra") for run in runs]
    between = [run.filled("seconds.inter") for run in runs]
    columns = [a + b for a, b in zip(inside, between, strict=True)]
    figure, panel = new_panel(3.6)
    size, unit = unit_of_seconds(max(float(column.max()) for column in columns))
    for run, column, look in zip(runs, columns, looks_of(runs), strict=True):
        plot(panel, run.iterations, column / size, **look)
    run_pictures.widen(panel, columns)
    panel.set_ylabel(f"{unit} of synchronisation,\nbetween nodes and inside them")
    run_pictures.count_iterations(panel)
    legend_above(panel, 3)
    rows = []
    for number, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        parts = (columns[number], between[number], inside[number])
        whole, outer, inner = (duration_words(float(np.median(part))) for part in parts)
        most = duration_words(float(columns[number].max()))
        here = f"median {whole}, between nodes {outer} and inside them {inner}; most {most}"
        rows.append(beside(run, name, here, paper_of(run, "7")))
    notes = [
        "Of an outer iteration, as rank 0 took it: with methods that exchange at each step, of all "
        "its steps together."
    ]
    averaging = [
        name
        for run, name in zip(runs, names_of(runs), strict=True)
        if run.setting("node-sync", "") == "step" and BY_NAME[str(run.setting("method"))].consensus
    ]
    if averaging:
        notes.append(
            f"Inside the node {', '.join(averaging)} averages the gradient of every local step "
            "(--node-sync step); the paper averages parameters once (--node-sync outer)."
        )
    return Drawn(figure, rows, notes)


def split(runs: Sequence[Run]) -> Drawn:
    """Draw figure 8: how the time of communication is split."""
    rows, shares = [], []
    names = names_of(runs)
    for run, name in zip(runs, names, strict=True):
        hierarchical = run.setting("method") == "prunex"
        seconds = communication(run)
        whole = sum(seconds.values())
        if not whole:
            raise lacking("8", run, f"any communication in {RANKS}")
        share = {part: 100 * value / whole for part, value in seconds.items()}
        shares.append(share)
        rows += [
            beside(run, f"{name}, {word}", f"{share[part]:.1f} %", paper if hierarchical else NONE)
            for part, (word, paper) in PARTS.items()
            if share[part]
        ]
    figure, panel = new_panel(1.6 + 0.4 * max(2, len(runs)))
    widths = {part: np.array([share[part] for share in shares]) for part in PARTS}
    bars = [(PARTS[p][0], w, {"color": PART_COLOURS[p]}) for p, w in widths.items() if w.any()]
    stack_bars(panel, names, bars)
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the time of communication")
    legend_above(panel, 2)
    return Drawn(figure, rows, ["Of the leaders of the nodes, which the others wait for."])


def communication(run: Run) -> dict[str, float]:
    """Return the seconds that leaders spent in collectives by part.

    What comes behind the local steps counts as far as it is waited for.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for record in read_ranks(run.path):
        leads = roles_of(record.node)
        for part, taken in record.exchange.items():
            if part in PARTS:
                seconds[part] += float(np.nan_to_num(taken[leads]).mean())
        handed = float(np.nan_to_num(record.broadcast[leads]).mean())
        seconds["inter"] -= handed
        seconds["broadcast"] += handed
    return seconds


# --------------------------------------------------------------------------------------------------
# Residuals and zeros
# --------------------------------------------------------------------------------------------------


def of_ranks(run: Run) -> Drawn:
    """Draw figure 10: the residuals of each rank."""
    found = run_pictures.RankResiduals()
    for _ in found.watch(read_ranks(run.path)):
        pass
    figure = run_pictures.rank_residuals(found)
    if figure is None:
        raise lacking("10", run, "residuals of each rank in ranks.jsonl (--residuals every)")
    rows = []
    for name in RESIDUALS:
        known = [row for row in found.values.get(name, []) if np.isfinite(row).any()]
        if known:
            ends = f"{np.nanmax(known[0]):.1e} to {np.nanmax(known[-1]):.1e} on the worst rank"
            rows.append(residual_row(name, RESIDUAL_WORDS[name], ends))
    return Drawn(figure, rows)


def residual_row(name: str, what: str, ends: str) -> Beside:
    """Return residuals beside the paper's, which shows primal ones alone."""
    primal = name.endswith("_primal")
    return Beside(what, f"from {ends}", DECAY if primal else NONE, DECAY_WHY if primal else "")


def chosen_layers(layers: Layers, wanted: Sequence[str]) -> list[int]:
    """Return which layers to draw: those `wanted`, or the few that begin farthest apart."""
    if len(wanted) > MOST_LAYERS:
        raise UserError(f"--layers: at most {MOST_LAYERS} can be told apart in a figure")
    if wanted:
        return [layers.names.index(layer_called(word, layers.names)) for word in wanted]
    parts = [layers.values[name] for name in RESIDUALS if name.endswith("_primal")]
    total = np.sqrt(sum(np.nan_to_num(part) ** 2 for part in parts))
    known = total[(total > 0).any(axis=1)]
    first = known[0] if len(known) else np.zeros(len(layers.names))
    return sorted(int(i) for i in np.argsort(-first, kind="stable")[:TOP_LAYERS])


def layer_called(word: str, names: Sequence[str], kind: str = "layer") -> str:
    """Return the name of the layer that is called `word`, with or without ".weight"."""
    for name in (word, f"{word}.weight"):
        if name in names:
            return name
    guess = meant(f"{word}.weight", names, f"; there are {listed(names)}")
    raise UserError(f"--layers: no {kind} {quote(word)}{guess}")


def of_layers(run: Run, wanted: Sequence[str] = ()) -> Drawn:
    """Draw figure 11: the residuals of layers, by default of the few that begin farthest apart."""
    layers = read_layers(run.path, wanted_iterations(run))
    there = [] if layers is None else [n for n in RESIDUALS if (layers.values[n] > 0).any()]
    if layers is None or not there:
        raise lacking("11", run, "residuals in layers.jsonl (--residuals every)")
    chosen = chosen_layers(layers, wanted)
    figure = new_figure(1.8 + 1.6 * ((len(there) + 1) // 2))
    panels = run_pictures.residual_panels(figure, there, "norm of the layer")
    rows = []
    for panel, name in zip(panels, there, strict=False):
        block = np.where(layers.values[name] > 0, layers.values[name], np.nan)
        for number, i in enumerate(chosen):
            word = layers.names[i].removesuffix(".weight")
            plot(panel, layers.iterations, block[:, i], **named_look(number, word))
            known = block[np.isfinite(block[:, i]), i]
            if len(known) and name.endswith("_primal"):
                ends = f"from {known[0]:.1e} to {known[-1]:.1e}"
                rows.append(Beside(f"{word}, {RESIDUAL_WORDS[name]}", ends, DECAY))
    legend_on_top(panels[0])
    few = f"The {len(chosen)} of {len(layers.names)} layers that begin farthest apart."
    why = f"The paper's are of other layers: {DECAY_WHY}."
    return Drawn(figure, rows, [why] if wanted else [few, why])


def patterns(run: Run, wanted: Sequence[str]) -> Drawn:
    """Draw figure 13: which weights of convolutions are zero, as C_out x (C_in kh kw)."""
    weights = read_weights(run, wanted)
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
        rows.append(Beside(name, f"{here}columns {gone[1]} of {kept.shape[1]}", "stripes"))
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
    if len(wanted) > MOST_PATTERNS:
        raise UserError(f"--layers: at most {MOST_PATTERNS} fit into a figure")
    chosen = [layer_called(word, tuple(found), "convolution") for word in wanted]
    if not wanted:
        pruned = [name for name, value in found.items() if (value == 0).any()]
        if not pruned:
            raise lacking("13", run, "a convolution with zeros")
        chosen = [pruned[i] for i in spread_out(np.arange(len(pruned)), PATTERNS)]
    return {name: found[name] for name in chosen}
