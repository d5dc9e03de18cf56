"""The tables of a comparison: what each row reached and cost, its trials, its way to a target."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, stdev

from prunex_mpi.base.tables import Cell, Table, with_losses
from prunex_mpi.base.units import MIB, wire_s
from prunex_mpi.research.outcomes import Comparison, Measured, Outcome, Point, by_row, ended

# Links to tell times to a target for: names, 10^9 bits per second.
LINKS = {"20 Mbit/s": 0.02, "100 Mbit/s": 0.1, "1 Gbit/s": 1.0}
BASELINE = "dense"


def tables_of(found: Comparison, targets: Sequence[float] = ()) -> list[Table]:
    """Return all tables of a comparison, with one of how soon each of `targets` is reached."""
    tables = [results_table(found), *(target_table(found, target) for target in targets)]
    return [*tables, tuning_table(found)] if found.tunings else tables


def shown(runs: Sequence[Outcome]) -> list[float]:
    """Return how good the networks of those runs are that ended, as tables show it."""
    return [run.quality.shown for run in runs if run.measured is not None]


def places_of(found: Comparison) -> dict[str, int]:
    """Return the places of the rows by mean accuracy, or by mean loss where there is none.

    Left out are those of which a run diverged or whose trials ended at chance level.
    """
    hopeless = {tuning.row for tuning in found.tunings if tuning.chance}
    means = {
        row: mean(shown(runs))
        for row, runs in by_row(found.outcomes).items()
        if row not in hopeless and len(ended(runs)) == len(runs)
    }
    sign = 1 if measures_accuracy(found) else -1
    return {
        row: 1 + sum(sign * other > sign * means[row] for other in means.values()) for row in means
    }


def measures_accuracy(found: Comparison) -> bool:
    """Return whether networks have an accuracy, and not only a loss."""
    return all(m.accuracy is not None for m in ended(found.outcomes))


def quality_names(found: Comparison) -> tuple[str, str]:
    """Return what the mean is of, with its unit, and on which data."""
    what = "accuracy %" if measures_accuracy(found) else "loss"
    return what, "test" if found.revealed or not found.plan else "validation"


def results_table(found: Comparison) -> Table:
    """Return the table of quality and cost: a row per method, means over the seeds that ended."""
    places, rows = places_of(found), []
    methods = by_row(found.outcomes)
    dense = _mean(ended(methods.get(BASELINE, [])), lambda m: m.sent_bytes)
    for row, runs in methods.items():
        done = ended(runs)
        sent = _mean(done, lambda m: m.sent_bytes)
        validation = {"validation": _mean(done, lambda m: m.shown)}
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
                "parameters left": round(mean(m.parameters_left for m in done)) if done else None,
            }
        )
    cells = tuple(tuple(row.values()) for row in rows)
    table = Table(found.title, tuple(rows[0]), cells, tuple(_notes(found)))
    return table if measures_accuracy(found) else with_losses(table, "lr", "epochs")


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
        if tuning.chance:
            text = "no better than guessing in any trial, so it has no place"
            notes.append(f"{tuning.row}: {text}")
    for row, runs in by_row(found.outcomes).items():
        if more := max((m.extra_samples for m in ended(runs)), default=0):
            text = f"{more:,} samples more, not trained on, to decide what to prune"
            notes.append(f"{row}: {text}")
    failed = [run for run in found.outcomes if run.measured is None]
    return notes + [f"{run.row}, seed {run.seed}: {run.problem}" for run in failed]


def _of_the_protocol(found: Comparison) -> str:
    """Return on which data networks were judged, and of which plan they are."""
    if not found.plan:
        return "a former protocol: choices were made with test accuracies known"
    when = "data held out of the training set; no test data were read"
    if found.revealed:
        when = f"test data, looked at once, {found.revealed}"
    return f"plan {found.plan}; networks are judged on {when}"


def _qualities(found: Comparison, runs: Sequence[Outcome]) -> dict[str, Cell]:
    """Return mean, standard deviation and each seed's accuracy or loss; None: no such run.

    Where one diverged there is no mean, which would be of the better ones.
    """
    values, cells = shown(runs), {run.seed: _cell(run) for run in runs}
    whole = len(values) == len(runs)
    what, where = quality_names(found)
    return {
        f"{where} {what}": mean(values) if whole else None,
        "+-": stdev(values) if whole and len(values) > 1 else None,
        **{f"seed {seed}": cells.get(seed) for seed in found.seeds},
    }


def _cell(run: Outcome) -> Cell:
    if run.quality is None:
        return "failed" if run.failed else "diverged"
    return run.quality.shown


def target_table(found: Comparison, target: float) -> Table:
    """Return what each row has sent and how long it takes until it has reached `target`."""
    rows = []
    for row, runs in by_row(found.outcomes).items():
        reached = [(m, point) for m in ended(runs) if (point := first_held(m.curve, target))]
        sent = mean(point.sent_bytes for _, point in reached) / MIB if reached else None
        timed = [(m, p.compute_s, p.sent_bytes) for m, p in reached if p.compute_s is not None]
        seconds = (
            mean(seconds_at(gbit, *run) for run in timed) if timed else None
            for gbit in LINKS.values()
        )
        rows.append((row, f"{len(reached)} of {len(runs)}", sent, *seconds))
    what = f"{100 * target:g} % accuracy" if measures_accuracy(found) else f"a loss of {target:g}"
    notes = (
        "the first evaluation on held-out data that reaches it, held at the next one; means over "
        "the seeds that do",
        "seconds: those of computing, as measured, and the bytes at the link's rate, of which "
        "overlapping steps hide what they can; latency is not counted; - where they were not kept",
    )
    columns = ("row", "seeds", "sent MiB", *(f"s at {name}" for name in LINKS))
    return Table(f"To {what}", columns, tuple(rows), notes)


def first_held(curve: Sequence[Point], target: float) -> Point | None:
    """Return the first evaluation that reaches the target, as the next one does; None if none."""
    for here, after in pairwise(curve):
        if here.reaches(target) and after.reaches(target):
            return here
    return None


def seconds_at(gbit: float, measured: Measured, compute_s: float, sent_bytes: int) -> float:
    """Return the seconds that a part of a run takes on a link of so many 10^9 bits per second."""
    return compute_s + max(0.0, wire_s(gbit, sent_bytes) - measured.hidden * compute_s)


def tuning_table(found: Comparison) -> Table:
    """Return what each row reached in each of its trials, on data held out."""

    def words(run: Outcome) -> str:
        return ", ".join(f"{key} {value}" for key, value in run.point.items())

    def text(run: Outcome) -> str:
        cell = _cell(run)
        return cell if isinstance(cell, str) else f"{cell:.4g}"

    rows = []
    for tuning in found.tunings:
        chosen = "none" if tuning.best is None else words(tuning.runs[tuning.best])
        edge = ", ".join(tuning.at_edge) or "no"
        tried = "; ".join(f"{words(run)}: {text(run)}" for run in tuning.runs)
        rows.append((tuning.row, chosen, edge, "yes" if tuning.chance else "no", tried))
    columns = ("row", "chosen", "at the edge", "at chance", "trials")
    what, _ = quality_names(found)
    return Table("Trials", columns, tuple(rows), (f"{what} on data held out", *found.notes[:1]))


def _mean(measured: Sequence[Measured], value: Callable[[Measured], float]) -> float | None:
    """Return the mean over the runs, None where there is none."""
    return mean(map(value, measured)) if measured else None
