"""Segments of a flat vector that travel as they are, beside what is compressed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunex_mpi.models.layout import Segment, pieces_of


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
