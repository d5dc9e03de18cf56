"""Vectors cut into one share per rank: each rank gets everyone's part of its own share."""

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, mpi_buffer, within_reach


def deal_(comm: MPI.Comm, mine: Tensor, received: Tensor, transport: Transport) -> None:
    """Send row r of `mine` [comm.size, n] to rank r; `received`, as large, is what came to here.

    One Alltoall per bucket. Row r of what is received came from rank r. Collective on `comm`.
    """
    if comm.size == 1:
        received.copy_(mine)
        return
    transport = within_reach(transport, mine)
    room = max(1, transport.bucket_bytes // (mine.element_size() * comm.size))
    for start in range(0, mine.shape[1], room):
        part, target = mine[:, start : start + room], received[:, start : start + room]
        if transport.staging is not None:
            _deal_staged_(comm, part, target, transport)
            continue
        comm.Alltoallv(_rows(mine, start, part.shape[1]), _rows(received, start, part.shape[1]))


def sum_shares_(comm: MPI.Comm, rows: Tensor, transport: Transport) -> None:
    """Sum float16 or bfloat16 `rows` [comm.size, n] over `comm` in place, alike on all ranks.

    For types that MPI doesn't add up: rank r adds up everyone's row r, in float32 and in the order
    of the ranks, rounds the sum once, and hands it to all (Alltoall, Allgather). A rank sends what
    it does in an Allreduce. Collective on `comm`.
    """
    if comm.size == 1:
        return
    transport = within_reach(transport, rows)
    room = max(1, transport.bucket_bytes // (rows.element_size() * comm.size))
    carried, mine = rows.view(torch.int16), comm.rank
    for start in range(0, rows.shape[1], room):
        part = carried[:, start : start + room]
        received = torch.empty(part.shape, dtype=torch.int16, device=rows.device)
        if transport.staging is not None:
            _deal_staged_(comm, part, received, transport)
        else:
            comm.Alltoallv(_rows(carried, start, part.shape[1]), _rows(received, 0, part.shape[1]))
        total = torch.zeros(part.shape[1], dtype=torch.float32, device=rows.device)
        for addend in received.view(rows.dtype):
            total.add_(addend)
        rows[mine, start : start + room].copy_(total)
        if transport.staging is not None:
            _spread_staged_(comm, part, transport)
        else:
            comm.Allgatherv(MPI.IN_PLACE, _rows(carried, start, part.shape[1]))


def _rows(rows: Tensor, start: int, width: int) -> list:
    """Return the MPI buffer of `width` columns from `start` on, a row of them for each rank."""
    buffer, kind = mpi_buffer(rows.view(-1)[start:])
    places = [rank * rows.shape[1] for rank in range(rows.shape[0])]
    return [buffer, ([width] * rows.shape[0], places), kind]


def _staged(part: Tensor, memory: Tensor) -> Tensor:
    """Return memory for a bucket in the shape and type of `part`."""
    return memory[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)


def _deal_staged_(comm: MPI.Comm, part: Tensor, target: Tensor, transport: Transport) -> None:
    """Deal one bucket through the memory of the transport."""
    sent, received = (_staged(part, memory) for memory in transport.staging)
    sent.copy_(part)
    comm.Alltoall(mpi_buffer(sent), mpi_buffer(received))
    target.copy_(received)


def _spread_staged_(comm: MPI.Comm, part: Tensor, transport: Transport) -> None:
    """Hand each rank's row of one bucket to all, through the memory of the transport."""
    everyone = _staged(part, transport.staging[0])
    everyone[comm.rank].copy_(part[comm.rank])
    comm.Allgather(MPI.IN_PLACE, mpi_buffer(everyone))
    part.copy_(everyone)
