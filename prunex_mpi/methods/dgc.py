"""A step of deep gradient compression: as many elements as reach a threshold, from each worker.

| what                 | communicator | MPI operation  | operand                       |
|----------------------|--------------|----------------|-------------------------------|
| how many there are   | workers      | Allgather      | one int64                     |
| elements, in buckets | workers      | Allgatherv (2) | values, then int32 positions  |
"""

import torch
from torch import Tensor

from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.workers import Workers, allgatherv_, gather_counts
from prunex_mpi.compress.sparse import POSITION_BYTES, kept_per_layer
from prunex_mpi.compress.threshold import accumulate_, forget_sent_, ratio_at, select_above_
from prunex_mpi.core.state import Problem, State, Traffic
from prunex_mpi.core.steps import clocked, count_allgather
from prunex_mpi.settings.fields import Settings

COUNT_BYTES = 8


def allocate_dgc(
    workers: Workers, state: State, settings: Settings, transport: Transport
) -> dict[str, Tensor]:
    """Return memory for the most that this worker sends, and for one bucket of what all do."""
    theta = state.theta
    largest = ratio_at(0, int(settings.dgc_warmup_epochs > 0), settings.compress_ratio)
    count = sum(kept_per_layer(state.layout, largest))
    room = min(count, piece_numel(workers, theta, transport))
    values, all_values = theta.new_empty(count), theta.new_empty(workers.count * room)
    return {
        "values": values,
        "positions": torch.empty_like(values, dtype=torch.int32),
        "all_values": all_values,
        "all_positions": torch.empty_like(all_values, dtype=torch.int32),
        "chosen": torch.empty_like(theta, dtype=torch.bool),
    }


def piece_numel(workers: Workers, theta: Tensor, transport: Transport) -> int:
    """Return how many elements of each worker are gathered at once: one bucket of all of them."""
    return max(1, transport.bucket_bytes // (theta.element_size() * workers.count))


def exchange_dgc_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Send what is largest of the accumulated momentum, and set `state.grad` to everyone's sum.

    Weight decay counts as a part of the gradient here. The sum is taken piece by piece and in them
    worker by worker, so that all workers get the same bits. Collective on `workers.comm`.
    """
    comm, grad = workers.comm, state.grad
    momentum, residual = state.memory["own.momentum"], state.memory["own.residual"]
    values, positions = space["values"], space["positions"]
    all_values, all_positions = space["all_values"], space["all_positions"]
    step = (state.position.iteration - 1) * problem.steps + state.position.step
    warmup_steps = round(settings.dgc_warmup_epochs * problem.train.steps_per_epoch)
    ratio = ratio_at(step, warmup_steps, settings.compress_ratio)
    with clocked(state, "method_seconds"):
        grad.add_(state.theta, alpha=settings.weight_decay * workers.weight)
        accumulate_(momentum, residual, grad, settings.momentum)
        sample, scratch, chosen = settings.dgc_sample, state.scratch, space["chosen"]
        count = select_above_(
            residual, state.layout, ratio, sample, step, scratch, chosen, values, positions
        )
        forget_sent_(momentum, residual, positions[:count])
        grad.zero_()
    with clocked(state, "exchange_seconds"):
        counts = gather_counts(comm, count)
    room = piece_numel(workers, grad, transport)
    for start in range(0, max(counts), room):
        pieces = [min(max(c - start, 0), room) for c in counts]
        mine = slice(start, start + pieces[comm.rank])
        with clocked(state, "exchange_seconds"):
            allgatherv_(comm, values[mine], pieces, all_values, transport)
            allgatherv_(comm, positions[mine], pieces, all_positions, transport)
        with clocked(state, "method_seconds"):
            for place, addend in zip(
                all_positions[: sum(pieces)].split(pieces),
                all_values[: sum(pieces)].split(pieces),
                strict=True,
            ):
                grad.index_add_(0, place, addend)
    size = values.element_size() + POSITION_BYTES
    count_allgather(traffic, workers, COUNT_BYTES, workers.count * COUNT_BYTES)
    count_allgather(traffic, workers, count * size, sum(counts) * size)
