"""Choose how often nodes exchange, and behind how many steps, by what both are measured to take.

Before a run that leaves it to be measured, a trial of it runs for a few outer iterations on the
real links, and is forgotten. What it took on the slowest rank before anything is pruned decides, so
all ranks decide alike. The run then keeps its length in epochs, and what is counted in outer
iterations comes at the same share of it as before.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import log
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.schedule import steps_of
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.supervision import outer_iterations
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.values import AUTO

# Of the trial: local steps per outer iteration, and outer iterations. The first one warms up, the
# second one is measured, the last one prunes.
STEPS, ITERATIONS, MEASURED = 8, 3, 2
# z arrives in the first quarter of the steps at the latest: later costs accuracy.
LATEST = 4
# The least outer iterations of a run; each of its stages has at least one.
FEWEST = 16
# Nothing is learned in the trial, and nothing may blow up.
TRIAL_RATE = 1e-9


@dataclass(frozen=True)
class Costs:
    """Seconds on the slowest rank: a local step, an exchange, and all else beside the steps."""

    step: float
    exchange: float
    rest: float


def is_left_to_measure(settings: Settings) -> bool:
    """Return whether something has to be measured before the run can begin."""
    overlaps = settings.method.averages and settings.overlap_steps == AUTO
    return overlaps or (settings.method.by_iteration and settings.local_steps == AUTO)


def tuned(topology: Topology, trial: RunContext, settings: Settings) -> Settings:
    """Return the settings with what they leave to be measured, by a trial of them.

    The trial's state is of no use afterwards. Collective on `world`.
    """
    costs = measure(topology, trial)
    nominal = steps_of(settings, trial.problem.train.steps_per_epoch)
    chosen = run_collectively(topology.world, lambda: chosen_by(settings, nominal, costs))
    names = ("outer_iterations", "local_steps", "overlap_steps")
    log.info(
        "measured: a local step %.1f ms, an exchange %.1f ms; chosen: %s",
        1e3 * costs.step,
        1e3 * costs.exchange,
        ", ".join(f"{key_of(name)} {getattr(chosen, name)}" for name in names),
    )
    return chosen


def hiding_steps(costs: Costs, steps: int) -> int:
    """Return the fewest of `steps` that hide the exchange, at most a quarter of them."""
    return min(int(np.ceil(costs.exchange / costs.step)), steps // LATEST)


def exposed(costs: Costs, hidden_steps: int) -> float:
    """Return the seconds of an outer iteration in which no step is taken."""
    return costs.rest + max(0.0, costs.exchange - hidden_steps * costs.step)


def interval(costs: Costs, share: float, overlap: int, most: int) -> int:
    """Return the fewest local steps between exchanges that these take at most `share` of the time.

    At most `most`. `overlap` steps hide an exchange, or as many as `hiding_steps` says (AUTO).
    """
    for steps in range(max(1, overlap), most):
        hidden = hiding_steps(costs, steps) if overlap == AUTO else overlap
        if exposed(costs, hidden) * (1 - share) <= share * steps * costs.step:
            return steps
    return most


def chosen_by(settings: Settings, nominal: int, costs: Costs) -> Settings:
    """Return the settings with all that was left to be measured.

    `nominal` is the number of local steps per outer iteration by --local-epochs.
    """
    changes: dict[str, Any] = {}
    steps = settings.local_steps
    if steps == AUTO:
        most = max(1, settings.outer_iterations * nominal // FEWEST)
        steps = interval(costs, settings.comm_share, settings.overlap_steps, most)
        changes = {**_stretched(settings, nominal / steps), "local_steps": steps}
    elif steps == 0:
        steps = nominal
    if settings.overlap_steps == AUTO:
        changes["overlap_steps"] = hiding_steps(costs, steps)
    if changes.get("overlap_steps", settings.overlap_steps) and "evaluate_every" in changes:
        # Of two exchanges one at least is not waited for.
        changes["evaluate_every"] = max(2, changes["evaluate_every"])
    return with_overrides(settings, **changes)


def _stretched(settings: Settings, factor: float) -> dict[str, int]:
    """Return the counts of outer iterations times `factor`."""

    def times(count: int) -> int:
        return max(1, round(count * factor)) if count else 0

    changes = {n: times(getattr(settings, n)) for n in ("outer_iterations", "evaluate_every")}
    for name, field in settings.method.option_fields().items():
        if field.metadata.get("share"):
            changes[name] = times(getattr(settings.options, field.name))
    if settings.method.consensus:
        freeze = times(settings.freeze_iteration)
        until = freeze or changes["outer_iterations"]
        warmup = min(times(settings.warmup_iterations), until - 1)
        ramp = min(times(settings.keep_ramp_iterations), until - warmup)
        changes |= {"warmup_iterations": warmup, "keep_ramp_iterations": ramp}
        changes |= {"freeze_iteration": freeze}
    return changes


def trial_of(settings: Settings) -> Settings:
    """Return the settings of the trial of a run."""
    changes: dict[str, Any] = {
        "local_steps": STEPS,
        "overlap_steps": 0,
        "outer_iterations": ITERATIONS,
        "evaluate_every": ITERATIONS,
        "lr": TRIAL_RATE,
        # Which weights they are doesn't change what things cost.
        "init_from": "",
        "init_digest": "",
    }
    if settings.method.consensus:
        stages = {"warmup_iterations": MEASURED, "keep_ramp_iterations": 0}
        changes |= {**stages, "freeze_iteration": ITERATIONS, "freeze_drift": -1.0}
    elif settings.method.prunes_once:
        changes["one_shot_prune_iteration"] = ITERATIONS
    elif settings.method.quadratic_interval:
        # So small that all its intervals are as short as they can be.
        changes["qsr_alpha"] = TRIAL_RATE * TRIAL_RATE
    return with_overrides(settings, **changes)


def measure(topology: Topology, context: RunContext) -> Costs:
    """Run the trial; return what things cost before anything is pruned. Collective on `world`."""
    context = replace(context, problem=replace(context.problem, test=None))
    seconds = list(outer_iterations(topology, context))[MEASURED - 1]["seconds"]
    rest = sum(seconds[phase] for phase in ("intra", "project", "dual"))
    slowest = np.array([seconds["local"] / STEPS, seconds["inter"], rest])
    fastest = slowest.copy()
    topology.world.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
    # Whoever comes last to an exchange does not wait for others in it.
    topology.world.Allreduce(MPI.IN_PLACE, fastest, op=MPI.MIN)
    return Costs(step=slowest[0], exchange=fastest[1], rest=slowest[2])
