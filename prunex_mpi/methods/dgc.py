"""A step of deep gradient compression: as many elements as reach a threshold, from each worker.

After Lin et al. 2018 and the authors' code (synxlin/deep-gradient-compression): tensors of two or
more dimensions are compressed, all others travel whole and have ordinary momentum. Weight decay is
added after the exchange with a momentum of its own, which nobody sends (dgc/optim/sgd.py), so what
accumulates on the workers are gradients alone.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from prunex_mpi.comm.counted import COUNT_BYTES
from prunex_mpi.compress import sparse, threshold
from prunex_mpi.core.memory import Declared, shared, summed
from prunex_mpi.core.schedule import steps_taken, total_steps
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.core.sums import SparseParts
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout, pieces_of
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
        self.compressed, self.whole = threshold.divide(self.state.layout, ratio)
        largest = threshold.ratio_in(0, warmup_parts(self.settings), ratio)
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
        state, sent = self.state, self.sent
        momentum, residual = state.memory[MOMENTUM], state.memory[RESIDUAL]
        sparse.move_whole_(flat, self.whole, self.dense)
        self.link.reduce_(self.dense)
        if self.compressed:
            threshold.accumulate_(momentum, residual, flat, self.settings.momentum)
            how = ratio_of(self.context), SAMPLE, steps_taken(self.context)
            spare, out = (state.scratch, self.chosen), (sent.values, sent.positions)
            count = threshold.select_above_(residual, self.compressed, *how, spare, out)
            threshold.forget_sent_(momentum, residual, sent.positions[:count])
            flat.zero_()
            sent.add_to_(flat, count)
        self.add_common_(flat)

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
        parts, whole = threshold.divide(state.layout, settings.options.ratio)
        others = sum(segment.numel for segment in whole) * size + (COUNT_BYTES if parts else 0)
        return sparse.position_bytes(payload - steps * others, size)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        compressed, whole = threshold.divide(layout, settings.options.ratio)
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
    return threshold.ratio_in(step * parts // steps, parts, final)


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
