"""The tables of a comparison: what each row reached and cost, and at equal budgets."""

import math
from collections.abc import Callable, Sequence
from statistics import mean, median, stdev

import numpy as np

from prunex_mpi.base.record_keys import LOSS
from prunex_mpi.base.tables import Cell, LossCell, Table
from prunex_mpi.base.units import MIB, wire_s
from prunex_mpi.tools.report.comparison import Comparison, Measured, Outcome, Point, ended

# Links to tell times for: names, 10^9 bits per second.
LINKS = {"20 Mbit/s": 0.02, "100 Mbit/s": 0.1, "1 Gbit/s": 1.0}
BASELINE = "dense"
# Of the fewest samples that a row was trained on.
SHARES = (0.25, 0.5, 1.0)
# What a run has spent where it was evaluated, None where that was not kept.
Cost = Callable[[Measured, Point], float | None]


def tables_of(found: Comparison) -> list[Table]:
    """Return all tables of a comparison."""
    return [results_table(found), *equal_tables(found), *tuning_tables(found)]


def shown(runs: Sequence[Outcome]) -> list[float]:
    """Return how good the networks of those runs are that ended, as tables show it."""
    return [run.quality.shown for run in runs if run.measured is not None]


def places_of(found: Comparison) -> dict[str, int]:
    """Return the places of the rows by mean accuracy, or by mean loss where there is none.

    Left out are those of which a run diverged.
    """
    means = {
        row: mean(shown(runs))
        for row, runs in found.by_row.items()
        if len(ended(runs)) == len(runs)
    }
    sign = 1 if found.measure.higher_is_better else -1
    return {
        row: 1 + sum(sign * other > sign * means[row] for other in means.values()) for row in means
    }


def quality_names(found: Comparison) -> tuple[str, str]:
    """Return what the mean is of, with its unit, and on which data."""
    what = "loss" if found.measure is LOSS else "accuracy %"
    return what, "test" if found.revealed else found.held_out


def _quality_cell(found: Comparison, value: float | None) -> Cell:
    """Return an accuracy or a loss as a cell."""
    return LossCell(value) if value is not None and found.measure is LOSS else value


def _mean(measured: Sequence[Measured], value: Callable[[Measured], float]) -> float | None:
    """Return the mean over the runs, None where there is none."""
    return mean(map(value, measured)) if measured else None


# --------------------------------------------------------------------------------------------------
# Whole runs
# --------------------------------------------------------------------------------------------------


def results_table(found: Comparison) -> Table:
    """Return the table of quality and cost: a row per method, means over the seeds that ended."""
    places, rows = places_of(found), []
    dense = _mean(ended(found.by_row.get(BASELINE, [])), lambda m: m.sent_bytes)
    for row, runs in found.by_row.items():
        done = ended(runs)
        sent = _mean(done, lambda m: m.sent_bytes)
        validation = {"validation": _quality_cell(found, _mean(done, lambda m: m.shown))}
        rows.append(
            {
                "row": row,
                "place": places.get(row),
                "lr": runs[0].lr,
                **_qualities(found, runs),
                **(validation if found.revealed else {}),
                "epochs": _mean(done, lambda m: m.epochs),
                "samples": done[0].samples if done else None,
                "sent MiB": None if sent is None else sent / MIB,
                "of dense %": 100 * sent / dense if dense and sent is not None else None,
                "metadata %": _mean(
                    done, lambda m: 100 * m.metadata_bytes / max(1, m.payload_bytes)
                ),
                "sync ms/step": _mean(done, lambda m: 1e3 * m.sync_s / m.steps),
                "own ms/step": _mean(done, lambda m: 1e3 * m.own_s / m.steps),
                "own %": _mean(done, lambda m: 100 * m.own_s / m.local_s),
                "train s": _mean(done, lambda m: m.train_s),
                "parameters left": _parameters_left(done),
            }
        )
    cells = tuple(tuple(row.values()) for row in rows)
    return Table(found.title, tuple(rows[0]), cells, tuple(_notes(found)))


def _parameters_left(done: Sequence[Measured]) -> int | None:
    return round(mean(m.parameters_left for m in done)) if done else None


def _notes(found: Comparison) -> list[str]:
    """Return what the table of results has to say beside its figures."""
    notes = [
        "place: by the mean; +-: standard deviation over the seeds; sent: what leaves a node in "
        "the whole run by ring algorithms, masks included; metadata: indices, bitmaps and masks, "
        "as a share of the operands",
        _of_the_protocol(found),
        "sync: all messages, between nodes and inside them, votes and losses too, waiting for the "
        "slowest rank included; own: the method's work beside forward, backward and step, coding "
        "too, and its share of these; train: all but evaluation",
        "times as rank 0 takes them; means over the seeds; parameters left: those not pruned",
        *found.notes,
    ]
    for tuning in found.tunings:
        if tuning.at_edge:
            edge = ", ".join(tuning.at_edge)
            notes.append(f"{tuning.row}: its best trial is at the edge of its grid ({edge})")
    for row, runs in found.by_row.items():
        if more := max((m.extra_samples for m in ended(runs)), default=0):
            text = f"{more:,} samples more, not trained on, to decide what to prune"
            notes.append(f"{row}: {text}")
    failed = [run for run in found.outcomes if run.measured is None]
    return notes + [f"{run.row}, seed {run.seed}: {run.problem}" for run in failed]


def _of_the_protocol(found: Comparison) -> str:
    """Return on which data networks were evaluated, and of which plan they are."""
    if not found.plan:
        return "a former protocol: choices were made with test accuracies known"
    when = "data held out of the training set; no test data were read"
    if found.revealed:
        when = f"test data, looked at once, {found.revealed}"
    return f"plan {found.plan}; networks are evaluated on {when}"


def _qualities(found: Comparison, runs: Sequence[Outcome]) -> dict[str, Cell]:
    """Return mean, standard deviation and each seed's accuracy or loss; None: no such run.

    Where one diverged there is no mean, which would be of the better ones.
    """
    values, cells = shown(runs), {run.seed: _outcome_cell(found, run) for run in runs}
    whole = len(values) == len(runs)
    what, where = quality_names(found)
    return {
        f"{where} {what}": _quality_cell(found, mean(values) if whole else None),
        "+-": _quality_cell(found, stdev(values) if whole and len(values) > 1 else None),
        **{f"seed {seed}": cells.get(seed) for seed in found.seeds},
    }


def _outcome_cell(found: Comparison, run: Outcome) -> Cell:
    return run.ending if run.quality is None else _quality_cell(found, run.quality.shown)


# --------------------------------------------------------------------------------------------------
# At equal budgets
# --------------------------------------------------------------------------------------------------


def equal_tables(found: Comparison) -> list[Table]:
    """Return what each row reached by equal samples, bytes and seconds, where there are any."""
    samples, sent = _ends(found, samples_at), _ends(found, sent_at)
    fewest = min(samples, default=0.0)
    seconds: list[tuple[str, Cost]] = [("measured", lambda _, point: point.train_s)]
    seconds += [(f"at {name}", seconds_on(gbit)) for name, gbit in LINKS.items()]
    timed = [(name, cost, _ends(found, cost)) for name, cost in seconds]
    budgets = {
        "samples": [(f"{share * fewest:,.0f}", samples_at, share * fewest) for share in SHARES],
        "bytes that leave a node": [
            (f"{power:,g} MiB", sent_at, power * MIB) for power in powers_between(sent)
        ],
        "seconds": [(f"{median(e):.3g} s {name}", cost, median(e)) for name, cost, e in timed if e],
    }
    notes = {
        "samples": "shares of the fewest samples that a row was trained on; those of an evaluation "
        "in proportion to its outer iteration",
        "bytes that leave a node": "a row that ends with fewer bytes counts with its end",
        "seconds": "those at which half of the rows are done, which count with their end; on a "
        "link computing as measured and the bytes at its rate, of which overlapping steps hide "
        "what they can",
    }
    return [
        _equal_table(found, what, some, notes[what])
        for what, some in budgets.items()
        if some and samples
    ]


def samples_at(measured: Measured, point: Point) -> float:
    """Return the samples that a run was trained on until it was evaluated."""
    return measured.samples * point.iteration / measured.curve[-1].iteration


def sent_at(_: Measured, point: Point) -> float:
    """Return the bytes that had left a node until a run was evaluated."""
    return point.sent_bytes


def seconds_on(gbit: float) -> Cost:
    """Return the cost in seconds on a link of so many 10^9 bits per second."""

    def cost(measured: Measured, point: Point) -> float | None:
        if point.compute_s is None:
            return None
        return seconds_at(gbit, measured, point.compute_s, point.sent_bytes)

    return cost


def seconds_at(gbit: float, measured: Measured, compute_s: float, sent_bytes: int) -> float:
    """Return the seconds that a part of a run takes on a link of so many 10^9 bits per second."""
    return compute_s + max(0.0, wire_s(gbit, sent_bytes) - measured.hidden * compute_s)


def powers_between(ends: Sequence[float]) -> list[float]:
    """Return the powers of ten, in MiB, between the least and most of some bytes, else the most.

    Nothing where nobody sends.
    """
    if not any(ends):
        return []
    least, most = (math.log10(max(1, choose(ends)) / MIB) for choose in (min, max))
    return [10.0**k for k in range(math.ceil(least), math.floor(most) + 1)] or [max(ends) / MIB]


def _ends(found: Comparison, cost: Cost) -> list[float]:
    """Return what the rows cost in whole, means over the seeds, of those for which it is known."""
    costs = ([cost(m, m.curve[-1]) for m in ended(r) if m.curve] for r in found.by_row.values())
    return [mean(known) for known in costs if known and None not in known]


def _equal_table(
    found: Comparison, what: str, budgets: Sequence[tuple[str, Cost, float]], note: str
) -> Table:
    """Return what each row reached by budgets: their names, what is spent of them, how much."""
    rows, speedups = [], {row: _speedup(ended(runs)) for row, runs in found.by_row.items()}
    faster = any(speedup is not None for speedup in speedups.values())
    for row, runs in found.by_row.items():
        values = [
            [quality_by(run.measured, cost, budget) for run in runs] for _, cost, budget in budgets
        ]
        means = [None if None in of_seeds else mean(of_seeds) for of_seeds in values]
        cells = [_quality_cell(found, value) for value in means]
        more = (speedups[row],) * faster
        rows.append((row, *cells, _parameters_left(ended(runs)), *more))
    quality, _ = quality_names(found)
    columns = ("row", *(name for name, _, _ in budgets), "parameters left")
    columns += ("inference, times as fast",) * faster
    notes = (
        f"{found.held_out} {quality}, means over the seeds, between evaluations on a straight "
        "line; -: not evaluated by then, or diverged",
        note,
        "parameters left at the end: what prunes late has all of them before",
    )
    return Table(f"At equal {what}", columns, tuple(rows), notes)


def quality_by(measured: Measured | None, cost: Cost, budget: float) -> float | None:
    """Return how good a run's network was, as tables show it, when it had spent a budget."""
    costs = [cost(measured, point) for point in measured.curve] if measured else []
    if not costs or None in costs or budget < costs[0]:
        return None
    return float(np.interp(budget, costs, [point.shown for point in measured.curve]))


def _speedup(done: Sequence[Measured]) -> float | None:
    """Return how many times as fast pruned networks are as in full size, None if not measured."""
    known = [m.speedup for m in done if m.speedup and m.parameters_left < m.parameters]
    return mean(known) if known else None


# --------------------------------------------------------------------------------------------------
# Trials
# --------------------------------------------------------------------------------------------------


def tuning_tables(found: Comparison) -> list[Table]:
    """Return the table of what each row reached in its trials, on data held out; [] without any."""
    if not found.tunings:
        return []

    def words(run: Outcome) -> str:
        return ", ".join(f"{key} {value}" for key, value in run.point.items())

    def text(run: Outcome) -> str:
        return run.ending if run.quality is None else f"{run.quality.shown:.4g}"

    rows = []
    for tuning in found.tunings:
        chosen = "none" if tuning.best is None else words(tuning.runs[tuning.best])
        edge = ", ".join(tuning.at_edge) or "no"
        tried = "; ".join(f"{words(run)}: {text(run)}" for run in tuning.runs)
        rows.append((tuning.row, chosen, edge, tried))
    columns = ("row", "chosen", "at the edge", "trials")
    what, _ = quality_names(found)
    notes = f"{what} on data held out", *found.notes[:1]
    return [Table("Trials", columns, tuple(rows), notes)]
