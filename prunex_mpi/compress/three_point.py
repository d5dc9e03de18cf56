"""The choice of a compressor among several (AdaCGD, Makarenko et al. 2022; 3PC, Richtarik et al.).

With a worker's gradient x, the estimate h of it that all know and its gradient y of the step
before, compressor j leads to the estimate h + C_j(x - h). The coarsest is taken for which

    |x - h - C_j(x - h)|^2 <= zeta |x - y|^2

nothing at all (C = 0) being the coarsest of them; if there is none the finest. Here C_j keeps the
elements of largest magnitude (Top-K), so that all C_j are read off one sorted list.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def choose_count(difference: Tensor, largest: Tensor, counts: Sequence[int], bound: Tensor) -> int:
    """Return how many elements of x - h are to be sent: 0 or one of the ascending `counts`.

    `largest` [counts[-1]] are the largest magnitudes of `difference`, in descending order; `bound`
    is zeta |x - y|^2, a 0-dim tensor.
    """
    sent = largest.double().square_().cumsum_(0)
    ends = torch.tensor(counts, device=sent.device) - 1
    whole = torch.linalg.vector_norm(difference, dtype=torch.float64).square()
    left = torch.cat([whole.view(1), whole - sent[ends]])
    # A NaN is below nothing: all that can be sent is.
    fits = (left <= bound).tolist()
    return next((n for n, fit in zip([0, *counts], fits, strict=True) if fit), counts[-1])
