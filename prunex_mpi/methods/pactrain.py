"""PacTrain: pruned weights, and gradients that are sparse in places all workers know.

**The mask** is decided once and alike on all ranks. Weights and momentum are
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

**GraSP** looks at images, or windows of text. As in its authors' code (Wang et al. 2020): of every
class as many, class by class, in two halves that are a batch each; gradients of both halves are
added up. The images are the first ones of their class over the shards of all ranks, whose order the
seed draws. So they are the same for any number of ranks; the ranks share the batches, not the
images of one.

Of text, which has no classes to balance, it is windows at even distances over all of it that is to
train on, in two halves and the same for any number of ranks as well.
"""

import hashlib
import math
from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, log
from prunex_mpi.comm.agreement import run_collectively, run_collectively_while
from prunex_mpi.comm.collectives import BUCKET_MIB
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.compress.quantise import integer_type, ternarise_
from prunex_mpi.core.evaluation import check_readable
from prunex_mpi.core.memory import Declared, shared
from prunex_mpi.core.state import PRUNED, RunContext, State
from prunex_mpi.core.task import IMAGES, one_tensor
from prunex_mpi.methods.declared import GRASP_BELOW
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.dummy_input import keeping
from prunex_mpi.models.layout import Layout, matrices
from prunex_mpi.pruning.projection import (
    add_gradients_,
    add_hessian_products_,
    kept_weights,
    prune_by_gradient_flow,
    prune_by_magnitude,
)
from prunex_mpi.settings.fields import Settings

# Per parameter, bool.
SUPPORT = "support"
# Per bucket: steps without growth, the support's digest or 0, whether it is stable.
UNCHANGED, DIGESTS, STABLE = "unchanged", "digests", "stable"
# Steps since the weights were pruned.
CLOCK = "clock"
# What logits are divided by for the score grasp (Wang et al. 2020).
GRASP_TEMPERATURE = 200.0
# A batch holds at most so many pixels, 512 images of 32x32: second derivatives take memory.
BATCH_PIXELS = 2**19
# Images of each class, of all ranks together.
SAMPLES = 10
# Windows of text, as many as CIFAR-10's images, and tokens of a batch of them.
WINDOWS, BATCH_TOKENS = 100, 2**13


class PacTrain(Exchange):
    """Send the supports of stable buckets, all others in full.

    On workers `numbers` are the stable buckets, `positions` those of their supports in the flat
    vector, `counts` how many each has; `message` are the values, and behind them a flag per bucket.
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
        if self.link.is_member:
            self.kept = torch.logical_not(pruned).to(theta.dtype)
            self.fit_to_stable()

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate the tracker: nothing is pruned and no bucket is stable."""
        count = math.ceil(theta.numel() / bucket_numel(theta.element_size()))
        return {
            PRUNED: shared(torch.zeros_like(theta, dtype=torch.bool)),
            SUPPORT: shared(torch.zeros_like(theta, dtype=torch.bool)),
            UNCHANGED: shared(torch.zeros(count, dtype=torch.int64)),
            DIGESTS: shared(torch.zeros(count, dtype=torch.int64)),
            STABLE: shared(torch.zeros(count, dtype=torch.bool)),
            CLOCK: shared(torch.zeros(1, dtype=torch.int64)),
        }

    def prune_(self, done: int) -> float:
        """Prune before training, or after the outer iteration of the option.

        Seconds and bytes count as set-up. Collective on `world`.
        """
        state, everyone = self.state, self.comms.everyone
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
        self.numbers = memory[STABLE].nonzero().view(-1).tolist()
        supports = memory[SUPPORT].split(self.bucket)
        found = [supports[n].nonzero().view(-1).add_(n * self.bucket) for n in self.numbers]
        self.positions = torch.cat([new(0, dtype=torch.int64), *found])
        self.counts = [places.numel() for places in found]
        total, buckets = self.positions.numel(), len(self.counts)
        self.message = new(total + buckets)
        if self.options.ternary:
            self.draws, self.scales = new(total), new(2, buckets)
            self.down = new(total, dtype=torch.bool)
            self.integers = new(total, dtype=integer_type(self.link.comm.size))

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of the masked ones of all workers."""
        memory = self.state.memory
        if memory[CLOCK] == 0:
            # The first step after pruning. The product is 7 times as fast as masked_fill_.
            torch.logical_not(memory[PRUNED], out=self.kept)
        flat.mul_(self.kept)
        if not memory[STABLE].any():
            self.link.reduce_(flat)
            return
        stable, in_full = memory[STABLE], ~memory[STABLE]
        in_full[stable] = torch.tensor(self.send_stable_(flat))
        pieces = flat.split(self.bucket)
        for number in in_full.nonzero().view(-1).tolist():
            self.link.reduce_(pieces[number])

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
            self.link.reduce_(self.message)
        raised = (flags > 0).tolist()
        pieces = grad.split(self.bucket)
        parts = self.numbers, positions.split(counts), values.split(counts), raised
        for number, places, sums, flagged in zip(*parts, strict=True):
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
        self.link.reduce_(scales.view(-1), MPI.MAX)
        flags.copy_(scales[1])
        parts = (values, self.draws, self.fresh[: values.numel()], self.down, self.integers)
        for number, pieces in enumerate(zip(*(t.split(counts) for t in parts), strict=True)):
            piece, draw, up, down, out = pieces
            ternarise_(piece, scales[0, number], draw, (up, down), out)
        self.link.reduce_(self.integers)
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
        digests = self.read_digests()
        stable = agree_on_stable(self.comms.everyone, memory[UNCHANGED], digests, window)
        if not torch.equal(stable, memory[STABLE]):
            memory[STABLE].copy_(stable)
            if self.link.is_member:
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

    def read_digests(self) -> Tensor:
        """Return a digest of each bucket's support, int64 [buckets]; what grew is read again."""
        digests = self.state.memory[DIGESTS]
        for number, piece in enumerate(self.state.memory[SUPPORT].split(self.bucket)):
            if digests[number] == 0:
                bits = np.packbits(piece.cpu().numpy())
                digest = hashlib.blake2b(bits, digest_size=8).digest()
                digests[number] = int.from_bytes(digest, "little", signed=True)
        return digests

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
    everyone: CountedComm, unchanged: Tensor, digests: Tensor, window: int
) -> Tensor:
    """Return which buckets are stable on every rank: bool [buckets]. Collective on `world`.

    Their supports are `unchanged` for a window of steps and their `digests` are the same (int64).
    """
    low = torch.stack([unchanged, digests, ~digests])
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


# --------------------------------------------------------------------------------------------------
# The mask, by magnitude or by GraSP
# --------------------------------------------------------------------------------------------------


def score_of(settings: Settings) -> str:
    """Return what decides which weights go, magnitude or grasp."""
    if settings.options.score != "auto":
        return settings.options.score
    return "magnitude" if settings.keep_ratio[0] >= GRASP_BELOW else "grasp"


def choose_pruned(everyone: CountedComm, context: RunContext) -> Tensor:
    """Return which weights go, bool [layout.numel]; only what world rank 0 returns counts.

    Collective on `world`. Raises UserError on every rank.
    """
    state, settings = context.state, context.settings
    layout, (ratio,) = state.layout, settings.keep_ratio
    if not matrices(layout):
        raise UserError("the model has no weight of two or more dimensions to prune")
    if score_of(settings) == "magnitude":
        return prune_by_magnitude(state.theta, layout, ratio)
    product = hessian_gradient_product(everyone, context)
    prune = partial(prune_by_gradient_flow, state.theta, product, layout, ratio)
    return run_collectively(everyone.comm, prune)


def hessian_gradient_product(everyone: CountedComm, context: RunContext) -> Tensor:
    """Return H g over the weights, both summed over the batches of all ranks.

    Of the loss at logits divided by `GRASP_TEMPERATURE`. As in the authors' code g and H are
    those of the weights that may be pruned alone. Collective on `world`. Raises UserError alike.
    """
    state, problem = context.state, context.problem
    if problem.train_shard is None:
        raise UserError(
            "score grasp looks at samples and their loss, which one's own loop keeps to itself; "
            "give pactrain_score='magnitude'"
        )
    batches = batches_to_score(everyone, context)

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        context.heartbeat.go_on()
        return problem.loss(one_tensor(outputs) / GRASP_TEMPERATURE, labels)

    slope, product = torch.zeros_like(state.theta), torch.zeros_like(state.theta)
    how = state.layout, problem.model, loss, batches
    passes = (
        (slope, partial(add_gradients_, slope, *how)),
        (product, partial(add_hessian_products_, product, slope, *how)),
    )
    problem.model.train()
    # The passes must leave no trace in the statistics of BatchNorm.
    with keeping(problem.model.buffers()):
        for flat, add in passes:
            run_collectively_while(everyone.comm, add, context.heartbeat)
            everyone.reduce_(flat, kind="setup")
            for segment in state.layout.segments:
                if len(segment.shape) < 2:
                    flat[segment.place].zero_()
    return product


# --------------------------------------------------------------------------------------------------
# What GraSP looks at
# --------------------------------------------------------------------------------------------------


def batches_to_score(everyone: CountedComm, context: RunContext) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches for the score grasp; it may have none.

    Collective on `world`. Raises UserError on every rank where a class has too few images, or one
    can't be read.
    """
    problem = context.problem
    shard, stream = problem.train_shard, problem.train
    of_images = problem.task is IMAGES
    pieces = halves_of(everyone, shard) if of_images else windows_apart(shard, stream.stop)
    check_readable(everyone.comm, context)
    mine = pieces[everyone.comm.rank :: everyone.comm.size]
    return [batch for piece in mine for batch in problem.batches(piece, batch_size=len(piece))]


def windows_apart(shard: Any, stop: int) -> list[Sized]:
    """Return windows at even distances before token `stop`, in pieces, each a batch.

    `shard` are `data.text.Windows`, which `starts` and `context` tell.
    """
    context = shard.context
    there = (stop - 1) // context
    count = min(WINDOWS, there)
    apart = there // count * context
    starts = range(0, count * apart, apart)
    cut = pieces_of_halves(count, max(1, BATCH_TOKENS // context))
    return [replace(shard, starts=starts[piece]) for piece in cut]


def pieces_of_halves(size: int, most: int) -> list[slice]:
    """Return the places of both halves of so many samples, each in pieces of at most `most`.

    They are as long as each other, since each batch's mean loss counts as much.
    """
    pieces = []
    for half in torch.arange(size).split([size // 2, size - size // 2]):
        parts = half.tensor_split(max(1, -(-len(half) // most)))
        pieces += [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return pieces


def halves_of(everyone: CountedComm, shard: Any) -> list[Sized]:
    """Return the same images on all ranks in pieces, each a batch. Collective on `world`."""
    drawn = draw_balanced(everyone, shard, SAMPLES)
    most = max(1, BATCH_PIXELS // drawn.images[0, 0].numel())
    return [
        replace(drawn, images=drawn.images[piece], labels=drawn.labels[piece])
        for piece in pieces_of_halves(len(drawn.labels), most)
    ]


def draw_balanced(everyone: CountedComm, shard: Any, each: int) -> Any:
    """Return `each` images of every class, class by class.

    `shard` is a `data.batches.Shard`, of images uint8 [n, 3, H, W] and labels int64 [n], CPU.
    The same on all ranks. Collective on `world`. Raises UserError on every rank.
    """
    comm = everyone.comm
    highest = torch.tensor([int(shard.labels.max()) if len(shard.labels) else -1])
    everyone.reduce_(highest, MPI.MAX, kind="setup")
    classes = int(highest) + 1
    table = torch.zeros(comm.size, classes, dtype=torch.int64)
    table[comm.rank] = torch.bincount(shard.labels, minlength=classes)
    everyone.reduce_(table.view(-1), kind="setup")
    fewest = int(table.sum(0).min())
    if fewest < each:
        raise UserError(
            f"pactrain.score grasp looks at {each} training images of each class, and one has "
            f"{fewest}: give --pactrain-score magnitude, or more images"
        )
    own, places = places_in_draw(shard.labels, table[: comm.rank].sum(0), each)
    images = torch.zeros(classes * each, *shard.images.shape[1:], dtype=shard.images.dtype)
    images[places] = shard.images[own]
    everyone.reduce_(images.view(-1), MPI.BOR, kind="setup")
    labels = torch.arange(classes).repeat_interleave(each)
    return replace(shard, images=images, labels=labels)


def places_in_draw(labels: Tensor, before: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Return which images of a shard are drawn, and where they stand among all that are.

    `each` images of every class, class by class: the first ones of it, in the order of the ranks
    and their shards. `before`, int64 [classes], are the images of each class on the ranks before.
    Returns int64 indices into the shard, and as many places.
    """
    counts = torch.bincount(labels, minlength=before.numel())
    order = torch.argsort(labels, stable=True)
    of_class = labels[order]
    first = torch.cumsum(counts, 0) - counts
    number = before[of_class] + torch.arange(labels.numel()) - first[of_class]
    drawn = number < each
    return order[drawn], of_class[drawn] * each + number[drawn]
