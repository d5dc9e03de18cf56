"""A step of OmniReduce: blocks that are zero on all workers stay at home, all others are added up.

The sum is that of dense SGD. Nothing is saved unless whole blocks of the gradient are zero: on most
networks none are.
"""

from typing import Any

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.blocks import (
    block_count,
    find_nonzero_,
    new_bits,
    pack_bits_,
    put_blocks_,
    take_blocks_,
    unpack_bits_,
)
from prunex_mpi.core.state import Work
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("blocks that hold any", "workers", "Allreduce BOR", "one bit per block (mask)"),
    ("blocks of the union", "workers", "Allreduce SUM", "their elements, no positions"),
)


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Return what a step hands to the next: nothing."""
    return {}


def allocate(wire: Wire, work: Work) -> dict[str, Any]:
    """Return memory for a bit per block, these packed, and as many blocks as there are."""
    if not wire.speaks:
        return {}
    state = work.state
    bits = new_bits(state.layout.numel, work.settings.block_size, state.theta.device)
    return {
        "bits": bits,
        "packed": bits.new_empty(bits.numel() // 8, dtype=torch.uint8),
        "blocks": torch.empty_like(state.theta),
    }


def exchange_(wire: Wire, space: dict[str, Any], work: Work) -> None:
    """Set `grad` to the sum over the workers. Collective on `wire.comm`."""
    grad, size = work.state.grad, work.settings.block_size
    bits, packed = space["bits"], space["packed"]
    find_nonzero_(grad, size, bits)
    pack_bits_(bits, packed)
    wire.reduce_(packed, MPI.BOR, kind="mask")
    unpack_bits_(packed, bits)
    chosen = bits.nonzero().squeeze(1)
    if chosen.numel() == block_count(grad.numel(), size):
        # They are together already.
        wire.reduce_(grad)
        return
    message = take_blocks_(grad, size, chosen, space["blocks"])
    wire.reduce_(message)
    put_blocks_(grad, size, chosen, message)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    packed = -(-block_count(layout.numel, settings.block_size) // 8)
    return layout.numel * size, f"at most, and {packed:,} B of block bits, {settings.aggregation}"
