"""Ternary quantisation: -1, 0 or 1 times a scale that all workers share.

TernGrad (Wen et al. 2017, Eq. 1 to 4): an element becomes its sign with probability |g| / s and 0
otherwise, s = max|g| over all workers. Its expectation is g, and since s is shared the integers of
all workers are added up as they are.
"""

import torch
from torch import Tensor


def integer_type(workers: int) -> torch.dtype:
    """Return the smallest integer type that holds the sum of -1, 0 and 1 of so many workers.

    It must not overflow: of small integers Open MPI's sums saturate, others wrap around.
    """
    for dtype in (torch.int8, torch.int16):
        if workers <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def ternarise_(
    values: Tensor,
    scale: Tensor,
    draws: Tensor,
    spare: tuple[Tensor, Tensor],
    out: Tensor,
    generator: torch.Generator | None = None,
) -> None:
    """Set the integers `out` to the signs of `values` with probability |values| / scale, else 0.

    All are [n]; `scale` is a scalar, and what is larger counts as that large. `draws` (values'
    dtype) and two `spare` bool tensors are overwritten. Without `generator` it draws from torch's
    global one, whose state is part of a checkpoint.
    """
    up, down = spare
    draws.uniform_(generator=generator).mul_(scale)
    torch.gt(values, draws, out=up)
    torch.lt(values, draws.neg_(), out=down)
    torch.sub(up.view(torch.int8), down.view(torch.int8), out=out)
