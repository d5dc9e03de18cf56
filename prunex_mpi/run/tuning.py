"""Choose how often nodes exchange, and behind how many steps, by what both are measured to take.

Before a run that leaves it to be measured, a trial of it runs for a few outer iterations, half of
them before and half of them after the freeze, on the real links, and is forgotten. What it took on
the slowest rank decides, so all ranks decide alike. The run then keeps its length in epochs, and
what is counted in outer iterations comes at the same share of it as before.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.schedule import steps_of
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.supervision import outer_iterations
from prunex_mpi.settings.fields import Settings, key_of, known_freeze
from prunex_mpi.settings.values import AUTO

# Of the trial: local steps per outer iteration, and its outer iterations. The first of a kind warms
# up or prunes, the one after it is measured.
STEPS, ITERATIONS, FREEZE = 8, 4, 3
# The last one as well.
MEASURED = 2
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
    before, after = measure(topology, trial)
    nominal = steps_of(settings, trial.problem.train.steps_per_epoch)
    chosen = run_collectively(topology.world, lambda: chosen_by(settings, nominal, before, after))
    log.info("%s", describe_choice(chosen, before, after))
    return chosen


def describe_choice(settings: Settings, before: Costs, after: Costs) -> str:
    """Return one line: what was measured and the settings chosen by it."""
    found = [f"a local step {1e3 * before.step:.1f} ms"]
    found += [f"an exchange {1e3 * before.exchange:.1f} ms"]
    names = ["outer_iterations", "local_steps", "overlap_steps"]
    if settings.frozen_local_steps:
        found += [f"{1e3 * after.exchange:.1f} ms once frozen"]
        names += ["frozen_local_steps"]
    values = [f"{key_of(name)} {getattr(settings, name)}" for name in names]
    return f"measured: {', '.join(found)}; chosen: {', '.join(values)}"


def behind(costs: Costs, steps: int) -> int:
    """Return the fewest of `steps` that hide the exchange, at most a quarter of them."""
    return min(int(np.ceil(costs.exchange / costs.step)), steps // LATEST)


def exposed(costs: Costs, hidden_steps: int) -> float:
    """Return the seconds of an outer iteration in which no step is taken."""
    return costs.rest + max(0.0, costs.exchange - hidden_steps * costs.step)


def interval(costs: Costs, share: float, overlap: int, most: int) -> int:
    """Return the fewest local steps between exchanges that these take at most `share` of the time.

    At most `most`. `overlap` steps hide an exchange, or as many as `behind` says (AUTO).
    """
    for steps in range(max(1, overlap), most):
        hidden = behind(costs, steps) if overlap == AUTO else overlap
        if exposed(costs, hidden) * (1 - share) <= share * steps * costs.step:
            return steps
    return most


def chosen_by(settings: Settings, nominal: int, before: Costs, after: Costs) -> Settings:
    """Return the settings with all that was left to be measured.

    `nominal` is the number of local steps per outer iteration by --local-epochs; `before` and
    `after` is what things cost before and after the freeze.
    """
    changes: dict[str, Any] = {}
    steps = settings.local_steps
    if steps == AUTO:
        whole = settings.outer_iterations * nominal
        most = max(1, whole // FEWEST)
        ways = settings.comm_share, settings.overlap_steps, most
        steps = interval(before, *ways)
        frozen = interval(after, *ways) if _knows_end_of_pruning(settings) else 0
        changes = _stretched(settings, nominal / steps, nominal / (frozen or steps))
        changes |= {"local_steps": steps}
        if frozen:
            changes |= {"frozen_local_steps": frozen}
    elif steps == 0:
        steps = nominal
    if settings.overlap_steps == AUTO:
        changes["overlap_steps"] = behind(before, steps)
    if changes.get("overlap_steps", settings.overlap_steps) and "evaluate_every" in changes:
        # Of two exchanges one at least is not waited for.
        changes["evaluate_every"] = max(2, changes["evaluate_every"])
    return with_overrides(settings, **changes)


def _knows_end_of_pruning(settings: Settings) -> bool:
    """Return whether the payload shrinks in an outer iteration that is known before."""
    if settings.method.consensus and not known_freeze(settings):
        return False
    return settings.method.shrinks


def _stretched(settings: Settings, before: float, after: float) -> dict[str, int]:
    """Return the counts of outer iterations, times `before` until the freeze, then `after`."""

    def times(count: int, factor: float) -> int:
        return max(1, round(count * factor)) if count else 0

    outer = settings.outer_iterations
    changes = {"evaluate_every": times(settings.evaluate_every, before)}
    for name, field in settings.method.option_fields().items():
        if field.metadata.get("share"):
            changes[name] = times(getattr(settings.options, field.name), before)
    if settings.method.consensus:
        split = settings.freeze_iteration or outer
        until = times(split, before)
        warmup = times(settings.warmup_iterations, before)
        ramp = times(settings.keep_ramp_iterations, before)
        changes |= {
            "warmup_iterations": min(warmup, until - 1),
            "keep_ramp_iterations": min(ramp, until - min(warmup, until - 1)),
            "freeze_iteration": until if settings.freeze_iteration else 0,
        }
    elif settings.method.prunes_once:
        split, until = settings.options.prune_iteration, changes["one_shot_prune_iteration"]
    else:
        split, until = outer, times(outer, before)
    changes["outer_iterations"] = until + times(outer - split, after)
    return changes


def trial_of(settings: Settings) -> Settings:
    """Return the settings of the trial of a run."""
    # The first iteration after the freeze makes the network smaller, and one more warms up.
    removes = settings.remove_dropped and settings.method.shrinks
    iterations = ITERATIONS + removes
    changes: dict[str, Any] = {
        "local_steps": STEPS,
        "overlap_steps": 0,
        "outer_iterations": iterations,
        "evaluate_every": iterations,
        "lr": TRIAL_RATE,
        # Which weights they are doesn't change what things cost.
        "init_from": "",
        "init_digest": "",
    }
    if settings.method.consensus:
        stages = {"warmup_iterations": FREEZE - 1, "keep_ramp_iterations": 0}
        changes |= {**stages, "freeze_iteration": FREEZE, "freeze_drift": -1.0}
    elif settings.method.prunes_once:
        changes["one_shot_prune_iteration"] = FREEZE
    elif settings.method.quadratic_interval:
        # So small that all its intervals are as short as they can be.
        changes["qsr_alpha"] = TRIAL_RATE * TRIAL_RATE
    return with_overrides(settings, **changes)


def measure(topology: Topology, context: RunContext) -> tuple[Costs, Costs]:
    """Run the trial; return what things cost before and after the freeze. Collective on `world`."""
    context = replace(context, problem=replace(context.problem, test=None))
    records = list(outer_iterations(topology, context))
    rows = []
    for record in (records[MEASURED - 1], records[-1]):
        seconds = record["seconds"]
        rest = sum(seconds[phase] for phase in ("intra", "project", "dual"))
        rows.append([seconds["local"] / STEPS, seconds["inter"], rest])
    slowest = np.array(rows)
    fastest = slowest.copy()
    topology.world.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
    # Whoever comes last to an exchange does not wait for others in it.
    topology.world.Allreduce(MPI.IN_PLACE, fastest, op=MPI.MIN)
    slowest[:, 1] = fastest[:, 1]
    before, after = (Costs(*row) for row in slowest.tolist())
    return before, after
