"""Evaluate what is delivered, the masked z with the consensus BatchNorm statistics; guard it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, Diverged, UserError
from prunex_mpi.comm.agreement import (
    VERDICT_BYTES,
    alike_bytes,
    of_all,
    raise_together,
    sum_alike_,
)
from prunex_mpi.comm.counted import reduce_between_nodes_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.memory import PARAMETERS, STATISTICS, Declared, shared
from prunex_mpi.core.schedule import schedule_progress
from prunex_mpi.core.state import (
    KNOWN,
    PRUNED,
    RunContext,
    State,
    agreeing,
    comms_of,
    in_place_of_z,
    weights,
)
from prunex_mpi.models import batchnorm
from prunex_mpi.models.dummy_input import keeping, keeping_draws
from prunex_mpi.models.layout import trained_parameters
from prunex_mpi.pruning.masks import kept_numel
from prunex_mpi.settings.fields import Settings

# A mean loss of so many times the first one is no training any more.
DIVERGED = 10.0
# In the memory of a run: the average, that of the BatchNorm means and variances, and of how many z
# it is since it has begun; with none of them it says nothing.
EMA, EMA_STATS, EMA_COUNT = "ema_z", "ema_statistics", "ema_count"
# The best z by held-out data, the BatchNorm means and variances that go with it, and its mask.
BEST, BEST_STATS, BEST_MASK = "best_z", "best_statistics", "best_mask"
# Densities that differ by less are the same: coupled groups need not all be of one size.
SAME_DENSITY = 1e-3


def memory_of_evaluation(settings: Settings, state: State) -> Declared:
    """Allocate the best z, where data are held out, and the average, of none so far, if asked."""

    def allocate(z: str, statistics: str) -> Declared:
        return {
            z: shared(torch.zeros_like(state.z), PARAMETERS),
            statistics: shared(torch.zeros_like(state.stats), STATISTICS),
        }

    found: Declared = {}
    if settings.val_split:
        mask = torch.ones(state.mask.bits.size, dtype=torch.bool)
        found |= allocate(BEST, BEST_STATS) | {BEST_MASK: shared(mask)}
    if settings.model_ema_decay:
        count = torch.zeros(1, dtype=torch.int64)
        found |= allocate(EMA, EMA_STATS) | {EMA_COUNT: shared(count)}
    return found


def add_z_(state: State, settings: Settings) -> None:
    """Set the average to D average + (1 - D) z, the first to z, and its statistics likewise."""
    if EMA not in state.memory:
        return
    average, of_statistics = state.memory[EMA], state.memory[EMA_STATS]
    if int(state.memory[EMA_COUNT]):
        average.lerp_(state.z, 1 - settings.model_ema_decay)
        of_statistics.lerp_(state.stats, 1 - settings.model_ema_decay)
    else:
        average.copy_(state.z)
        of_statistics.copy_(state.stats)
    state.memory[EMA_COUNT].add_(1)


def average_z_(topology: Topology, context: RunContext, changed: bool, estimated: bool) -> None:
    """Let the average of z take in what z has become; anew where the mask has `changed`.

    Where statistics were `estimated` on z for good they are on the average as well. Collective on
    `world`.
    """
    state = context.state
    if EMA not in state.memory:
        return
    if changed:
        state.memory[EMA_COUNT].zero_()
    if state.position.in_flight:
        # It is taken in when it arrives; what z still is has been already.
        return
    add_z_(state, context.settings)
    if estimated and int(state.memory[EMA_COUNT]) > 1:
        with ema_of(state):
            estimate_statistics(topology, context)
            batchnorm.read_plain_(state.bn_modules, state.memory[EMA_STATS])


def ema_of(state: State) -> AbstractContextManager[None]:
    """Have the average, if it has begun, and its statistics in place of z for the block."""
    if EMA not in state.memory or not int(state.memory[EMA_COUNT]):
        return nullcontext()
    return in_place_of_z(state, state.memory[EMA], state.memory[EMA_STATS])


class Evaluation(NamedTuple):
    """What a network reached in an outer iteration, by the data that are held out.

    `stage` says how far pruning had come, `density` how much was left of what can be pruned. The
    accuracy is 0 where the task has none.
    """

    iteration: int
    stage: float
    density: float
    accuracy: float
    loss: float


def keep_best_(context: RunContext, found: dict[str, float]) -> None:
    """Keep z and its statistics in the memory where `found` is the best evaluation so far."""
    state, settings, k = context.state, context.settings, context.state.position.iteration
    stage, accuracy = stage_of(settings, k, state.frozen), found.get("accuracy", 0.0)
    here = Evaluation(k, stage, density(state), accuracy, found["loss"])
    best, method = state.position.best, settings.method
    # Each mask keeps as much as it may then, and none is a union of several.
    of_one_size = method.consensus and (settings.mask_agreement == "vote" or method.flat)
    if not best or is_better(here, Evaluation(*best), by_size=not of_one_size):
        state.position.best = list(here)
        state.memory[BEST].copy_(state.z)
        batchnorm.read_plain_(state.bn_modules, state.memory[BEST_STATS])
        state.memory[BEST_MASK].copy_(torch.from_numpy(state.mask.bits))


def stage_of(settings: Settings, k: int, frozen: bool) -> float:
    """Return how far pruning has come in outer iteration `k`: 2 where masks are `frozen`."""
    if not settings.method.consensus:
        return 0.0
    return schedule_progress(k, settings.warmup_iterations, settings.keep_ramp_iterations) + frozen


def is_better(here: Evaluation, best: Evaluation, by_size: bool) -> bool:
    """Return whether a network is better than the best one so far.

    By the later stage of pruning, then, where it counts `by_size`, the lower density, then the
    higher accuracy, then the lower loss.
    """
    if here.stage != best.stage:
        return here.stage > best.stage
    if by_size and here.density < best.density * (1 - SAME_DENSITY):
        return True
    if by_size and here.density > best.density * (1 + SAME_DENSITY):
        return False
    return (here.accuracy, -here.loss) > (best.accuracy, -best.loss)


def delivered(context: RunContext) -> AbstractContextManager[None]:
    """Have what is delivered in place of z: the best that was kept, else the average, else z.

    With the best one its mask is in place of the last.
    """
    state = context.state
    if BEST not in state.memory or not state.position.best:
        return ema_of(state)
    bits = state.memory[BEST_MASK].numpy()
    return in_place_of_z(state, state.memory[BEST], state.memory[BEST_STATS], bits)


# How long BatchNorm statistics that are estimated on z stay: for its evaluation, or for good.
TEMPORARY, PERMANENT = "temporary", "permanent"
# Per rank: the statistics of a channel settle within a few thousand activations.
RECALIBRATION_BATCHES = 8


@torch.no_grad()
def evaluate(topology: Topology, context: RunContext, estimate: bool = False) -> dict[str, float]:
    """Return the loss of z over the test shares of all ranks, and what else the task measures.

    Of the average of z, if there is one; the best by held-out data is kept. With `estimate` the
    BatchNorm statistics are estimated on it for as long as this takes. Training does not notice.
    Collective on `world`: all receive the same numbers, or raise UserError.
    """
    judged = statistics_of_z(topology, context) if estimate else nullcontext()
    # Statistics are estimated on what is judged.
    with ema_of(context.state), judged:
        found = evaluate_on(topology, context, context.problem.test)
        if BEST in context.state.memory:
            keep_best_(context, found)
    return found


@torch.no_grad()
def evaluate_on(topology: Topology, context: RunContext, shard: Any) -> dict[str, float]:
    """Return what z comes to over the `shard`s of all ranks, as `evaluate` does."""
    state, problem = context.state, context.problem
    # On the device, so that no batch is waited for.
    found, count = torch.zeros(2, dtype=torch.float64, device=state.theta.device), 0
    loss = problem.task.tested_by(problem.loss)
    problem.model.eval()
    with keeping_draws(state.theta.device), weights(state, state.z):
        for images, labels in problem.batches(shard, batch_size=problem.at_once):
            # Without the batch's number: who has fewer of them must not look late.
            context.heartbeat.beat(0)
            outputs = problem.model(images)
            found[0] += loss(outputs, labels).double() * labels.numel()
            found[1] += problem.task.right(outputs, labels)
            count += labels.numel()
    sums = np.array([*found.tolist(), count])
    with agreeing(state, "sum over all ranks", alike_bytes(sums.size), kind="evaluate"):
        sum_alike_(topology.world, sums)
    check_readable(topology.world, context)
    if not np.isfinite(sums[0]):
        # Every rank holds the same sums, so every rank raises.
        what = "the loss on the test set is not finite"
        raise Diverged(f"{what}; lower the learning rate, or check model and data", FAILURE)
    return problem.task.outcome(float(sums[0] / sums[2]), float(sums[1] / sums[2]))


@contextmanager
def statistics_of_z(topology: Topology, context: RunContext) -> Iterator[None]:
    """Estimate the BatchNorm statistics on z for the time of the block. Collective on `world`."""
    modules = context.state.bn_modules
    with keeping(buffer for module in modules for buffer in module.buffers()):
        estimate_statistics(topology, context)
        yield


def estimate_statistics(topology: Topology, context: RunContext) -> None:
    """Estimate the BatchNorm statistics again on z, and average them over all ranks.

    Each rank runs a few batches of its own shard. Raises UserError on every rank where one could
    not read an image. Collective on `world`.
    """
    state, problem = context.state, context.problem
    if not state.bn_modules:
        return
    batches = problem.batches(problem.train_shard, batch_size=problem.train.batch_size)
    # Whole batches only: BatchNorm refuses a single image, and a small batch would weigh too much.
    of_an_epoch = min(RECALIBRATION_BATCHES, problem.train.steps_per_epoch)
    count = problem.calibration_batches or of_an_epoch
    images = (images for images, _ in islice(batches, count))
    with keeping_draws(state.theta.device), weights(state, state.z):
        batchnorm.estimate(problem.model, state.bn_modules, images)
    check_readable(topology.world, context)
    if state.alone:
        batchnorm.read_plain_(state.bn_modules, state.stats)
        return
    known = state.memory[KNOWN]
    batchnorm.read_(state.bn_modules, state.stats, known)
    comms = comms_of(topology, state, context.transport)
    comms.node.reduce_(state.stats)
    state.stats.div_(topology.world_size)
    reduce_between_nodes_(comms.workers, comms.node, state.stats, kind="evaluate")
    batchnorm.as_plain_(state.bn_modules, state.stats, known)
    batchnorm.write_plain(state.bn_modules, state.stats)


def check_readable(world: MPI.Comm, context: RunContext) -> None:
    """Raise UserError on every rank if any could not read an image. Collective on `world`."""
    reader = context.problem.reader
    if reader is not None:
        with agreeing(context.state, "Allreduce of what went wrong", VERDICT_BYTES):
            raise_together(world, reader.error)


def check_divergence(topology: Topology, context: RunContext, loss: float) -> None:
    """Raise Diverged on every rank if any rank's loss or weights say that training went wrong.

    They are not finite, or the mean loss is many times the first outer iteration's, or that of
    guessing where that is more. Comes before phase 2, so that nothing of it enters a consensus, nor
    of images that could not be read; that, and what is in `context.failures`, is raised as it is.
    Collective on `world`.
    """
    first = context.state.position.first_loss
    normal = max(first or 0.0, context.problem.guess_loss)
    problem = _not_finite(context, loss)
    if not problem and first is not None and 0 < DIVERGED * normal < loss:
        whose = "the first iteration's" if normal == first else "that of guessing"
        problem = f"the loss {loss:.3g} is {DIVERGED:g} times {whose} or more"
    _refuse_together(topology, context, problem)


def check_errors(topology: Topology, context: RunContext) -> None:
    """Do as `check_divergence` after a part of phase 1, but for its loss. Collective on `world`."""
    _refuse_together(topology, context, _not_finite(context, context.state.position.loss_sum))


def check_finite(topology: Topology, context: RunContext) -> None:
    """Raise Diverged on every rank where what any holds would spoil a checkpoint.

    An exchange can make z infinite, as a sum in fewer bits. Collective on `world`.
    """
    state = context.state
    held = [state.theta, state.z] + ([state.message.buffer] if state.position.in_flight else [])
    problem = None
    if not all(bool(torch.isfinite(tensor).all()) for tensor in held):
        text = f"weights are not finite after outer iteration {state.position.iteration - 1}"
        problem = UserError(f"{text}; lower the learning rate or check the data", FAILURE)
    _raise_together(topology.world, problem)


def _not_finite(context: RunContext, loss: float) -> str:
    norm = torch.linalg.vector_norm(context.state.theta)
    finite = np.isfinite(loss) and bool(torch.isfinite(norm))
    return "" if finite else "the loss or the weights are not finite"


def _detached_gradient(context: RunContext) -> UserError | None:
    """Return what is wrong where the optimizer would no longer see a parameter's gradient."""
    whole = context.state.grad.untyped_storage().data_ptr()
    for name, parameter in trained_parameters(context.problem.model).items():
        grad = parameter.grad
        if grad is None or grad.untyped_storage().data_ptr() != whole:
            return UserError(
                f"the gradient of {name} was replaced, as by zero_grad(set_to_none=True): the "
                "model's own code must leave gradients alone"
            )
    return None


def _refuse_together(topology: Topology, context: RunContext, problem: str) -> None:
    """Raise on all what one has met: a `problem` as Diverged. Collective on `world`."""
    state, reader = context.state, context.problem.reader
    failure = reader.error if reader is not None else None
    failure = failure or next(iter(context.failures), None) or _detached_gradient(context)
    if problem and failure is None:
        failure = UserError(
            f"{problem} in phase local of outer iteration {state.position.iteration}; "
            "lower the learning rate or check the data",
            FAILURE,
        )
    with agreeing(state, "Allreduce of what went wrong", VERDICT_BYTES):
        _raise_together(topology.world, failure)


def _raise_together(world: MPI.Comm, failure: UserError | None) -> None:
    """Raise the first rank's failure on all, as Diverged by its code. Collective on `world`."""
    try:
        raise_together(world, failure)
    except UserError as agreed:
        if agreed.exit_code != FAILURE:
            raise
        raise of_all(Diverged(str(agreed), agreed.exit_code)) from None


# --------------------------------------------------------------------------------------------------
# How much of the network is left
# --------------------------------------------------------------------------------------------------


def kept_by_segment(state: State) -> dict[int, tuple[int, int]]:
    """Return (weights kept, weights there were) of each segment that the method may prune."""
    if PRUNED in state.memory:
        pruned = state.layout.views(state.memory[PRUNED])
        pieces = zip(state.layout.segments, pruned, strict=True)
        return {
            i: (s.numel - int(p.sum()), s.numel)
            for i, (s, p) in enumerate(pieces)
            if len(s.shape) > 1
        }
    layers = zip(state.groups.layers, kept_numel(state.mask.bits, state.groups), strict=True)
    return {layer.segment: (kept, layer.numel) for layer, kept in layers}


def prunable_and_kept(state: State) -> tuple[int, int]:
    """Return how many weights the method may prune, and how many of them it keeps."""
    counts = kept_by_segment(state).values()
    return sum(numel for _, numel in counts), sum(kept for kept, _ in counts)


def density(state: State) -> float:
    """Return the kept fraction of the weights that the method may prune, 1 where it prunes none."""
    prunable, kept = prunable_and_kept(state)
    return kept / prunable if prunable else 1.0
