"""Time actions fairly, one after the other in turns."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from prunex_mpi.base.heartbeat import Heartbeat


class Action(NamedTuple):
    """What is timed, and what prepares it without being timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def min_seconds(
    actions: dict[str, Action], repeat: int, device: torch.device, heartbeat: Heartbeat
) -> dict[str, float]:
    """Return the shortest of `repeat` wall times of each action, in seconds; see `wall_times`."""
    times = wall_times(actions, repeat, device, heartbeat)
    return {name: min(taken) for name, taken in times.items()}


def wall_times(
    actions: dict[str, Action], repeat: int, device: torch.device, heartbeat: Heartbeat
) -> dict[str, list[float]]:
    """Return `repeat` wall times of each action, in seconds.

    The actions take turns, so that whatever else the machine does hits all of them alike; the first
    round is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeat + 1):
        for name, action in actions.items():
            heartbeat.go_on()
            action.prepare()
            synchronize(device)
            start = time.perf_counter()
            action.run()
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def synchronize(device: torch.device) -> None:
    """Wait for the kernels queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
