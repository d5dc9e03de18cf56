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
from prunex_mpi.methods.stepper import Stepper
from prunex_mpi.models import batchnorm


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
    loss = forward(context, *next_batch(context))
    if averager is not None:
        averager.begin()
    context.state.scaler.scale(loss).backward()
    return loss.detach()


def next_batch(context: RunContext) -> tuple[Tensor, Tensor]:
    """Return images and labels of the next batch."""
    problem = context.problem
    images, labels = problem.train.next()
    context.state.position.clock.data += problem.train.waited
    if problem.reader is not None and problem.reader.error is not None:
        ask_to_stop_(context)
    return images, labels


def forward(context: RunContext, images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a batch, which is one update of BatchNorm's averages."""
    problem, state, amp = context.problem, context.state, context.settings.amp
    fresh = state.bn_modules if state.position.fresh_statistics else []
    update = steps_taken(context) + 1
    device_type = state.theta.device.type
    amp_dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    with (
        batchnorm.warmed_up(fresh, update) as warming,
        torch.autocast(device_type, amp_dtype, enabled=amp != "off"),
    ):
        # A compiled network is compiled anew for each momentum.
        outputs = (problem.model if warming else problem.forward)(images)
        loss = problem.loss(outputs, labels)
        return distilled(problem.teacher, images, outputs, loss) if problem.teacher else loss
