"""A step of PowerSGD: sums over the workers of two thin factors per gradient matrix.

The first worker alone makes the left factors orthonormal: where their columns depend on each other
nearly, rounding decides what comes out, and all must go on with the same.
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress import low_rank
from prunex_mpi.compress.sparse import move_whole_, put_whole_
from prunex_mpi.core.state import OWN, SHARED, RunContext
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("whole tensors", "workers", "Allreduce SUM", "1-D tensors and small matrices"),
    ("left factors P", "workers", "Reduce SUM, Bcast", "rank elements per row of a matrix"),
    ("right factors Q", "workers", "Allreduce SUM", "rank elements per column of a matrix"),
)
RESIDUAL, RIGHT_FACTORS = f"{OWN}residual", f"{SHARED}right_factors"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what has not been sent yet, and the right factors that a step starts from."""
    split = low_rank.split_layout(layout, settings.options.rank)
    right = low_rank.new_right_factors(split, settings.seed, theta)
    return {RESIDUAL: torch.zeros_like(theta), RIGHT_FACTORS: right}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return what travels how, and memory for left factors and for tensors that travel whole."""
    theta = context.state.theta
    split = low_rank.split_layout(context.state.layout, context.settings.options.rank)
    return {
        "split": split,
        "left_factors": theta.new_empty(split.left_numel),
        "whole": theta.new_empty(split.whole_numel),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the low-rank part of the sum of residual + gradient over the workers.

    A worker's new residual is its own part without the projection on the common left factors.
    Collective on `wire.comm`.
    """
    state, split, left, whole = context.state, space["split"], space["left_factors"], space["whole"]
    right = state.memory[RIGHT_FACTORS]
    residual = state.memory[RESIDUAL].add_(state.grad)
    move_whole_(residual, split.whole, whole)
    low_rank.project_left_(residual, right, split, left)
    wire.reduce_(whole)
    wire.reduce_by_first_(left, lambda: low_rank.orthonormalise_(left, split))
    low_rank.project_right_(residual, left, split, right)
    wire.reduce_(right)
    low_rank.multiply_(state.grad, left, right, split)
    put_whole_(state.grad, split.whole, whole)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    split = low_rank.split_layout(layout, settings.options.rank)
    how = (
        f"{len(split.matrices)} matrices as factors of rank {split.rank}, "
        f"{split.whole_numel:,} elements whole, {settings.aggregation}"
    )
    return (split.left_numel + split.right_numel + split.whole_numel) * size, how
