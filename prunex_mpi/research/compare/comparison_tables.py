"""Show a comparison: tables of what each row reached and cost, and accuracy over bytes and time."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import write_json
from prunex_mpi.base.tables import Cell, Table, as_json, format_table
from prunex_mpi.base.units import MIB
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.outcomes import (
    NOTHING,
    OF_RATES,
    Comparison,
    Measured,
    Outcome,
    Tuning,
    by_row,
    ended,
    lies_inside,
    to_dict,
)
from prunex_mpi.research.picture_files import save
from prunex_mpi.tools.drawing import new_figure, styled
from prunex_mpi.tools.report.comparisons import THIS_MACHINE, curves_of, draw_bytes, draw_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS: dict[str, tuple[str, Callable[[Measured], float]]] = {
    "bytes": ("sent MiB", lambda m: m.sent_bytes / MIB),
    "time": ("train s", lambda m: m.train_s),
}
BASELINE = "dense"
PANEL_INCHES, HEIGHT_INCHES, LEGEND_INCHES = 4.2, 4.0, 2.6
# What a row takes of the legend's height; the layout makes no room for a legend that is too high.
ROW_INCHES = 0.19
# More panels than these would be too small beside each other in a page of text.
IN_A_ROW = 3
# Bytes of a step that differ by no more are those of one method: stages are whole iterations.
SAME_BYTES = 0.05


def show(options: Options, found: Comparison, times: Mapping[str, Comparison]) -> None:
    """Print, write and draw; raise UserError."""
    tables = tables_of(found)
    # First of all: who reads the text through a pipe may close it.
    if options.json_file:
        whole = as_json(dict(found.machine), tables) | {"comparison": to_dict(found)}
        write_json(options.json_file, whole)
    text = "\n\n".join(["\n".join(found.machine.values()), *map(format_table, tables)])
    print(text, flush=True)
    if options.figure:
        draw(found, times, options.figure)


def tables_of(found: Comparison) -> list[Table]:
    """Return all tables of a comparison."""
    tables = [results_table(found)]
    tables += [equal_table(found, what, runs) for what, runs in found.equal.items()]
    tables.append(measured_table(found.outcomes))
    if found.tunings:
        tables.append(tuning_table(found))
    return tables


def ranks_of(found: Comparison) -> dict[str, int]:
    """Return the places of the rows by mean accuracy.

    Left out are those of which a run diverged or whose search ended at chance level.
    """
    hopeless = {tuning.row for tuning in found.tunings if tuning.chance}
    means = {
        row: mean(m.accuracy for m in ended(runs))
        for row, runs in by_row(found.outcomes).items()
        if row not in hopeless and len(ended(runs)) == len(runs)
    }
    return {row: 1 + sum(other > means[row] for other in means.values()) for row in means}


def results_table(found: Comparison) -> Table:
    """Return the table of quality and cost: a row per method, means over the seeds that ended."""
    places, rows = ranks_of(found), []
    methods = by_row(found.outcomes)
    dense = _mean(ended(methods.get(BASELINE, [])), lambda m: m.sent_bytes)
    for row, runs in methods.items():
        done = ended(runs)
        sent = _mean(done, lambda m: m.sent_bytes)
        rows.append(
            (
                row,
                places.get(row),
                runs[0].lr,
                *_accuracies(runs, found.seeds),
                _mean(done, lambda m: m.epochs),
                done[0].samples if done else None,
                None if sent is None else sent / MIB,
                100 * sent / dense if dense and sent is not None else None,
                _mean(done, lambda m: 1e3 * m.sync_s / m.steps),
                _mean(done, lambda m: 1e3 * m.own_s / m.steps),
                _mean(done, lambda m: 100 * m.own_s / m.local_s),
                _mean(done, lambda m: m.train_s),
                round(mean(m.parameters_left for m in done)) if done else None,
            )
        )
    columns = (
        "row",
        "place",
        "lr",
        *_accuracy_columns(found),
        "epochs",
        "samples",
        "sent MiB",
        "of dense %",
        "sync ms/step",
        "own ms/step",
        "own %",
        "train s",
        "parameters left",
    )
    explained = (
        "place: by mean accuracy; +-: standard deviation over the seeds; sent: what leaves a node "
        "in the whole run by ring algorithms, masks included",
        "sync: all messages, between nodes and inside them, votes and losses too, waiting for the "
        "slowest rank included; own: the method's work beside forward, backward and step, coding "
        "too, and its share of these; train: all but evaluation",
        "times as rank 0 takes them; means over the seeds; parameters left: those that are not 0",
    )
    chance = [
        f"{tuning.row}: no better than guessing at any learning rate, so it has no place"
        for tuning in found.tunings
        if tuning.chance
    ]
    extra = [
        f"{row}: {max(m.extra_samples for m in ended(runs)):,} samples more, not trained on, to "
        "decide what to prune"
        for row, runs in methods.items()
        if any(m.extra_samples for m in ended(runs))
    ]
    problems = [
        f"{run.row}, seed {run.seed}: {run.problem}"
        for run in found.outcomes
        if run.measured is None
    ]
    notes = (*explained, *found.notes, *chance, *_misled(found), *extra, *problems)
    return Table(found.title, columns, tuple(rows), notes)


def equal_table(found: Comparison, what: str, runs: Sequence[Outcome]) -> Table:
    """Return how far rows get with what the reference has spent of `what`, bytes or time."""
    reference = found.reference[what]
    unit, value = UNITS[what]
    full = by_row(found.outcomes)
    shown = {reference: full[reference], **by_row(runs)}
    rows = [
        (
            row,
            some[0].lr,
            *_accuracies(some, found.seeds),
            _mean(ended(full[row]), lambda m: 100 * m.accuracy),
            _mean(ended(some), lambda m: m.epochs),
            _mean(ended(some), value),
        )
        for row, some in shown.items()
    ]
    columns = ("row", "lr", *_accuracy_columns(found), "at full length", "epochs", unit)
    spent = {row: _mean(ended(some), value) for row, some in full.items() if ended(some)}
    limit = spent.get(reference, 0)
    cheap = [row for row in spent if row not in shown and spent[row] <= limit]
    # Of rows that came from another file.
    missing = [row for row in spent if row not in shown and spent[row] > limit]
    notes = [f"trained anew, with the whole course of the learning rate, as far as {unit} go"]
    notes.append(_of_shorter_rates(found.equal_tunings.get(what, ()), by_row(runs)))
    if cheap:
        notes.append(f"at full length no dearer than {reference}: {', '.join(cheap)}")
    if missing:
        notes.append(f"dearer, and not trained anew: {', '.join(missing)}")
    over = [row for row, some in by_row(runs).items() if (_mean(ended(some), value) or 0) > limit]
    if over:
        notes.append(f"more than {reference} nevertheless, by whole iterations: {', '.join(over)}")
    fewer = [row for row, some in by_row(runs).items() if len(some) < len(full[reference])]
    if fewer:
        notes.append(f"of fewer seeds than {reference}: {', '.join(fewer)}")
    return Table(f"With the {what} of {reference}", columns, tuple(rows), tuple(notes))


def _of_shorter_rates(tunings: Sequence[Tuning], rows: Iterable[str]) -> str:
    """Return how the learning rates of rows at equal bytes or time were chosen."""
    searched = [tuning.row for tuning in tunings]
    kept = [row for row in rows if row not in searched]
    if not searched:
        return "learning rates: those of the whole runs"
    chance = [tuning.row for tuning in tunings if tuning.chance]
    return (
        "learning rates: searched for this length"
        + (f"; those of the whole runs: {', '.join(kept)}" if kept else "")
        + (f"; at chance whatever the rate: {', '.join(chance)}" if chance else "")
    )


def _accuracy_columns(found: Comparison) -> tuple[str, ...]:
    return ("mean %", "+-", *(f"seed {seed}" for seed in found.seeds))


def _accuracies(runs: Sequence[Outcome], seeds: Sequence[int]) -> tuple[Cell, ...]:
    """Return mean, standard deviation and each seed's accuracy, in percent; None: no such run.

    Where one diverged there is no mean, which would be of the better ones.
    """
    found = [100 * m.accuracy for m in ended(runs)]
    cells: dict[int, Cell] = {
        r.seed: "diverged" if r.measured is None else 100 * r.measured.accuracy for r in runs
    }
    whole = len(found) == len(runs)
    spread = stdev(found) if whole and len(found) > 1 else None
    return (mean(found) if whole and found else None, spread, *(cells.get(seed) for seed in seeds))


def measured_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the columns of Table 1 of the PruneX paper, measured: a row per method."""
    methods = by_row(outcomes)
    dense = ended(methods.get(BASELINE, []))
    dense_sent, dense_wait = (
        _mean(dense, lambda m: m.sent_bytes),
        _mean(dense, lambda m: m.sync_s),
    )
    rows: list[tuple[Cell, ...]] = []
    for row, runs in methods.items():
        done = ended(runs)
        sent, wait = _mean(done, lambda m: m.sent_bytes), _mean(done, lambda m: m.sync_s)
        rows.append(
            (
                row,
                _mean(done, lambda m: 100 * m.zeros / m.weights),
                _mean(done, lambda m: 100 * m.line_zeros / m.zeros if m.zeros else None),
                _mean(done, lambda m: 100 * m.metadata_bytes / max(1, m.payload_bytes)),
                done[0].operations if done else None,
                f"{done[0].speakers} of {done[0].ranks} ranks" if done else None,
                dense_sent / sent if dense_sent and sent else None,
                dense_wait / wait if dense_wait and wait else None,
                _mean(done, lambda m: m.dense_forward_s / m.forward_s),
                _mean(done, lambda m: m.forward_spread * m.dense_forward_s / m.forward_s),
            )
        )
    columns = (
        "row",
        "sparsity: % zero",
        "in whole lines %",
        "metadata %",
        "operations between nodes",
        "topology: who speaks",
        "bytes saved, times",
        "sync saved, times",
        "inference, times",
        "+-",
    )
    return Table(
        "The same rows in the columns of the PruneX paper's Table 1, measured",
        columns,
        tuple(rows),
        (
            "% zero: of the weights of kernels and matrices; in whole lines: the part of them that "
            "fills rows or columns of C_out x (C_in kh kw), which a smaller network does without",
            "metadata: indices, bitmaps and masks, as a share of the operands",
            "saved: what leaves a node, and the synchronisation time, of the row dense over the "
            "row's own",
            "inference: the forward pass of the dense network over that of the exported, smaller "
            "one, medians of turns; +-: half the distance of the quartiles",
        ),
    )


def tuning_table(found: Comparison) -> Table:
    """Return the held-out accuracy of each row at each learning rate that was tried."""
    tunings = {tuning.row: tuning for tuning in found.tunings}
    for what, some in found.equal_tunings.items():
        tunings |= {f"{tuning.row}, equal {what}": tuning for tuning in some}
    grid = sorted({lr for tuning in tunings.values() for lr in tuning.scores})
    rows = []
    for name, tuning in tunings.items():
        scores = tuning.scores
        cells: list[Cell] = []
        for lr in grid:
            tried = scores.get(lr)
            cells.append(None if tried is None else _cell(tried[0]))
        inside = "yes" if lies_inside(scores) else "no"
        rows.append((name, *cells, tuning.lr, inside, "yes" if tuning.chance else "no"))
    columns = ("row", *(f"{lr:g}" for lr in grid), "chosen", "inside", "at chance")
    chosen = [note for note in found.notes if note.startswith(OF_RATES)]
    notes = ("accuracy % on held-out images; -: not tried", *chosen)
    return Table("Learning rates", columns, tuple(rows), notes)


def _misled(found: Comparison) -> list[str]:
    """Return a line for each row that did better in a shorter run, which chose its rate."""
    lines, methods = [], by_row(found.outcomes)
    for tuning in found.tunings:
        chosen = ended([run for run in tuning.runs if run.lr == tuning.lr])
        done = ended(methods.get(tuning.row, []))
        if not chosen or not done or chosen[0].samples >= done[0].samples:
            continue
        reached, before = mean(m.accuracy for m in done), chosen[0].accuracy
        if reached < before:
            lines.append(
                f"{tuning.row}: {100 * reached:.1f} % after whole runs, {100 * before:.1f} % after "
                "the shorter one that chose its learning rate, which may be too high for the "
                "whole: raise --tune-length"
            )
    return lines


def _cell(accuracy: float) -> Cell:
    return "diverged" if accuracy == NOTHING[0] else 100 * accuracy


def _mean(measured: Sequence[Measured], value: Callable[[Measured], float | None]) -> float | None:
    """Return the mean over the runs, None where there is none or one of them has no value."""
    values = [value(m) for m in measured]
    return mean(values) if values and None not in values else None


# --------------------------------------------------------------------------------------------------
# The figure
# --------------------------------------------------------------------------------------------------


def seconds_of(found: Comparison, times: Comparison) -> dict[str, float]:
    """Return what the runs of `found` take at the pace of `times`, by row.

    The same rows, perhaps shorter: stages that are shares of a run are as large a share of both. A
    row whose step sends something else there has another pace, and is left out.
    """
    whole, paced = _per_step(found), _per_step(times)
    return {
        row: paced[row][1] * steps
        for row, (sent, _, steps) in whole.items()
        if row in paced and math.isclose(sent, paced[row][0], rel_tol=SAME_BYTES)
    }


def _per_step(found: Comparison) -> dict[str, tuple[float, float, int]]:
    """Return of each row that ended bytes and seconds of a step, and its steps."""
    return {
        row: (
            mean(m.sent_bytes / m.steps for m in ended(runs)),
            mean(m.train_s / m.steps for m in ended(runs)),
            ended(runs)[0].steps,
        )
        for row, runs in by_row(found.outcomes).items()
        if ended(runs)
    }


def draw(found: Comparison, times: Mapping[str, Comparison], path: str) -> None:
    """Write the figure of a comparison, as `make_figure` makes it; raise UserError."""
    with styled():
        save(make_figure(found, times), path, "--figure")


def make_figure(found: Comparison, times: Mapping[str, Comparison]) -> "Figure":
    """Return a panel over bytes, and one over seconds for each of `times`, by the names there.

    Without `times` the seconds are those of the comparison itself. Raises UserError.
    """
    curves = curves_of(to_dict(found)["outcomes"])
    if not curves:
        raise UserError("--figure: no run was evaluated, so there is nothing to draw")
    paces = {name: seconds_of(found, other) for name, other in times.items()}
    paces = paces or {THIS_MACHINE: {curve.row: curve.train_s for curve in curves}}
    count = 1 + len(paces)
    columns = count if count <= IN_A_ROW else 2
    lines = math.ceil(count / columns)
    height = max(HEIGHT_INCHES * lines, ROW_INCHES * (len(curves) + 1))
    figure = new_figure(height, PANEL_INCHES * columns + LEGEND_INCHES)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    draw_bytes(panels[0], curves)
    for panel in panels[::columns]:
        panel.set_ylabel("test accuracy %")
    for panel, (name, pace) in zip(panels[1:], paces.items(), strict=False):
        draw_seconds(panel, curves, pace, name)
    for panel in panels[count:]:
        panel.remove()
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    return figure
