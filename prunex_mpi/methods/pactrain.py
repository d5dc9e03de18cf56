"""PacTrain's steps: gradients that are sparse in places all workers know, without indices.

| what                     | communicator  | MPI operation    | operand                        |
|--------------------------|---------------|------------------|--------------------------------|
| unstable bucket          | workers       | Allreduce SUM    | gradient, dense                |
| stable buckets           | workers       | Allreduce SUM    | their supports, a flag each    |
| stable buckets, ternary  | workers       | Allreduce MAX    | a scale and a flag each        |
|                          | workers       | Allreduce SUM    | integers for their supports    |
| end of a window          | world         | Allreduce MIN    | steps and digests per bucket   |
| trial step (`adaptive`)  | world         | Allreduce MAX    | seconds of the exchange        |

Gradients of pruned weights are set to zero on the workers. What a worker finds outside of a stable
bucket's support raises that bucket's flag, and it is sent in full in the same step. So without
`ternary` the sum is that of the masked gradients, whichever way it travels.
"""

import time

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.logs import log
from prunex_mpi.comm.collectives import Transport, allreduce_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.workers import Workers
from prunex_mpi.compress.quantise import integer_type, ternarise_
from prunex_mpi.compress.support import (
    CHOICE,
    CLOCK,
    PRUNED,
    SECONDS,
    STABLE,
    SUPPORT,
    TRIALS,
    UNCHANGED,
    bucket_numel,
    observe_,
    outside_,
    read_digests,
    stable_positions,
)
from prunex_mpi.core.state import State, Traffic, ring_bytes
from prunex_mpi.core.steps import clocked, count_allreduce
from prunex_mpi.settings.fields import Settings

# How a gradient travels once there are stable buckets; indices into `SECONDS`.
FULL, COMPACT, TERNARY = range(3)
WAY_NAMES = ("full", "compact", "compact and ternary")
# Per way; the shortest counts.
TRIALS_PER_WAY = 3


# --------------------------------------------------------------------------------------------------
# A step on the workers
# --------------------------------------------------------------------------------------------------


def allocate_pactrain(workers: Workers, state: State, settings: Settings) -> dict[str, Tensor]:
    """Return memory for one step; on workers also for what stable buckets send."""
    space = {"fresh": torch.empty_like(state.memory[PRUNED]), "seconds": torch.zeros(1)}
    if workers.speaks:
        space["kept"] = torch.empty_like(state.theta)
        torch.logical_not(state.memory[PRUNED], out=space["kept"])
        refresh_(workers, space, state, settings)
    return space


def refresh_(workers: Workers, space: dict[str, Tensor], state: State, settings: Settings) -> None:
    """Fit the worker's memory in `space` to the buckets that are stable now."""
    bucket = bucket_numel(settings.bucket_mib, state.theta)
    positions, counts = stable_positions(state.memory, bucket)
    space["positions"], space["counts"] = positions, torch.tensor(counts, dtype=torch.int64)
    # Behind the values a flag per stable bucket.
    space["message"] = state.theta.new_empty(positions.numel() + len(counts))
    if settings.ternary:
        space["draws"] = state.theta.new_empty(positions.numel())
        space["down"] = torch.empty_like(positions, dtype=torch.bool)
        space["integers"] = torch.empty_like(positions, dtype=integer_type(workers.count))
        space["scales"] = state.theta.new_empty(2, len(counts))


def way_in_force(memory: dict[str, Tensor], settings: Settings) -> int:
    """Return how stable buckets travel in this step: FULL, COMPACT or TERNARY."""
    if not settings.adaptive:
        return TERNARY if settings.ternary else COMPACT
    if memory[CHOICE] >= 0:
        return int(memory[CHOICE])
    return int(memory[TRIALS]) % ways(settings)


def ways(settings: Settings) -> int:
    """Return how many ways to exchange are compared; the ternary one rounds, so it is asked for."""
    return 3 if settings.ternary else 2


def on_trial(memory: dict[str, Tensor], settings: Settings) -> bool:
    """Say whether this step's exchange is one of those that are measured."""
    return settings.adaptive and bool(memory[CHOICE] < 0) and bool(memory[STABLE].any())


def exchange_pactrain_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Replace this worker's weighted gradient by the sum of the masked ones of all workers.

    Collective on `workers.comm`.
    """
    memory, grad = state.memory, state.grad
    trial = on_trial(memory, settings)
    if trial:
        # Who comes late must not count for the way that happens to be tried.
        workers.comm.Barrier()
    started = time.perf_counter()
    with clocked(state, "method_seconds"):
        if memory[CLOCK] == 0:
            # The first step after pruning. The product is 7 times as fast as masked_fill_.
            torch.logical_not(memory[PRUNED], out=space["kept"])
        grad.mul_(space["kept"])
    way = way_in_force(memory, settings)
    if way == FULL or not memory[STABLE].any():
        with clocked(state, "exchange_seconds"):
            allreduce_(workers.comm, grad, transport)
        count_allreduce(traffic, workers, grad.nbytes)
    else:
        outside = send_stable_(workers, space, state, settings, way, transport, traffic)
        with clocked(state, "exchange_seconds"):
            for piece in dense_pieces(state, settings, outside):
                allreduce_(workers.comm, piece, transport)
                count_allreduce(traffic, workers, piece.nbytes)
    space["seconds"][0] = time.perf_counter() - started if trial else 0.0


def send_stable_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    way: int,
    transport: Transport,
    traffic: Traffic,
) -> list[bool]:
    """Exchange the supports of the stable buckets; return whose flag was raised, on any worker.

    Those buckets are left as they were: they have to be sent in full. Collective on `workers.comm`.
    """
    memory, grad, positions = state.memory, state.grad, space["positions"]
    counts = space["counts"].tolist()
    values, flags = space["message"].split([positions.numel(), len(counts)])
    with clocked(state, "method_seconds"):
        torch.index_select(grad, 0, positions, out=values)
        bucket = bucket_numel(settings.bucket_mib, grad)
        found = outside_(grad, memory[SUPPORT], space["fresh"], bucket)
        flags.copy_(found[memory[STABLE]])
    if way == TERNARY:
        sum_ternary_(workers, space, state, values, flags, counts, transport, traffic)
    else:
        with clocked(state, "exchange_seconds"):
            allreduce_(workers.comm, space["message"], transport)
        count_allreduce(traffic, workers, space["message"].nbytes)
    with clocked(state, "method_seconds"):
        raised = (flags > 0).tolist()
        numbers = memory[STABLE].nonzero().view(-1).tolist()
        pieces = grad.split(bucket)
        parts = zip(positions.split(counts), values.split(counts), strict=True)
        for number, (places, sums), flagged in zip(numbers, parts, raised, strict=True):
            if not flagged:
                pieces[number].zero_()
                grad.index_copy_(0, places, sums)
    return raised


def sum_ternary_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    values: Tensor,
    flags: Tensor,
    counts: list[int],
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Replace `values` by the sum of all workers' ternary ones, `flags` by their maximum.

    Collective on `workers.comm`.
    """
    scales, integers, draws = space["scales"], space["integers"], space["draws"]
    spare = space["fresh"][: values.numel()], space["down"]
    with clocked(state, "method_seconds"):
        for number, piece in enumerate(values.split(counts)):
            # A support may be empty.
            scales[0, number] = torch.linalg.vector_norm(piece, torch.inf) if piece.numel() else 0.0
        scales[1].copy_(flags)
    with clocked(state, "exchange_seconds"):
        allreduce_(workers.comm, scales.view(-1), transport, op=MPI.MAX)
    count_allreduce(traffic, workers, scales.nbytes)
    with clocked(state, "method_seconds"):
        flags.copy_(scales[1])
        parts = (values, draws, *spare, integers)
        for number, pieces in enumerate(zip(*(t.split(counts) for t in parts), strict=True)):
            piece, draw, up, down, out = pieces
            ternarise_(piece, scales[0, number], draw, (up, down), out)
    with clocked(state, "exchange_seconds"):
        allreduce_(workers.comm, integers, transport)
    count_allreduce(traffic, workers, integers.nbytes)
    with clocked(state, "method_seconds"):
        values.copy_(integers)
        for number, piece in enumerate(values.split(counts)):
            piece.mul_(scales[0, number])


def dense_pieces(state: State, settings: Settings, raised: list[bool]) -> list[Tensor]:
    """Return the gradient's unstable buckets, and the stable ones whose flag was raised."""
    stable = state.memory[STABLE]
    in_full = ~stable
    in_full[stable] = torch.tensor(raised)
    pieces = state.grad.split(bucket_numel(settings.bucket_mib, state.grad))
    return [pieces[number] for number in in_full.nonzero().view(-1).tolist()]


# --------------------------------------------------------------------------------------------------
# After a step, on all ranks
# --------------------------------------------------------------------------------------------------


def follow_pactrain_(
    topology: Topology,
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    traffic: Traffic,
) -> None:
    """Track the supports in the gradient of all ranks; settle what is due after this step.

    Collective on `world`.
    """
    if not state.frozen:
        return
    memory = state.memory
    bucket = bucket_numel(settings.bucket_mib, state.theta)
    if on_trial(memory, settings):
        with clocked(state, "exchange_seconds"):
            note_trial_(topology.world, workers, space, memory, settings, traffic)
    with clocked(state, "method_seconds"):
        observe_(state.grad, memory, space["fresh"], bucket)
    if memory[CLOCK] % settings.stable_window:
        return
    with clocked(state, "method_seconds"):
        digests = read_digests(memory, bucket)
    with clocked(state, "exchange_seconds"):
        stable = agree_on_stable(
            topology.world, memory[UNCHANGED].numpy(), digests, settings.stable_window
        )
    message = 3 * digests.nbytes
    traffic.mask += message
    traffic.sent += ring_bytes(workers.ring, message)
    if not np.array_equal(stable, memory[STABLE].numpy()):
        memory[STABLE].copy_(torch.from_numpy(stable))
        if workers.speaks:
            refresh_(workers, space, state, settings)


def agree_on_stable(
    world: MPI.Comm, unchanged: np.ndarray, digests: np.ndarray, window: int
) -> np.ndarray:
    """Return which buckets are stable on every rank: bool [buckets], alike on all of them.

    Their supports are `unchanged` for a window of steps and their `digests` are the same (both
    int64). Collective on `world`.
    """
    low = np.stack([unchanged, digests, ~digests])
    world.Allreduce(MPI.IN_PLACE, low, op=MPI.MIN)
    # The minimum of the complement is the complement of the maximum.
    return (low[0] >= window) & (low[1] == ~low[2])


def note_trial_(
    world: MPI.Comm,
    workers: Workers,
    space: dict[str, Tensor],
    memory: dict[str, Tensor],
    settings: Settings,
    traffic: Traffic,
) -> None:
    """Note the seconds of the slowest worker; after the last trial rank 0 chooses the fastest way.

    Collective on `world`.
    """
    slowest = space["seconds"].double().numpy()
    world.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
    traffic.mask += slowest.nbytes
    traffic.sent += ring_bytes(workers.ring, slowest.nbytes)
    way, count = way_in_force(memory, settings), ways(settings)
    memory[SECONDS][way] = min(float(memory[SECONDS][way]), float(slowest[0]))
    memory[TRIALS].add_(1)
    if memory[TRIALS] < TRIALS_PER_WAY * count:
        return
    choice = memory[SECONDS].argmin().view(1).numpy()
    world.Bcast(choice, root=0)
    traffic.mask += choice.nbytes
    traffic.sent += ring_bytes(workers.ring, choice.nbytes, passes=1)
    memory[CHOICE].copy_(torch.from_numpy(choice))
    measured = zip(WAY_NAMES, memory[SECONDS].tolist(), strict=True)
    times = ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in list(measured)[:count])
    log.info("stable gradients travel %s from now on (%s)", WAY_NAMES[int(choice[0])], times)
