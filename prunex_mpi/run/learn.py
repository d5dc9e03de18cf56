"""The program's loop: batches, losses and backward passes between the steps of a method."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.losses import distilled
from prunex_mpi.core.schedule import rate_now, steps_taken
from prunex_mpi.core.state import RunContext
from prunex_mpi.core.steps import ask_to_stop_
from prunex_mpi.data.transforms import mix
from prunex_mpi.methods.stepper import Stepper
from prunex_mpi.models import batchnorm

# Images and labels of the parts of a batch.
Batch = list[tuple[Tensor, Tensor]]


def outer_iterations(topology: Topology, context: RunContext) -> Iterator[dict[str, Any]]:
    """Train from where `context` stands; yield the record of each outer iteration.

    Collective on `topology.world`: every rank must exhaust the iterator, which ends early where the
    ranks agree to stop. Between two records the state is all there is to know. Raises Diverged on
    every rank.
    """
    with closing(Stepper(topology, context)) as stepper:
        while stepper.begin():
            record = stepper.finish(learn(context, stepper.averager))
            if record is not None:
                yield record


def learn(context: RunContext, averager: GradientAverager | None) -> Tensor:
    """Add the (scaled) gradient of the next batch to that of the model; return its loss, detached.

    The averager, if there is one, has begun then to send the gradient.
    """
    context.state.optimizer.set_rate_(rate_now(context))
    batch = next_batch(context)
    return backward(context, averager, batch, forward(context, batch[0]))


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
