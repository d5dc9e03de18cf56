"""The program's loop: batches, losses and backward passes between the steps of a method."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.agreement import VERDICT_BYTES, raise_together
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.losses import distilled
from prunex_mpi.core.schedule import rate_now, steps_taken
from prunex_mpi.core.state import RunContext, agreeing
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
        first, record = topology.world, stepper.resume(None)
        while not stepper.ended:
            if record is not None:
                yield record
                record = stepper.resume(None)
            else:
                record = stepper.resume(learn(context, stepper.averager, first))
                first = None


def learn(
    context: RunContext, averager: GradientAverager | None, world: MPI.Comm | None = None
) -> Tensor:
    """Add the (scaled) gradient of the next batch to that of the model; return its loss, detached.

    The averager, if there is one, has begun then to send the gradient. With `world`, in the first
    step of a job, what model or loss refuse is everyone's UserError: collective on it. Later a rank
    that raises is alone, and no UserError, which all ranks raise, may leave it.
    """
    context.state.optimizer.set_rate_(rate_now(context))
    batch = next_batch(context)
    loss, refused = None, None
    try:
        loss = forward(context, *batch)
    except UserError as error:
        refused = error
    if world is not None:
        with agreeing(context.state, "Allreduce of what went wrong", VERDICT_BYTES):
            raise_together(world, refused)
    elif refused is not None:
        raise RuntimeError(str(refused)) from refused
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
