"""What is measured in one outer iteration: seconds per phase and the records of the run's files."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.compress.support import PRUNED
from prunex_mpi.core.residuals import RESIDUALS, Residuals
from prunex_mpi.core.state import State, Traffic
from prunex_mpi.pruning.projection import kept_numel


@contextmanager
def timed(
    heartbeat: Heartbeat, seconds: dict[str, float], phase: str, state: State
) -> Iterator[None]:
    """Store the wall time of a phase, and tell the watchdog of it."""
    heartbeat.enter(phase)
    start = time.perf_counter()
    yield
    if state.theta.device.type == "cuda":
        torch.cuda.synchronize(state.theta.device)
    seconds[phase] = time.perf_counter() - start


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
    layers = zip(state.groups.layers, kept_numel(state.mask, state.groups), strict=True)
    return {layer.segment: (kept, layer.numel) for layer, kept in layers}


def prunable_and_kept(state: State) -> tuple[int, int]:
    """Return how many weights the method may prune, and how many of them it keeps."""
    counts = kept_by_segment(state).values()
    return sum(numel for _, numel in counts), sum(kept for kept, _ in counts)


def density(state: State) -> float:
    """Return the kept fraction of the weights that the method may prune, 1 where it prunes none."""
    prunable, kept = prunable_and_kept(state)
    return kept / prunable if prunable else 1.0


def layer_records(
    iteration: int, state: State, residuals: Residuals | None
) -> list[dict[str, Any]]:
    """Return one row of layers.jsonl per parameter tensor; null for residuals that are not."""
    density = {i: kept / numel for i, (kept, numel) in kept_by_segment(state).items()}
    rows = []
    for i, segment in enumerate(state.layout.segments):
        rows.append(
            {
                "iteration": iteration,
                "layer": segment.name,
                "density": density.get(i, 1.0),
                "rho1": float(state.rho1[i]) if residuals else None,
                "rho2": float(state.rho2[i]) if residuals else None,
                **{
                    name: float(getattr(residuals, name)[i]) if residuals else None
                    for name in RESIDUALS
                },
            }
        )
    return rows


def iteration_record(
    iteration: int,
    state: State,
    seconds: dict[str, float],
    traffic: Traffic,
    residuals: Residuals | None,
) -> dict[str, Any]:
    """Return the part of a metrics.jsonl object that follows from the state.

    Methods without dual variables have no residuals and no penalties: null in the file.
    """
    return {
        "iteration": iteration,
        "seconds": seconds,
        "bytes": {
            "dense": traffic.dense,
            "payload": traffic.payload,
            "sent": traffic.sent,
            "mask": traffic.mask,
            "intra": traffic.intra,
            "evaluate": traffic.evaluate,
        },
        "density": density(state),
        "frozen": state.frozen,
        "residuals": residuals.totals() if residuals else dict.fromkeys(RESIDUALS),
        "rho1": float(state.rho1.mean()) if residuals else None,
        "rho2": float(state.rho2.mean()) if residuals else None,
        "lr": state.optimizer.param_groups[0]["lr"],
    }
