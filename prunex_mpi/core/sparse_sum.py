"""Add up vectors of which each worker sends some elements, others than the others do."""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.sparse import add_sparse_

KINDS = ("values", "positions")


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
        add_sparse_(flat, addends, places)


def allocate_equal(wire: Wire, values: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return memory for `values` [n] or [n, row] and their `positions` [n] of each worker.

    Those of all workers are held for one bucket at a time.
    """
    workers = wire.comm.size
    rows = min(len(values), max(1, wire.transport.bucket_bytes // (values[:1].nbytes * workers)))
    return {
        "values": values,
        "positions": positions,
        "all_values": values.new_empty(workers, rows, *values.shape[1:]),
        "all_positions": positions.new_empty(workers, rows),
    }


def sum_sparse_(wire: Wire, space: dict[str, Any], out: Tensor) -> None:
    """Set `out` to the sum of what the workers send, which is as much of each.

    As `add_sparse_parts_`, with memory of `allocate_equal`. Collective on `wire.comm`.
    """
    out.zero_()
    rows = space["all_positions"].shape[1]
    for start in range(0, len(space["positions"]), rows):
        addends, places = (_gather_part(wire, space, kind, start) for kind in KINDS)
        add_sparse_(out, addends, places)


def _gather_part(wire: Wire, space: dict[str, Any], kind: str, start: int) -> Tensor:
    """Return the values or positions of all workers from `start` on, as many as there is room."""
    everyone = space[f"all_{kind}"]
    mine = space[kind][start : start + everyone.shape[1]]
    gathered = everyone.view(-1)[: len(everyone) * mine.numel()].view(len(everyone), -1)
    wire.gather_(mine.view(-1), gathered)
    return gathered.view(-1, *mine.shape)
