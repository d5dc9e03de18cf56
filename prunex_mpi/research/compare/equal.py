"""Train rows once more, only as far as the bytes or the seconds of another one go."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import mean

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.research.compare.outcomes import Outcome, Tuning, by_row, ended
from prunex_mpi.research.compare.rows import Row, settings_of
from prunex_mpi.research.compare.runs import Bench, run_row
from prunex_mpi.research.compare.tuning import hold_out, tune

# By row, then by seed: the share of its whole run that spends what is allowed.
Shares = dict[str, dict[int, Fraction]]


def run_equal(
    bench: Bench,
    rows: Sequence[Row],
    what: str,
    reference: str,
    rates: Mapping[str, float | None],
    outcomes: Sequence[Outcome],
) -> tuple[tuple[Outcome, ...], tuple[Tuning, ...]]:
    """Train what has spent more than `reference` once more, only as far as that goes.

    A learning rate that whole runs were given by a search is searched for the shorter ones too,
    and its course fits them. Returns the runs, and those that chose the rates. Collective on
    `world`.
    """
    options = bench.options
    shares = affordable_shares(bench, rows, what, reference, outcomes)
    tunings = _tune_shorter(bench, rows, shares, what)
    chosen = {tuning.row: tuning.lr for tuning in tunings}
    found: list[Outcome] = []
    for seed in options.seeds:
        wanted = [row for row in rows if seed in shares.get(row.name, {})]
        if not wanted:
            continue
        dataset = bench.load(settings_of(options.common, rows[0], seed))
        for row in wanted:
            share = shares[row.name][seed]
            if share == 1 and row.name not in chosen:
                found += [run for run in outcomes if (run.row, run.seed) == (row.name, seed)]
            else:
                found.append(run_row(bench, row, seed, {**rates, **chosen}, dataset, share, what))
    return tuple(found), tuple(tunings)


def affordable_shares(
    bench: Bench, rows: Sequence[Row], what: str, reference: str, outcomes: Sequence[Outcome]
) -> Shares:
    """Return how far the rows get that have spent more than `reference` in the mean.

    What a run may spend is decided by that of `reference` with the same seed, so that more seeds
    change nothing about these. Collective on `world`.
    """
    spent = spending(bench, what, outcomes)
    means = {
        name: mean(spent[name, run.seed] for run in runs if run.measured is not None)
        for name, runs in by_row(outcomes).items()
        if ended(runs)
    }
    options, shares = bench.options, {}
    limit = means.get(reference)
    for row in rows:
        if limit is None or means.get(row.name, 0) <= limit:
            continue
        mine: dict[int, Fraction] = {}
        for seed in options.seeds:
            if (row.name, seed) not in spent or (reference, seed) not in spent:
                log.warning("%s, seed %d: none of equal %s, as one diverged", row.name, seed, what)
                continue
            whole = settings_of(options.common, row, seed, length=options.length)
            took, allowed = spent[row.name, seed], spent[reference, seed]
            mine[seed] = affordable(whole.outer_iterations, took, allowed)
        try:
            for seed, share in mine.items():
                settings_of(options.common, row, seed, length=share * options.length)
            if mine and row in options.tuned:
                length = options.tuning_length * _first(mine)
                settings_of(options.common, row, options.tune_seed, options.grid[0], length)
        except UserError as error:
            # What all others have reached must not be lost for it.
            log.warning("%s can't be trained so much shorter: %s", row.name, error)
            continue
        shares[row.name] = mine
    return shares


def _tune_shorter(bench: Bench, rows: Sequence[Row], shares: Shares, what: str) -> list[Tuning]:
    """Search a learning rate for runs of the share that the first seed affords.

    A row whose whole run that seed affords keeps its rate. Collective on `world`.
    """
    options = bench.options
    first = {name: _first(by_seed) for name, by_seed in shares.items() if by_seed}
    wanted = [row for row in rows if row in options.tuned and first.get(row.name, 1) < 1]
    if not wanted:
        return []
    held_out = hold_out(bench.load, settings_of(options.common, rows[0], options.tune_seed))
    return [tune(bench, row, held_out, first[row.name], what) for row in wanted]


def _first(shares: Mapping[int, Fraction]) -> Fraction:
    return next(iter(shares.values()))


def affordable(iterations: int, spent: int, allowed: int) -> Fraction:
    """Return the largest share of whole iterations that spends no more than `allowed`, or of one.

    All of them have spent `spent`, in the same unit; there are no more than all.
    """
    return Fraction(min(iterations, max(1, iterations * allowed // spent)), iterations)


def spending(bench: Bench, what: str, runs: Sequence[Outcome]) -> dict[tuple[str, int], int]:
    """Return the bytes or microseconds that runs took, by row and seed, of those that ended.

    As world rank 0 saw it. Collective on `world`.
    """
    done = [run for run in runs if run.measured is not None]
    value = (lambda m: m.sent_bytes) if what == "bytes" else (lambda m: 1e6 * m.train_s)
    took = [max(1, round(value(m))) for m in ended(done)]
    agreed = json.loads(broadcast_text(bench.world, json.dumps(took)))
    return {(run.row, run.seed): spent for run, spent in zip(done, agreed, strict=True)}
