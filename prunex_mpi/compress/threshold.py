"""The arithmetic of deep gradient compression (Lin et al. 2018) on one worker's flat vectors.

With momentum m, a worker's gradient g, its momentum u and what it has not sent yet, v:

    u = m u + g,   v = v + u,   send the largest of v,   u = v = 0 where sent

(momentum correction, momentum factor masking). What is sent is found with a threshold per layer
that a sample decides; it is lowered where it lets too few pass. Sample sizes, bounds and the course
of the warm-up are those of the authors' code (synxlin/deep-gradient-compression, dgc/compression.py
and dgc/memory.py); its samples start at random places, here the place moves on with the step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prunex_mpi.compress.sparse import kept_per_layer, share_of
from prunex_mpi.models.layout import Layout, Segment, matrices

# A sample holds at least so many of the elements that are to be sent.
LEAST_ABOVE = 2
# Where the threshold lets more than UPPER times the share pass, the largest of these are sent;
# where it lets less than LOWER times the share pass, it is multiplied by LOWER, so often at most.
UPPER, LOWER, MOST_ADAPTATIONS = 1.3, 0.8, 10


def divide(layout: Layout, ratio: float) -> tuple[list[Segment], list[Segment]]:
    """Return the tensors of which a part travels, those of two or more dimensions, and the others.

    None are the former where the share is everything.
    """
    parts = [] if ratio == 1 else list(matrices(layout))
    return parts, [s for s in layout.segments if ratio == 1 or len(s.shape) < 2]


def ratio_in(part: int, parts: int, final: float) -> float:
    """Return the share of a layer that travels in a part of the warm-up, counted from 0.

    In each of E parts it falls by the same factor, final^(1/(E+1)), and once more after the last.
    """
    return final if part >= parts else max(final, final ** ((part + 1) / (parts + 1)))


def accumulate_(momentum: Tensor, residual: Tensor, grad: Tensor, factor: float) -> None:
    """Correct the momentum: u = factor u + g, v = v + u (Lin et al. 2018, Eq. 5)."""
    momentum.mul_(factor).add_(grad)
    residual.add_(momentum)


def sample_stride(numel: int, ratio: float, sample: float) -> int:
    """Return of how many elements of a layer one is drawn: about a share `sample` of them.

    Odd, so that it has no common period with the kernels' sizes; 1 where a sample would be small.
    """
    least = math.ceil(LEAST_ABOVE / ratio)
    if sample >= 1 or numel <= least:
        return 1
    wanted = max(math.ceil(numel * sample), least)
    stride = math.ceil(numel / wanted / 32) * 32 + 1
    while numel // stride < wanted:
        stride -= 8
    return stride


def sampled_threshold(magnitudes: Tensor, ratio: float, stride: int, step: int) -> Tensor:
    """Return the magnitude that about `ratio` of a layer's reach, by every stride-th; 0-dim."""
    count = share_of(magnitudes.numel() // stride, ratio)
    drawn = magnitudes[step % stride :: stride]
    # Zeros have nothing to say.
    return torch.topk(drawn, count).values[-1].clamp(min=torch.finfo(magnitudes.dtype).tiny)


def select_above_(
    residual: Tensor,
    segments: Sequence[Segment],
    ratio: float,
    sample: float,
    step: int,
    spare: tuple[Tensor, Tensor],
    sent: tuple[Tensor, Tensor],
) -> int:
    """Copy what reaches each layer's threshold; return how many elements that are.

    At most `kept_per_layer(segments, ratio)` of a layer, so that what is `sent`, values and
    positions (int32, in the flat vector), never needs more room: where many more pass, the largest
    of them (hierarchical selection), where few more do, the first. `spare` (one like `residual`,
    one bool) is overwritten.
    """
    (scratch, chosen), (values, positions) = spare, sent
    torch.abs(residual, out=scratch)
    passing = adapt_thresholds_(scratch, segments, ratio, sample, step, chosen)
    found = chosen.nonzero().squeeze(1)
    start = taken = 0
    limits = kept_per_layer(segments, ratio)
    for count, limit in zip(passing, limits, strict=True):
        mine = found[start : start + count]
        start += count
        if count > UPPER * limit:
            largest = torch.topk(scratch.index_select(0, mine), limit, sorted=False).indices
            mine = mine.index_select(0, largest)
        mine = mine[:limit]
        stop = taken + mine.numel()
        torch.index_select(residual, 0, mine, out=values[taken:stop])
        positions[taken:stop].copy_(mine)
        taken = stop
    return taken


def adapt_thresholds_(
    magnitudes: Tensor,
    segments: Sequence[Segment],
    ratio: float,
    sample: float,
    step: int,
    chosen: Tensor,
) -> list[int]:
    """Set `chosen` where a layer's threshold is reached; return how many elements each has there.

    Sampled thresholds that too few reach are lowered.
    """
    places = [s.place for s in segments]
    strides = [sample_stride(s.numel, ratio, sample) for s in segments]
    thresholds = [
        sampled_threshold(magnitudes[place], ratio, stride, step)
        for place, stride in zip(places, strides, strict=True)
    ]
    chosen.zero_()

    def count(layers: Sequence[int]) -> list[int]:
        for i in layers:
            # Not "at least": a NaN must travel, so that the run is seen to diverge.
            part = chosen[places[i]]
            torch.lt(magnitudes[places[i]], thresholds[i], out=part).logical_not_()
        return torch.stack([chosen[places[i]].sum() for i in layers]).tolist() if layers else []

    layers = list(range(len(segments)))
    passing = count(layers)
    least = [LOWER * limit for limit in kept_per_layer(segments, ratio)]
    for _ in range(MOST_ADAPTATIONS):
        layers = [i for i in layers if strides[i] > 1 and passing[i] < least[i]]
        for i in layers:
            thresholds[i].mul_(LOWER).clamp_(min=torch.finfo(magnitudes.dtype).tiny)
        for i, found in zip(layers, count(layers), strict=True):
            passing[i] = found
    return passing


def forget_sent_(momentum: Tensor, residual: Tensor, positions: Tensor) -> None:
    """Set u and v to 0 where they were sent: momentum factor masking."""
    places = positions.long()
    momentum.index_fill_(0, places, 0.0)
    residual.index_fill_(0, places, 0.0)
