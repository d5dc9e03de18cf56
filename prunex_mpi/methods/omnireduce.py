"""A step of OmniReduce: blocks that are zero on all workers stay at home, all others are added up.

| what                   | communicator | MPI operation | operand                      |
|------------------------|--------------|---------------|------------------------------|
| blocks that hold any   | workers      | Allreduce BOR | one bit per block (mask)     |
| blocks of the union    | workers      | Allreduce SUM | their elements, no positions |

The sum is that of dense SGD. Nothing is saved unless whole blocks of the gradient are zero: on most
networks none are.
"""

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, allreduce_
from prunex_mpi.comm.workers import Workers
from prunex_mpi.compress.blocks import (
    block_count,
    find_nonzero_,
    new_bits,
    pack_bits_,
    put_blocks_,
    take_blocks_,
    unpack_bits_,
)
from prunex_mpi.core.state import State, Traffic, ring_bytes
from prunex_mpi.core.steps import clocked, count_allreduce
from prunex_mpi.settings.fields import Settings


def allocate_omnireduce(state: State, settings: Settings) -> dict[str, Tensor]:
    """Return memory for a bit per block, these packed, and as many blocks as there are."""
    bits = new_bits(state.layout.numel, settings.block_size, state.theta.device)
    return {
        "bits": bits,
        "packed": bits.new_empty(bits.numel() // 8, dtype=torch.uint8),
        "blocks": torch.empty_like(state.theta),
    }


def exchange_omnireduce_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Set `state.grad` to the sum over the workers. Collective on `workers.comm`."""
    comm, grad, size = workers.comm, state.grad, settings.block_size
    bits, packed = space["bits"], space["packed"]
    with clocked(state, "method_seconds"):
        find_nonzero_(grad, size, bits)
        pack_bits_(bits, packed)
    with clocked(state, "exchange_seconds"):
        allreduce_(comm, packed, transport, MPI.BOR)
    with clocked(state, "method_seconds"):
        unpack_bits_(packed, bits)
        chosen = bits.nonzero().squeeze(1)
        # Where all blocks travel they are together already.
        everything = chosen.numel() == block_count(grad.numel(), size)
        message = grad if everything else take_blocks_(grad, size, chosen, space["blocks"])
    with clocked(state, "exchange_seconds"):
        allreduce_(comm, message, transport)
    if not everything:
        with clocked(state, "method_seconds"):
            put_blocks_(grad, size, chosen, message)
    traffic.mask += packed.nbytes
    traffic.sent += ring_bytes(workers.ring, packed.nbytes)
    count_allreduce(traffic, workers, message.nbytes)
