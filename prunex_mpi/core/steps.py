"""One local step, in the pieces that every driver puts its communication between."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.workers import Workers
from prunex_mpi.core.schedule import ROLLBACK_FACTOR, learning_rate
from prunex_mpi.core.state import Problem, State, Traffic, ring_bytes
from prunex_mpi.settings.fields import Settings


def open_averager(
    exits: ExitStack,
    comm: MPI.Comm | None,
    state: State,
    problem: Problem,
    transport: Transport,
) -> GradientAverager | None:
    """Return what averages gradients over `comm` during the backward pass, None without `comm`.

    `exits` close it.
    """
    if comm is None:
        return None
    averager = GradientAverager(comm, problem.model, state.layout, state.grad, transport)
    exits.callback(averager.close)
    return averager


def forward_backward(state: State, problem: Problem, settings: Settings) -> Tensor:
    """Leave the (scaled) gradient of the next batch in `state.grad`; return the loss, detached."""
    loss = forward(state, problem, settings)
    state.grad.zero_()
    state.scaler.scale(loss).backward()
    return loss.detach()


def forward(state: State, problem: Problem, settings: Settings) -> Tensor:
    """Return the loss of the next batch."""
    device_type = state.theta.device.type
    amp_dtype = torch.float16 if settings.amp == "fp16" else torch.bfloat16
    images, labels = problem.train.next()
    with torch.autocast(device_type, amp_dtype, enabled=settings.amp != "off"):
        return problem.loss(problem.forward(images), labels)


def step_optimizer_(state: State, problem: Problem, settings: Settings) -> None:
    """Move theta along the unscaled gradient, at the learning rate of this step of the run."""
    position = state.position
    state.optimizer.param_groups[0]["lr"] = learning_rate(
        (position.iteration - 1) * problem.steps + position.step,
        settings.outer_iterations * problem.steps,
        base=settings.lr * ROLLBACK_FACTOR**position.rollbacks,
        schedule=settings.lr_schedule,
        warmup=settings.lr_warmup,
        final=settings.lr_final,
    )
    state.scaler.step(state.optimizer)
    state.scaler.update()


def loss_sums(state: State) -> Tensor:
    """Return the sum of this outer iteration's losses so far and their count, on theta's device."""
    position = state.position
    sums = torch.tensor([position.loss_sum, position.loss_count], dtype=torch.float64)
    return sums.to(state.theta.device)


def add_loss_(sums: Tensor, loss: Tensor, settings: Settings) -> None:
    """Add one loss to `sums`."""
    total, counted = sums
    if settings.amp == "fp16":
        # The scaler skips steps that overflow; their loss says nothing.
        finite = torch.isfinite(loss)
        total += torch.where(finite, loss, 0.0)
        counted += finite
    else:
        total += loss
        counted += 1


def count_allreduce(traffic: Traffic, workers: Workers, operand: int) -> None:
    """Count an Allreduce of `operand` bytes over the workers."""
    traffic.payload += operand
    traffic.sent += ring_bytes(workers.ring, operand)


def count_allgather(traffic: Traffic, workers: Workers, mine: int, everyone: int) -> None:
    """Count an Allgather: `mine` bytes of this worker, `everyone` bytes of all together."""
    traffic.payload += mine
    traffic.sent += ring_bytes(workers.ring, everyone, passes=1)


def count_sum_over_ranks(
    traffic: Traffic, topology: Topology, workers: Workers, aggregation: str, operand: int
) -> None:
    """Count `exchange.sum_over_ranks_` of `operand` bytes."""
    count_allreduce(traffic, workers, operand)
    if aggregation == "hierarchical" and topology.node_size > 1:
        traffic.intra += 2 * operand


@contextmanager
def clocked(state: State, name: str) -> Iterator[None]:
    """Add the seconds of the block to `method_seconds` or `exchange_seconds` of the position."""
    cuda = state.theta.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(state.theta.device)
    started = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize(state.theta.device)
    position = state.position
    setattr(position, name, getattr(position, name) + time.perf_counter() - started)
