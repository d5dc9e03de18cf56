"""A step of TernGrad: of each worker's gradient -1, 0 or 1 times a scale that all workers share.

After Wen et al. 2017 and the authors' code (wenwei202/terngrad, inception/bingrad_common.py): per
tensor s is the largest of the workers' scales, and an element becomes its sign with probability
|g| / s, 1 beyond it, which keeps its expectation. A worker's scale is 2.5 standard
deviations of its gradient, or the largest magnitude where that is less. Sums of the workers' whole
numbers are exact. What an element becomes depends on seed, step and worker alone.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.quantise import ternarise_
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.state import RunContext
from prunex_mpi.core.sums import allocate_counts, bytes_handed_over, spread_, sum_numbers_
from prunex_mpi.models.layout import Layout, pieces_of
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("scales", "workers", "Allreduce MAX", "one per tensor"),
    ("up to 3 workers: signs or 0", "workers", "Allgather", "2 bits each"),
    ("from 4 on: signs or 0", "workers", "Alltoall", "2 bits each, a share for each worker"),
    ("from 4 on: their sums", "workers", "Allgather", "4 bits each, 8 from 8 workers on"),
)
UP = 2
# Standard deviations of a tensor's gradient that its scale is at most.
CLIP_SIGMA = 2.5


def bits_down(workers: int) -> int:
    """Return the bits of a sum of so many numbers 0, 1 or 2: 4, 8 or 16."""
    return next(bits for bits in (4, 8, 16) if 2 * workers < 1 << bits)


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for whole numbers, scales and random numbers."""
    state = context.state
    return {
        **allocate_counts(wire, state.theta, UP, bits_down(wire.comm.size)),
        "scales": state.theta.new_empty(len(state.layout.segments)),
        "draws": torch.empty_like(state.theta),
        "up": torch.empty_like(state.theta, dtype=torch.bool),
        "down": torch.empty_like(state.theta, dtype=torch.bool),
        "generator": torch.Generator(state.theta.device),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum of the workers' ternary gradients. Collective on `wire.comm`."""
    grad, scales, segments = context.state.grad, space["scales"], context.state.layout.segments
    find_scales_(pieces_of(grad, segments), scales)
    wire.reduce_(scales, MPI.MAX)
    draw_numbers_(wire, space, context)
    sums = sum_numbers_(wire, space, UP)
    if not space["to_all"]:
        sums = spread_(wire, space, sums, bits_down(wire.comm.size))
    grad.copy_(sums.view(-1)[: grad.numel()]).sub_(wire.comm.size)
    for piece, scale in zip(pieces_of(grad, segments), scales, strict=True):
        piece.mul_(scale)


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


def draw_numbers_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set the first elements of `numbers` to 0, 1 or 2 for the signs of `grad`, at random."""
    state, generator = context.state, space["generator"]
    seeds = np.random.SeedSequence([context.settings.seed, steps_taken(context), wire.comm.rank])
    generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
    signs = space["numbers"].view(torch.int8).view(-1)[: state.grad.numel()]
    kinds = (state.grad, space["draws"], space["up"], space["down"], signs)
    views = zip(*(pieces_of(t, state.layout.segments) for t in kinds), strict=True)
    for scale, (piece, draws, up, down, out) in zip(space["scales"], views, strict=True):
        ternarise_(piece, scale, draws, (up, down), out, generator)
    signs.add_(1)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    scales = len(layout.segments)
    numbers = bytes_handed_over(layout.numel, workers, UP, bits_down(workers))
    how = f"2 bits per element, its share of the sums, {scales} scales, {settings.aggregation}"
    return numbers + scales * size, how
