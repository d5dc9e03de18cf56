"""Time actions fairly, one after the other in turns, on one rank or on all of them together."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.heartbeat import Heartbeat

if TYPE_CHECKING:
    from mpi4py import MPI

SAMPLE_S = 0.02  # at least, or the clock and the first touch of memory count
MOST_S = 30.0  # of the turns of slow networks, which are few


class Action(NamedTuple):
    """What is timed, and what prepares it without being timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def wall_times(
    actions: dict[str, Action],
    repeat: int,
    device: torch.device,
    heartbeat: Heartbeat,
    world: "MPI.Comm | None" = None,
    alternate: bool = False,
) -> dict[str, np.ndarray]:
    """Return `repeat` wall times of each action, in seconds, float64 [repeat].

    The actions take turns, so that whatever else the machine does hits all of them alike; the first
    turn is not counted. `alternate` reverses every other turn, since an action finds in the caches
    what the one before it has left there. With `world` its ranks start each action together, and
    the time is that of the slowest rank: then collective on `world`.
    """
    times = {name: np.empty(repeat + 1) for name in actions}
    for turn in range(repeat + 1):
        for name in list(actions)[:: 1 if turn % 2 or not alternate else -1]:
            heartbeat.go_on()
            actions[name].prepare()
            synchronize(device)
            if world is not None:
                world.Barrier()
            start = time.perf_counter()
            actions[name].run()
            synchronize(device)
            times[name][turn] = time.perf_counter() - start
    if world is not None:
        everyone = np.empty((world.size, repeat + 1))
        for taken in times.values():
            world.Allgather(taken, everyone)
            taken[:] = everyone.max(axis=0)
    return {name: taken[1:] for name, taken in times.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the kernels queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def seconds_per_call(
    models: Mapping[str, nn.Module], batch: Tensor, repeat: int, heartbeat: Heartbeat
) -> dict[str, float]:
    """Return the median time of each network for a `batch`, over `repeat` turns of SAMPLE_S each.

    The networks, in evaluation mode and on the device of `batch`, take turns; fewer of them, one at
    least, where they would take longer than MOST_S.
    """

    def run(model: nn.Module, calls: int) -> float:
        synchronize(batch.device)
        start = time.perf_counter()
        for _ in range(calls):
            model(batch)
        synchronize(batch.device)
        return time.perf_counter() - start

    # The first call prepares more than those that follow.
    first = [(run(model, 1), run(model, 1))[1] for model in models.values()]
    calls = {name: math.ceil(SAMPLE_S / s) for name, s in zip(models, first, strict=True)}
    actions = {name: Action(partial(run, model, calls[name])) for name, model in models.items()}
    turns = max(1, min(repeat, int(MOST_S / sum(first))))
    times = wall_times(actions, turns, batch.device, heartbeat)
    return {name: float(np.median(taken)) / calls[name] for name, taken in times.items()}
