"""Residuals, stopping test and penalties of both consensus levels, per layer (Boyd et al. 2011).

Every rank contributes its own squared norms; their sum over all ranks carries the weights P_i by
itself, since z_i and v_i are replicated on the P_i ranks of their node and z on all N.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")


class NormSums(NamedTuple):
    """Squared norms per layer, float64 [layers] each, of one rank or summed over all ranks."""

    theta_minus_z_node: np.ndarray
    z_node_step: np.ndarray
    theta: np.ndarray
    z_node: np.ndarray
    u: np.ndarray
    z_node_minus_z: np.ndarray
    z_step: np.ndarray
    z: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class Residuals:
    """Residual norms and their thresholds per layer, float64 [layers] each."""

    intra_primal: np.ndarray
    intra_dual: np.ndarray
    inter_primal: np.ndarray
    inter_dual: np.ndarray
    converged: np.ndarray

    def totals(self) -> dict[str, float]:
        """Return the norm over all layers of each residual."""
        return {name: float(np.linalg.norm(getattr(self, name))) for name in RESIDUALS}


def compute_residuals(
    sums: NormSums,
    numels: np.ndarray,
    world_size: int,
    rho1: np.ndarray,
    rho2: np.ndarray,
    eps_abs: float,
    eps_rel: float,
) -> Residuals:
    """Compute residuals and the stopping test from the norms summed over all ranks.

    The dual residual of the inter level is rho2 (z^{k+1} - z^k); thresholds as in section 3.3.1 of
    Boyd et al. with N n elements per layer.
    """
    root = NormSums(*(np.sqrt(s) for s in sums))
    floor = np.sqrt(world_size * numels) * eps_abs
    intra_primal, intra_dual = root.theta_minus_z_node, rho1 * root.z_node_step
    inter_primal, inter_dual = root.z_node_minus_z, rho2 * root.z_step
    converged = (
        (intra_primal <= floor + eps_rel * np.maximum(root.theta, root.z_node))
        & (intra_dual <= floor + eps_rel * rho1 * root.u)
        & (inter_primal <= floor + eps_rel * np.maximum(root.z_node, root.z))
        & (inter_dual <= floor + eps_rel * rho2 * root.v)
    )
    return Residuals(intra_primal, intra_dual, inter_primal, inter_dual, converged)


def converges(residuals: Residuals | None) -> bool:
    """Say whether every layer satisfies both stopping tests; without residuals none does."""
    return residuals is not None and bool(residuals.converged.all())


def update_penalty(
    rho: np.ndarray,
    primal: np.ndarray | None,
    dual: np.ndarray | None,
    rule: str,
    factor: float,
    rho_min: float,
    rho_max: float,
) -> np.ndarray:
    """Return the penalties of the next iteration, float64 [layers].

    `fixed` keeps them, `ramp` multiplies by `factor` up to `rho_max`, `balance` is Boyd's residual
    balancing: times `factor` where the primal residual exceeds ten times the dual one, divided
    where it is the other way round. The caller rescales the duals by old / new.
    """
    if rule == "fixed":
        return rho
    if rule == "ramp":
        return np.minimum(rho * factor, rho_max)
    scale = np.where(primal > 10 * dual, factor, np.where(dual > 10 * primal, 1 / factor, 1.0))
    return np.clip(rho * scale, rho_min, rho_max)
