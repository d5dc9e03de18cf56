"""Figures 5 to 8: what training reaches, and what it costs in bytes and time."""

from collections.abc import Sequence

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.research.figures.beside import (
    NONE,
    PAYLOAD_WHY,
    Beside,
    Drawn,
    setup_words,
    unequal,
)
from prunex_mpi.settings.methods import PER_STEP
from prunex_mpi.tools.drawing import COLOURS, legend_above, marker_of, name_bars, new_figure
from prunex_mpi.tools.report import run_pictures as pictures
from prunex_mpi.tools.report.read_runs import RANKS, Run, read_ranks, shown
from prunex_mpi.tools.report.run_pictures import along, axis_unit, plot, trained_seconds
from prunex_mpi.tools.report.several_runs import held_out, judged_on, label, last, look_and_label
from prunex_mpi.tools.report.stragglers import roles_of
from prunex_mpi.tools.report.words import duration_words, size_words

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
PARTS = {
    "inter": ("between nodes", "#D55E00", "68.4 %"),
    "broadcast": ("broadcast in the node", "#E69F00", "13.8 %"),
    "intra": ("inside the node, gradients included", "#56B4E9", "17.8 %"),
    "local": ("agreement in the local steps", "#0072B2", NONE),
    "project": ("mask agreement", "#009E73", NONE),
    "dual": ("loss and norms", "#CC79A7", NONE),
}


def ranks_of(run: Run) -> int:
    """Return how many ranks a run had, 0 where its files do not say."""
    for record in read_ranks(run.path):
        return len(record.node)
    return sum(run.sizes())


def lacking(number: str, run: Run, what: str) -> UserError:
    """Return the error of a run that lacks what a figure needs."""
    where = quote(shown(run.path), 250)
    return UserError(f"figure {number} needs {what}, which {where} does not have", UNREADABLE)


def paper_of(run: Run, number: str) -> str:
    """Return what the paper has for the method of a run."""
    return OF_METHOD.get(str(run.setting("method")), {}).get(number, NONE)


def accuracy(runs: Sequence[Run]) -> Drawn:
    """Draw figure 5: accuracy against time and against bytes between nodes."""
    for run in runs:
        if not np.isfinite(run.accuracy).any():
            raise lacking("5", run, "an accuracy (train with --evaluate-every)")
    figure = new_figure(3.4, 7.6)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, axis in zip(panels, ("seconds", "bytes"), strict=True):
        size, word = axis_unit(runs, axis)
        for number, run in enumerate(runs):
            look = look_and_label(number, run)
            x = along(run, axis) / size
            plot(panel, x, 100 * run.accuracy, marker_of(number), **look)
        panel.set_xlabel(word)
    panels[0].set_ylabel(f"{judged_on(runs)} accuracy %")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3)
    rows = [
        Beside(
            label(number, run),
            f"{run.final_accuracy * 100:.1f} % in "
            f"{duration_words(float(trained_seconds(run)[-1]))}",
            paper_of(run, "5"),
            setup_words(run, ranks_of(run)) if paper_of(run, "5") != NONE else "",
        )
        for number, run in enumerate(runs)
    ]
    return Drawn(figure, rows, [*held_out(runs), *unequal(runs)])


def payload(runs: Sequence[Run]) -> Drawn:
    """Draw figure 6a: what a leader hands over in each outer iteration, and if it were dense."""
    for run in runs:
        if not run.has("bytes.payload"):
            raise lacking("6a", run, "bytes")
    figure = new_figure(3.6)
    panel = figure.subplots()
    columns = [run.column("bytes.dense") for run in runs]
    size, unit = pictures.unit_of_bytes(max(float(np.nanmax(np.nan_to_num(c))) for c in columns))
    rows = []
    for number, run in enumerate(runs):
        look = look_and_label(number, run)
        plot(panel, run.iterations, run.column("bytes.payload") / size, marker_of(number), **look)
        dense = {"color": look["color"], "linestyle": (0, (1, 3)), "linewidth": 1}
        word = {"label": "if dense (dotted)"} if number == len(runs) - 1 else {}
        plot(panel, run.iterations, run.column("bytes.dense") / size, **dense, **word)
        first, end = run.column("bytes.dense")[0], last(run, "bytes.payload")
        share = end / last(run, "bytes.dense")
        pruned = str(run.setting("method")) == "prunex"
        rows.append(
            Beside(
                label(number, run),
                f"dense {size_words(first)}, at the end {size_words(end)}: {100 * share:.1f} %",
                "221.9 MiB falling to about 40 %" if pruned else NONE,
                PAYLOAD_WHY if pruned else "",
            )
        )
    panel.set_ylim(bottom=0)
    panel.set_ylabel(f"{unit} per leader,\nbetween nodes")
    pictures.count_iterations(panel)
    legend_above(panel, 3)
    return Drawn(figure, rows)


def volume(runs: Sequence[Run]) -> Drawn:
    """Draw figure 6b: the bytes of whole runs, and if they were dense."""
    for run in runs:
        if not run.has("bytes.payload"):
            raise lacking("6b", run, "bytes")
    dense = np.array([np.nansum(run.column("bytes.dense")) for run in runs])
    sent = np.array([np.nansum(run.column("bytes.payload")) for run in runs])
    size, unit = pictures.unit_of_bytes(float(max(dense.max(), sent.max())))
    figure = new_figure(1.5 + 0.55 * max(2, len(runs)))
    panel = figure.subplots()
    places = np.arange(len(runs))
    at_each_step = np.array([str(run.setting("method")) in PER_STEP for run in runs])
    light = {"facecolor": "#e4e4e4", "edgecolor": "#555555", "linewidth": 0.6}
    kinds = (
        (~at_each_step, "dense: one full model per OUTER iteration", ""),
        (at_each_step, "dense: one full model per STEP", "////"),
    )
    for which, word, hatch in kinds:
        if which.any():
            bars = places[which] - 0.2
            panel.barh(bars, dense[which] / size, 0.38, label=word, hatch=hatch, **light)
    panel.barh(places + 0.2, sent / size, 0.38, color=COLOURS[1], label="sent")
    name_bars(panel, [label(number, run) for number, run in enumerate(runs)])
    panel.set_xlabel(f"{unit} per leader between nodes, whole run")
    legend_above(panel, 2)
    rows = []
    for number, run in enumerate(runs):
        paper = VOLUMES.get(str(run.setting("model")), NONE)
        paper = paper if str(run.setting("method")) == "prunex" else NONE
        rows.append(
            Beside(
                f"{label(number, run)}, {len(run.iterations)} outer iterations",
                f"{size_words(dense[number])} → {size_words(sent[number])}",
                f"{paper} in 60" if paper != NONE else NONE,
                PAYLOAD_WHY if paper != NONE else "",
            )
        )
    notes = [
        "The paper's dense figure, and ours of methods that exchange once per outer iteration, is "
        "one full model per outer iteration; DDP sends a full gradient at each step."
    ]
    return Drawn(figure, rows, notes)


def waiting(runs: Sequence[Run]) -> Drawn:
    """Draw figure 7: the seconds of synchronisation of each outer iteration."""
    columns = []
    for run in runs:
        if not run.has("seconds.inter"):
            raise lacking("7", run, "seconds by phase")
        inside = np.nan_to_num(run.column("seconds.intra"))
        columns.append(inside + np.nan_to_num(run.column("seconds.inter")))
    figure = new_figure(3.6)
    panel = figure.subplots()
    size, unit = pictures.unit_of_seconds(max(float(column.max()) for column in columns))
    for number, (run, column) in enumerate(zip(runs, columns, strict=True)):
        look = look_and_label(number, run)
        plot(panel, run.iterations, column / size, marker_of(number), **look)
    pictures.widen(panel, columns)
    panel.set_ylabel(f"{unit} of phases 2 and 4")
    pictures.count_iterations(panel)
    legend_above(panel, 3)
    rows = [
        Beside(
            label(number, run),
            f"median {duration_words(float(np.median(column)))}, "
            f"most {duration_words(float(column.max()))}",
            paper_of(run, "7"),
            setup_words(run, ranks_of(run)) if paper_of(run, "7") != NONE else "",
        )
        for number, (run, column) in enumerate(zip(runs, columns, strict=True))
    ]
    notes = [
        "Of an outer iteration, as rank 0 took it: with methods that exchange at each step, of all "
        "its steps together."
    ]
    return Drawn(figure, rows, notes)


def split(runs: Sequence[Run]) -> Drawn:
    """Draw figure 8: how the time of communication is split."""
    rows, shares = [], []
    notes: list[str] = []
    for number, run in enumerate(runs):
        seconds, note = communication(run)
        if note not in notes:
            notes.append(note)
        whole = sum(seconds.values())
        if not whole:
            raise lacking("8", run, "any communication")
        shares.append({part: value / whole for part, value in seconds.items()})
        rows += [
            Beside(
                f"{label(number, run)}, {word}",
                f"{100 * shares[-1][part]:.1f} %",
                paper,
                setup_words(run, ranks_of(run)) if paper != NONE else "",
            )
            for part, (word, _, paper) in PARTS.items()
            if shares[-1].get(part)
        ]
    figure = new_figure(1.6 + 0.4 * max(2, len(runs)))
    panel = figure.subplots()
    base = np.zeros(len(runs))
    for part, (word, colour, _) in PARTS.items():
        width = np.array([100 * share.get(part, 0.0) for share in shares])
        if width.any():
            panel.barh(range(len(runs)), width, left=base, height=0.7, color=colour, label=word)
            base += width
    name_bars(panel, [label(number, run) for number, run in enumerate(runs)])
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the time of communication")
    legend_above(panel, 2)
    return Drawn(figure, rows, notes)


def communication(run: Run) -> tuple[dict[str, float], str]:
    """Return the seconds that leaders spent in collectives by part, and what these are in words.

    What comes behind the local steps counts as far as it is waited for.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    found, apart = False, True
    for record in read_ranks(run.path):
        found = True
        leads = roles_of(record.node, run.leaders)
        for part in PARTS:
            if part in record.exchange:
                seconds[part] += float(np.nan_to_num(record.exchange[part][leads]).mean())
        if record.broadcast is None:
            apart = False
        else:
            handed = float(np.nan_to_num(record.broadcast[leads]).mean())
            seconds["inter"] -= handed
            seconds["broadcast"] += handed
    if found and apart:
        return seconds, "Of the leaders of the nodes, which the others wait for."
    if found:
        return seconds, f"Of the leaders; an older {RANKS} does not tell the broadcast apart."
    for part in ("inter", "intra"):
        seconds[part] = float(np.nansum(run.column(f"seconds.{part}")))
    return seconds, f"Without {RANKS}: phases 2 and 4 of rank 0, their arithmetic included."
