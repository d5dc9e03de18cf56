"""The frame of an outer iteration, the same for every driver: beginning, phases, steps, record.

What happens in between is the driver's.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.record_keys import KINDS, PHASES, RANK_PHASES, RESIDUALS
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import now
from prunex_mpi.core.admm import Residuals
from prunex_mpi.core.evaluation import (
    PERMANENT,
    TEMPORARY,
    average_z_,
    density,
    estimate_statistics,
    evaluate,
    kept_by_segment,
)
from prunex_mpi.core.schedule import Stage, local_steps, rounds_left
from prunex_mpi.core.state import (
    RunContext,
    State,
    forget_momentum_,
    next_iteration,
    starts_from_z,
)
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import norm
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
    """Return whether this outer iteration is the last, or completes an interval of evaluations.

    Where they are of several lengths their steps count, so that all methods see as many samples.
    """
    if this.last:
        return True
    every = context.settings.evaluate_every
    if not context.settings.method.quadratic_interval:
        return this.k % every == 0
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
        if estimate == PERMANENT:
            estimate_statistics(topology, context)
        average_z_(topology, context, changed=drift > 0, estimated=estimate == PERMANENT)
        if evaluates(context, this, converged):
            found = evaluate(topology, context, estimate == TEMPORARY)
    this.seconds["total"] = time.perf_counter() - this.started + position.clock.earlier
    trained_s = this.seconds["total"] - this.seconds["evaluate"]
    steps_per_second = position.step * topology.world_size / max(trained_s, 1e-9)
    record = {
        **iteration_record(context, this, residuals),
        "mask_drift": drift,
        "train_loss": loss,
        **quality(context, found),
        **task.speed(context.problem.train, steps_per_second),
        "layers": layer_records(context, this, residuals) if topology.world.rank == 0 else [],
        "rank": rank_record(this, position.clock.broadcast),
        "status": "converged" if converged else "completed" if this.last else "running",
    }
    position.converged_of = context.settings.outer_iterations if converged else 0
    next_iteration(position, loss)
    return record


# --------------------------------------------------------------------------------------------------
# A local step beside its gradient, in the pieces that drivers put their communication between
# --------------------------------------------------------------------------------------------------


# What a driver yields. Where it needs a gradient: the averager that may begin to send it while
# backward goes on, or None; the caller leaves the (scaled) gradient of this rank's next batch in
# `grad` and sends its loss, detached. At the end of each outer iteration: the record.
Rounds = Generator[GradientAverager | dict[str, Any] | None, Tensor | None, None]
# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6


def averaging(
    link: CountedComm | None, context: RunContext
) -> AbstractContextManager[GradientAverager | None]:
    """Average gradients over `link`, if there is one, during backward passes of the block."""
    if link is None:
        return nullcontext()
    state = context.state
    return closing(GradientAverager(link, context.problem.model, state.layout, state.grad))


def start_(context: RunContext) -> None:
    """Set theta and momentum to where an outer iteration begins: z, or z_i where z is not there."""
    state, settings, position = context.state, context.settings, context.state.position
    if starts_from_z(state, settings):
        state.theta.copy_(state.z_node if position.in_flight else state.z)
    if settings.inner_momentum == "reset":
        forget_momentum_(state)


def begin_step_(state: State) -> None:
    """Make ready for the next gradient: `grad` is zero.

    A step in float16 can spoil BatchNorm statistics: those of before are kept.
    """
    if state.sound is not None:
        batchnorm.read_plain_(state.bn_modules, state.sound)
    state.grad.zero_()


def finish_average_(context: RunContext, averager: GradientAverager | None) -> None:
    """Leave the averager's mean in `grad`, if there is one; note a failure. Collective on its link.

    A rank that raised it would leave the other nodes alone, and who is not late in its node.
    """
    if averager is None:
        return
    averager.finish_()
    if averager.late and not context.failures:
        reason = (
            "the model uses a part of its own several times by reentrant checkpointing, which "
            "adds up gradients in several passes; give checkpoint use_reentrant=False"
        )
        context.failures.append(UserError(reason))
        ask_to_stop_(context)


def ask_to_stop_(context: RunContext) -> None:
    """Have the others learn where they agree on going on that this rank can't."""
    if context.stop is not None:
        context.stop.failed = True


def step_optimizer_(context: RunContext) -> None:
    """Move theta along the unscaled gradient.

    A step that overflowed in float16 is left out, and BatchNorm statistics that it has spoilt are
    undone.
    """
    state, optimizer = context.state, context.state.optimizer
    state.scaler.step(optimizer.optimizer)
    state.scaler.update()
    optimizer.adopt_()
    if state.sound is not None:
        batchnorm.mend_(state.bn_modules, state.sound)


def clip_(context: RunContext) -> None:
    """Scale the unscaled gradient down to the norm `--clip-grad`, if it is longer."""
    limit, grad = context.settings.clip_grad, context.state.grad
    if limit:
        # No value of a device is looked at, which would wait for it.
        grad.mul_((limit / (norm(grad) + CLIP_EPSILON)).clamp_max(1.0))


def begin_losses_(state: State) -> None:
    """Put the sum of this outer iteration's losses so far and their count on theta's device."""
    so_far = [state.position.loss_sum, state.position.loss_count]
    state.losses = torch.tensor(so_far, dtype=torch.float64).to(state.theta.device)


def add_loss_(context: RunContext, loss: Tensor) -> None:
    """Add the loss of one step to the sum of this outer iteration's."""
    total, counted = context.state.losses
    if context.settings.amp == "fp16":
        # The scaler skips steps that overflow; their loss says nothing.
        finite = torch.isfinite(loss)
        total += torch.where(finite, loss, 0.0)
        counted += finite
    else:
        total += loss
        counted += 1


def stops_here(context: RunContext, started: float) -> bool:
    """Return whether all ranks leave before the next step; note then where phase 1 stands.

    `started` is when this job's part of the phase began. Collective where the run can be stopped.
    """
    if context.stop is None:
        return False
    position = context.state.position
    asked = time.perf_counter()
    reached = context.stop.reached()
    position.clock.agreed += time.perf_counter() - asked
    if not reached:
        return False
    position.loss_sum, position.loss_count = context.state.losses.tolist()
    position.clock.earlier += time.perf_counter() - started
    return True


# --------------------------------------------------------------------------------------------------
# What one outer iteration came to, for the files of a run
# --------------------------------------------------------------------------------------------------


def layer_records(
    context: RunContext, this: Round, residuals: Residuals | None
) -> list[dict[str, Any]]:
    """Return one row of layers.jsonl per parameter tensor; null for what there is not."""
    state = context.state
    density = {i: kept / numel for i, (kept, numel) in kept_by_segment(state).items()}
    penalties = context.settings.method.consensus
    return [
        {
            "iteration": this.k,
            "layer": segment.name,
            "density": density.get(i, 1.0),
            "rho1": float(state.rho1[i]) if penalties else None,
            "rho2": float(state.rho2[i]) if penalties else None,
            **{n: float(getattr(residuals, n)[i]) if residuals else None for n in RESIDUALS},
        }
        for i, segment in enumerate(state.layout.segments)
    ]


def iteration_record(
    context: RunContext, this: Round, residuals: Residuals | None
) -> dict[str, Any]:
    """Return what of a metrics.jsonl object follows from the state; null for what there is not."""
    state = context.state
    traffic = state.position.traffic
    penalties = context.settings.method.consensus
    return {
        "iteration": this.k,
        "seconds": {phase: this.seconds.get(phase, 0.0) for phase in PHASES},
        "data_wait_seconds": state.position.clock.data,
        "bytes": {kind: getattr(traffic, kind) for kind in KINDS},
        "density": density(state),
        "frozen": state.frozen,
        "residuals": residuals.totals() if residuals else dict.fromkeys(RESIDUALS),
        "rho1": float(state.rho1.mean()) if penalties else None,
        "rho2": float(state.rho2.mean()) if penalties else None,
        "lr": state.optimizer.optimizer.param_groups[0]["lr"],
        # Of methods whose nodes drift apart; their driver measures it.
        "replica_distance": None,
    }


def quality(context: RunContext, found: dict[str, float] | None) -> dict[str, float | None]:
    """Return what an evaluation has `found`, by the names of the data that it was made on.

    Where some are held out for it the test set is kept back: of it nothing is known yet.
    """
    measures = context.problem.task.measures
    values = found or dict.fromkeys(measures)
    if not context.settings.val_split:
        return {f"test_{name}": values[name] for name in measures}
    unknown = {f"test_{name}": None for name in measures}
    return {**unknown, **{f"val_{name}": values[name] for name in measures}}


def rank_record(this: Round, broadcast: float) -> dict[str, Any]:
    """Return what one rank has for ranks.jsonl: seconds of each phase, work apart from messages.

    `broadcast` is what of those of phase 4 was the broadcast in the node.
    """
    messages = {phase: this.exchange.get(phase, 0.0) for phase in RANK_PHASES}
    work = {phase: this.seconds.get(phase, 0.0) - messages[phase] for phase in RANK_PHASES}
    found = {"work": work, "exchange": messages, "broadcast": broadcast}
    return found | {"residuals": this.residuals}
