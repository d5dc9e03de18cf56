"""A step of SparDL (Zhao et al. 2024): sums of the largest elements by shares, sparse all the way.

The gradient is cut into as many blocks as there are workers (W), of one size but for the last. In
ceil(log2 W) rounds worker r sends away all blocks but block r: with distance d, a falling power of
two, blocks r + d to r + 2d - 1, counted around, go to worker r + d. Before a block is sent its k
largest elements are taken, k being the ratio of a block rounded up; whoever receives them adds them
to its own block, and takes the largest of the sum when its turn comes. So what travels never grows,
for any W. The k largest of the sums of block r, which worker r holds in the end, go to all.

B-SAG, the paper's exchange in teams of workers, is not here.

The residual is the authors' global one (ZJU-DAILY/SparDL, allreducer.py). Where nothing was chosen
in the end, every worker keeps what it had, residual + gradient, as if nothing had been sent;
elsewhere it keeps what it has left out, others' values among it. At each place the workers' sum of
what has arrived and what is kept is what was there before.
"""

import torch
from torch import Tensor

from prunex_mpi.compress import sparse
from prunex_mpi.methods.exchange import RESIDUAL
from prunex_mpi.methods.topk import TopK
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class SparDl(TopK):
    """Add up the largest elements of blocks, filled up with zeros, in pairs (values, positions).

    What is remembered, and what positions take, is as in `TopK`.
    """

    OPERATIONS = (
        ("largest of blocks, in each round", "workers", "Sendrecv", "values, then int32 positions"),
        ("largest of each sum", "workers", "Allgather", "values, then int32 positions"),
    )

    def allocate(self) -> None:
        theta, workers = self.state.theta, self.link.comm.size
        size, count = sizes_of(self.settings, theta.numel(), workers)
        self.blocks = theta.new_zeros(workers, size)
        most = max(map(len, rounds(workers, 0)), default=1)
        self.leaving = paired(theta.new_empty(most, count))
        self.arriving = paired(theta.new_empty(most, count))
        self.everyone = paired(theta.new_empty(workers, count))
        self.starts = size * torch.arange(workers, device=theta.device).view(-1, 1)

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the largest of the sums of residual + gradient."""
        residual = self.state.memory[RESIDUAL].add_(flat)
        self.blocks.view(-1)[: flat.numel()].copy_(residual)
        self.reduce_blocks_()
        values, places = self.gather_blocks_()
        # What fills up the last blocks may be among the largest of a block of zeros.
        chosen = places < flat.numel()
        places, values = places[chosen], values[chosen]
        residual.index_copy_(0, places, self.blocks.view(-1)[places])
        flat.zero_().index_copy_(0, places, values)

    def reduce_blocks_(self) -> None:
        """Add up every block at its owner; `blocks` become what is left out."""
        blocks, place, size = self.blocks, self.link.comm.rank, self.link.comm.size
        for leaving in rounds(size, place):
            distance, many = leaving.start - place, len(leaving)
            for number, values, positions in zip(leaving, *self.leaving, strict=False):
                sparse.move_top_(blocks[number % size], values, positions)
            to, source = leaving.start % size, (place - distance) % size
            for mine, came in zip(self.leaving, self.arriving, strict=True):
                flat, received = mine[:many].view(-1), came[:many].view(-1)
                self.link.sendrecv_(flat, to, received, source)
            for number in range(many):
                values, positions = (came[number] for came in self.arriving)
                blocks[(place + number) % size].index_add_(0, positions, values)

    def gather_blocks_(self) -> tuple[Tensor, Tensor]:
        """Hand the largest of this block to all; return values and places of all."""
        mine = [kind[0] for kind in self.leaving]
        sparse.move_top_(self.blocks[self.link.comm.rank], *mine)
        for kind, everyone in zip(mine, self.everyone, strict=True):
            self.link.gather_(kind, everyone)
        return self.everyone[0], self.everyone[1] + self.starts

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        _, count = sizes_of(settings, layout.numel, workers)
        how = f"{count:,} values and positions of each of {workers} blocks, {settings.aggregation}"
        return workers * count * (size + sparse.POSITION_BYTES), how


def paired(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return `values` and as many int32 positions."""
    return values, torch.empty_like(values, dtype=torch.int32)


def sizes_of(settings: Settings, numel: int, workers: int) -> tuple[int, int]:
    """Return the elements of a block, and how many of them travel."""
    size = -(-numel // workers)
    return size, sparse.share_of(size, settings.options.ratio)


def rounds(workers: int, rank: int) -> list[range]:
    """Return the blocks, counted around, that go to the worker of the first in each round."""
    distances = [1 << bit for bit in reversed(range((workers - 1).bit_length()))]
    return [range(rank + d, rank + min(2 * d, workers)) for d in distances]
