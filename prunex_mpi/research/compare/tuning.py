"""Choose the learning rate of each row by runs that are judged on held-out images."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from prunex_mpi.data.datasets import Dataset
from prunex_mpi.research.compare import kept_runs as store
from prunex_mpi.research.compare.outcomes import Outcome, Tuning
from prunex_mpi.research.compare.rows import Row, settings_of
from prunex_mpi.research.compare.runs import Bench, refuse_impossible, train
from prunex_mpi.research.compare.search import at_chance, next_rate
from prunex_mpi.settings.fields import Settings

# One of so many training images of each class is what a run that tunes is tested on.
HELD_OUT = 5


def tune_all(bench: Bench, rows: Sequence[Row]) -> list[Tuning]:
    """Search the learning rate of each row that is given none. Collective on `world`."""
    options = bench.options
    wanted = [row for row in rows if row in options.tuned]
    if not wanted:
        return []
    settings = settings_of(options.common, rows[0], options.tune_seed)
    held_out = hold_out(bench.load, settings)
    refuse_impossible(bench, rows, held_out)
    return [tune(bench, row, held_out) for row in wanted]


def tune(
    bench: Bench, row: Row, held_out: Dataset, share: Fraction = Fraction(1), equal: str = ""
) -> Tuning:
    """Train a row with one learning rate after the other.

    `share` is that of its outer iterations that spends as much as another row of what `equal` says.
    Collective on `world`.
    """
    options = bench.options
    runs: dict[float, Outcome] = {}
    start = row.grid or options.grid
    length = options.tuning_length * share
    while (lr := next_rate({x: run.score for x, run in runs.items()}, start)) is not None:
        settings = settings_of(options.common, row, options.tune_seed, lr, length)
        settings = replace(settings, evaluate_every=settings.outer_iterations)
        name = store.tuning_name(row, lr, equal)
        runs[lr] = train(bench, row, settings, held_out, name, keep=False)
    tuning = Tuning(row.name, tuple(runs.values()), chance=False)
    reached = max(tuning.scores.values())[0]
    chance = at_chance(reached, held_out.num_classes, held_out.test_total)
    return replace(tuning, chance=chance)


def hold_out(load: Callable[[Settings], Dataset], settings: Settings) -> Dataset:
    """Return a data set whose test images are a part of the training images.

    Raises UserError where these are too few. Collective on `world`, as `load`.
    """
    dataset = load(replace(settings, val_share=1 / HELD_OUT))
    return replace(dataset, test=dataset.val, test_total=dataset.val_total, val=None, val_total=0)
