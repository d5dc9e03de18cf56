"""A step of deep gradient compression: as many elements as reach a threshold, from each worker.

With momentum m, a worker's gradient g, its momentum u and what it has not sent yet, v
(Lin et al. 2018, Eq. 5):

    u = m u + g,   v = v + u,   send the largest of v,   u = v = 0 where sent

What is sent is found with a threshold per layer that a sample decides; it is lowered where it lets
too few pass. Sample sizes, bounds and the course of the warm-up are those of the authors' code
(synxlin/deep-gradient-compression, dgc/compression.py and dgc/memory.py); its samples start at
random places, here the place moves on with the step.

Tensors of two or more dimensions are compressed, all others travel whole and have ordinary
momentum. Weight decay is added after the exchange with a momentum of its own, which nobody sends
(dgc/optim/sgd.py), so what accumulates on the workers are gradients alone.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from prunex_mpi.comm.counted import COUNT_BYTES
from prunex_mpi.compress import sparse
from prunex_mpi.core.memory import Declared, shared, summed
from prunex_mpi.core.schedule import steps_taken, total_steps
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.core.sums import SparseParts
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout, Segment, matrices, pieces_of
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.values import AUTO

MOMENTUM = "worker_momentum"
# The momentum of what is not accumulated on the workers: weight decay, and tensors sent whole.
COMMON = "common_momentum"
# The warm-up by itself: the paper's, but no larger part of a shorter run than the 5 epochs of 200
# that it is in the authors' code.
WARMUP_EPOCHS, WARMUP_SHARE = 4, Fraction(1, 40)
# Share of a layer's gradient that its threshold is estimated from (the authors').
SAMPLE = 0.01
# A sample holds at least so many of the elements that are to be sent.
LEAST_ABOVE = 2
# Where the threshold lets more than UPPER times the share pass, the largest of these are sent;
# where it lets less than LOWER times the share pass, it is multiplied by LOWER, so often at most.
UPPER, LOWER, MOST_ADAPTATIONS = 1.3, 0.8, 10


class Dgc(Exchange):
    """Send the largest of the momentum that a worker accumulates."""

    OPERATIONS = (
        ("tensors of one dimension", "workers", "Allreduce SUM", "dense"),
        ("how many elements there are", "workers", "Allgather", "one int64"),
        ("elements, in buckets", "workers", "Allgatherv", "values, then int32 positions"),
    )
    own_decay = True

    def allocate(self) -> None:
        theta, ratio = self.state.theta, self.options.ratio
        self.compressed, self.whole = divide(self.state.layout, ratio)
        largest = ratio_in(0, warmup_parts(self.settings), ratio)
        most = sum(sparse.kept_per_layer(self.compressed, largest))
        self.sent = SparseParts(self.link, theta, most)
        self.dense = theta.new_empty(sum(s.numel for s in self.whole))
        self.chosen = torch.empty_like(theta, dtype=torch.bool)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate the accumulated momentum, what has not been sent, and the common momentum."""
        sparse.check_positions(layout)
        own = {key: summed(torch.zeros_like(theta)) for key in (MOMENTUM, RESIDUAL)}
        return own | {COMMON: shared(torch.zeros_like(theta))}

    def exchange_(self, flat: Tensor) -> None:
        """Send the largest momentum; set the gradient to the sum of all."""
        momentum, residual = (self.state.memory[key] for key in (MOMENTUM, RESIDUAL))
        sparse.move_whole_(flat, self.whole, self.dense)
        self.link.reduce_(self.dense)
        if self.compressed:
            residual.add_(momentum.mul_(self.settings.momentum).add_(flat))
            places = self.select_(ratio_of(self.context))
            momentum.index_fill_(0, places, 0.0)
            residual.index_fill_(0, places, 0.0)
            flat.zero_()
            self.sent.add_to_(flat, len(places))
        self.add_common_(flat)

    def select_(self, ratio: float) -> Tensor:
        """Copy what of the residual reaches each layer's threshold; return where that is, int64.

        At most as many of a layer as `ratio` says, so that what is `sent` never needs more room:
        where many more pass, the largest of them (hierarchical selection), where few more do, the
        first.
        """
        residual, sent = self.state.memory[RESIDUAL], self.sent
        magnitudes = torch.abs(residual, out=self.state.scratch)
        passing = self.find_passing_(magnitudes, ratio)
        found = self.chosen.nonzero().squeeze(1).split(passing)
        kept = []
        for mine, limit in zip(found, sparse.kept_per_layer(self.compressed, ratio), strict=True):
            if len(mine) > UPPER * limit:
                largest = torch.topk(magnitudes.index_select(0, mine), limit, sorted=False).indices
                mine = mine.index_select(0, largest)
            kept.append(mine[:limit])
        places = torch.cat(kept)
        torch.index_select(residual, 0, places, out=sent.values[: len(places)])
        sent.positions[: len(places)].copy_(places)
        return places

    def find_passing_(self, magnitudes: Tensor, ratio: float) -> list[int]:
        """Set `chosen` where a layer's threshold is reached; return at how many of its elements.

        Sampled thresholds that too few reach are lowered.
        """
        step, tiny = steps_taken(self.context), torch.finfo(magnitudes.dtype).tiny
        pieces = pieces_of(magnitudes, self.compressed)
        marks = pieces_of(self.chosen.zero_(), self.compressed)
        strides = [sample_stride(piece.numel(), ratio) for piece in pieces]
        thresholds = [
            sampled_threshold(piece, ratio, stride, step)
            for piece, stride in zip(pieces, strides, strict=True)
        ]

        def count(layers: list[int]) -> list[int]:
            for i in layers:
                # Not "at least": a NaN must travel, so that the run is seen to diverge.
                torch.lt(pieces[i], thresholds[i], out=marks[i]).logical_not_()
            return torch.stack([marks[i].sum() for i in layers]).tolist() if layers else []

        layers = list(range(len(pieces)))
        passing = count(layers)
        least = [LOWER * limit for limit in sparse.kept_per_layer(self.compressed, ratio)]
        for _ in range(MOST_ADAPTATIONS):
            layers = [i for i in layers if strides[i] > 1 and passing[i] < least[i]]
            for i in layers:
                thresholds[i].mul_(LOWER).clamp_(min=tiny)
            for i, found in zip(layers, count(layers), strict=True):
                passing[i] = found
        return passing

    def add_common_(self, grad: Tensor) -> None:
        """Add weight decay and the tensors that travelled whole, by their own momentum."""
        state, settings = self.state, self.settings
        fresh = torch.mul(state.theta, settings.weight_decay, out=state.scratch)
        spared = [s for s in state.layout.segments if len(s.shape) < 2]
        if settings.weight_decay_on == "weights" and spared:
            torch._foreach_zero_(pieces_of(fresh, spared))
        if self.whole:
            added = list(self.dense.split([s.numel for s in self.whole]))
            torch._foreach_add_(pieces_of(fresh, self.whole), added)
        grad.add_(state.memory[COMMON].mul_(settings.momentum).add_(fresh))

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many bytes are positions, of what does not travel whole."""
        size, steps = state.theta.element_size(), state.position.steps_done
        parts, whole = divide(state.layout, settings.options.ratio)
        others = sum(segment.numel for segment in whole) * size + (COUNT_BYTES if parts else 0)
        return sparse.position_bytes(payload - steps * others, size)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        compressed, whole = divide(layout, settings.options.ratio)
        dense = sum(s.numel for s in whole)
        if not compressed:
            return dense * size, settings.aggregation
        count = sum(sparse.kept_per_layer(compressed, settings.options.ratio))
        how = f"at most {count:,} values and positions, {dense:,} elements whole"
        if settings.options.warmup_epochs:
            how += "; more in the warm-up"
        pairs = count * (size + sparse.POSITION_BYTES) + COUNT_BYTES
        return pairs + dense * size, f"{how}, {settings.aggregation}"


def ratio_of(context: RunContext) -> float:
    """Return the share of a layer that travels in this step."""
    settings, step = context.settings, steps_taken(context)
    steps, final = warmup_steps(context), settings.options.ratio
    if step >= steps:
        return final
    parts = warmup_parts(settings)
    return ratio_in(step * parts // steps, parts, final)


def warmup_steps(context: RunContext) -> int:
    """Return how many steps the warm-up takes."""
    settings, problem = context.settings, context.problem
    per_epoch = problem.train.steps_per_epoch
    if settings.options.warmup_epochs != AUTO:
        return round(settings.options.warmup_epochs * per_epoch)
    run = total_steps(settings, problem.steps)
    return min(WARMUP_EPOCHS * per_epoch, round(WARMUP_SHARE * run))


def warmup_parts(settings: Settings) -> int:
    """Return in how many equal parts the share falls: the epochs, but 4 where they are fewer."""
    epochs = settings.options.warmup_epochs
    if epochs == AUTO:
        return WARMUP_EPOCHS
    return max(WARMUP_EPOCHS, math.ceil(epochs)) if epochs else 0


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


def sample_stride(numel: int, ratio: float) -> int:
    """Return of how many elements of a layer one is drawn: about a share `SAMPLE` of them.

    Odd, so that it has no common period with the kernels' sizes; 1 where a sample would be small.
    """
    least = math.ceil(LEAST_ABOVE / ratio)
    if SAMPLE >= 1 or numel <= least:
        return 1
    wanted = max(math.ceil(numel * SAMPLE), least)
    stride = math.ceil(numel / wanted / 32) * 32 + 1
    while numel // stride < wanted:
        stride -= 8
    return stride


def sampled_threshold(magnitudes: Tensor, ratio: float, stride: int, step: int) -> Tensor:
    """Return the magnitude that about `ratio` of a layer's reach, by every stride-th; 0-dim."""
    count = sparse.share_of(magnitudes.numel() // stride, ratio)
    drawn = magnitudes[step % stride :: stride]
    # Zeros have nothing to say.
    return torch.topk(drawn, count).values[-1].clamp(min=torch.finfo(magnitudes.dtype).tiny)
