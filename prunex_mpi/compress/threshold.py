"""The arithmetic of deep gradient compression (Lin et al. 2018) on one worker's flat vectors.

With momentum m, a worker's gradient g, its momentum u and what it has not sent yet, v:

    u = m u + g,   v = v + u,   send the largest of v,   u = v = 0 where sent

(momentum correction, momentum factor masking). What is sent is found with a threshold per layer
that a sample decides.
"""

import math

import torch
from torch import Tensor

from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.models.layout import Layout

# The warm-up's stages, each with a quarter of the share before: 1/4, 1/16, 1/64, 1/256.
STAGES = 4
# A sample holds at least so many of the elements that are to be sent.
LEAST_ABOVE = 2


def ratio_at(step: int, warmup_steps: int, final: float) -> float:
    """Return the share of a layer that travels after `step` steps of the run."""
    if step >= warmup_steps:
        return final
    stage = STAGES * step // warmup_steps
    return max(final, 0.25 ** (stage + 1))


def accumulate_(momentum: Tensor, residual: Tensor, grad: Tensor, factor: float) -> None:
    """Correct the momentum: u = factor u + g, v = v + u (Lin et al. 2018, Eq. 5)."""
    momentum.mul_(factor).add_(grad)
    residual.add_(momentum)


def sampled_threshold(magnitudes: Tensor, ratio: float, sample: float, step: int) -> Tensor:
    """Return the magnitude that about `ratio` of a layer's exceed, a 0-dim tensor above 0.

    Read off every n-th element, about a share `sample` of them, at places that move on with `step`.
    Exact where so few elements would hold less than LEAST_ABOVE to be sent.
    """
    wanted = max(math.ceil(sample * magnitudes.numel() - 1e-9), math.ceil(LEAST_ABOVE / ratio))
    stride = max(1, magnitudes.numel() // wanted)
    drawn = magnitudes[step % stride :: stride]
    count = max(1, math.ceil(ratio * drawn.numel() - 1e-9))
    # Zeros have nothing to say.
    tiny = torch.finfo(magnitudes.dtype).tiny
    return torch.topk(drawn, count).values[-1].clamp(min=tiny)


def select_above_(
    residual: Tensor,
    layout: Layout,
    ratio: float,
    sample: float,
    step: int,
    spare: tuple[Tensor, Tensor],
    sent: tuple[Tensor, Tensor],
) -> int:
    """Copy what reaches each layer's sampled threshold; return how many elements that are.

    At most `kept_per_layer(layout, ratio)` of a layer: where the threshold lets more pass, these
    are the largest among them (hierarchical selection), so what is `sent`, values and positions
    (int32, in the flat vector), never needs more room. `spare` (one like `residual`, one bool) is
    overwritten.
    """
    (scratch, chosen), (values, positions) = spare, sent
    torch.abs(residual, out=scratch)
    passed = []
    for segment in layout.segments:
        place = slice(segment.offset, segment.offset + segment.numel)
        threshold = sampled_threshold(scratch[place], ratio, sample, step)
        # Not "at least": a NaN must travel, so that the run is seen to diverge.
        torch.lt(scratch[place], threshold, out=chosen[place]).logical_not_()
        passed.append(chosen[place].sum())
    found = chosen.nonzero().squeeze(1)
    start = taken = 0
    limits = kept_per_layer(layout, ratio)
    for count, limit in zip(torch.stack(passed).tolist(), limits, strict=True):
        mine = found[start : start + count]
        start += count
        if count > limit:
            largest = torch.topk(scratch.index_select(0, mine), limit, sorted=False).indices
            mine = mine.index_select(0, largest)
        stop = taken + mine.numel()
        torch.index_select(residual, 0, mine, out=values[taken:stop])
        positions[taken:stop].copy_(mine)
        taken = stop
    return taken


def forget_sent_(momentum: Tensor, residual: Tensor, positions: Tensor) -> None:
    """Set u and v to 0 where they were sent: momentum factor masking."""
    places = positions.long()
    momentum.index_fill_(0, places, 0.0)
    residual.index_fill_(0, places, 0.0)
