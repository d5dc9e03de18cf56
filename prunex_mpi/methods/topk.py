"""A step of top-k sparsification: every worker's largest elements, gathered by all.

| what      | communicator | MPI operation | operand                       |
|-----------|--------------|---------------|-------------------------------|
| values    | workers      | Allgatherv    | the largest of each layer     |
| positions | workers      | Allgatherv    | int32, one per value          |
"""

import torch
from torch import Tensor

from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.workers import Workers, allgather_, allocate_gathered
from prunex_mpi.compress.sparse import add_sparse_, kept_per_layer, select_top_
from prunex_mpi.core.state import State, Traffic
from prunex_mpi.core.steps import clocked, count_allgather
from prunex_mpi.settings.fields import Settings


def allocate_topk(workers: Workers, state: State, settings: Settings) -> dict[str, Tensor]:
    """Return memory for one worker's values and positions, and for those of all."""
    count = sum(kept_per_layer(state.layout, settings.compress_ratio))
    values = state.theta.new_empty(count)
    positions = torch.empty(count, dtype=torch.int32, device=values.device)
    return {
        "values": values,
        "positions": positions,
        "all_values": allocate_gathered(workers, values),
        "all_positions": allocate_gathered(workers, positions),
    }


def exchange_topk_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Send the elements of largest magnitude of residual + gradient; the rest is the new residual.

    Top-k sparsification with error feedback (Stich et al. 2018), per layer. Two Allgathers of
    values and int32 positions. Collective on `workers.comm`.
    """
    residual = state.memory["own.residual"]
    values, positions = space["values"], space["positions"]
    with clocked(state, "method_seconds"):
        residual.add_(state.grad)
        counts = kept_per_layer(state.layout, settings.compress_ratio)
        select_top_(residual, state.layout, counts, values, positions)
    with clocked(state, "exchange_seconds"):
        allgather_(workers.comm, values, space["all_values"], transport)
        allgather_(workers.comm, positions, space["all_positions"], transport)
    with clocked(state, "method_seconds"):
        add_sparse_(state.grad, space["all_values"], space["all_positions"])
    mine = values.nbytes + positions.nbytes
    count_allgather(traffic, workers, mine, workers.count * mine)
