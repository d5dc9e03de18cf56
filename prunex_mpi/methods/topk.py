"""A step of top-k sparsification: every worker's largest elements, gathered by all."""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress import sparse
from prunex_mpi.core.state import OWN, RunContext, State
from prunex_mpi.core.sums import allocate_equal, sum_sparse_
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("values", "workers", "Allgatherv", "the largest of each layer"),
    ("positions", "workers", "Allgatherv", "int32, one per value"),
)
RESIDUAL = f"{OWN}residual"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what has not been sent yet."""
    sparse.check_positions(layout)
    return {RESIDUAL: torch.zeros_like(theta)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for one worker's values and positions, and for a bucket of those of all."""
    state = context.state
    counts = sparse.kept_per_layer(state.layout.segments, context.settings.options.ratio)
    values = state.theta.new_empty(sum(counts))
    return allocate_equal(wire, values, torch.empty_like(values, dtype=torch.int32))


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Send the elements of largest magnitude of residual + gradient; the rest is the new residual.

    Per layer (Stich et al. 2018). Collective on `wire.comm`.
    """
    state = context.state
    residual = state.memory[RESIDUAL].add_(state.grad)
    counts = sparse.kept_per_layer(state.layout.segments, context.settings.options.ratio)
    sparse.select_top_(residual, state.layout, counts, space["values"], space["positions"])
    sum_sparse_(wire, space, state.grad)


def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
    """Return how many of a run's `payload` bytes are positions."""
    return sparse.position_bytes(payload, state.theta.element_size())


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    count = sum(sparse.kept_per_layer(layout.segments, settings.options.ratio))
    how = f"{count:,} values and positions, {settings.aggregation}"
    return count * (size + sparse.POSITION_BYTES), how
