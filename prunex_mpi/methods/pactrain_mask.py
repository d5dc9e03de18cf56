"""PacTrain's mask: which weights are pruned, decided once and alike on all ranks.

| what                | communicator | MPI operation | operand                   |
|---------------------|--------------|---------------|---------------------------|
| GraSP: ∇L, then H∇L | all ranks    | Allreduce SUM | dense vector, once each   |
| mask                | world        | Bcast         | packed bits, once         |

Weights and momentum are set to zero once, gradients at each step (`exchange_pactrain.py`): so
pruned weights stay zero. The paper's g ⊙ [w ≠ 0] is g ⊙ mask here, since a kept weight that happens
to be zero may move.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.logs import log
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology, together
from prunex_mpi.comm.workers import Workers, sum_over_ranks_
from prunex_mpi.compress.support import restart_
from prunex_mpi.core.state import Problem, State, Traffic, ring_bytes
from prunex_mpi.core.steps import clocked, count_sum_over_ranks
from prunex_mpi.pruning.unstructured import (
    add_gradients_,
    add_hessian_products_,
    prunable,
    prune_by_gradient_flow,
    prune_by_magnitude,
)
from prunex_mpi.settings.fields import Settings


def prune_when_due_(
    topology: Topology,
    workers: Workers,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
    done: int,
) -> float:
    """Prune if `done` outer iterations are those of `--prune-iteration`; return the mask's drift.

    The mask is decided on world rank 0. Collective on `world`, or on `node` and `leader`.
    """
    if state.frozen or done != settings.prune_iteration:
        return 0.0
    with clocked(state, "method_seconds"):
        pruned = choose_pruned(topology, workers, state, problem, settings, transport, traffic)
        bits = np.packbits(pruned.cpu().numpy())
        topology.world.Bcast(bits, root=0)
        traffic.mask += bits.nbytes
        traffic.sent += ring_bytes(workers.ring, bits.nbytes, passes=1)
        mask = np.unpackbits(bits, count=pruned.numel()).astype(bool)
        pruned.copy_(torch.from_numpy(mask))
        adopt_pruned_(state, pruned)
    total = sum(segment.numel for segment in prunable(state.layout))
    kept = total - int(mask.sum())
    text = "pruned by %s: %d of %d weights are kept, biases and BatchNorm apart"
    log.info(text, settings.prune_by, kept, total)
    return (total - kept) / max(1, kept)


def choose_pruned(
    topology: Topology,
    workers: Workers,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> Tensor:
    """Return which weights go, bool [layout.numel]; only what world rank 0 returns counts.

    Collective on `world`, or on `node` and `leader`. Raises UserError on every rank.
    """
    world, layout, (ratio,) = topology.world, state.layout, settings.keep_ratio
    if not prunable(layout):
        raise UserError("the model has no weight of two or more dimensions to prune")
    if settings.prune_by == "magnitude":
        return prune_by_magnitude(state.theta, layout, ratio)
    model, loss = problem.model, problem.loss
    batches = [problem.train.next() for _ in range(settings.grasp_batches)]
    slope, product = torch.zeros_like(state.theta), torch.zeros_like(state.theta)
    # The passes must leave no trace in the statistics of BatchNorm.
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    passes = (
        (slope, lambda: add_gradients_(slope, layout, model, loss, batches)),
        (product, lambda: add_hessian_products_(product, slope, layout, model, loss, batches)),
    )
    for flat, add in passes:
        together(world, add)
        sum_over_ranks_(topology, settings.aggregation, flat, transport)
        flat.div_(len(batches) * world.size)
        count_sum_over_ranks(traffic, topology, workers, settings.aggregation, flat.nbytes)
    for buffer, value in kept:
        buffer.copy_(value)
    return together(world, lambda: prune_by_gradient_flow(state.theta, product, layout, ratio))


def adopt_pruned_(state: State, pruned: Tensor) -> None:
    """Make `pruned` the mask in force: weights and momentum vanish on it, buckets are unstable."""
    momentum = state.optimizer.state[state.theta].get("momentum_buffer")
    for flat in (state.theta, momentum):
        if flat is not None:
            flat.masked_fill_(pruned, 0.0)
    restart_(state.memory, pruned, state.theta, state.layout)
    state.frozen = True
