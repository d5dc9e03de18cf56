"""Tables of a comparison: what each method reached and cost, from what its runs measured."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from prunex_mpi.base.tables import Cell, Table
from prunex_mpi.base.units import MIB
from prunex_mpi.methods.exchanges import operations_of
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Measured:
    """What one run measured, as world rank 0 saw it; all sums are over the run.

    `accuracy` is a fraction. `samples` are those that steps were taken on, `extra_samples` those
    that the method looked at besides, to decide what to prune. `payload_bytes` are operands that
    one worker hands to collectives between nodes, masks included, `metadata_bytes` the part of them
    that says where values belong, `dense_bytes` what dense SGD hands over for the same steps.
    `sync_s` is waiting for messages, `own_s` the method's own work. Of `weights`, the elements of
    matrices and kernels in the delivered model, `zeros` are 0 and `line_zeros` of these fill whole
    rows or columns. `operations` is what it calls to send between nodes.
    """

    accuracy: float
    loss: float
    samples: int
    extra_samples: int
    epochs: float
    steps: int
    payload_bytes: int
    sent_bytes: int
    metadata_bytes: int
    dense_bytes: int
    sync_s: float
    own_s: float
    local_s: float
    train_s: float
    parameters: int
    parameters_left: int
    weights: int
    zeros: int
    line_zeros: int
    forward_s: float
    dense_forward_s: float
    speakers: int
    ranks: int
    operations: str


@dataclass(frozen=True)
class Outcome:
    """One run: `measured` is None where it diverged, and `problem` then says how."""

    method: str
    seed: int
    lr: float
    measured: Measured | None
    problem: str = ""


@dataclass(frozen=True)
class Tuning:
    """The short runs of one method: held-out accuracy per learning rate, None where it diverged.

    `lr` is None where every one of them diverged.
    """

    method: str
    accuracies: tuple[float | None, ...]
    lr: float | None


def choose_rate(grid: Sequence[float], runs: Sequence[Outcome]) -> float | None:
    """Return the rate of highest accuracy, of these the one of lowest loss; None if none ran."""
    ran = [
        (-run.measured.accuracy, run.measured.loss, lr)
        for lr, run in zip(grid, runs, strict=True)
        if run.measured is not None
    ]
    return min(ran)[2] if ran else None


def by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each method, both in the order of `outcomes`."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.method, []).append(outcome)
    return found


def require_same_work(outcomes: Sequence[Outcome]) -> None:
    """Raise RuntimeError unless all runs that ended were trained on the same number of samples."""
    measured = {o.method: o.measured for o in outcomes if o.measured is not None}
    trained = {method: m.samples for method, m in measured.items()}
    if len(set(trained.values())) > 1:
        raise RuntimeError(f"methods were not trained on the same number of samples: {trained}")
    if any(m.extra_samples < 0 for m in measured.values()):
        raise RuntimeError(f"methods have drawn fewer samples than they report: {measured}")


def results_table(
    title: str, seeds: Sequence[int], outcomes: Sequence[Outcome], notes: Sequence[str]
) -> Table:
    """Return the table of quality and cost: a row per method, means over the seeds that ended."""
    rows: list[tuple[Cell, ...]] = []
    for method, runs in by_method(outcomes).items():
        ended = [run.measured for run in runs if run.measured is not None]
        accuracy = [
            "diverged" if run.measured is None else 100 * run.measured.accuracy for run in runs
        ]
        average = mean(100 * m.accuracy for m in ended) if ended else None
        payload = _mean(ended, lambda m: m.payload_bytes / MIB)
        rows.append(
            (
                method,
                runs[0].lr,
                *accuracy,
                average,
                _mean(ended, lambda m: m.epochs),
                ended[0].samples if ended else None,
                payload,
                payload / average if average else None,
                _mean(ended, lambda m: m.sent_bytes / MIB),
                _mean(ended, lambda m: 1e3 * m.sync_s / m.steps),
                _mean(ended, lambda m: m.sync_s / m.epochs),
                _mean(ended, lambda m: 1e3 * m.own_s / m.steps),
                _mean(ended, lambda m: 100 * m.own_s / m.local_s),
                _mean(ended, lambda m: m.train_s),
                round(mean(m.parameters_left for m in ended)) if ended else None,
            )
        )
    columns = (
        "method",
        "lr",
        *(f"accuracy %, seed {seed}" for seed in seeds),
        "mean",
        "epochs",
        "samples",
        "payload MiB",
        "MiB/point",
        "sent MiB",
        "sync ms/step",
        "sync s/epoch",
        "own ms/step",
        "own %",
        "train s",
        "parameters left",
    )
    explained = (
        "payload: operands that one rank that speaks between nodes hands to collectives in the "
        "whole run, masks included; MiB/point: of it, per point of accuracy; sent: what leaves a "
        "node for it by ring algorithms",
        "sync: the phases that exchange messages, between nodes and inside them, waiting for the "
        "slowest rank included; own: the method's other work beside forward, backward and step, "
        "and its share of these; train: all but evaluation",
        "times as rank 0 takes them; means over the seeds; parameters left: those that are not 0",
    )
    extra = [
        f"{method}: {max(m.extra_samples for m in ended):,} samples more, not trained on, to "
        "decide what to prune"
        for method, runs in by_method(outcomes).items()
        if (ended := [run.measured for run in runs if run.measured is not None])
        and any(m.extra_samples for m in ended)
    ]
    problems = [
        f"{run.method}, seed {run.seed}: {run.problem}" for run in outcomes if run.measured is None
    ]
    return Table(title, columns, tuple(rows), (*explained, *notes, *extra, *problems))


def operations(settings: Settings) -> str:
    """Return what a run calls to send between nodes, in the order of its messages."""
    words = " ".join(operation for _, _, operation, _ in operations_of(settings))
    return ", ".join(dict.fromkeys(re.findall(r"All\w+|Reduce|Bcast", words)))


def measured_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the columns of Table 1 of the PruneX paper, measured: a row per method."""
    methods = by_method(outcomes)
    waits = {}
    for method, runs in methods.items():
        ended = [run.measured for run in runs if run.measured is not None]
        waits[method] = _mean(ended, lambda m: m.sync_s)
    rows: list[tuple[Cell, ...]] = []
    for method, runs in methods.items():
        ended = [run.measured for run in runs if run.measured is not None]
        wait, dense_wait = waits[method], waits.get("dense")
        rows.append(
            (
                method,
                _mean(ended, lambda m: 100 * m.zeros / m.weights),
                _mean(ended, lambda m: 100 * m.line_zeros / m.zeros if m.zeros else None),
                _mean(ended, lambda m: 100 * m.metadata_bytes / max(1, m.payload_bytes)),
                ended[0].operations if ended else None,
                f"{ended[0].speakers} of {ended[0].ranks} ranks" if ended else None,
                _mean(ended, lambda m: m.dense_bytes / max(1, m.payload_bytes)),
                dense_wait / wait if dense_wait and wait else None,
                _mean(ended, lambda m: m.dense_forward_s / m.forward_s),
            )
        )
    columns = (
        "method",
        "sparsity: % zero",
        "in whole lines %",
        "metadata %",
        "operations between nodes",
        "topology: who speaks",
        "bytes saved, times",
        "sync saved, times",
        "inference, times",
    )
    return Table(
        "The same methods in the columns of the PruneX paper's Table 1, measured",
        columns,
        tuple(rows),
        (
            "% zero: of the weights of kernels and matrices; in whole lines: the part of them that "
            "fills rows or columns of C_out x (C_in kh kw), which a smaller network does without",
            "metadata: indices, bitmaps and masks, as a share of the payload",
            "saved: what dense SGD hands over in these steps over what the method does, and the "
            "synchronisation time of dense in this table over the method's",
            "inference: the forward pass of the dense network over that of the network as training "
            "leaves it, in turns",
        ),
    )


def tuning_table(grid: Sequence[float], tunings: Sequence[Tuning], how: str) -> Table:
    """Return the held-out accuracy of each method at each learning rate of the grid."""
    rows = []
    for tuning in tunings:
        cells = ["diverged" if a is None else 100 * a for a in tuning.accuracies]
        at_edge = len(grid) > 1 and tuning.lr in (min(grid), max(grid))
        rows.append((tuning.method, *cells, tuning.lr, "yes" if at_edge else "no"))
    columns = ("method", *(f"accuracy % at {lr:g}" for lr in grid), "chosen", "end of the grid")
    return Table("Learning rates", columns, tuple(rows), (how,))


def _mean(measured: Sequence[Measured], value: Callable[[Measured], float | None]) -> float | None:
    """Return the mean over the runs, None where there is none or one of them has no value."""
    values = [value(m) for m in measured]
    return mean(values) if values and None not in values else None
