"""The frame of an outer iteration, the same for every driver: beginning, phases, record.

What happens in between is the driver's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import now
from prunex_mpi.core.admm import Residuals
from prunex_mpi.core.evaluation import (
    PERMANENT,
    TEMPORARY,
    average_other_buffers_,
    average_z_,
    estimate_statistics,
    evaluate,
    iteration_record,
    layer_records,
    quality,
    rank_record,
)
from prunex_mpi.core.schedule import Stage, local_steps, rounds_left
from prunex_mpi.core.state import RunContext, next_iteration
from prunex_mpi.pruning.masks import mask_drift


@dataclass(frozen=True)
class Round:
    """Outer iteration `k` under way: when it `started`, with which mask.

    `seconds` are those of its phases, `exchange` the part of them that went to messages.
    """

    k: int
    last: bool
    started: float
    mask: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    exchange: dict[str, float] = field(default_factory=dict)
    residuals: dict[str, float] = field(default_factory=dict)


def rounds(context: RunContext) -> Iterator[Round]:
    """Go through the outer iterations that are left, from `position` on."""
    while (left := rounds_left(context, most=2)) > 0:
        k = context.state.position.iteration
        context.heartbeat.iteration = k
        yield Round(k, left == 1, time.perf_counter(), context.state.mask.bits)


@contextmanager
def phase(context: RunContext, this: Round, name: str) -> Iterator[None]:
    """Add to the seconds of a phase, and tell the watchdog of it."""
    context.heartbeat.enter(name)
    clock = context.state.position.clock
    started, messages = time.perf_counter(), clock.messages
    with clock.named(f"phase {name}"):
        yield
        ended = now(context.state.theta.device)
    this.seconds[name] = this.seconds.get(name, 0.0) + ended - started
    this.exchange[name] = this.exchange.get(name, 0.0) + clock.messages - messages


def split_local(context: RunContext, this: Round, waiting: str) -> None:
    """Move seconds of the phase `local` to the phases that they belong to.

    Those of the method's computations go to `project`, of exchanges behind the steps to `inter`, of
    messages of the steps to the phase `waiting`.
    """
    clock, seconds = context.state.position.clock, this.seconds
    seconds["local"] += (
        clock.earlier - clock.method - clock.exchange - clock.asynchronous - clock.setup
    )
    seconds["setup"] = clock.setup
    seconds["inter"] = clock.asynchronous
    seconds["project"] = clock.method
    seconds[waiting] = seconds.get(waiting, 0.0) + clock.exchange
    # With what was exchanged before the run was interrupted in the phase.
    this.exchange.update({"local": clock.agreed, "inter": clock.late})
    this.exchange[waiting] = this.exchange.get(waiting, 0.0) + clock.exchange


def evaluates(context: RunContext, this: Round, ends: bool = False) -> bool:
    """Return whether z is evaluated in this outer iteration; where the run `ends` it is."""
    return (ends or is_due(context, this)) and context.problem.test is not None


def is_due(context: RunContext, this: Round) -> bool:
    """Return whether this outer iteration is one to look at: the last, or one of an interval."""
    return this.last or falls_due(context, this.k)


def falls_due(context: RunContext, k: int) -> bool:
    """Return whether outer iteration `k` completes as many as there are between two evaluations.

    Where they are of several lengths their steps count, so that all methods see as many samples.
    """
    every = context.settings.evaluate_every
    if not context.settings.method.quadratic_interval:
        return k % every == 0
    done, every = context.state.position.steps_done, every * context.problem.steps
    return (done + local_steps(context)) // every > done // every


def measures_residuals(context: RunContext, this: Round) -> bool:
    """Return whether this outer iteration's residuals are computed: as asked, and with duals."""
    wanted, state = context.settings.residuals, context.state
    # A vote that follows a union lets the run stop only if it is measured itself.
    due = state.position.vote_next or evaluates(context, this)
    asked = wanted == "every" or (wanted == "evaluate" and due)
    return asked and not state.consensus_sgd


def is_asynchronous(context: RunContext, this: Round, stage: Stage) -> bool:
    """Return whether this outer iteration's exchange runs behind the next one's local steps."""
    # Not where z is evaluated, delivered, measured or frozen.
    needs_z = this.last or stage.freeze or stage.measured or evaluates(context, this)
    return context.helper is not None and not needs_z


def finish_round(
    topology: Topology,
    context: RunContext,
    this: Round,
    loss: float,
    *,
    drift: float | None = None,
    residuals: Residuals | None = None,
    estimate: str = "",
    converged: bool = False,
) -> dict[str, Any]:
    """Evaluate z where that is due, and return the record; the next outer iteration can begin.

    `drift` is that of the mask unless given. With `estimate` the statistics in force do not fit z:
    they are estimated for the evaluation and put back after it (TEMPORARY), or for good
    (PERMANENT). Collective on `world`.
    """
    state = context.state
    position = state.position
    drift = mask_drift(state.mask.bits, this.mask) if drift is None else drift
    found, task = None, context.problem.task
    with phase(context, this, "evaluate"):
        if this.last or converged:
            # What is delivered keeps them.
            average_other_buffers_(topology, context)
        if estimate == PERMANENT:
            estimate_statistics(topology, context)
        average_z_(topology, context, changed=drift > 0, estimated=estimate == PERMANENT)
        if evaluates(context, this, converged):
            found = evaluate(topology, context, estimate == TEMPORARY)
    this.seconds["total"] = time.perf_counter() - this.started + position.clock.earlier
    trained_s = this.seconds["total"] - this.seconds["evaluate"]
    steps_per_second = position.step * topology.world_size / max(trained_s, 1e-9)
    record = {
        **iteration_record(context, this.k, this.seconds, residuals),
        "mask_drift": drift,
        "train_loss": loss,
        **quality(context, found),
        **task.speed(context.problem.train, steps_per_second),
        "layers": layer_records(context, this.k, residuals) if topology.world.rank == 0 else [],
        "rank": rank_record(this.seconds, this.exchange, position.clock.broadcast, this.residuals),
        "status": "converged" if converged else "completed" if this.last else "running",
    }
    position.converged_of = context.settings.outer_iterations if converged else 0
    next_iteration(position, loss)
    return record
