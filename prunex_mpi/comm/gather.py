"""Gather what each rank of a communicator has, of equal or of other lengths, alike on all."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, mpi_buffer, within_reach


def allgather_(comm: MPI.Comm, mine: Tensor, everyone: Tensor, transport: Transport) -> None:
    """Gather `mine` [n] of every rank into `everyone` [comm.size, n], alike on all ranks.

    One Allgatherv per bucket. Collective on `comm`.
    """
    if comm.size == 1:
        everyone[0].copy_(mine)
        return
    transport = within_reach(transport, everyone)
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
    """Gather one bucket through the memory of the transport."""
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
    places = list(accumulate(counts, initial=0))[:-1]
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
