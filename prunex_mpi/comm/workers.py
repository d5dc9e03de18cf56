"""Who speaks between nodes in a method that communicates at each step, and what it exchanges.

The workers are all ranks (`flat`) or the leaders of the nodes (`hierarchical`). A worker's
contribution is its gradient, averaged inside its node if that is what it speaks for, times its
weight: 1/N or P_i/N. So the plain sum of all contributions is the mean over all N ranks, with
uneven nodes as well, and so is the sum of what compressors send and what they keep for later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import (
    Transport,
    allreduce_,
    allreduce_then_bcast_,
    mpi_buffer,
)
from prunex_mpi.comm.topology import Topology


@dataclass(frozen=True)
class Workers:
    """The `count` ranks that speak between nodes; `comm` is MPI.COMM_NULL on those that do not.

    `ring` is the number of workers in a ring of which a part lies between nodes: 1 if all of them
    are on one node.
    """

    comm: MPI.Comm
    count: int
    weight: float
    ring: int

    @property
    def speaks(self) -> bool:
        return self.comm != MPI.COMM_NULL


def worker_weight(topology: Topology, aggregation: str) -> float:
    """Return what this rank's contribution counts in the mean over all ranks; followers: 0."""
    if aggregation == "flat":
        return 1 / topology.world_size
    return topology.node_weight if topology.is_leader else 0.0


def find_workers(topology: Topology, aggregation: str) -> Workers:
    """Return the workers of `aggregation` (flat | hierarchical)."""
    flat = aggregation == "flat"
    count = topology.world_size if flat else topology.num_nodes
    return Workers(
        comm=topology.world if flat else topology.leader,
        count=count,
        weight=worker_weight(topology, aggregation),
        ring=count if topology.num_nodes > 1 else 1,
    )


def sum_over_ranks_(
    topology: Topology, aggregation: str, flat: Tensor, transport: Transport
) -> None:
    """Sum `flat` over all ranks, workers or not. Collective on `world`, or `node` and `leader`."""
    if aggregation == "flat":
        allreduce_(topology.world, flat, transport)
    else:
        allreduce_(topology.node, flat, transport)
        allreduce_then_bcast_(topology.leader, topology.node, flat, transport)


def allgather_(comm: MPI.Comm, mine: Tensor, everyone: Tensor, transport: Transport) -> None:
    """Gather `mine` [n] of every rank into `everyone` [comm.size, n], alike on all ranks.

    One Allgatherv per bucket. Collective on `comm`.
    """
    if comm.size == 1:
        everyone[0].copy_(mine)
        return
    room = max(1, transport.bucket_bytes // (mine.element_size() * comm.size))
    for start in range(0, mine.numel(), room):
        piece = mine[start : start + room]
        target = everyone[:, start : start + room]
        if transport.staging is not None:
            _allgather_staged_(comm, piece, target, transport)
            continue
        # The ranks' pieces lie a row apart, which is what displacements are for.
        buffer, kind = mpi_buffer(everyone.view(-1)[start:])
        places = [rank * mine.numel() for rank in range(comm.size)]
        counts = [piece.numel()] * comm.size
        comm.Allgatherv(mpi_buffer(piece), [buffer, (counts, places), kind])


def _allgather_staged_(comm: MPI.Comm, piece: Tensor, target: Tensor, transport: Transport) -> None:
    """Gather one bucket through host memory."""
    size = piece.element_size()
    sent, received = (
        memory[: n * size].view(piece.dtype)
        for memory, n in zip(transport.staging, (piece.numel(), target.numel()), strict=True)
    )
    sent.copy_(piece)
    comm.Allgather(mpi_buffer(sent), mpi_buffer(received))
    target.copy_(received.view(target.shape))


def gather_counts(comm: MPI.Comm, count: int) -> list[int]:
    """Return every rank's `count`, alike on all ranks. Collective on `comm`."""
    counts = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([count], dtype=np.int64), counts)
    return counts.tolist()


def allgatherv_(
    comm: MPI.Comm, mine: Tensor, counts: Sequence[int], everyone: Tensor, transport: Transport
) -> None:
    """Gather `counts[r]` elements of each rank r, one behind the other, into `everyone`.

    `mine` holds this rank's; all of them fit into one bucket, and `everyone` may be longer.
    Collective on `comm`.
    """
    target = everyone[: sum(counts)]
    if comm.size == 1:
        target.copy_(mine)
        return
    places = [sum(counts[:rank]) for rank in range(comm.size)]
    sent, received = mine, target
    if transport.staging is not None:
        sent, received = (
            memory[: part.nbytes].view(part.dtype)
            for memory, part in zip(transport.staging, (mine, target), strict=True)
        )
        sent.copy_(mine)
    buffer, kind = mpi_buffer(received)
    comm.Allgatherv(mpi_buffer(sent), [buffer, (list(counts), places), kind])
    if received is not target:
        target.copy_(received)


def allocate_gathered(workers: Workers, mine: Tensor) -> Tensor:
    """Return memory [workers, *mine.shape] for what `allgather_` gathers."""
    return torch.empty((workers.count, *mine.shape), dtype=mine.dtype, device=mine.device)
