"""What phase 1 adds to each gradient: that of rho1/2 |theta - z_i + u|^2, in few passes.

It is rho1 theta - anchor with the anchor rho1 (z_i - u). That stands still during the phase, and
rho1 theta is a weight decay: the optimizer's one pass adds it where it can.
"""

import torch
from torch import Tensor

from prunex_mpi.core.state import State
from prunex_mpi.models.layout import fill_, one_or_all, scale_
from prunex_mpi.settings.fields import Settings


def set_anchor_(state: State) -> None:
    """Leave rho1 (z_i - u) in `scratch`, for as long as phase 1 lasts."""
    torch.sub(state.z_node, state.u, out=state.scratch)
    scale_(state.scratch, state.layout, state.rho1)


def share_pull_(state: State, settings: Settings) -> Tensor | float:
    """Let the optimizer add rho1 theta, beside the weight decay that it has; set the anchor.

    Returns the rho1 by which `add_pull_` has to do it: 0 where the optimizer does, one number for
    all parameters, or one for each, [numel], in the memory of `payload`.
    """
    set_anchor_(state)
    rho1 = one_or_all(state.rho1)
    if isinstance(rho1, float):
        # AdamW's decay is no part of the gradient.
        if settings.optimizer == "adamw":
            return rho1
        state.optimizer.param_groups[0]["weight_decay"] += rho1
        return 0.0
    # Nothing is under way in it: penalties that differ come of residuals, and those wait.
    return fill_(state.payload[: state.layout.numel], state.layout, rho1)


def add_pull_(state: State, rho1: Tensor | float) -> None:
    """Add rho1 theta - anchor to the gradient, `rho1` being what `share_pull_` has returned."""
    state.grad.sub_(state.scratch)
    if isinstance(rho1, Tensor):
        state.grad.addcmul_(state.theta, rho1)
    elif rho1:
        state.grad.add_(state.theta, alpha=rho1)
