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

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.compress.sparse import POSITION_BYTES, add_sparse_
from prunex_mpi.methods.parallax import Parallax, most
from prunex_mpi.models.layout import Layout, Segment
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Columns:
    """An embedding, the columns of each worker, and memory for a bucket of `room` rows of each.

    `mine` are this worker's numbers of rows, `numbers` those of all; `seen` is who has any, bool.
    """

    segment: Segment
    room: int
    places: list[slice]
    leaving: Tensor
    arriving: Tensor
    numbers: Tensor
    mine: Tensor
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
        room = self.wire.transport.bucket_bytes // (width * theta.element_size())
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
            numbers.new_empty(room),
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
        wire, rank, places = self.wire, self.wire.comm.rank, table.places
        widths = [place.stop - place.start for place in places]
        table.seen.zero_()
        for start in range(0, counts.max(), table.room):
            pieces = (counts[:, 0] - start).clip(0, table.room).tolist()
            mine, numbers = table.mine[: pieces[rank]], table.numbers[: sum(pieces)]
            mine.copy_(touched[0][start : start + table.room])
            wire.gather_parts_(mine, pieces, numbers, "mask")
            leaving = [0 if worker == rank else len(mine) * n for worker, n in enumerate(widths)]
            arriving = [
                0 if worker == rank else n * widths[rank] for worker, n in enumerate(pieces)
            ]
            sent, came = table.leaving[: sum(leaving)], table.arriving[: sum(arriving)]
            for place, part in zip(places, sent.split(leaving), strict=True):
                if len(part):
                    torch.index_select(rows[:, place], 0, mine, out=part.view(len(mine), -1))
            wire.deal_parts_(sent, leaving, came, arriving)
            for part, which in zip(came.split(arriving), numbers.split(pieces), strict=True):
                if len(part):
                    add_sparse_(rows[:, places[rank]], [part.view(len(which), -1)], [which])
            table.seen.index_fill_(0, numbers.long(), True)

    def spread_(self, table: Columns, rows: Tensor) -> None:
        """Set `rows` to the sums of their owners' columns, and to zero where no worker has any."""
        rank = self.wire.comm.rank
        # Zeros have two signs.
        rows.masked_fill_(~table.seen.unsqueeze(1), 0)
        for chosen in table.seen.nonzero().squeeze(1).split(table.room):
            shapes = [(len(chosen), place.stop - place.start) for place in table.places]
            lengths = [n * width for n, width in shapes]
            mine, came = table.leaving[: lengths[rank]], table.arriving[: sum(lengths)]
            own = rows[:, table.places[rank]]
            torch.index_select(own, 0, chosen, out=mine.view(shapes[rank]))
            self.wire.gather_parts_(mine, lengths, came)
            for place, part, shape in zip(table.places, came.split(lengths), shapes, strict=True):
                rows[:, place].index_copy_(0, chosen, part.view(shape))

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return most(settings, layout, size, counts=1)
