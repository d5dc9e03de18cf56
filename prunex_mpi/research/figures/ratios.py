"""Figure 12: accuracy against the keep ratio, with the spread over seeds."""

from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np

from prunex_mpi.base.errors import UserError
from prunex_mpi.research.figures.beside import (
    Beside,
    Drawn,
    differing,
    setup_words,
    unequal,
    value_of,
)
from prunex_mpi.research.figures.run_figures import lacking, ranks_of
from prunex_mpi.settings.fields import FIELDS, OF_THE_JOB, key_of, methods_of
from prunex_mpi.settings.methods import REMOVING
from prunex_mpi.tools.drawing import legend_above, look_of, marker_of, new_figure, plain
from prunex_mpi.tools.report.read_runs import Run

PAPER = {1.0: "85.96 %", 0.5: "81.39 %"}
# What makes a curve of its own where runs of a method differ in it at one keep ratio: all but the
# seed, and what follows from other settings.
TOLD_APART = tuple(
    key_of(name)
    for name in FIELDS
    if name not in (*OF_THE_JOB, "preset", "method", "groups", "keep_ratio", "seed")
)


def ratios(runs: Sequence[Run]) -> Drawn:
    """Draw figure 12 from runs with different keep ratios."""
    for run in runs:
        if np.isnan(run.final_accuracy):
            raise lacking("12", run, "an accuracy")
        if not run.complete:
            raise lacking("12", run, "an end: it is not complete")
    found = curves(runs)
    known = {ratio for series in found.values() for ratio in series}
    if len(known) < 2:
        raise UserError("figure 12 needs runs with two or more keep ratios (--keep-ratio)")
    figure = new_figure(3.6)
    panel = figure.subplots()
    rows = []
    for number, (name, series) in enumerate(found.items()):
        ordered = sorted(series)
        seeds = {x: [100 * run.final_accuracy for run in series[x]] for x in ordered}
        spread = [stdev(seeds[x]) if len(seeds[x]) > 1 else 0.0 for x in ordered]
        look = look_of(number)
        means = [mean(seeds[x]) for x in ordered]
        panel.errorbar(
            ordered,
            means,
            yerr=spread,
            capsize=3,
            marker=marker_of(number),
            label=plain(name),
            **look,
        )
        for x in ordered:
            panel.plot([x] * len(seeds[x]), seeds[x], "_", color=look["color"], markersize=9)
            many = f"{len(seeds[x])} run{'s' if len(seeds[x]) > 1 else ''}"
            apart = f" ± {stdev(seeds[x]):.2f}" if len(seeds[x]) > 1 else ""
            paper = PAPER.get(x, "-")
            first = series[x][0]
            rows.append(
                Beside(
                    f"{name}, keep {x:g}",
                    f"{mean(seeds[x]):.2f}{apart} % ({many})",
                    paper,
                    setup_words(first, ranks_of(first)) if paper != "-" else "",
                )
            )
    panel.set_xlim(0, 1.05)
    panel.set_xlabel("keep ratio: share of the groups that is kept")
    panel.set_ylabel("test accuracy % at the end")
    legend_above(panel, 3)
    single = [x for series in found.values() for x in series if len(series[x]) == 1]
    notes = ["Bars: standard deviation over seeds; dashes: each run."]
    if single:
        notes.append("Where there is one run there is no spread.")
    return Drawn(figure, rows, [*notes, *unequal(runs)])


def curves(runs: Sequence[Run]) -> dict[str, dict[float, list[Run]]]:
    """Return the runs of each curve by keep ratio, those of one point alike but for the seed."""
    points: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        points.setdefault((series_of(run), ratio_of(run)), []).append(run)
    apart: dict[str, dict[str, None]] = {}
    for (series, _), some in points.items():
        apart.setdefault(series, {}).update(dict.fromkeys(differing(some, TOLD_APART)))
    found: dict[str, dict[float, list[Run]]] = {}
    for (series, ratio), some in points.items():
        for run in some:
            own = [f"{key} {value_of(run, key)}" for key in apart[series]]
            found.setdefault(", ".join([series, *own]), {}).setdefault(ratio, []).append(run)
    return found


def ratio_of(run: Run) -> float:
    """Return the keep ratio of a run, 1 where it prunes nothing."""
    method = run.setting("method")
    if method in REMOVING:
        raise lacking("12", run, f"a keep ratio: {method} has none")
    if method not in methods_of("keep_ratio"):
        return 1.0
    ratio = run.setting("keep-ratio", [1.0])
    try:
        return float(np.prod([float(x) for x in (ratio if isinstance(ratio, list) else [ratio])]))
    except (TypeError, ValueError):
        raise lacking("12", run, "a keep ratio") from None


def series_of(run: Run) -> str:
    """Return what runs of one curve have in common."""
    method = str(run.setting("method"))
    if method not in methods_of("keep_ratio"):
        return method
    groups = run.setting("groups", [])
    kinds = " ".join(map(str, groups)) if isinstance(groups, list) else str(groups)
    return f"{method}, {kinds}" if kinds else method
