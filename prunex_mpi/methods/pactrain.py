"""PacTrain: pruned weights, and gradients that are sparse in places all workers know.

**The mask** is decided once and alike on all ranks (`pactrain_mask.py`). Weights and momentum are
set to zero then, gradients on the workers at each step: so pruned weights stay zero. The paper's
g ⊙ [w ≠ 0] is g ⊙ mask here, since a kept weight that happens to be zero may move.

**The tracker** knows where each bucket of the gradient may differ from zero, and since when. A
bucket's support is that of its weights and of every gradient seen since they were pruned. It only
grows, and with pruned gradients masked it stays inside the mask. A bucket is stable when its
support has not grown for a window of steps on any rank and is the same on all of them; that is
settled at the end of each window. All of it is memory of the method, alike on all ranks. What there
is one of per bucket, and what decides, stays on the host.

**A step** sends of stable buckets the support alone, without indices. What a worker finds outside
of it raises that bucket's flag, and the bucket is sent in full in the same step; its stability ends
with the window. So without `ternary` the sum is that of the masked gradients, whichever way it
travels.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.logs import log
from prunex_mpi.comm.collectives import BUCKET_MIB
from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.quantise import integer_type, ternarise_
from prunex_mpi.core.memory import Declared, common
from prunex_mpi.core.state import PRUNED, State
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.methods.pactrain_mask import choose_pruned, score_of
from prunex_mpi.models.layout import Layout, matrices
from prunex_mpi.pruning.unstructured import kept_weights
from prunex_mpi.settings.fields import Settings

# Per parameter, bool.
SUPPORT = "support"
# Per bucket: steps without growth, the support's digest or 0, whether it is stable.
UNCHANGED, DIGESTS, STABLE = "unchanged", "digests", "stable"
# Steps since the weights were pruned.
CLOCK = "clock"


class PacTrain(Exchange):
    """Send the supports of stable buckets, all others in full.

    On workers `positions` are those of the stable supports in the flat vector, `counts` how many
    each has; `message` are their values, and behind them a flag per stable bucket.
    """

    OPERATIONS = (
        ("unstable bucket", "workers", "Allreduce SUM", "gradient, dense"),
        ("stable buckets", "workers", "Allreduce SUM", "their supports, a flag each"),
        ("scales, ternary", "workers", "Allreduce MAX", "a scale and a flag per stable bucket"),
        ("stable buckets, ternary", "workers", "Allreduce SUM", "integers for their supports"),
        ("end of a window", "world", "Allreduce MIN", "steps and digests per bucket"),
        ("samples of GraSP, once", "world", "Allreduce BOR", "images"),
        ("GraSP, once", "world", "Allreduce SUM", "two dense vectors"),
        ("mask, once", "world", "Bcast", "packed bits"),
    )
    everywhere = True

    def allocate(self) -> None:
        theta, pruned = self.state.theta, self.state.memory[PRUNED]
        self.bucket = bucket_numel(theta.element_size())
        self.fresh = torch.empty_like(pruned)
        if self.wire.is_member:
            self.kept = torch.logical_not(pruned).to(theta.dtype)
            self.fit_to_stable()

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate the tracker: nothing is pruned and no bucket is stable."""
        count = math.ceil(theta.numel() / bucket_numel(theta.element_size()))
        return {
            PRUNED: common(torch.zeros_like(theta, dtype=torch.bool)),
            SUPPORT: common(torch.zeros_like(theta, dtype=torch.bool)),
            UNCHANGED: common(torch.zeros(count, dtype=torch.int64)),
            DIGESTS: common(torch.zeros(count, dtype=torch.int64)),
            STABLE: common(torch.zeros(count, dtype=torch.bool)),
            CLOCK: common(torch.zeros(1, dtype=torch.int64)),
        }

    def prune_(self, done: int) -> float:
        """Prune before training, or after the outer iteration of the option.

        Seconds and bytes count as set-up. Collective on `world`.
        """
        state, everyone = self.state, self.wires.everyone
        if state.frozen or done != self.options.prune_iteration:
            return 0.0
        with state.position.clock.setting_up(state.theta.device):
            pruned = choose_pruned(everyone, self.context)
            mask = everyone.broadcast_bits(pruned.cpu().numpy(), kind="setup")
            pruned.copy_(torch.from_numpy(mask))
            adopt_pruned_(state, pruned)
        total = sum(segment.numel for segment in matrices(state.layout))
        kept = total - int(mask.sum())
        text = "pruned by %s: %d of %d weights are kept, biases and BatchNorm apart"
        log.info(text, score_of(self.settings), kept, total)
        return (total - kept) / max(1, kept)

    def fit_to_stable(self) -> None:
        """Fit what a worker sends to the buckets that are stable now."""
        memory, new = self.state.memory, self.state.theta.new_empty
        numbers = memory[STABLE].nonzero().view(-1).tolist()
        supports = memory[SUPPORT].split(self.bucket)
        found = [supports[n].nonzero().view(-1).add_(n * self.bucket) for n in numbers]
        self.positions = torch.cat([new(0, dtype=torch.int64), *found])
        self.counts = [places.numel() for places in found]
        total, buckets = self.positions.numel(), len(self.counts)
        self.message = new(total + buckets)
        if self.options.ternary:
            self.draws, self.scales = new(total), new(2, buckets)
            self.down = new(total, dtype=torch.bool)
            self.integers = new(total, dtype=integer_type(self.wire.comm.size))

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of the masked ones of all workers."""
        memory = self.state.memory
        if memory[CLOCK] == 0:
            # The first step after pruning. The product is 7 times as fast as masked_fill_.
            torch.logical_not(memory[PRUNED], out=self.kept)
        flat.mul_(self.kept)
        if not memory[STABLE].any():
            self.wire.reduce_(flat)
            return
        stable, in_full = memory[STABLE], ~memory[STABLE]
        in_full[stable] = torch.tensor(self.send_stable_(flat))
        pieces = flat.split(self.bucket)
        for number in in_full.nonzero().view(-1).tolist():
            self.wire.reduce_(pieces[number])

    def send_stable_(self, grad: Tensor) -> list[bool]:
        """Exchange the supports of the stable buckets; return whose flag was raised, on any worker.

        Those buckets are left as they were: they have to be sent in full.
        """
        memory, positions, counts = self.state.memory, self.positions, self.counts
        values, flags = self.message.split([positions.numel(), len(counts)])
        torch.index_select(grad, 0, positions, out=values)
        found = outside_(grad, memory[SUPPORT], self.fresh, self.bucket)
        flags.copy_(found[memory[STABLE]])
        if self.options.ternary:
            self.sum_ternary_(values, flags)
        else:
            self.wire.reduce_(self.message)
        raised = (flags > 0).tolist()
        numbers = memory[STABLE].nonzero().view(-1).tolist()
        pieces = grad.split(self.bucket)
        parts = zip(positions.split(counts), values.split(counts), strict=True)
        for number, (places, sums), flagged in zip(numbers, parts, raised, strict=True):
            if not flagged:
                pieces[number].zero_()
                grad.index_copy_(0, places, sums)
        return raised

    def sum_ternary_(self, values: Tensor, flags: Tensor) -> None:
        """Set `values` to their ternary sum, `flags` to their maximum."""
        scales, counts = self.scales, self.counts
        for number, piece in enumerate(values.split(counts)):
            # A support may be empty.
            scales[0, number] = torch.linalg.vector_norm(piece, torch.inf) if piece.numel() else 0.0
        scales[1].copy_(flags)
        self.wire.reduce_(scales.view(-1), MPI.MAX)
        flags.copy_(scales[1])
        parts = (values, self.draws, self.fresh[: values.numel()], self.down, self.integers)
        for number, pieces in enumerate(zip(*(t.split(counts) for t in parts), strict=True)):
            piece, draw, up, down, out = pieces
            ternarise_(piece, scales[0, number], draw, (up, down), out)
        self.wire.reduce_(self.integers)
        values.copy_(self.integers)
        for number, piece in enumerate(values.split(counts)):
            piece.mul_(scales[0, number])

    def follow_(self) -> None:
        """Track the supports in the gradient of all; settle what is due. Collective on `world`."""
        state, memory = self.state, self.state.memory
        if not state.frozen:
            return
        if self.settings.amp == "fp16" and not torch.isfinite(state.grad).all():
            # Too large a loss scale, on all ranks alike: no step is taken, and 0 * inf is no
            # gradient.
            return
        self.observe_()
        window = self.options.stable_window
        if memory[CLOCK] % window:
            return
        unchanged, digests = memory[UNCHANGED].numpy(), self.read_digests()
        stable = agree_on_stable(self.wires.everyone, unchanged, digests, window)
        if not torch.equal(stable, memory[STABLE]):
            memory[STABLE].copy_(stable)
            if self.wire.is_member:
                self.fit_to_stable()

    def observe_(self) -> None:
        """Count a step; the supports of unstable buckets grow by its gradient."""
        memory = self.state.memory
        grew = outside_(self.state.grad, memory[SUPPORT], self.fresh, self.bucket)
        memory[UNCHANGED].add_(1).masked_fill_(grew, 0)
        memory[CLOCK].add_(1)
        pieces = zip(memory[SUPPORT].split(self.bucket), self.fresh.split(self.bucket), strict=True)
        for number, (support, new) in enumerate(pieces):
            if grew[number] and not memory[STABLE][number]:
                support.logical_or_(new)
                memory[DIGESTS][number] = 0

    def read_digests(self) -> np.ndarray:
        """Return a digest of each bucket's support, int64 [buckets]; what grew is read again."""
        digests = self.state.memory[DIGESTS]
        for number, piece in enumerate(self.state.memory[SUPPORT].split(self.bucket)):
            if digests[number] == 0:
                bits = np.packbits(piece.cpu().numpy())
                digest = hashlib.blake2b(bits, digest_size=8).digest()
                digests[number] = int.from_bytes(digest, "little", signed=True)
        return digests.numpy()

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        """Return the bytes that a worker hands over once all is stable, and what they are."""
        (ratio,) = settings.keep_ratio
        weights = sum(segment.numel for segment in matrices(layout))
        count = layout.numel - weights + kept_weights(layout, ratio, score_of(settings))
        buckets = -(-layout.numel // bucket_numel(size))
        each = f"{count:,} values, {settings.aggregation}"
        when = "once all buckets are stable, dense before"
        if not settings.options.ternary:
            return count * size + buckets * size, f"{each}, {when}"
        narrow = integer_type(workers).itemsize
        return count * narrow + 2 * buckets * size, f"{each}, as integers, {when}"


def agree_on_stable(
    everyone: Wire, unchanged: np.ndarray, digests: np.ndarray, window: int
) -> Tensor:
    """Return which buckets are stable on every rank: bool [buckets]. Collective on `world`.

    Their supports are `unchanged` for a window of steps and their `digests` are the same (int64).
    """
    low = torch.from_numpy(np.stack([unchanged, digests, ~digests]))
    everyone.reduce_(low.view(-1), MPI.MIN, kind="mask")
    # The minimum of the complement is the complement of the maximum.
    return (low[0] >= window) & (low[1] == ~low[2])


def adopt_pruned_(state: State, pruned: Tensor) -> None:
    """Make `pruned` the mask in force: weights and momentum vanish on it.

    So do those of z, which other nodes go on from where a run leaves in this outer iteration. The
    support of a bucket is that of the weights that are kept. What is never pruned belongs to it
    from the start: biases begin at zero and move at once.
    """
    for flat in (state.theta, state.z, *state.optimizer.moments.values()):
        flat.masked_fill_(pruned, 0.0)
    state.memory[PRUNED].copy_(pruned)
    support = state.memory[SUPPORT].fill_(True)
    for segment in matrices(state.layout):
        torch.ne(state.theta[segment.place], 0.0, out=support[segment.place])
    torch.gt(support, pruned, out=support)
    state.frozen = True


def bucket_numel(size: int) -> int:
    """Return how many elements of `size` bytes a bucket holds; the last one may hold fewer."""
    return max(1, int(BUCKET_MIB * 2**20) // size)


def outside_(grad: Tensor, support: Tensor, fresh: Tensor, bucket: int) -> Tensor:
    """Mark in `fresh` where `grad` is not zero outside of `support`; return it per bucket, bool."""
    torch.ne(grad, 0.0, out=fresh)
    torch.gt(fresh, support, out=fresh)
    return torch.stack([piece.any() for piece in fresh.split(bucket)]).cpu()
