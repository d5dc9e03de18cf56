"""A step of PowerSGD: sums over the workers of two thin factors per gradient matrix.

The first worker alone makes the left factors orthonormal: where their columns depend on each other
nearly, rounding decides what comes out, and all must go on with the same.
"""

import torch
from torch import Tensor

from prunex_mpi.compress import low_rank
from prunex_mpi.compress.sparse import move_whole_, put_whole_
from prunex_mpi.core.memory import Declared, shared, summed
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout
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

    def allocate(self) -> None:
        self.split = low_rank.split_layout(self.state.layout, self.options.rank)
        self.left = self.state.theta.new_empty(self.split.left_numel)
        self.whole = self.state.theta.new_empty(self.split.whole_numel)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet, and the right factors."""
        split = low_rank.split_layout(layout, settings.options.rank)
        right = low_rank.new_right_factors(split, settings.seed, theta)
        return {RESIDUAL: summed(torch.zeros_like(theta)), RIGHT_FACTORS: shared(right)}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the low-rank part of the sum of residual + gradient.

        A worker's new residual is its own part without the projection on the common left factors.
        """
        split, left, whole = self.split, self.left, self.whole
        right = self.state.memory[RIGHT_FACTORS]
        residual = self.state.memory[RESIDUAL].add_(flat)
        move_whole_(residual, split.whole, whole)
        low_rank.project_left_(residual, right, split, left)
        self.link.reduce_(whole)
        self.link.reduce_by_first_(left, lambda: low_rank.orthonormalise_(left, split))
        low_rank.project_right_(residual, left, split, right)
        self.link.reduce_(right)
        low_rank.multiply_(flat, left, right, split)
        put_whole_(flat, split.whole, whole)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        split = low_rank.split_layout(layout, settings.options.rank)
        how = (
            f"{len(split.matrices)} matrices as factors of rank {split.rank}, "
            f"{split.whole_numel:,} elements whole, {settings.aggregation}"
        )
        return (split.left_numel + split.right_numel + split.whole_numel) * size, how
