"""A step of TernGrad: of each worker's gradient -1, 0 or 1 times a scale that all workers share.

After Wen et al. 2017 and the authors' code (wenwei202/terngrad, inception/bingrad_common.py): per
tensor s is the largest of the workers' scales, and an element becomes its sign with probability
|g| / s, 1 beyond it, which keeps its expectation. A worker's scale is 2.5 standard
deviations of its gradient, or the largest magnitude where that is less. Sums of the workers' whole
numbers are exact. What an element becomes depends on seed, step and worker alone.
"""

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.compress.quantise import ternarise_
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.sums import Counts, bytes_handed_over
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout, pieces_of
from prunex_mpi.settings.fields import Settings

UP = 2
# Standard deviations of a tensor's gradient that its scale is at most.
CLIP_SIGMA = 2.5


class TernGrad(Exchange):
    """Send signs or zeros, and a scale per tensor."""

    OPERATIONS = (
        ("scales", "workers", "Allreduce MAX", "one per tensor"),
        ("up to 3 workers: signs or 0", "workers", "Allgather", "2 bits each"),
        ("from 4 on: signs or 0", "workers", "Alltoall", "2 bits each, a share for each worker"),
        ("from 4 on: their sums", "workers", "Allgather", "4 bits each, 8 from 8 workers on"),
    )

    def allocate(self) -> None:
        theta = self.state.theta
        self.counts = Counts(self.link, theta, UP, bits_down(self.link.comm.size))
        self.scales = theta.new_empty(len(self.state.layout.segments))
        self.draws = torch.empty_like(theta)
        self.up, self.down = (torch.empty_like(theta, dtype=torch.bool) for _ in range(2))
        self.generator = torch.Generator(theta.device)

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of the workers' ternary ones."""
        pieces = pieces_of(flat, self.state.layout.segments)
        find_scales_(pieces, self.scales)
        self.link.reduce_(self.scales, MPI.MAX)
        self.draw_(flat)
        sums = self.counts.sum_()
        if not self.counts.to_all:
            sums = self.counts.spread_(sums)
        flat.copy_(sums.view(-1)[: flat.numel()]).sub_(self.link.comm.size)
        for piece, scale in zip(pieces, self.scales, strict=True):
            piece.mul_(scale)

    def draw_(self, grad: Tensor) -> None:
        """Set the first numbers to 0, 1 or 2 for the signs of `grad`, at random."""
        seed, step, rank = self.settings.seed, steps_taken(self.context), self.link.comm.rank
        drawn = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
        self.generator.manual_seed(int(drawn >> 1))
        signs = self.counts.numbers.view(torch.int8).view(-1)[: grad.numel()]
        kinds = (grad, self.draws, self.up, self.down, signs)
        views = zip(*(pieces_of(t, self.state.layout.segments) for t in kinds), strict=True)
        for scale, (piece, draws, up, down, out) in zip(self.scales, views, strict=True):
            ternarise_(piece, scale, draws, (up, down), out, self.generator)
        signs.add_(1)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        scales = len(layout.segments)
        numbers = bytes_handed_over(layout.numel, workers, UP, bits_down(workers))
        how = f"2 bits per element, its share of the sums, {scales} scales, {settings.aggregation}"
        return numbers + scales * size, how


def bits_down(workers: int) -> int:
    """Return the bits of a sum of so many numbers 0, 1 or 2: 4, 8 or 16."""
    return next(bits for bits in (4, 8, 16) if 2 * workers < 1 << bits)


def find_scales_(pieces: list[Tensor], scales: Tensor) -> None:
    """Set `scales` [tensors] to `CLIP_SIGMA` deviations of each, or its largest magnitude.

    The smaller of both that is not 0.
    """
    for number, piece in enumerate(pieces):
        scales[number] = torch.linalg.vector_norm(piece, torch.inf)
    spreads = CLIP_SIGMA * torch.stack([piece.std(unbiased=False) for piece in pieces])
    scales.copy_(torch.where(spreads > 0, torch.minimum(scales, spreads), scales))
    # A maximum by MPI may drop a NaN.
    scales.nan_to_num_(nan=torch.inf, posinf=torch.inf)
