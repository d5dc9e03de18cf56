"""A step of PowerSGD (Vogels et al. 2019): sums over the workers of two factors per matrix.

A parameter tensor of two or more dimensions is the matrix M [shape[0], the rest]. By one power
iteration (Alg. 1), with the right factor Q [columns, rank] of the step before,

    P = M Q,   P orthonormalised,   Q = M^T P,   M is about P Q^T

and all but the orthonormalisation is linear in M, so sums of P and Q over workers are those of the
sum of their M. Tensors for which the two factors are no smaller than the matrix stay whole.

The first worker alone makes the left factors orthonormal: where their columns depend on each other
nearly, rounding decides what comes out, and all must go on with the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.compress.sparse import move_whole_, put_whole_
from prunex_mpi.core.memory import Declared, shared, summed
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout, Segment
from prunex_mpi.settings.fields import Settings

# What a step starts from.
RIGHT_FACTORS = "right_factors"


class PowerSgd(Exchange):
    """Send two factors of each matrix; what they leave out is the residual."""

    OPERATIONS = (
        ("whole tensors", "workers", "Allreduce SUM", "1-D tensors and small matrices"),
        ("left factors P", "workers", "Reduce SUM, Bcast", "rank elements per row of a matrix"),
        ("right factors Q", "workers", "Allreduce SUM", "rank elements per column of a matrix"),
    )

    # The share of what is sent that leaves the residual.
    spent = 1.0

    def allocate(self) -> None:
        self.split = self.split_of(self.settings, self.state.layout)
        self.left = self.state.theta.new_empty(self.split.left_numel)
        self.whole = self.state.theta.new_empty(self.split.whole_numel)

    @staticmethod
    def split_of(settings: Settings, layout: Layout) -> "Split":
        """Return which segments travel as factors; raise UserError where none does."""
        return split_layout(layout, settings.options.rank)

    @classmethod
    def memory(cls, settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet, and the right factors, random at first."""
        numel = cls.split_of(settings, layout).right_numel
        generator = torch.Generator().manual_seed(settings.seed)
        right = torch.randn(numel, generator=generator, dtype=theta.dtype).to(theta.device)
        return {RESIDUAL: summed(torch.zeros_like(theta)), RIGHT_FACTORS: shared(right)}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the low-rank part of the sum of residual + gradient.

        A worker's new residual is its own part without the projection on the common left factors.
        """
        split, left, whole = self.split, self.left, self.whole
        right = self.state.memory[RIGHT_FACTORS]
        residual = self.state.memory[RESIDUAL].add_(flat)
        move_whole_(residual, split.whole, whole)
        for m, p, q in split.triples(residual, left, right):
            torch.mm(m, q, out=p)
        self.link.reduce_(whole)
        self.link.reduce_by_first_(left, self.orthonormalise_)
        for m, p, q in split.triples(residual, left, right):
            torch.mm(m.T, p, out=q)
            m.addmm_(p, q.T, alpha=-self.spent)
        self.link.reduce_(right)
        self.scale_right_()
        for m, p, q in split.triples(flat, left, right):
            torch.mm(p, q.T, out=m)
        put_whole_(flat, split.whole, whole)

    def orthonormalise_(self) -> None:
        """Replace each left factor by an orthonormal basis of its columns (QR)."""
        for p in self.split.factors(self.left, 0):
            p.copy_(torch.linalg.qr(p).Q)

    def scale_right_(self) -> None:
        """Change the sum of the right factors before it becomes part of the gradient."""

    @classmethod
    def payload(
        cls, settings: Settings, layout: Layout, size: int, workers: int
    ) -> tuple[int, str]:
        split = cls.split_of(settings, layout)
        ranks = sorted(set(split.ranks))
        how = (
            f"{len(split.matrices)} matrices as factors of rank {' or '.join(map(str, ranks))}, "
            f"{split.whole_numel:,} elements whole, {settings.aggregation}"
        )
        return (split.left_numel + split.right_numel + split.whole_numel) * size, how


@dataclass(frozen=True)
class Split:
    """The segments that travel as two factors of so many columns, and those that travel whole."""

    ranks: tuple[int, ...]
    matrices: tuple[Segment, ...]
    whole: tuple[Segment, ...]

    @property
    def left_numel(self) -> int:
        """Elements of all left factors P."""
        return sum(self._numels(0))

    @property
    def right_numel(self) -> int:
        """Elements of all right factors Q."""
        return sum(self._numels(1))

    @property
    def whole_numel(self) -> int:
        return sum(s.numel for s in self.whole)

    def factors(self, flat: Tensor, dim: int) -> Iterator[Tensor]:
        """Walk left (`dim` 0) or right factors [size, rank], one behind the other in `flat`."""
        pieces = zip(flat.split(self._numels(dim)), self.ranks, strict=True)
        return (piece.view(-1, rank) for piece, rank in pieces)

    def triples(
        self, flat: Tensor, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Walk the matrices [rows, columns] of `flat` with their left and their right factors."""
        matrices = (flat[s.place].view(sides(s)) for s in self.matrices)
        return zip(matrices, self.factors(left, 0), self.factors(right, 1), strict=True)

    def _numels(self, dim: int) -> list[int]:
        return [r * sides(s)[dim] for r, s in zip(self.ranks, self.matrices, strict=True)]


def sides(segment: Segment) -> tuple[int, int]:
    """Return the rows and columns of a segment's matrix."""
    return segment.shape[0], segment.numel // segment.shape[0]


def largest_rank(segment: Segment) -> int:
    """Return the largest rank whose factors are smaller than the matrix, 0 where none is."""
    if len(segment.shape) < 2:
        return 0
    rows, columns = sides(segment)
    return (rows * columns - 1) // (rows + columns)


def split_layout(layout: Layout, rank: int) -> Split:
    """Divide the segments; raise UserError where `rank` is too large to compress any of them."""
    best = max(layout.segments, key=largest_rank)
    if not largest_rank(best):
        raise UserError("powersgd finds no matrix in the model that two factors would be less than")
    if rank > largest_rank(best):
        rows, columns = sides(best)
        raise UserError(
            f"powersgd-rank {rank} is too large for every matrix of the model; {best.name}, "
            f"{rows} x {columns}, takes the largest, {largest_rank(best)}"
        )
    matrices = tuple(s for s in layout.segments if rank <= largest_rank(s))
    whole = tuple(s for s in layout.segments if rank > largest_rank(s))
    return Split((rank,) * len(matrices), matrices, whole)
