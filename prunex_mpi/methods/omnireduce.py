"""A step of OmniReduce (Fei et al. 2021): blocks of the gradient travel or stay at home as a whole.

With Block Top-k, the default, each worker sends a share of its blocks, those of largest norm, and
keeps the others for later (error feedback). With --omnireduce-block-ratio 1 all blocks travel but
those that are zero on all workers: the sum is that of dense SGD, and nothing is saved unless whole
blocks of the gradient are zero, which on most networks none are.
"""

from typing import Any

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress import sparse
from prunex_mpi.compress.quantise import pack_, unpack_
from prunex_mpi.core.state import OWN, RunContext, State
from prunex_mpi.core.sums import allocate_equal, sum_sparse_
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("own blocks", "workers", "Allgather", "Block Top-k: elements"),
    ("their numbers", "workers", "Allgather", "Block Top-k: one int32 per block"),
    ("blocks that hold any", "workers", "Allreduce BOR", "all blocks: one bit per block (mask)"),
    ("blocks of the union", "workers", "Allreduce SUM", "all blocks: elements, no positions"),
)
RESIDUAL = f"{OWN}residual"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what has not been sent yet, in whole blocks; nothing where all of them travel."""
    if settings.options.block_ratio == 1:
        return {}
    blocks = sparse.block_count(layout.numel, settings.options.block_size)
    return {RESIDUAL: theta.new_zeros(blocks * settings.options.block_size)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for what travels: the largest blocks, or bits for all and as many blocks."""
    state, size = context.state, context.settings.options.block_size
    if context.settings.options.block_ratio < 1:
        blocks = sparse.block_count(state.layout.numel, size)
        count = sparse.share_of(blocks, context.settings.options.block_ratio)
        blocks = state.theta.new_empty(count, size)
        numbers = torch.empty(count, dtype=torch.int32, device=blocks.device)
        total = torch.empty_like(state.memory[RESIDUAL]).view(-1, size)
        return {**allocate_equal(wire, blocks, numbers), "sum": total}
    bits = sparse.new_bits(state.layout.numel, size, state.theta.device)
    return {
        "bits": bits,
        "packed": bits.new_empty(1, bits.numel() // 8, dtype=torch.uint8),
        "blocks": torch.empty_like(state.theta),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum of what the workers send. Collective on `wire.comm`."""
    if context.settings.options.block_ratio < 1:
        send_top_(wire, space, context)
    else:
        send_nonzero_(wire, space, context)


def send_top_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Send the blocks of largest norm of residual + gradient; the others are the new residual.

    Of the whole gradient, as blocks are larger than many layers. Collective on `wire.comm`.
    """
    grad, residual = context.state.grad, context.state.memory[RESIDUAL]
    residual[: grad.numel()].add_(grad)
    rows = residual.view(-1, context.settings.options.block_size)
    sparse.move_top_blocks_(rows, space["values"], space["positions"])
    sum_sparse_(wire, space, space["sum"])
    grad.copy_(space["sum"].view(-1)[: grad.numel()])


def send_nonzero_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum over the workers. Collective on `wire.comm`."""
    grad, size = context.state.grad, context.settings.options.block_size
    bits, packed = space["bits"], space["packed"]
    row = bits.view(torch.uint8).view(1, -1)
    sparse.find_nonzero_(grad, size, bits)
    pack_(row, 1, packed)
    wire.reduce_(packed.view(-1), MPI.BOR, kind="mask")
    unpack_(packed, 1, row)
    chosen = bits.nonzero().squeeze(1)
    if chosen.numel() == sparse.block_count(grad.numel(), size):
        # They are together already.
        wire.reduce_(grad)
        return
    message = sparse.take_blocks_(grad, size, chosen, space["blocks"])
    wire.reduce_(message)
    sparse.put_blocks_(grad, size, chosen, message)


def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
    """Return how many of a run's `payload` bytes are numbers of blocks."""
    if settings.options.block_ratio == 1:
        return 0
    return sparse.position_bytes(payload, settings.options.block_size * state.theta.element_size())


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    blocks = sparse.block_count(layout.numel, settings.options.block_size)
    if settings.options.block_ratio == 1:
        how = f"at most, and {-(-blocks // 8):,} B of block bits, {settings.aggregation}"
        return layout.numel * size, how
    count = sparse.share_of(blocks, settings.options.block_ratio)
    how = f"{count:,} of {blocks:,} blocks of {settings.options.block_size}, {settings.aggregation}"
    return count * (settings.options.block_size * size + sparse.POSITION_BYTES), how
