"""What is measured in one outer iteration: seconds per phase and the records of the run's files."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prunex_mpi.residuals import Residuals
from prunex_mpi.sparsity import kept_numel
from prunex_mpi.state import State, Traffic
from prunex_mpi.watchdog import Heartbeat


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


def layer_records(iteration: int, state: State, residuals: Residuals) -> list[dict[str, Any]]:
    """Return one row of layers.jsonl per parameter tensor."""
    kept = dict(
        zip(
            (layer.segment for layer in state.groups.layers),
            kept_numel(state.mask, state.groups),
            strict=True,
        )
    )
    rows = []
    for i, segment in enumerate(state.layout.segments):
        rows.append(
            {
                "iteration": iteration,
                "layer": segment.name,
                "density": kept.get(i, segment.numel) / segment.numel,
                "rho1": float(state.rho1[i]),
                "rho2": float(state.rho2[i]),
                "intra_primal": float(residuals.intra_primal[i]),
                "intra_dual": float(residuals.intra_dual[i]),
                "inter_primal": float(residuals.inter_primal[i]),
                "inter_dual": float(residuals.inter_dual[i]),
            }
        )
    return rows


def iteration_record(
    iteration: int,
    state: State,
    seconds: dict[str, float],
    traffic: Traffic,
    residuals: Residuals,
) -> dict[str, Any]:
    """Return the part of a metrics.jsonl object that follows from the state."""
    return {
        "iteration": iteration,
        "seconds": seconds,
        "bytes": {
            "dense": (state.layout.numel + state.stats.numel()) * state.theta.element_size(),
            "payload": traffic.payload,
            "mask": traffic.mask,
            "intra": traffic.intra,
            "evaluate": traffic.evaluate,
        },
        "density": sum(kept_numel(state.mask, state.groups)) / state.groups.prunable_numel,
        "frozen": state.frozen,
        "residuals": residuals.totals(),
        "rho1": float(state.rho1.mean()),
        "rho2": float(state.rho2.mean()),
        "lr": state.optimizer.param_groups[0]["lr"],
    }
