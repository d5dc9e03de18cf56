"""A step of AdaCGD: each worker mends the estimate of its gradient by as much as it needs.

After Makarenko et al. 2022 (arXiv:2211.00188), with Top-K of several levels. All workers know the
sum of the estimates h. A worker sends what the coarsest level that is good enough for it keeps of
its gradient less its estimate, and nothing where the estimate is good enough as it is
(`compress/sparse.py`). The first gradients travel whole. Nothing is left over for later: the
estimates follow (EF21), and the step takes their sum.

With `--adacgd-average` a below 1 the worker's own average of gradients, x = (1 - a) y + a g, stands
for the gradient, y being the average of the step before (EF21-SGDM, Fatkhullin et al. 2023).
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import COUNT_BYTES, Wire
from prunex_mpi.compress import sparse
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.state import OWN, SUM_OF, RunContext, State
from prunex_mpi.core.sums import add_sparse_parts_, allocate_sparse
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("gradient, first step alone", "workers", "Allreduce SUM", "dense"),
    ("how many elements there are", "workers", "Allgather", "one int64"),
    ("elements, in buckets", "workers", "Allgatherv", "values, then int32 positions"),
)
# Shares of the gradient that a worker chooses from, ascending.
LEVELS = (0.01, 0.03, 0.1)
# How good an estimate must be, as a share of the gradient's last change (squares).
ZETA = 0.4
ESTIMATE, LAST, SUM = f"{OWN}estimate", f"{OWN}last_gradient", f"{SUM_OF}estimates"


def counts_of(numel: int) -> list[int]:
    """Return how many elements each level sends, ascending."""
    return [sparse.share_of(numel, level) for level in LEVELS]


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate a worker's estimate and last gradient, and the sum of all workers' estimates."""
    sparse.check_positions(layout)
    return {key: torch.zeros_like(theta) for key in (ESTIMATE, LAST, SUM)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for the most that this worker sends, and for one bucket of what all do."""
    theta = context.state.theta
    most = counts_of(theta.numel())[-1]
    return {
        **allocate_sparse(wire, theta, most),
        "magnitudes": torch.empty_like(theta),
        "largest": theta.new_empty(most),
        "places": torch.empty(most, dtype=torch.int64, device=theta.device),
    }


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the sum of the workers' mended estimates. Collective on `wire.comm`."""
    state = context.state
    grad, total = state.grad, state.memory[SUM]
    estimate, last = state.memory[ESTIMATE], state.memory[LAST]
    if steps_taken(context) == 0:
        estimate.copy_(grad)
        last.copy_(grad)
        wire.reduce_(grad)
        total.copy_(grad)
        return
    if context.settings.options.average < 1:
        grad.lerp_(last, 1 - context.settings.options.average)
    change = torch.linalg.vector_norm(last.sub_(grad), dtype=torch.float64).square()
    last.copy_(grad)
    difference = torch.sub(grad, estimate, out=state.scratch)
    torch.abs(difference, out=space["magnitudes"])
    counts = counts_of(grad.numel())
    largest, places = space["largest"], space["places"]
    torch.topk(space["magnitudes"], counts[-1], out=(largest, places))
    count = sparse.choose_count(difference, largest, counts, ZETA * change)
    torch.index_select(difference, 0, places[:count], out=space["values"][:count])
    space["positions"][:count].copy_(places[:count])
    estimate.index_add_(0, places[:count], space["values"][:count])
    add_sparse_parts_(wire, space, count, total)
    grad.copy_(total)


def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
    """Return how many of a run's `payload` bytes are positions; the first step is dense."""
    size, steps = state.theta.element_size(), state.position.steps_done
    others = state.layout.numel * size + (steps - 1) * COUNT_BYTES
    return sparse.position_bytes(payload - others, size)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    counts = counts_of(layout.numel)
    levels = ", ".join(f"{count:,}" for count in counts)
    how = f"at most: 0, {levels} values and positions; the first step dense, {settings.aggregation}"
    return counts[-1] * (size + sparse.POSITION_BYTES) + COUNT_BYTES, how
