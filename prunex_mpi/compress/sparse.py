"""Sparsification of a flat gradient with error feedback: what is sent and what is kept for later.

A compressor works on the accumulated gradient, residual + gradient, layer by layer. What it selects
travels as values and flat positions; the rest stays in the residual. Sent + kept is always what was
there before, exactly: elements move, and no arithmetic touches them.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.layout import Layout, Segment, pieces_of

# A position is an int32.
POSITION_BYTES = 4


def position_bytes(nbytes: int, size: int) -> int:
    """Return how many of the bytes of elements, each with `size` bytes of values, are positions."""
    return nbytes * POSITION_BYTES // (POSITION_BYTES + size)


def check_positions(layout: Layout) -> None:
    """Raise UserError where a position does not fit into an int32."""
    if layout.numel > torch.iinfo(torch.int32).max:
        raise UserError("the model has more parameters than 32-bit positions can name")


def kept_per_layer(segments: Iterable[Segment], ratio: float) -> list[int]:
    """Return how many elements of each layer travel: at least one, `ratio` of it rounded up."""
    return [share_of(segment.numel, ratio) for segment in segments]


def share_of(numel: int, ratio: float) -> int:
    """Return a share `ratio` of so many elements, rounded up; at least one."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    return max(1, math.ceil(ratio * numel - 1e-9))


def move_top_(piece: Tensor, values: Tensor, positions: Tensor) -> None:
    """Move the k elements of largest magnitude out of `piece`; `positions` are int32 [k]."""
    move_(piece, torch.topk(piece.abs(), values.numel(), sorted=False).indices, values, positions)


def move_(piece: Tensor, chosen: Tensor, values: Tensor, positions: Tensor) -> None:
    """Move the `chosen` elements (int64 [k]), or rows, out of `piece`; zeros remain."""
    torch.index_select(piece, 0, chosen, out=values)
    piece.index_fill_(0, chosen, 0.0)
    positions.copy_(chosen)


def add_sparse_(flat: Tensor, values: Iterable[Tensor], positions: Iterable[Tensor]) -> None:
    """Add sparse vectors to `flat`: `values` and `positions` [elements] of each, in their order.

    Elements may be rows: `flat` is [rows, n] and the values of each are [elements, n] then.
    """
    for mine, places in zip(values, positions, strict=True):
        flat.index_add_(0, places, mine)


def move_whole_(flat: Tensor, segments: Sequence[Segment], message: Tensor) -> None:
    """Move segments out of `flat` into `message`, one behind the other; zeros remain."""
    pieces = pieces_of(flat, segments)
    if pieces:
        torch.cat(pieces, out=message)
        torch._foreach_zero_(pieces)


def put_whole_(flat: Tensor, segments: Sequence[Segment], message: Tensor) -> None:
    """Copy what `move_whole_` wrote to the segments' places in `flat`."""
    pieces = pieces_of(flat, segments)
    if pieces:
        torch._foreach_copy_(pieces, list(message.split([s.numel for s in segments])))
