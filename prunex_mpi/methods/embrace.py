"""A step of EmbRace (Li et al. 2022): of embeddings the rows that are touched, cut into columns.

A worker sends of each row that its batch has touched a stretch of columns to each other worker
(Alltoallv), and the rows' numbers to all (Allgatherv); it adds up its own columns, and they go back
to all (Allgatherv). All other gradients are added up whole (Allreduce), and so is an embedding of
which so many rows are touched that their columns could cost more. So the result is that of dense
SGD. Cut into columns all shares are as large, whatever words are frequent; cut into rows, as in
Parallax, they are not, but the ranks of a node can add up their rows first: what travels here grows
with the ranks of all nodes.

In the paper a worker holds its columns alone and hands out those that are looked up next. Here
every rank holds all rows and takes every step itself, so that rows that others have touched come
as well. The paper's order, rows of the next batch first, hides time alone, and is not here.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.sparse import POSITION_BYTES, add_sparse_
from prunex_mpi.core.state import RunContext
from prunex_mpi.methods.parallax import (
    all_but_rows,
    find_embeddings,
    find_touched,
    memory,
    most,
)
from prunex_mpi.models.layout import Layout, Segment
from prunex_mpi.settings.fields import Settings

__all__ = ["OPERATIONS", "allocate", "exchange_", "memory", "payload"]

OPERATIONS = (
    ("all but rows", "workers", "Allreduce SUM", "dense"),
    ("how many rows", "workers", "Allgather", "int32 (mask)"),
    ("numbers of rows", "workers", "Allgatherv", "int32 (mask)"),
    ("columns for their owners", "workers", "Alltoallv", "values"),
    ("sums of columns", "workers", "Allgatherv", "values"),
)


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for counts and, of each embedding, for a bucket of rows and their numbers."""
    theta, layout, workers = context.state.theta, context.state.layout, wire.comm.size
    tables = []
    for table in find_embeddings(context.settings, layout):
        rows, width = table.shape
        room = wire.transport.bucket_bytes // (width * theta.element_size())
        room = min(max(1, room // workers), rows)
        ends = [width * worker // workers for worker in range(workers + 1)]
        tables.append(
            {
                "table": table,
                "room": room,
                "columns": [slice(start, stop) for start, stop in pairwise(ends)],
                "leaving": theta.new_empty(room * width),
                "arriving": theta.new_empty(room * max(width, workers * -(-width // workers))),
                "numbers": torch.empty(workers * room, dtype=torch.int32, device=theta.device),
                "mine": torch.empty(room, dtype=torch.int32, device=theta.device),
                "seen": torch.empty(rows, dtype=torch.bool, device=theta.device),
            }
        )
    counts = torch.empty(len(tables), dtype=torch.int32)
    return {
        "tables": tables,
        "dense": all_but_rows(layout),
        "counts": counts,
        "all_counts": counts.new_empty(workers, len(tables)),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum over the workers. Collective on `wire.comm`."""
    grad = context.state.grad
    for place in space["dense"]:
        wire.reduce_(grad[place])
    tables = space["tables"]
    views = [grad[own["table"].place].view(own["table"].shape) for own in tables]
    touched = [find_touched(rows, 0, 1) for rows in views]
    space["counts"].copy_(torch.tensor([len(numbers) for numbers in touched]))
    wire.gather_(space["counts"], space["all_counts"], "mask")
    every_count = space["all_counts"].T.tolist()
    for own, rows, numbers, counts in zip(tables, views, touched, every_count, strict=True):
        if costs_more(counts, own["table"], grad.element_size()):
            wire.reduce_(grad[own["table"].place])
            continue
        add_up_(wire, own, rows, numbers, counts)
        spread_(wire, own, rows)


def costs_more(counts: list[int], table: Segment, size: int) -> bool:
    """Return whether columns could send as much as an Allreduce of the whole `table`.

    `counts` are the rows that each worker has touched; at worst no two are one.
    """
    workers, (rows, width) = len(counts), table.shape
    touched = sum(counts)
    leaves = touched * (width - width // workers) + (workers - 1) * min(touched, rows) * width
    sent = leaves * size + (workers - 1) * touched * POSITION_BYTES
    return sent >= 2 * (workers - 1) * table.numel * size


def add_up_(
    wire: Wire, own: dict[str, Any], rows: Tensor, touched: Tensor, counts: list[int]
) -> None:
    """Add the others' columns of this worker to its `rows` [n, width]; `seen` is who has any.

    Collective on `wire.comm`.
    """
    room, rank, columns = own["room"], wire.comm.rank, own["columns"]
    widths = [place.stop - place.start for place in columns]
    own["seen"].zero_()
    for start in range(0, max(counts), room):
        pieces = [min(max(count - start, 0), room) for count in counts]
        mine, numbers = own["mine"][: pieces[rank]], own["numbers"][: sum(pieces)]
        mine.copy_(touched[start : start + room])
        wire.gather_parts_(mine, pieces, numbers, "mask")
        leaving = [0 if worker == rank else len(mine) * n for worker, n in enumerate(widths)]
        arriving = [0 if worker == rank else n * widths[rank] for worker, n in enumerate(pieces)]
        sent, came = own["leaving"][: sum(leaving)], own["arriving"][: sum(arriving)]
        for place, part in zip(columns, sent.split(leaving), strict=True):
            if len(part):
                torch.index_select(rows[:, place], 0, mine, out=part.view(len(mine), -1))
        wire.deal_parts_(sent, leaving, came, arriving)
        for part, places in zip(came.split(arriving), numbers.split(pieces), strict=True):
            if len(part):
                add_sparse_(rows[:, columns[rank]], [part.view(len(places), -1)], [places])
        own["seen"].index_fill_(0, numbers.long(), True)


def spread_(wire: Wire, own: dict[str, Any], rows: Tensor) -> None:
    """Set `rows` to the sums of their owners' columns, and to zero where no worker has any.

    Collective on `wire.comm`.
    """
    columns, rank = own["columns"], wire.comm.rank
    # Zeros have two signs.
    rows.masked_fill_(~own["seen"].unsqueeze(1), 0)
    for chosen in own["seen"].nonzero().squeeze(1).split(own["room"]):
        shapes = [(len(chosen), place.stop - place.start) for place in columns]
        lengths = [n * width for n, width in shapes]
        mine, came = own["leaving"][: lengths[rank]], own["arriving"][: sum(lengths)]
        torch.index_select(rows[:, columns[rank]], 0, chosen, out=mine.view(shapes[rank]))
        wire.gather_parts_(mine, lengths, came)
        for place, part, shape in zip(columns, came.split(lengths), shapes, strict=True):
            rows[:, place].index_copy_(0, chosen, part.view(shape))


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, or the most, and what they are."""
    return most(settings, layout, size, counts=1)
