"""Draw one of the paper's figures from runs; here too those over settings, 9 and 12.

Figure 9 is strong scaling, figure 12 accuracy against the keep ratio, with the spread over seeds.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.base.record_keys import ACCURACY
from prunex_mpi.base.single_process import require_packages
from prunex_mpi.base.tables import Table, format_table
from prunex_mpi.config.resolve import BY_NAME, FIELDS, toml_key
from prunex_mpi.research.figures import run_figures
from prunex_mpi.research.figures.figure_options import FIGURES, Options
from prunex_mpi.research.figures.run_figures import (
    NONE,
    Beside,
    Drawn,
    as_in_the_paper,
    beside,
    lacking,
    unequal,
    value_of,
)
from prunex_mpi.settings.fields import OF_THE_JOB
from prunex_mpi.tools.drawing import (
    DPI,
    MOST_CURVES,
    legend_above,
    legend_on_top,
    look_of,
    marker_of,
    new_figure,
    new_panel,
    plain,
    styled,
)
from prunex_mpi.tools.report.read_runs import Run, read_ranks, read_runs, shown
from prunex_mpi.tools.report.several_runs import differing, ended_on, held_out

# Of one run each.
ALONE = ("10", "11", "13")
PAPER_SCALING = {
    "prunex": "6.75 on 8 times as many GPUs (8 to 64), 84.4 %",
    "dense": "5.81, 72.7 %",
    "topk": "3.71",
}
MEASURED_PHASES = ("local", "inter", "intra", "project", "dual", "setup")
# What runs of one curve may differ in: how long they are, where their stages lie, what goes with
# the number of ranks, and what changes no work.
OF_ONE_CURVE = (
    *OF_THE_JOB,
    *("preset", "method", "model", "dataset", "seed", "init_from", "init_digest"),
    *("teacher_digest", "outer_iterations", "local_epochs", "local_steps", "frozen_local_steps"),
    *("comm_share", "batch_size", "lr", "lr_schedule", "warmup_ratio"),
    *("min_lr_ratio", "lr_scaling", "image_mean", "image_std", "test_samples"),
    *("warmup_iterations", "keep_ramp_iterations", "freeze_iteration", "one_shot_prune_iteration"),
    *("dgc_warmup_epochs", "prunetrain_reconfigure_every", "evaluate_every"),
    "ranks_per_node",
)
SCALING_APART = tuple(toml_key(name) for name in FIELDS if name not in OF_ONE_CURVE)
PAPER_ACCURACY = {1.0: "85.96 %", 0.5: "81.39 % in the text, 82.8 % in the caption"}
# What makes a curve of its own where runs of a method differ in it at one keep ratio: all but the
# seed, and what follows from other settings.
RATIOS_APART = tuple(
    toml_key(name)
    for name in FIELDS
    if name not in (*OF_THE_JOB, "preset", "method", "groups", "keep_ratio", "seed")
)


def figure(options: Options) -> None:
    """Write the figure and print the values beside the paper's; raise UserError."""
    require_packages("bench figure", "report", "matplotlib")
    if options.number in ALONE and len(options.runs) > 1:
        raise UserError(f"figure {options.number} is of one run; give one")
    if len(options.runs) > MOST_CURVES and options.number not in ("9", "12"):
        raise UserError(f"at most {MOST_CURVES} runs can be told apart; give fewer")
    runs = read_runs(options.runs)
    with styled():
        drawn = draw(options, runs)
        try:
            drawn.figure.savefig(options.output, dpi=DPI)
        except OSError as error:
            where = quote(options.output, 250)
            raise UserError(f"--output {where}: {error.strerror}; choose another") from None
    rows = tuple((row.what, row.here, row.paper, row.why) for row in drawn.rows)
    title = f"Figure {options.number}: {FIGURES[options.number]}"
    columns = ("what", "here", "paper", "why they differ")
    print(format_table(Table(title, columns, rows, tuple(drawn.notes))))
    print(f"written to {shown(options.output)}", flush=True)


def draw(options: Options, runs: Sequence[Run]) -> Drawn:
    """Return the figure of a number; raise UserError where the runs lack what it needs."""
    match options.number:
        case "10":
            return run_figures.of_ranks(runs[0])
        case "11":
            return run_figures.of_layers(runs[0], options.layers)
        case "13":
            return run_figures.patterns(runs[0], options.layers)
        case number:
            return OF_RUNS[number](runs)


def curves(
    runs: Sequence[Run], points: Mapping[Path, tuple[str, float | None]], keys: Sequence[str]
) -> dict[str, list[Run]]:
    """Return the runs of each curve by its name.

    `points` are the series and the point in it of each run, by its path. Where runs of one point
    differ in one of the settings `keys`, each value has a curve of its own.
    """
    alike: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        alike.setdefault(points[run.path], []).append(run)
    apart: dict[str, dict[str, None]] = {}
    for (series, _), some in alike.items():
        apart.setdefault(series, {}).update(dict.fromkeys(differing(some, keys, value_of)))
    found: dict[str, list[Run]] = {}
    for (series, _), some in alike.items():
        for run in some:
            own = [f"{key} {value_of(run, key)}" for key in apart[series]]
            found.setdefault(", ".join([series, *own]), []).append(run)
    return found


# --------------------------------------------------------------------------------------------------
# Figure 9
# --------------------------------------------------------------------------------------------------


def scaling(runs: Sequence[Run]) -> Drawn:
    """Draw figure 9 from runs with different numbers of ranks."""
    for run in runs:
        refuse_growing(run)
    points = {run.path: (scaling_series(run), None) for run in runs}
    found = curves(runs, points, SCALING_APART)
    # Of runs with as many ranks the fastest one counts.
    rates = {name: dict(sorted(map(measure, some))) for name, some in found.items()}
    series = {name: best for name, best in rates.items() if len(best) > 1}
    if not series:
        raise UserError(
            "figure 9 needs runs of one method and of one work with different numbers of ranks; "
            f"these are {'; '.join(found)}"
        )
    figure = new_figure(3.6)
    panel, share = figure.subplots(1, 2)
    rows, farthest = [], 1.0
    for number, (name, best) in enumerate(series.items()):
        fewest = min(best)
        x = np.array([*best]) / fewest
        y = np.array([*best.values()]) / best[fewest]
        drawing = {"marker": marker_of(number), "markersize": 6, **look_of(number)}
        panel.plot(x, y, label=plain(name), **drawing)
        share.plot(x, 100 * y / x, **drawing)
        farthest = max(farthest, x[-1])
        paper = PAPER_SCALING.get(str(found[name][0].setting("method")), NONE)
        rows.append(
            Beside(
                name,
                f"{y[-1]:.2f} on {x[-1]:g} times as many ranks ({fewest} to {max(best)}), "
                f"{100 * y[-1] / x[-1]:.0f} %",
                paper,
                "other machines and links, and fewer ranks" if paper != NONE else "",
            )
        )
    ideal = np.array([1, farthest])
    panel.plot(ideal, ideal, color="#888888", linewidth=0.8, label="ideal")
    share.axhline(100, color="#888888", linewidth=0.8)
    panel.set_yscale("log", base=2)
    for part in (panel, share):
        part.set_xscale("log", base=2)
        part.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        part.set_xlabel("times as many ranks\nas the smallest run of the curve")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_ylabel("(a) times as fast")
    share.set_ylabel("(b) parallel efficiency %")
    share.set_ylim(bottom=0)
    legend_on_top(panel, 2)
    note = (
        "Work per second of training, medians of outer iterations: where a run has some that began "
        "with fixed masks, of these."
    )
    return Drawn(figure, rows, [note])


def scaling_series(run: Run) -> str:
    """Return what runs of one curve have in common: their work is counted in the same unit."""
    what = [str(run.setting(key, "")) for key in ("method", "model", "dataset")]
    if local_steps_of(run) > 0:
        what.append("by steps")
    if fixed_masks(run).any():
        what.append("with fixed masks")
    return " ".join(filter(None, what))


def refuse_growing(run: Run) -> None:
    """Raise UserError for a run whose outer iterations have more and more steps."""
    method = str(run.setting("method"))
    if method in BY_NAME and BY_NAME[method].quadratic_interval:
        where = quote(shown(run.path), 250)
        raise UserError(
            f"figure 9: outer iterations of {method} have more and more local steps, so that their "
            f"seconds tell no speed; leave {where} away"
        )


def fixed_masks(run: Run) -> np.ndarray:
    """Return which outer iterations began with masks that were fixed; bool."""
    return np.append(False, run.column("frozen")[:-1] == 1)


def local_steps_of(run: Run) -> int:
    """Return the local steps of the outer iterations that are measured, 0 by epochs.

    Raises UserError where that is not known.
    """
    try:
        fixed = int(run.setting("frozen-local-steps", 0)) if fixed_masks(run).any() else 0
        return fixed or int(run.setting("local-steps", 0))
    except (TypeError, ValueError):
        raise lacking("9", run, "local-epochs or local-steps in its config.toml") from None


def only_ranks_of(run: Run) -> int:
    """Return how many ranks a run had; raise UserError where that changed, or is not known."""
    known = sorted({len(record.node) for record in read_ranks(run.path)} or {sum(run.sizes())})
    if len(known) > 1:
        where, numbers = quote(shown(run.path), 250), " and ".join(map(str, known))
        raise UserError(f"figure 9: the ranks of {where} changed ({numbers}); leave it away")
    if not known[0]:
        raise lacking("9", run, "a number of ranks (it is not complete)")
    return known[0]


def measure(run: Run) -> tuple[int, float]:
    """Return the number of ranks of a run and its work per second of training.

    Raises UserError where it lacks what that takes.
    """
    ranks = only_ranks_of(run)
    if not run.has("seconds.local"):
        raise lacking("9", run, "seconds by phase")
    chosen = fixed_masks(run)
    if not chosen.any():
        # The first outer iteration warms caches up.
        chosen = np.arange(len(chosen)) >= min(1, len(chosen) - 1)
    columns = [run.filled(f"seconds.{phase}")[chosen] for phase in MEASURED_PHASES]
    return ranks, work_of(run, ranks) / sum(float(np.median(column)) for column in columns)


def work_of(run: Run, ranks: int) -> float:
    """Return the work of an outer iteration: epochs, or images where steps are counted.

    Raises UserError where neither is known.
    """
    steps = local_steps_of(run)
    try:
        if steps > 0:
            return float(steps * ranks * int(run.setting("batch-size")))
        return float(Fraction(str(run.setting("local-epochs"))))
    except (TypeError, ValueError, ZeroDivisionError):
        raise lacking("9", run, "local-epochs or local-steps in its config.toml") from None


# --------------------------------------------------------------------------------------------------
# Figure 12
# --------------------------------------------------------------------------------------------------


def ratios(runs: Sequence[Run]) -> Drawn:
    """Draw figure 12 from runs with different keep ratios."""
    for run in runs:
        if run.measure is not ACCURACY or np.isnan(run.final):
            raise lacking("12", run, "an accuracy")
        if not run.complete:
            raise lacking("12", run, "an end: it is not complete")
    points = {run.path: (ratio_series(run), ratio_of(run)) for run in runs}
    found: dict[str, dict[float, list[Run]]] = {}
    for name, some in curves(runs, points, RATIOS_APART).items():
        for run in some:
            found.setdefault(name, {}).setdefault(points[run.path][1], []).append(run)
    known = {ratio for series in found.values() for ratio in series}
    if len(known) < 2:
        raise UserError("figure 12 needs runs with two or more keep ratios (--keep-ratio)")
    figure, panel = new_panel(3.6)
    rows = []
    for number, (name, series) in enumerate(found.items()):
        ordered, look = sorted(series), look_of(number)
        seeds = {x: [run.final for run in series[x]] for x in ordered}
        spread = {x: stdev(some) if len(some) > 1 else 0.0 for x, some in seeds.items()}
        drawing = {"capsize": 3, "marker": marker_of(number), "label": plain(name), **look}
        panel.errorbar(ordered, list(map(mean, seeds.values())), yerr=[*spread.values()], **drawing)
        for x, some in seeds.items():
            panel.plot([x] * len(some), some, "_", color=look["color"], markersize=9)
            many = f"{len(some)} run{'s' if len(some) > 1 else ''}"
            apart = f" ± {spread[x]:.2f}" if len(some) > 1 else ""
            # Of its own method, on input channels, and of the network that is not pruned.
            known = as_in_the_paper(series[x][0]) or (x == 1 and name.startswith("dense"))
            paper = PAPER_ACCURACY.get(x, NONE) if known else NONE
            here = f"{mean(some):.2f}{apart} % ({many})"
            rows.append(beside(series[x][0], f"{name}, keep {x:g}", here, paper))
    panel.set_xlim(0, 1.05)
    pruning = [run for run in runs if BY_NAME[run.setting("method")].keeps_a_share]
    counted = " or ".join(sorted({keep_by(run) for run in pruning})) or "groups"
    panel.set_xlabel(f"keep ratio: share of the {counted} that is kept")
    panel.set_ylabel(f"{ended_on(runs)} accuracy % at the end")
    legend_above(panel, 3)
    single = [x for series in found.values() for x in series if len(series[x]) == 1]
    notes = ["Bars: standard deviation over seeds; dashes: each run."]
    if single:
        notes.append("Where there is one run there is no spread.")
    return Drawn(figure, rows, [*notes, *held_out(runs), *unequal(runs)])


def ratio_of(run: Run) -> float:
    """Return the keep ratio of a run, 1 where it prunes nothing."""
    method = run.setting("method")
    if BY_NAME[method].removes:
        raise lacking("12", run, f"a keep ratio: {method} has none")
    if not BY_NAME[method].keeps_a_share:
        return 1.0
    return float(np.prod(run.setting("keep-ratio", 1.0)))


def ratio_series(run: Run) -> str:
    """Return what runs of one curve have in common."""
    method = str(run.setting("method"))
    if not BY_NAME[method].keeps_a_share:
        return method
    kinds, counted = " ".join(run.setting("groups", ())), keep_by(run)
    by = f"by {counted}" if counted != "groups" else ""
    return ", ".join(filter(None, (method, kinds, by)))


def keep_by(run: Run) -> str:
    """Return what the keep ratio of a run counts."""
    return str(run.setting("keep-by", "groups"))


OF_RUNS = {
    "5": run_figures.accuracy,
    "6a": run_figures.payload,
    "6b": run_figures.volume,
    "7": run_figures.waiting,
    "8": run_figures.split,
    "9": scaling,
    "12": ratios,
}
