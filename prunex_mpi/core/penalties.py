"""How the penalties rho1 and rho2 of each layer change from one outer iteration to the next."""

import numpy as np
from torch import Tensor

from prunex_mpi.core.residuals import Residuals, update_penalty
from prunex_mpi.core.state import State
from prunex_mpi.models.layout import scale_
from prunex_mpi.settings.fields import Settings


def update_penalties(state: State, settings: Settings, residuals: Residuals | None) -> None:
    """Update rho1 and rho2 per layer and rescale the duals: rho u and rho v stay what they were.

    Only `balance` looks at the residuals. While z is under way rho2 waits for it, as v does.
    """
    intra = (None, None)
    if residuals is not None:
        intra = residuals.intra_primal, residuals.intra_dual
    state.rho1 = _rescaled(state.u, state.rho1, state, settings, intra)
    if not state.position.under_way:
        update_rho2(state, settings, residuals)


def update_rho2(state: State, settings: Settings, residuals: Residuals | None = None) -> None:
    """Update rho2 as `update_penalties` does; where z was under way once v has followed it."""
    inter = (None, None)
    if residuals is not None:
        inter = residuals.inter_primal, residuals.inter_dual
    state.rho2 = _rescaled(state.v, state.rho2, state, settings, inter)


def _rescaled(
    dual: Tensor,
    rho: np.ndarray,
    state: State,
    settings: Settings,
    found: tuple[np.ndarray | None, np.ndarray | None],
) -> np.ndarray:
    """Return the next `rho`, and rescale its dual in place."""
    limits = settings.rho_min, settings.rho_max
    new = update_penalty(rho, *found, settings.penalty, settings.rho_factor, *limits)
    if np.any(new != rho):
        scale_(dual, state.layout, rho / new)
    return new
