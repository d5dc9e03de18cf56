"""A local step beside its gradient, in the pieces that drivers put their communication between."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.core.state import RunContext, State, forget_momentum_, starts_from_z
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import norm

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
