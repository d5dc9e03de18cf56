"""PacTrain's steps: gradients that are sparse in places all workers know, without indices.

Gradients of pruned weights are set to zero on the workers. What a worker finds outside of a stable
bucket's support raises that bucket's flag, and it is sent in full in the same step. So without
`ternary` the sum is that of the masked gradients, whichever way it travels.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.logs import log
from prunex_mpi.comm.traffic import now
from prunex_mpi.comm.wire import Wire, Wires
from prunex_mpi.compress.quantise import integer_type, ternarise_
from prunex_mpi.core.state import PRUNED, RunContext, State
from prunex_mpi.methods.pactrain_mask import prune_when_due_, score_of
from prunex_mpi.methods.pactrain_support import (
    CHOICE,
    CLOCK,
    SECONDS,
    STABLE,
    SUPPORT,
    TRIALS,
    UNCHANGED,
    bucket_numel,
    build_tracker,
    observe_,
    outside_,
    read_digests,
    stable_positions,
)
from prunex_mpi.models.layout import Layout, matrices
from prunex_mpi.pruning.unstructured import kept_weights
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("unstable bucket", "workers", "Allreduce SUM", "gradient, dense"),
    ("stable buckets", "workers", "Allreduce SUM", "their supports, a flag each"),
    ("scales, ternary", "workers", "Allreduce MAX", "a scale and a flag per stable bucket"),
    ("stable buckets, ternary", "workers", "Allreduce SUM", "integers for their supports"),
    ("end of a window", "world", "Allreduce MIN", "steps and digests per bucket"),
    ("trial step (adaptive)", "world", "Allreduce MAX", "seconds of the exchange"),
    ("samples of GraSP, once", "world", "Allreduce BOR", "images"),
    ("GraSP, once", "world", "Allreduce SUM", "two dense vectors"),
    ("mask, once", "world", "Bcast", "packed bits"),
)
# How a gradient travels once there are stable buckets; indices into `SECONDS`.
FULL, COMPACT, TERNARY = range(3)
WAY_NAMES = ("full", "compact", "compact and ternary")
# Per way; the shortest counts.
TRIALS_PER_WAY = 3

# Before training, or after an outer iteration.
prune_ = prune_when_due_


# --------------------------------------------------------------------------------------------------
# A step on the workers
# --------------------------------------------------------------------------------------------------


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate the tracker of supports."""
    return build_tracker(theta, bucket_numel(theta.element_size()))


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for one step; on workers also for what stable buckets send."""
    state = context.state
    space = {"fresh": torch.empty_like(state.memory[PRUNED]), "seconds": torch.zeros(1)}
    if wire.is_member:
        space["kept"] = torch.empty_like(state.theta)
        torch.logical_not(state.memory[PRUNED], out=space["kept"])
        refresh_(wire, space, state, context.settings)
    return space


def refresh_(wire: Wire, space: dict[str, Any], state: State, settings: Settings) -> None:
    """Fit the worker's memory in `space` to the buckets that are stable now."""
    bucket = bucket_numel(state.theta.element_size())
    positions, counts = stable_positions(state.memory, bucket)
    space["positions"], space["counts"] = positions, counts
    # Behind the values a flag per stable bucket.
    space["message"] = state.theta.new_empty(positions.numel() + len(counts))
    if settings.options.ternary:
        space["draws"] = state.theta.new_empty(positions.numel())
        space["down"] = torch.empty_like(positions, dtype=torch.bool)
        space["integers"] = torch.empty_like(positions, dtype=integer_type(wire.comm.size))
        space["scales"] = state.theta.new_empty(2, len(counts))


def way_in_force(tracked: dict[str, Tensor], settings: Settings) -> int:
    """Return how stable buckets travel in this step: FULL, COMPACT or TERNARY."""
    if not settings.options.adaptive:
        return TERNARY if settings.options.ternary else COMPACT
    if tracked[CHOICE] >= 0:
        return int(tracked[CHOICE])
    return int(tracked[TRIALS]) % ways(settings)


def ways(settings: Settings) -> int:
    """Return how many ways to exchange are compared; the ternary one rounds, so it is asked for."""
    return 3 if settings.options.ternary else 2


def on_trial(tracked: dict[str, Tensor], settings: Settings) -> bool:
    """Return whether this step's exchange is one of those that are measured."""
    return settings.options.adaptive and bool(tracked[CHOICE] < 0) and bool(tracked[STABLE].any())


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum of the masked gradients of all workers. Collective on `wire.comm`."""
    state, settings = context.state, context.settings
    tracked, grad = state.memory, state.grad
    trial = on_trial(tracked, settings)
    if trial:
        # Who comes late must not count for the way that happens to be tried.
        with wire.clock.exchanging(grad.device, "Barrier"):
            wire.comm.Barrier()
    started = time.perf_counter()
    if tracked[CLOCK] == 0:
        # The first step after pruning. The product is 7 times as fast as masked_fill_.
        torch.logical_not(tracked[PRUNED], out=space["kept"])
    grad.mul_(space["kept"])
    way = way_in_force(tracked, settings)
    if way == FULL or not tracked[STABLE].any():
        wire.reduce_(grad)
    else:
        outside = send_stable_(wire, space, state, settings, way)
        for piece in dense_pieces(state, settings, outside):
            wire.reduce_(piece)
    space["seconds"][0] = now(grad.device) - started if trial else 0.0


def send_stable_(
    wire: Wire, space: dict[str, Any], state: State, settings: Settings, way: int
) -> list[bool]:
    """Exchange the supports of the stable buckets; return whose flag was raised, on any worker.

    Those buckets are left as they were: they have to be sent in full. Collective on `wire.comm`.
    """
    tracked, grad = state.memory, state.grad
    positions, counts = space["positions"], space["counts"]
    values, flags = space["message"].split([positions.numel(), len(counts)])
    torch.index_select(grad, 0, positions, out=values)
    bucket = bucket_numel(grad.element_size())
    found = outside_(grad, tracked[SUPPORT], space["fresh"], bucket)
    flags.copy_(found[tracked[STABLE]])
    if way == TERNARY:
        sum_ternary_(wire, space, values, flags)
    else:
        wire.reduce_(space["message"])
    raised = (flags > 0).tolist()
    numbers = tracked[STABLE].nonzero().view(-1).tolist()
    pieces = grad.split(bucket)
    parts = zip(positions.split(counts), values.split(counts), strict=True)
    for number, (places, sums), flagged in zip(numbers, parts, raised, strict=True):
        if not flagged:
            pieces[number].zero_()
            grad.index_copy_(0, places, sums)
    return raised


def sum_ternary_(wire: Wire, space: dict[str, Any], values: Tensor, flags: Tensor) -> None:
    """Set `values` to their ternary sum, `flags` to their maximum. Collective on `wire.comm`."""
    scales, integers, counts = space["scales"], space["integers"], space["counts"]
    spare = space["fresh"][: values.numel()], space["down"]
    for number, piece in enumerate(values.split(counts)):
        # A support may be empty.
        scales[0, number] = torch.linalg.vector_norm(piece, torch.inf) if piece.numel() else 0.0
    scales[1].copy_(flags)
    wire.reduce_(scales.view(-1), MPI.MAX)
    flags.copy_(scales[1])
    parts = (values, space["draws"], *spare, integers)
    for number, pieces in enumerate(zip(*(t.split(counts) for t in parts), strict=True)):
        piece, draw, up, down, out = pieces
        ternarise_(piece, scales[0, number], draw, (up, down), out)
    wire.reduce_(integers)
    values.copy_(integers)
    for number, piece in enumerate(values.split(counts)):
        piece.mul_(scales[0, number])


def dense_pieces(state: State, settings: Settings, raised: list[bool]) -> list[Tensor]:
    """Return the gradient's unstable buckets, and the stable ones whose flag was raised."""
    stable = state.memory[STABLE]
    in_full = ~stable
    in_full[stable] = torch.tensor(raised)
    pieces = state.grad.split(bucket_numel(state.grad.element_size()))
    return [pieces[number] for number in in_full.nonzero().view(-1).tolist()]


# --------------------------------------------------------------------------------------------------
# After a step, on all ranks
# --------------------------------------------------------------------------------------------------


def follow_(wires: Wires, space: dict[str, Any], context: RunContext) -> None:
    """Track the supports in the gradient of all; settle what is due. Collective on `world`."""
    state, settings = context.state, context.settings
    if not state.frozen:
        return
    if settings.amp == "fp16" and not torch.isfinite(state.grad).all():
        # Too large a loss scale, on all ranks alike: no step is taken, and 0 * inf is no gradient.
        return
    tracked = state.memory
    bucket = bucket_numel(state.theta.element_size())
    if on_trial(tracked, settings):
        note_trial_(wires.everyone, space["seconds"].double(), tracked, settings)
    observe_(state.grad, tracked, space["fresh"], bucket)
    if tracked[CLOCK] % settings.options.stable_window:
        return
    digests, window = read_digests(tracked, bucket), settings.options.stable_window
    stable = agree_on_stable(wires.everyone, tracked[UNCHANGED].numpy(), digests, window)
    if not torch.equal(stable, tracked[STABLE]):
        tracked[STABLE].copy_(stable)
        if wires.workers.is_member:
            refresh_(wires.workers, space, state, settings)


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


def note_trial_(
    everyone: Wire, slowest: Tensor, tracked: dict[str, Tensor], settings: Settings
) -> None:
    """Note the seconds of the slowest worker; after the last trial rank 0 chooses the fastest way.

    `slowest`, float64 [1], holds this worker's. Collective on `world`.
    """
    everyone.reduce_(slowest, MPI.MAX, kind="mask")
    way, count = way_in_force(tracked, settings), ways(settings)
    tracked[SECONDS][way] = min(float(tracked[SECONDS][way]), float(slowest[0]))
    tracked[TRIALS].add_(1)
    if tracked[TRIALS] < TRIALS_PER_WAY * count:
        return
    choice = tracked[SECONDS].argmin().view(1)
    everyone.broadcast_(choice, kind="mask")
    tracked[CHOICE].copy_(choice)
    measured = zip(WAY_NAMES, tracked[SECONDS].tolist(), strict=True)
    times = ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in list(measured)[:count])
    log.info("stable gradients travel %s from now on (%s)", WAY_NAMES[int(choice[0])], times)


# --------------------------------------------------------------------------------------------------
# Before training
# --------------------------------------------------------------------------------------------------


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step once all is stable, and what they are."""
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
