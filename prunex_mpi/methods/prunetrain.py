"""PruneTrain: a network that becomes physically smaller while it is trained.

World rank 0 decides what is removed and the coefficient of the lasso, so that ranks that round
differently decide alike. The penalty's gradient, which all ranks have alike, is added to the mean.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire, Wires
from prunex_mpi.core.removal import remove_
from prunex_mpi.core.state import SHARED, RunContext
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning import lasso
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),
    ("coefficient of the lasso", "world", "Bcast, once", "one number"),
    ("what is removed", "world", "Bcast, when due", "a bit per group"),
)
COEFFICIENT = f"{SHARED}lasso_coefficient"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate the coefficient of the penalty."""
    return {COEFFICIENT: torch.zeros(1, dtype=torch.float64, device=theta.device)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Prepare the penalty of the network as it is now."""
    state = context.state
    coupling = state.groups.coupling.left(state.mask.bits)
    channels = lasso.build_lasso(state.layout, coupling, state.theta.device)
    # A channel's outputs and inputs are groups of their own in each layer.
    return {"channels": channels, "lasso": lasso.one_group_per_layer(channels)}


def add_penalty_(wires: Wires, space: dict[str, Any], context: RunContext, loss: Tensor) -> None:
    """Add the (scaled) gradient of the penalty to `grad`.

    The first step of a run fixes the coefficient by the `loss` of world rank 0's first batch.
    Collective on `world` in that step.
    """
    state, penalty = context.state, space["lasso"]
    coefficient, position = state.memory[COEFFICIENT], state.position
    with position.clock.computing(state.theta.device):
        norms = lasso.group_norms(state.theta, penalty, state.scratch)
        if (position.iteration, position.step) == (1, 0):
            ratio = context.settings.options.lasso_ratio
            coefficient.copy_(lasso.coefficient_for(ratio, loss.detach(), norms))
            wires.everyone.broadcast_(coefficient)
        scaled = state.scaler.scale(coefficient)
        lasso.write_subgradient_(state.theta, penalty, norms, scaled, state.scratch)
        state.grad.add_(state.scratch)


def reshape_(wires: Wires, space: dict[str, Any], context: RunContext, done: int) -> bool:
    """Take the groups that the lasso has emptied out of the network; return whether there were any.

    What was built on the old parameters (the space, an averager) is then of no use any more.
    Collective on `world`.
    """
    state, settings = context.state, context.settings
    if done % settings.options.reconfigure_every:
        return False
    removed = np.zeros(state.mask.bits.size, dtype=bool)
    if wires.everyone.comm.rank == 0:
        where = state.groups, state.mask.bits, settings.options.threshold
        removed = lasso.emptied(state.theta, space["channels"], *where)
    removed = wires.everyone.broadcast_bits(removed, kind="mask")
    if not removed.any():
        return False
    remove_(state, context.problem.model, removed, settings)
    return True


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    return layout.numel * size, f"{settings.aggregation}; less once channels have been removed"
