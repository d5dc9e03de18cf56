"""A step of Parallax (Kim et al. 2019): of embeddings the rows that are touched, all else dense.

A batch looks up some rows of an embedding; the gradient of all others is zero. The ranks of a node
add up their gradients first, so that a leader has the rows that any of them has touched. It sends
them with their numbers to their owners (Alltoallv), the owners add them up, and the sums go to all
leaders (Allgatherv). All other gradients are added up whole (Allreduce), and so is an embedding of
which so many rows are touched that its rows could cost more: positions always are. So the result is
that of dense SGD, and rows that nobody has touched decay and move on with their momentum as there.

In the paper owners are parameter servers: they hold the rows, step on them and hand out those that
are looked up next. Here every rank holds all rows and takes every step itself. The paper's fit of
the seconds of a step, t = b/n + a (n - 1) + c, finds how many partitions n the rows on servers are
cut into, and has no counterpart: there are as many shares as leaders. Of M leaders the one at place
r owns rows r, r + M, ...: rows are often numbered by how frequent they are, so that runs of them
would not be touched alike.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.sparse import POSITION_BYTES, add_sparse_
from prunex_mpi.core.state import RunContext
from prunex_mpi.models.layout import Layout, Segment
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("all but rows", "leader", "Allreduce SUM", "dense"),
    ("how many rows for each owner", "leader", "Allgather", "int32 (mask)"),
    ("rows for their owners", "leader", "Alltoallv", "values, then int32 numbers (mask)"),
    ("sums of rows", "leader", "Allgatherv", "values, then int32 numbers (mask)"),
)


def find_embeddings(settings: Settings, layout: Layout) -> tuple[Segment, ...]:
    """Return the embeddings of a model; raise UserError where it has none, or a tied one."""
    if not layout.embeddings:
        raise UserError(
            f"method {settings.method.name}: the model has no nn.Embedding whose weights no other "
            "layer shares; give one that has, such as gpt_nano-untied, or method dense"
        )
    return layout.embeddings


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Return what a step hands to the next, nothing, if there are embeddings."""
    find_embeddings(settings, layout)
    return {}


def all_but_rows(layout: Layout) -> list[slice]:
    """Return the stretches of a flat vector that are no embedding's."""
    ends = [0, *(end for s in layout.embeddings for end in (s.offset, s.offset + s.numel))]
    stretches = zip(ends[::2], [*ends[1::2], layout.numel], strict=True)
    return [slice(start, stop) for start, stop in stretches if start < stop]


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for counts and, of each embedding, for a bucket of rows and their numbers."""
    theta, layout, workers = context.state.theta, context.state.layout, wire.comm.size
    tables = []
    for table in find_embeddings(context.settings, layout):
        rows, width = table.shape
        room = max(1, wire.transport.bucket_bytes // (width * theta.element_size() * workers))
        room = min(room, -(-rows // workers))
        values = theta.new_empty(2, workers * room, width)
        numbers = torch.empty(2, workers * room, dtype=torch.int32, device=theta.device)
        tables.append({"table": table, "room": room, "values": values, "numbers": numbers})
    counts = torch.empty(len(tables), workers, dtype=torch.int32)
    return {
        "tables": tables,
        "dense": all_but_rows(layout),
        "counts": counts,
        "all_counts": counts.new_empty(workers, *counts.shape),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum over the leaders. Collective on `wire.comm`."""
    grad, scratch = context.state.grad, context.state.scratch
    for place in space["dense"]:
        wire.reduce_(grad[place])
    touched = []
    for row, own in zip(space["counts"], space["tables"], strict=True):
        rows = grad[own["table"].place].view(own["table"].shape)
        touched.append([find_touched(rows, r, wire.comm.size) for r in range(wire.comm.size)])
        row.copy_(torch.tensor([len(numbers) for numbers in touched[-1]]))
    wire.gather_(space["counts"].view(-1), space["all_counts"].view(wire.comm.size, -1), "mask")
    for number, (own, numbers) in enumerate(zip(space["tables"], touched, strict=True)):
        table, counts = own["table"], space["all_counts"][:, number].numpy().astype(np.int64)
        if costs_more(counts, table, grad.element_size()):
            wire.reduce_(grad[table.place])
            continue
        rows, total = (flat[table.place].view(table.shape) for flat in (grad, scratch))
        add_up_(wire, own, rows, numbers, counts)
        spread_(wire, own, rows, total)


def find_touched(rows: Tensor, owner: int, owners: int) -> Tensor:
    """Return the numbers of an owner's `rows` [n, width] that are not zero; NaN is not."""
    return owner + owners * torch.any(rows[owner::owners], 1).nonzero().squeeze(1)


def costs_more(counts: np.ndarray, table: Segment, size: int) -> bool:
    """Return whether rows could send as much as an Allreduce of the whole `table`.

    `counts` [from, to] are the rows that each leader has for each owner; at worst no two are one.
    """
    workers, (rows, width) = len(counts), table.shape
    shares = [len(range(owner, rows, workers)) for owner in range(workers)]
    sums = np.minimum(counts.sum(axis=0), shares).sum()
    sent = counts.sum() - counts.trace() + (workers - 1) * sums
    return sent * (width * size + POSITION_BYTES) >= 2 * (workers - 1) * table.numel * size


def add_up_(
    wire: Wire, own: dict[str, Any], rows: Tensor, touched: list[Tensor], counts: np.ndarray
) -> None:
    """Add to this leader's `rows` [n, width] those that the others have of them, leader by leader.

    Collective on `wire.comm`.
    """
    room, width = own["room"], rows.shape[1]
    counts = counts * (1 - np.eye(len(counts), dtype=np.int64))
    for start in range(0, counts.max(), room):
        pieces = (counts - start).clip(0, room)
        leaving, arriving = pieces[wire.comm.rank].tolist(), pieces[:, wire.comm.rank].tolist()
        parts = (part[start : start + n] for part, n in zip(touched, leaving, strict=True))
        mine, numbers = take_(own, rows, torch.cat(tuple(parts)))
        came, places = (own[kind][1, : sum(arriving)] for kind in ("values", "numbers"))
        by_width = [[width * n for n in counted] for counted in (leaving, arriving)]
        wire.deal_parts_(mine.view(-1), by_width[0], came.view(-1), by_width[1])
        wire.deal_parts_(numbers, leaving, places, arriving, "mask")
        add_sparse_(rows, came.split(arriving), places.split(arriving))


def spread_(wire: Wire, own: dict[str, Any], rows: Tensor, total: Tensor) -> None:
    """Set `rows` to the owners' rows, and zero elsewhere; `total` [n, width] is overwritten.

    Collective on `wire.comm`.
    """
    room, rank, workers = own["room"], wire.comm.rank, wire.comm.size
    chosen = find_touched(rows, rank, workers)
    everyone = torch.empty(workers, 1, dtype=torch.int32)
    wire.gather_(torch.tensor([len(chosen)], dtype=torch.int32), everyone, "mask")
    counts = everyone.view(-1).tolist()
    total.zero_()
    for start in range(0, max(counts), room):
        pieces = [min(max(count - start, 0), room) for count in counts]
        mine, numbers = take_(own, rows, chosen[start : start + pieces[rank]])
        came, places = (own[kind][1, : sum(pieces)] for kind in ("values", "numbers"))
        wire.gather_parts_(mine.view(-1), [rows.shape[1] * n for n in pieces], came.view(-1))
        wire.gather_parts_(numbers, pieces, places, "mask")
        add_sparse_(total, [came], [places])
    rows.copy_(total)


def take_(own: dict[str, Any], rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Copy `chosen` rows and their numbers to where they leave from."""
    values, numbers = (own[kind][0, : len(chosen)] for kind in ("values", "numbers"))
    torch.index_select(rows, 0, chosen, out=values)
    return values, numbers.copy_(chosen)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, or the most, and what they are."""
    return most(settings, layout, size, counts=workers + 1)


def most(settings: Settings, layout: Layout, size: int, counts: int) -> tuple[int, str]:
    """Return what `payload` does, where a worker tells so many `counts` of each embedding."""
    tables = find_embeddings(settings, layout)
    rows = sum(table.numel for table in tables) * size
    numbers = POSITION_BYTES * sum(table.shape[0] + counts for table in tables)
    how = f"at most, {rows:,} B of them rows of embeddings, and {numbers:,} B of their numbers"
    return layout.numel * size, f"{how}, {settings.aggregation}"
