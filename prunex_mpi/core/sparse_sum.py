"""Add up vectors of which each worker sends some elements, others than the others do."""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire


def allocate_sparse(wire: Wire, like: Tensor, count: int) -> dict[str, Any]:
    """Return memory for `count` elements of this worker, and for one bucket of what all send.

    So many elements of each worker are gathered at once: one bucket of all of them.
    """
    room = max(1, wire.transport.bucket_bytes // (like.element_size() * wire.comm.size))
    values, all_values = like.new_empty(count), like.new_empty(wire.comm.size * min(count, room))
    return {
        "room": room,
        "values": values,
        "positions": torch.empty_like(values, dtype=torch.int32),
        "all_values": all_values,
        "all_positions": torch.empty_like(all_values, dtype=torch.int32),
    }


def add_sparse_parts_(wire: Wire, space: dict[str, Any], count: int, flat: Tensor) -> None:
    """Add to `flat` what all workers send, of this one the first `count` values and positions.

    Piece by piece and in them worker by worker, so that all workers get the same bits. Collective
    on `wire.comm`.
    """
    values, positions = space["values"], space["positions"]
    counts, room = wire.gather_counts(count), space["room"]
    for start in range(0, max(counts), room):
        pieces = [min(max(c - start, 0), room) for c in counts]
        mine = slice(start, start + pieces[wire.comm.rank])
        wire.gather_parts_(values[mine], pieces, space["all_values"])
        wire.gather_parts_(positions[mine], pieces, space["all_positions"])
        everyone = space["all_positions"], space["all_values"]
        places, addends = (t[: sum(pieces)].split(pieces) for t in everyone)
        for place, addend in zip(places, addends, strict=True):
            flat.index_add_(0, place, addend)
