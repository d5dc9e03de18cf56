"""Of embeddings the rows that a batch touches, all else dense: Parallax and EmbRace.

A batch looks up some rows of an embedding; the gradient of all others is zero. All other gradients
are added up whole (Allreduce), and so is an embedding of which so many rows are touched that they
could cost more: positions always are. So the result is that of dense SGD, and rows that nobody has
touched decay and move on with their momentum as there.

In Parallax (Kim et al. 2019) the ranks of a node add up their gradients first, so that a leader has
the rows that any of them has touched. It sends them with their numbers to their owners (Alltoallv),
the owners add them up, and the sums go to all leaders (Allgatherv). Of M leaders the one at place r
owns rows r, r + M, ...: rows are often numbered by how frequent they are, so that runs of them
would not be touched alike. The paper's fit of the seconds of a step, which finds how many
partitions the rows on servers are cut into, has no counterpart: there are as many as leaders.

In EmbRace (Li et al. 2022) a worker sends of each row a stretch of columns to each other worker
(Alltoallv), and the rows' numbers to all (Allgatherv); it adds up its own columns, and they go back
to all (Allgatherv). So all shares are as large, whatever words are frequent, but what travels grows
with the ranks of all nodes. The paper's order, rows of the next batch first, hides time alone, and
is not here.

In the papers owners hold their rows, or columns, alone, step on them and hand out those that are
looked up next. Here every rank holds all rows and takes every step itself.
"""

from dataclasses import dataclass
from itertools import pairwise

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
        self.workers, layout = self.link.comm.size, self.state.layout
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
        theta, bucket = self.state.theta, self.link.transport.bucket_bytes
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
            self.link.reduce_(flat[place])
        views = [flat[t.segment.place].view(t.segment.shape) for t in self.tables]
        owners = range(self.owners)
        touched = [[find_touched(rows, r, len(owners)) for r in owners] for rows in views]
        self.counts.copy_(torch.tensor([[len(part) for part in parts] for parts in touched]))
        self.link.gather_(self.counts.view(-1), self.all_counts.view(self.workers, -1), "mask")
        every_count = self.all_counts.transpose(0, 1).numpy().astype(np.int64)
        for table, rows, parts, counts in zip(
            self.tables, views, touched, every_count, strict=True
        ):
            if self.costs_more(counts, table.segment, flat.element_size()):
                self.link.reduce_(flat[table.segment.place])
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
        rank, width, room = self.link.comm.rank, rows.shape[1], table.room
        counts = counts * (1 - np.eye(len(counts), dtype=np.int64))
        for start in range(0, counts.max(), room):
            pieces = (counts - start).clip(0, room)
            leaving, arriving = pieces[rank].tolist(), pieces[:, rank].tolist()
            parts = (part[start : start + n] for part, n in zip(touched, leaving, strict=True))
            mine, numbers = table.take_(rows, torch.cat(tuple(parts)))
            came, places = (t[1, : sum(arriving)] for t in (table.values, table.numbers))
            by_width = [[width * n for n in counted] for counted in (leaving, arriving)]
            self.link.alltoall_parts_(mine.view(-1), by_width[0], came.view(-1), by_width[1])
            self.link.alltoall_parts_(numbers, leaving, places, arriving, "mask")
            add_sparse_(rows, came.split(arriving), places.split(arriving))

    def spread_(self, table: Rows, rows: Tensor) -> None:
        """Set `rows` to the owners' rows, and zero elsewhere."""
        link, width = self.link, rows.shape[1]
        chosen = find_touched(rows, link.comm.rank, self.workers)
        everyone = torch.empty(self.workers, 1, dtype=torch.int32)
        link.gather_(torch.tensor([len(chosen)], dtype=torch.int32), everyone, "mask")
        counts = everyone.view(-1).tolist()
        total = self.state.scratch[table.segment.place].view(rows.shape).zero_()
        for start in range(0, max(counts), table.room):
            pieces = [min(max(count - start, 0), table.room) for count in counts]
            mine, numbers = table.take_(rows, chosen[start : start + pieces[link.comm.rank]])
            came, places = (t[1, : sum(pieces)] for t in (table.values, table.numbers))
            link.gather_parts_(mine.view(-1), [width * n for n in pieces], came.view(-1))
            link.gather_parts_(numbers, pieces, places, "mask")
            add_sparse_(total, [came], [places])
        rows.copy_(total)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return most(settings, layout, size, counts=workers + 1)


@dataclass(frozen=True)
class Columns:
    """An embedding, the columns of each worker, and memory for a bucket of `room` rows of each.

    `numbers` are those of all workers' rows; `seen` says of which any worker has something, bool.
    """

    segment: Segment
    room: int
    places: list[slice]
    leaving: Tensor
    arriving: Tensor
    numbers: Tensor
    seen: Tensor


class EmbRace(Parallax):
    """Send stretches of the rows that a batch has touched to the owners of their columns."""

    OPERATIONS = (
        ("all but rows", "workers", "Allreduce SUM", "dense"),
        ("how many rows", "workers", "Allgather", "int32 (mask)"),
        ("numbers of rows", "workers", "Allgatherv", "int32 (mask)"),
        ("columns for their owners", "workers", "Alltoallv", "values"),
        ("sums of columns", "workers", "Allgatherv", "values"),
    )
    # Of rows: all are everyone's.
    owners = 1

    def new_table(self, segment: Segment) -> Columns:
        """Allocate memory for an embedding."""
        theta, workers, (rows, width) = self.state.theta, self.workers, segment.shape
        room = self.link.transport.bucket_bytes // (width * theta.element_size())
        room = min(max(1, room // workers), rows)
        ends = [width * worker // workers for worker in range(workers + 1)]
        numbers = torch.empty(workers * room, dtype=torch.int32, device=theta.device)
        return Columns(
            segment,
            room,
            [slice(start, stop) for start, stop in pairwise(ends)],
            theta.new_empty(room * width),
            theta.new_empty(room * max(width, workers * -(-width // workers))),
            numbers,
            numbers.new_empty(rows, dtype=torch.bool),
        )

    @staticmethod
    def costs_more(counts: np.ndarray, table: Segment, size: int) -> bool:
        """Return whether columns could send as much as an Allreduce of the whole `table`.

        `counts` [from, 1] are the rows that each worker has touched; at worst no two are one.
        """
        workers, (rows, width), touched = len(counts), table.shape, int(counts.sum())
        leaves = touched * (width - width // workers) + (workers - 1) * min(touched, rows) * width
        sent = leaves * size + (workers - 1) * touched * POSITION_BYTES
        return sent >= 2 * (workers - 1) * table.numel * size

    def add_up_(
        self, table: Columns, rows: Tensor, touched: list[Tensor], counts: np.ndarray
    ) -> None:
        """Add the others' columns of this worker to its `rows` [n, width]; note who has any."""
        link, rank, places = self.link, self.link.comm.rank, table.places
        widths = [place.stop - place.start for place in places]
        table.seen.zero_()
        for start in range(0, counts.max(), table.room):
            pieces = (counts[:, 0] - start).clip(0, table.room).tolist()
            mine, numbers = touched[0][start : start + table.room], table.numbers[: sum(pieces)]
            link.gather_parts_(mine, pieces, numbers, "mask")
            leaving = [0 if worker == rank else len(mine) * n for worker, n in enumerate(widths)]
            arriving = [
                0 if worker == rank else n * widths[rank] for worker, n in enumerate(pieces)
            ]
            sent, came = table.leaving[: sum(leaving)], table.arriving[: sum(arriving)]
            for place, part in zip(places, sent.split(leaving), strict=True):
                if len(part):
                    torch.index_select(rows[:, place], 0, mine, out=part.view(len(mine), -1))
            link.alltoall_parts_(sent, leaving, came, arriving)
            for part, which in zip(came.split(arriving), numbers.split(pieces), strict=True):
                if len(part):
                    add_sparse_(rows[:, places[rank]], [part.view(len(which), -1)], [which])
            table.seen.index_fill_(0, numbers.long(), True)

    def spread_(self, table: Columns, rows: Tensor) -> None:
        """Set `rows` to the sums of their owners' columns, and to zero where no worker has any."""
        rank = self.link.comm.rank
        # Zeros have two signs.
        rows.masked_fill_(~table.seen.unsqueeze(1), 0)
        for chosen in table.seen.nonzero().squeeze(1).split(table.room):
            shapes = [(len(chosen), place.stop - place.start) for place in table.places]
            lengths = [n * width for n, width in shapes]
            mine, came = table.leaving[: lengths[rank]], table.arriving[: sum(lengths)]
            own = rows[:, table.places[rank]]
            torch.index_select(own, 0, chosen, out=mine.view(shapes[rank]))
            self.link.gather_parts_(mine, lengths, came)
            for place, part, shape in zip(table.places, came.split(lengths), shapes, strict=True):
                rows[:, place].index_copy_(0, chosen, part.view(shape))

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return most(settings, layout, size, counts=1)


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
    """Return the numbers, int32, of an owner's `rows` [n, width] that are not zero; NaN is not."""
    return (owner + owners * torch.any(rows[owner::owners], 1).nonzero().squeeze(1)).int()


def most(settings: Settings, layout: Layout, size: int, counts: int) -> tuple[int, str]:
    """Return what `payload` does, where a worker tells so many `counts` of each embedding."""
    tables = find_embeddings(settings, layout)
    rows = sum(table.numel for table in tables) * size
    numbers = POSITION_BYTES * sum(table.shape[0] + counts for table in tables)
    how = f"at most, {rows:,} B of them rows of embeddings, and {numbers:,} B of their numbers"
    return layout.numel * size, f"{how}, {settings.aggregation}"
