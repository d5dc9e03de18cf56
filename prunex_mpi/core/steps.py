"""One local step, in the pieces that every driver puts its communication between."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prunex_mpi.comm.gradients import GradientAverager, several_passes
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.losses import distilled
from prunex_mpi.core.schedule import rate_now, steps_taken
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.data.transforms import mix
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import matrices, norm, pieces_of
from prunex_mpi.settings.fields import Settings

# Images and labels of the parts of a batch.
Batch = list[tuple[Tensor, Tensor]]
# Gradients, and the weights whose decay is to be added to them.
Pairs = tuple[list[Tensor], list[Tensor]]
# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6


@contextmanager
def averaging(wire: Wire | None, context: RunContext) -> Iterator[GradientAverager | None]:
    """Average gradients over `wire`, if there is one, during backward passes of the block."""
    if wire is None:
        yield None
        return
    state = context.state
    averager = GradientAverager(wire, context.problem.model, state.layout, state.grad)
    try:
        yield averager
    finally:
        averager.close()


def remember_statistics_(state: State) -> None:
    """Keep the BatchNorm statistics of before a step, which one in float16 can spoil."""
    if state.sound is not None:
        batchnorm.read_plain_(state.bn_modules, state.sound)


def forward_backward(
    context: RunContext,
    averager: GradientAverager | None,
    start_: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Leave the (scaled) gradient of the next batch in `grad`; return the loss, detached.

    `start_` sets `grad` to what the gradient is added to, given the loss of the first part; without
    it, zero. The averager, if there is one, has begun then to send the gradient.
    """
    batch = next_batch(context)
    remember_statistics_(context.state)
    loss = forward(context, batch[0])
    if start_ is None:
        context.state.grad.zero_()
    else:
        start_(loss)
    return backward(context, averager, batch, loss)


def next_batch(context: RunContext) -> Batch:
    """Return images and labels of the next batch, in `--grad-accum-steps` parts.

    Where images are mixed, the labels are shares of classes.
    """
    problem = context.problem
    images, labels = problem.train.next()
    context.state.position.clock.data += problem.train.waited
    if problem.reader is not None and problem.reader.error is not None:
        ask_to_stop_(context)
    if context.problem.mixing is not None:
        images, labels = mix(images, labels, context.problem.mixing, steps_taken(context))
    parts = context.settings.grad_accum_steps
    if parts == 1:
        return [(images, labels)]
    return list(zip(images.chunk(parts), labels.chunk(parts), strict=True))


def forward(context: RunContext, part: tuple[Tensor, Tensor], number: int = 0) -> Tensor:
    """Return the loss of part `number` of a batch, each an update of BatchNorm's averages."""
    problem, state, amp = context.problem, context.state, context.settings.amp
    fresh = state.bn_modules if state.position.fresh_statistics else []
    update = steps_taken(context) * context.settings.grad_accum_steps + number + 1
    device_type = state.theta.device.type
    amp_dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    images, labels = part
    with (
        batchnorm.warmed_up(fresh, update) as warming,
        torch.autocast(device_type, amp_dtype, enabled=amp != "off"),
    ):
        # A compiled network is compiled anew for each momentum.
        outputs = (problem.model if warming else problem.forward)(images)
        loss = problem.objective(outputs, labels)
        return distilled(problem.teacher, images, outputs, loss) if problem.teacher else loss


def backward(
    context: RunContext, averager: GradientAverager | None, batch: Batch, loss: Tensor
) -> Tensor:
    """Add the (scaled) gradient of a batch to `grad`; return its loss, detached.

    `loss` is that of its first part. The averager listens while the last part goes back.
    """
    total = None
    for number, part in enumerate(batch):
        if number:
            loss = forward(context, part, number)
        if len(batch) > 1:
            loss = loss / len(batch)
        if averager is not None and number == len(batch) - 1:
            averager.begin()
        context.state.scaler.scale(loss).backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def finish_average_(context: RunContext, averager: GradientAverager | None) -> None:
    """Leave the averager's mean in `grad`, if there is one; note a failure. Collective on its wire.

    A rank that raised it would leave the other nodes alone, and who is not late in its node.
    """
    if averager is None:
        return
    averager.finish_()
    if averager.late and not context.failures:
        context.failures.append(several_passes())
        ask_to_stop_(context)


def ask_to_stop_(context: RunContext) -> None:
    """Have the others learn where they agree on going on that this rank can't."""
    if context.stop is not None:
        context.stop.failed = True


def share_decay_(context: RunContext, decay: float) -> Pairs | None:
    """Let the optimizer's one pass shrink all parameters by `decay`, and return None.

    With `--weight-decay-on weights` it shrinks none, and views of what `step_optimizer_` has to
    shrink are returned.
    """
    state = context.state
    alone = decay > 0 and context.settings.weight_decay_on == "weights"
    state.optimizer.param_groups[0]["weight_decay"] = 0.0 if alone else decay
    if not alone:
        return None
    segments = matrices(state.layout)
    return pieces_of(state.grad, segments), pieces_of(state.theta, segments)


def step_optimizer_(context: RunContext, decayed: Pairs | None = None) -> None:
    """Move theta along the unscaled gradient, at the learning rate of this step of the run.

    `decayed` is as of `share_decay_`. A step that overflowed in float16 is left out, and BatchNorm
    statistics that it has spoilt are undone.
    """
    state, settings, rate = context.state, context.settings, rate_now(context)
    state.optimizer.param_groups[0]["lr"] = rate
    if decayed and decayed[0]:
        shrink_(settings, rate, decayed)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    if state.sound is not None:
        batchnorm.mend_(state.bn_modules, state.sound)


def clip_(context: RunContext) -> None:
    """Scale the unscaled gradient down to the norm `--clip-grad`, if it is longer."""
    limit, grad = context.settings.clip_grad, context.state.grad
    if limit:
        # No value of a device is looked at, which would wait for it.
        grad.mul_((limit / (norm(grad) + CLIP_EPSILON)).clamp_max(1.0))


def shrink_(settings: Settings, rate: float, decayed: Pairs) -> None:
    """Let weight decay act on some parameters alone; only SGD's is a part of the gradient."""
    gradients, values = decayed
    if settings.optimizer != "sgd":
        torch._foreach_mul_(values, 1 - rate * settings.weight_decay)
    else:
        torch._foreach_add_(gradients, values, alpha=settings.weight_decay)


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
