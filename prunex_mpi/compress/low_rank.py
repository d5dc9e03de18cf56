"""Low-rank approximation of gradients by one power iteration per step (Vogels et al. 2019, Alg. 1).

A parameter tensor of two or more dimensions is the matrix M [shape[0], the rest]. With the right
factor Q [columns, rank] of the step before,

    P = M Q,   P orthonormalised,   Q = M^T P,   M is about P Q^T

and all but the orthonormalisation is linear in M, so sums of P and Q over workers are those of the
sum of their M. Tensors for which the two factors are no smaller than the matrix stay whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.layout import Layout, Segment


@dataclass(frozen=True)
class Split:
    """The segments that travel as two factors of `rank` columns, and those that travel whole."""

    rank: int
    matrices: tuple[Segment, ...]
    whole: tuple[Segment, ...]

    @property
    def left_numel(self) -> int:
        """Elements of all left factors P."""
        return self.rank * sum(_sides(s)[0] for s in self.matrices)

    @property
    def right_numel(self) -> int:
        """Elements of all right factors Q."""
        return self.rank * sum(_sides(s)[1] for s in self.matrices)

    @property
    def whole_numel(self) -> int:
        return sum(s.numel for s in self.whole)

    def matrix_views(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices [rows, columns] in a flat vector of the layout."""
        return [flat[s.place].view(_sides(s)) for s in self.matrices]

    def factor_views(self, flat: Tensor, dim: int) -> list[Tensor]:
        """Return left (`dim` 0) or right factors [size, rank], one behind the other in `flat`."""
        sides = [_sides(s)[dim] for s in self.matrices]
        pieces = flat.split([side * self.rank for side in sides])
        return [piece.view(side, self.rank) for piece, side in zip(pieces, sides, strict=True)]

    def triples(
        self, flat: Tensor, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Walk the matrices with their left and their right factors."""
        factors = self.factor_views(left, 0), self.factor_views(right, 1)
        return zip(self.matrix_views(flat), *factors, strict=True)


def _sides(segment: Segment) -> tuple[int, int]:
    return segment.shape[0], segment.numel // segment.shape[0]


def largest_rank(segment: Segment) -> int:
    """Return the largest rank whose factors are smaller than the matrix, 0 where none is."""
    if len(segment.shape) < 2 or not segment.numel:
        return 0
    rows, columns = _sides(segment)
    return (rows * columns - 1) // (rows + columns)


def split_layout(layout: Layout, rank: int) -> Split:
    """Divide the segments; raise UserError where `rank` is too large to compress any of them."""
    best = max(layout.segments, key=largest_rank)
    if not largest_rank(best):
        raise UserError("powersgd finds no matrix in the model that two factors would be less than")
    if rank > largest_rank(best):
        rows, columns = _sides(best)
        raise UserError(
            f"powersgd-rank {rank} is too large for every matrix of the model; {best.name}, "
            f"{rows} x {columns}, takes the largest, {largest_rank(best)}"
        )
    return Split(
        rank,
        tuple(s for s in layout.segments if rank <= largest_rank(s)),
        tuple(s for s in layout.segments if rank > largest_rank(s)),
    )


def new_right_factors(split: Split, seed: int, theta: Tensor) -> Tensor:
    """Return the right factors of the first step, random and flat, like `theta`."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(split.right_numel, generator=generator, dtype=theta.dtype)
    return factors.to(theta.device)


def project_left_(flat: Tensor, right: Tensor, split: Split, left: Tensor) -> None:
    """Set the left factors to P = M Q."""
    for m, p, q in split.triples(flat, left, right):
        torch.mm(m, q, out=p)


def orthonormalise_(left: Tensor, split: Split) -> None:
    """Replace each left factor by an orthonormal basis of its columns (QR)."""
    for p in split.factor_views(left, 0):
        p.copy_(torch.linalg.qr(p).Q)


def project_right_(flat: Tensor, left: Tensor, split: Split, right: Tensor) -> None:
    """Set the right factors to Q = M^T P and the matrices to what is left of them, M - P Q^T."""
    for m, p, q in split.triples(flat, left, right):
        torch.mm(m.T, p, out=q)
        m.addmm_(p, q.T, alpha=-1)


def multiply_(flat: Tensor, left: Tensor, right: Tensor, split: Split) -> None:
    """Set the matrices in `flat` to P Q^T."""
    for m, p, q in split.triples(flat, left, right):
        torch.mm(p, q.T, out=m)
