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

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.compress.sparse import POSITION_BYTES, add_sparse_
from prunex_mpi.core.memory import Declared
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout, Segment
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Rows:
    """An embedding, and memory for a bucket of `room` rows for each owner, and their numbers.

    `values` [2, workers * room, width] and `numbers` are of what leaves, and of what arrives.
    """

    segment: Segment
    room: int
    values: Tensor
    numbers: Tensor

    def take_(self, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Copy `chosen` rows and their numbers to where they leave from."""
        values, numbers = self.values[0, : len(chosen)], self.numbers[0, : len(chosen)]
        torch.index_select(rows, 0, chosen, out=values)
        return values, numbers.copy_(chosen)


class Parallax(Exchange):
    """Send the rows of embeddings that a batch has touched to their owners, and back to all."""

    OPERATIONS = (
        ("all but rows", "leader", "Allreduce SUM", "dense"),
        ("how many rows for each owner", "leader", "Allgather", "int32 (mask)"),
        ("rows for their owners", "leader", "Alltoallv", "values, then int32 numbers (mask)"),
        ("sums of rows", "leader", "Allgatherv", "values, then int32 numbers (mask)"),
    )

    def allocate(self) -> None:
        self.workers, layout = self.wire.comm.size, self.state.layout
        self.tables = [self.new_table(s) for s in find_embeddings(self.settings, layout)]
        self.dense = all_but_rows(layout)
        self.counts = torch.empty(len(self.tables), self.owners, dtype=torch.int32)
        self.all_counts = self.counts.new_empty(self.workers, *self.counts.shape)

    @property
    def owners(self) -> int:
        """How many workers own rows of their own."""
        return self.workers

    def new_table(self, segment: Segment) -> Rows:
        """Allocate memory for an embedding."""
        rows, width = segment.shape
        theta, bucket = self.state.theta, self.wire.transport.bucket_bytes
        room = max(1, bucket // (width * theta.element_size() * self.workers))
        room = min(room, -(-rows // self.workers))
        values = theta.new_empty(2, self.workers * room, width)
        numbers = torch.empty(2, self.workers * room, dtype=torch.int32, device=theta.device)
        return Rows(segment, room, values, numbers)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Return what a step hands to the next, nothing, if there are embeddings."""
        find_embeddings(settings, layout)
        return {}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum over the workers."""
        for place in self.dense:
            self.wire.reduce_(flat[place])
        views = [flat[t.segment.place].view(t.segment.shape) for t in self.tables]
        owners = range(self.owners)
        touched = [[find_touched(rows, r, len(owners)) for r in owners] for rows in views]
        self.counts.copy_(torch.tensor([[len(part) for part in parts] for parts in touched]))
        self.wire.gather_(self.counts.view(-1), self.all_counts.view(self.workers, -1), "mask")
        every_count = self.all_counts.transpose(0, 1).numpy().astype(np.int64)
        for table, rows, parts, counts in zip(
            self.tables, views, touched, every_count, strict=True
        ):
            if self.costs_more(counts, table.segment, flat.element_size()):
                self.wire.reduce_(flat[table.segment.place])
            else:
                self.add_up_(table, rows, parts, counts)
                self.spread_(table, rows)

    @staticmethod
    def costs_more(counts: np.ndarray, table: Segment, size: int) -> bool:
        """Return whether rows could send as much as an Allreduce of the whole `table`.

        `counts` [from, to] are the rows that each leader has for each owner; at worst no two are
        one.
        """
        workers, (rows, width) = len(counts), table.shape
        shares = [len(range(owner, rows, workers)) for owner in range(workers)]
        sums = np.minimum(counts.sum(axis=0), shares).sum()
        sent = counts.sum() - counts.trace() + (workers - 1) * sums
        return sent * (width * size + POSITION_BYTES) >= 2 * (workers - 1) * table.numel * size

    def add_up_(self, table: Rows, rows: Tensor, touched: list[Tensor], counts: np.ndarray) -> None:
        """Add to this leader's `rows` [n, width] those that others have of them, one by one."""
        rank, width, room = self.wire.comm.rank, rows.shape[1], table.room
        counts = counts * (1 - np.eye(len(counts), dtype=np.int64))
        for start in range(0, counts.max(), room):
            pieces = (counts - start).clip(0, room)
            leaving, arriving = pieces[rank].tolist(), pieces[:, rank].tolist()
            parts = (part[start : start + n] for part, n in zip(touched, leaving, strict=True))
            mine, numbers = table.take_(rows, torch.cat(tuple(parts)))
            came, places = (t[1, : sum(arriving)] for t in (table.values, table.numbers))
            by_width = [[width * n for n in counted] for counted in (leaving, arriving)]
            self.wire.deal_parts_(mine.view(-1), by_width[0], came.view(-1), by_width[1])
            self.wire.deal_parts_(numbers, leaving, places, arriving, "mask")
            add_sparse_(rows, came.split(arriving), places.split(arriving))

    def spread_(self, table: Rows, rows: Tensor) -> None:
        """Set `rows` to the owners' rows, and zero elsewhere."""
        wire, width = self.wire, rows.shape[1]
        chosen = find_touched(rows, wire.comm.rank, self.workers)
        everyone = torch.empty(self.workers, 1, dtype=torch.int32)
        wire.gather_(torch.tensor([len(chosen)], dtype=torch.int32), everyone, "mask")
        counts = everyone.view(-1).tolist()
        total = self.state.scratch[table.segment.place].view(rows.shape).zero_()
        for start in range(0, max(counts), table.room):
            pieces = [min(max(count - start, 0), table.room) for count in counts]
            mine, numbers = table.take_(rows, chosen[start : start + pieces[wire.comm.rank]])
            came, places = (t[1, : sum(pieces)] for t in (table.values, table.numbers))
            wire.gather_parts_(mine.view(-1), [width * n for n in pieces], came.view(-1))
            wire.gather_parts_(numbers, pieces, places, "mask")
            add_sparse_(total, [came], [places])
        rows.copy_(total)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return most(settings, layout, size, counts=workers + 1)


def find_embeddings(settings: Settings, layout: Layout) -> tuple[Segment, ...]:
    """Return the embeddings of a model; raise UserError where it has none, or a tied one."""
    if not layout.embeddings:
        raise UserError(
            f"method {settings.method.name}: the model has no nn.Embedding whose weights no other "
            "layer shares; give one that has, such as gpt_nano-untied, or method dense"
        )
    return layout.embeddings


def all_but_rows(layout: Layout) -> list[slice]:
    """Return the stretches of a flat vector that are no embedding's."""
    ends = [0, *(end for s in layout.embeddings for end in (s.offset, s.offset + s.numel))]
    stretches = zip(ends[::2], [*ends[1::2], layout.numel], strict=True)
    return [slice(start, stop) for start, stop in stretches if start < stop]


def find_touched(rows: Tensor, owner: int, owners: int) -> Tensor:
    """Return the numbers of an owner's `rows` [n, width] that are not zero; NaN is not."""
    return owner + owners * torch.any(rows[owner::owners], 1).nonzero().squeeze(1)


def most(settings: Settings, layout: Layout, size: int, counts: int) -> tuple[int, str]:
    """Return what `payload` does, where a worker tells so many `counts` of each embedding."""
    tables = find_embeddings(settings, layout)
    rows = sum(table.numel for table in tables) * size
    numbers = POSITION_BYTES * sum(table.shape[0] + counts for table in tables)
    how = f"at most, {rows:,} B of them rows of embeddings, and {numbers:,} B of their numbers"
    return layout.numel * size, f"{how}, {settings.aggregation}"
