"""PacTrain's mask tracker: where each bucket of the gradient may differ from zero, and since when.

A bucket's support is that of its weights and of every gradient seen since they were pruned. It only
grows, and with pruned gradients masked it stays inside the mask. A bucket is stable when its
support has not grown for a window of steps on any rank and is the same on all of them; that is
settled at the end of each window (`methods/pactrain.py`). The support of a stable bucket is fixed:
what appears outside of it is sent all the same, and ends the bucket's stability with the window.

All of it is memory of the method, alike on all ranks. What there is one of per bucket, and what
decides, stays on the host.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.comm.collectives import BUCKET_MIB
from prunex_mpi.core.state import PRUNED
from prunex_mpi.models.layout import Layout, matrices

# Per parameter, bool.
SUPPORT = "shared.support"
# Per bucket: steps without growth, the support's digest or 0, whether it is stable.
UNCHANGED, DIGESTS, STABLE = "shared.unchanged", "shared.digests", "shared.stable"
# Steps since the weights were pruned.
CLOCK = "shared.clock"
# The way to exchange that measurements have chosen, or -1; how many there were, and the shortest
# seconds of each way.
CHOICE, TRIALS, SECONDS = "shared.choice", "shared.trials", "shared.seconds"
WAYS = 3


def bucket_numel(size: int) -> int:
    """Return how many elements of `size` bytes a bucket holds; the last one may hold fewer."""
    return max(1, int(BUCKET_MIB * 2**20) // size)


def build_tracker(theta: Tensor, bucket: int) -> dict[str, Tensor]:
    """Allocate the tracker's memory: nothing is pruned and no bucket is stable."""
    count = math.ceil(theta.numel() / bucket)
    return {
        PRUNED: torch.zeros_like(theta, dtype=torch.bool),
        SUPPORT: torch.zeros_like(theta, dtype=torch.bool),
        UNCHANGED: torch.zeros(count, dtype=torch.int64),
        DIGESTS: torch.zeros(count, dtype=torch.int64),
        STABLE: torch.zeros(count, dtype=torch.bool),
        CLOCK: torch.zeros(1, dtype=torch.int64),
        CHOICE: torch.full((1,), -1),
        TRIALS: torch.zeros(1, dtype=torch.int64),
        SECONDS: torch.full((WAYS,), math.inf, dtype=torch.float64),
    }


def set_support_(memory: dict[str, Tensor], pruned: Tensor, theta: Tensor, layout: Layout) -> None:
    """Adopt the mask: the support of a bucket is that of the weights that are kept.

    What is never pruned belongs to it from the start: biases begin at zero and move at once.
    """
    memory[PRUNED].copy_(pruned)
    support = memory[SUPPORT].fill_(True)
    for segment in matrices(layout):
        torch.ne(theta[segment.place], 0.0, out=support[segment.place])
    torch.gt(support, pruned, out=support)


def outside_(grad: Tensor, support: Tensor, fresh: Tensor, bucket: int) -> Tensor:
    """Mark in `fresh` where `grad` is not zero outside of `support`; return it per bucket, bool."""
    torch.ne(grad, 0.0, out=fresh)
    torch.gt(fresh, support, out=fresh)
    return torch.stack([piece.any() for piece in fresh.split(bucket)]).cpu()


def observe_(grad: Tensor, memory: dict[str, Tensor], fresh: Tensor, bucket: int) -> None:
    """Count a step with `grad`; unstable buckets' supports grow by it. `fresh` is overwritten."""
    grew = outside_(grad, memory[SUPPORT], fresh, bucket)
    memory[UNCHANGED].add_(1).masked_fill_(grew, 0)
    memory[CLOCK].add_(1)
    pieces = zip(memory[SUPPORT].split(bucket), fresh.split(bucket), strict=True)
    for number, (support, new) in enumerate(pieces):
        if grew[number] and not memory[STABLE][number]:
            support.logical_or_(new)
            memory[DIGESTS][number] = 0


def read_digests(memory: dict[str, Tensor], bucket: int) -> np.ndarray:
    """Return a digest of each bucket's support, int64 [buckets]; only what grew is read again."""
    digests = memory[DIGESTS]
    for number, piece in enumerate(memory[SUPPORT].split(bucket)):
        if digests[number] == 0:
            bits = np.packbits(piece.cpu().numpy())
            digest = hashlib.blake2b(bits, digest_size=8).digest()
            digests[number] = int.from_bytes(digest, "little", signed=True)
    return digests.numpy()


def stable_positions(memory: dict[str, Tensor], bucket: int) -> tuple[Tensor, list[int]]:
    """Return where the stable buckets' supports are in the flat vector, and how many of each.

    Positions are int64 on the gradient's device, in order; counts one per stable bucket.
    """
    pieces = memory[SUPPORT].split(bucket)
    numbers = memory[STABLE].nonzero().view(-1).tolist()
    found = [pieces[n].nonzero().view(-1).add_(n * bucket) for n in numbers]
    empty = torch.empty(0, dtype=torch.int64, device=memory[SUPPORT].device)
    return torch.cat([empty, *found]), [places.numel() for places in found]
