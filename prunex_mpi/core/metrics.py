"""The records of a run's files: what one outer iteration came to."""

from typing import Any

from prunex_mpi.base.record_keys import KINDS, PHASES, RANK_PHASES, RESIDUALS
from prunex_mpi.core.admm import Residuals
from prunex_mpi.core.state import PRUNED, RunContext, State
from prunex_mpi.pruning.masks import kept_numel


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


def layer_records(
    context: RunContext, iteration: int, residuals: Residuals | None
) -> list[dict[str, Any]]:
    """Return one row of layers.jsonl per parameter tensor; null for what there is not."""
    state = context.state
    density = {i: kept / numel for i, (kept, numel) in kept_by_segment(state).items()}
    penalties = context.settings.method.consensus
    return [
        {
            "iteration": iteration,
            "layer": segment.name,
            "density": density.get(i, 1.0),
            "rho1": float(state.rho1[i]) if penalties else None,
            "rho2": float(state.rho2[i]) if penalties else None,
            **{n: float(getattr(residuals, n)[i]) if residuals else None for n in RESIDUALS},
        }
        for i, segment in enumerate(state.layout.segments)
    ]


def iteration_record(
    context: RunContext, iteration: int, seconds: dict[str, float], residuals: Residuals | None
) -> dict[str, Any]:
    """Return what of a metrics.jsonl object follows from the state; null for what there is not."""
    state = context.state
    traffic = state.position.traffic
    penalties = context.settings.method.consensus
    return {
        "iteration": iteration,
        "seconds": {phase: seconds.get(phase, 0.0) for phase in PHASES},
        "data_wait_seconds": state.position.clock.data,
        "bytes": {kind: getattr(traffic, kind) for kind in KINDS},
        "density": density(state),
        "frozen": state.frozen,
        "residuals": residuals.totals() if residuals else dict.fromkeys(RESIDUALS),
        "rho1": float(state.rho1.mean()) if penalties else None,
        "rho2": float(state.rho2.mean()) if penalties else None,
        "lr": state.optimizer.optimizer.param_groups[0]["lr"],
        # Of methods whose nodes drift apart; their driver measures it.
        "replica_distance": None,
    }


def quality(context: RunContext, found: dict[str, float] | None) -> dict[str, float | None]:
    """Return what an evaluation has `found`, by the names of the data that it was made on.

    Where some are held out for it the test set is kept back: of it nothing is known yet.
    """
    measures = context.problem.task.measures
    values = found or dict.fromkeys(measures)
    if not context.settings.val_split:
        return {f"test_{name}": values[name] for name in measures}
    unknown = {f"test_{name}": None for name in measures}
    return {**unknown, **{f"val_{name}": values[name] for name in measures}}


def rank_record(
    seconds: dict[str, float],
    exchange: dict[str, float],
    broadcast: float,
    residuals: dict[str, float],
) -> dict[str, Any]:
    """Return what one rank has for ranks.jsonl: seconds of each phase, work apart from messages.

    `broadcast` is what of those of phase 4 was the broadcast in the node.
    """
    messages = {phase: exchange.get(phase, 0.0) for phase in RANK_PHASES}
    computing = {phase: seconds.get(phase, 0.0) - messages[phase] for phase in RANK_PHASES}
    return {"work": computing, "exchange": messages, "broadcast": broadcast, "residuals": residuals}
