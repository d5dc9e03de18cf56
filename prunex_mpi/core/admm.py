"""The algebra of H-SADMM, phase by phase, on the flat vectors and penalties of a state.

    phase 1   min f_ij(theta) + rho1/2 |theta - z_i + u|^2                              (Eq. 8)
    phase 2   z~_i = [rho1 mean_j(theta_ij + u_ij) + rho2 (z - v_i)] / (lambda + rho1 + rho2)  (9)
    phase 3   z_i = P(z~_i)                          (Eq. 10, `mask_agreement`)
    phase 4   z = sum_i P_i (z_i + v_i) / N          (Eq. 11, `message`)
    phase 5   u += theta - z_i,   v += z_i - z       (Eq. 12, 13), residuals, penalties

Duals are scaled. Every rank contributes its own squared norms to the residuals; their sum over all
ranks carries the weights P_i by itself, since z_i and v_i are replicated on the P_i ranks of their
node and z on all N. Vectors are read once, tile by tile (`models.layout`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.record_keys import RESIDUALS
from prunex_mpi.comm.agreement import alike_bytes, mean_over_ranks, sum_alike_
from prunex_mpi.core.state import State, agreeing
from prunex_mpi.models.layout import (
    Layout,
    one_or_all,
    scale_,
    spare_tile,
    sum_tile_norms,
    tile_norms,
    tiles,
)
from prunex_mpi.settings.fields import RHO_MAX, RHO_MIN, Settings

# Boyd's factor of one change of a penalty.
RHO_FACTOR = 2.0

# --------------------------------------------------------------------------------------------------
# Phase 1: the proximal term
# --------------------------------------------------------------------------------------------------


def find_anchor(state: State) -> Tensor:
    """Return the anchor z_i - u, which stands still during phase 1, in the memory of `scratch`."""
    return torch.sub(state.z_node, state.u, out=state.scratch)


def add_pull_(state: State, anchor: Tensor) -> None:
    """Add rho1 (theta - anchor) to the gradient: exactly zero where theta is at the anchor.

    An optimizer that divides by the size of gradients would make steps of the rounding that
    rho1 theta - rho1 anchor leaves.
    """
    rho1, spare = one_or_all(state.rho1), spare_tile(state.theta)
    for tile in tiles(state.layout, state.theta.device):
        theta, centre, grad = (f[tile.place] for f in (state.theta, anchor, state.grad))
        gap = torch.sub(theta, centre, out=spare[: grad.numel()])
        if isinstance(rho1, float):
            grad.add_(gap, alpha=rho1)
        else:
            tile.scale_(gap, rho1)
            grad.add_(gap)


# --------------------------------------------------------------------------------------------------
# Phase 2: the dense candidate of a node
# --------------------------------------------------------------------------------------------------


def decay_of_layers(settings: Settings, layout: Layout) -> np.ndarray:
    """Return lambda of each segment, float64 [segments]: 0 of those that do not decay."""
    every = settings.weight_decay_on == "all"
    decayed = [every or len(segment.shape) > 1 for segment in layout.segments]
    return settings.weight_decay * np.array(decayed, dtype=np.float64)


def sum_candidate(state: State) -> Tensor:
    """Return theta + u in the memory of `scratch`; theta alone where there are no duals."""
    if state.consensus_sgd:
        return state.scratch.copy_(state.theta)
    return torch.add(state.theta, state.u, out=state.scratch)


def weigh_candidate(
    state: State, decay: np.ndarray, ranks: int, total: Tensor | None = None
) -> Tensor:
    """Return [rho1 mean(theta + u) + rho2 (z - v)] / (decay + rho1 + rho2) in `scratch`.

    Without duals it is the mean alone. `decay` is that of each segment, [segments]. `total` is the
    sum of theta + u over `ranks` ranks, in the memory of `scratch`; without it the mean is this
    rank's own theta + u.
    """
    if state.consensus_sgd:
        return sum_candidate(state) if total is None else total.div_(ranks)
    # Between z - v and the mean, times what the weight decay leaves of it.
    weights = one_or_all(state.rho1 / (state.rho1 + state.rho2))
    left = (state.rho1 + state.rho2) / (decay + state.rho1 + state.rho2)
    spare = spare_tile(state.theta)
    for tile in tiles(state.layout, state.theta.device):
        at, part = tile.place, state.scratch[tile.place]
        if total is None:
            mean = torch.add(state.theta[at], state.u[at], out=spare[: part.numel()])
        else:
            mean = torch.mul(part, 1 / ranks, out=spare[: part.numel()])
        torch.sub(state.z[at], state.v[at], out=part)
        tile.mix_(part, mean, weights)
        if decay.any():
            tile.scale_(part, left)
    return state.scratch


# --------------------------------------------------------------------------------------------------
# Phase 5: duals; residuals and the stopping test (Boyd et al. 2011); penalties
# --------------------------------------------------------------------------------------------------


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


def update_duals(
    state: State, moved_node: np.ndarray | None, moved: np.ndarray | None
) -> NormSums | None:
    """u += theta - z_i (Eq. 12), v += z_i - z (Eq. 13); return this rank's squared norms.

    None where phases 3 and 4 have not measured how z_i and z `moved`. While z is under way v waits
    for it. Does not communicate.
    """
    found, spare = [], spare_tile(state.theta)
    for tile in tiles(state.layout, state.theta.device):
        flats = (state.theta, state.z_node, state.u, state.z, state.v)
        theta, z_node, u, z, v = (flat[tile.place] for flat in flats)
        gap = torch.sub(theta, z_node, out=spare[: theta.numel()])
        u.add_(gap)
        if state.position.in_flight:
            continue
        norms = [] if moved is None else tile_norms(tile, gap, theta, z_node, u)
        torch.sub(z_node, z, out=gap)
        v.add_(gap)
        norms += [] if moved is None else tile_norms(tile, gap, z, v)
        found.append(norms)
    if moved is None:
        return None
    own = sum_tile_norms(found, state.layout, state.theta.device)
    gap_theta, theta, z_node, u, gap_node, z, v = own
    return NormSums(gap_theta, moved_node, theta, z_node, u, gap_node, moved, z, v)


@dataclass(frozen=True)
class Residuals:
    """Residual norms per layer, float64 [layers] each; whether all layers pass both tests."""

    intra_primal: np.ndarray
    intra_dual: np.ndarray
    inter_primal: np.ndarray
    inter_dual: np.ndarray
    converged: bool

    def totals(self) -> dict[str, float]:
        """Return the norm over all layers of each residual."""
        return {name: float(np.linalg.norm(getattr(self, name))) for name in RESIDUALS}


def compute_residuals(
    sums: NormSums,
    numels: np.ndarray,
    world_size: int,
    rho1: np.ndarray,
    rho2: np.ndarray,
    settings: Settings,
) -> Residuals:
    """Compute residuals and the stopping test from the norms summed over all ranks.

    Thresholds as in section 3.3.1 of Boyd et al. with N n elements per layer.
    """
    root = NormSums(*(np.sqrt(s) for s in sums))
    floor, eps_rel = np.sqrt(world_size * numels) * settings.eps_abs, settings.eps_rel
    intra_primal, intra_dual = root.theta_minus_z_node, rho1 * root.z_node_step
    inter_primal, inter_dual = root.z_node_minus_z, rho2 * root.z_step
    converged = (
        (intra_primal <= floor + eps_rel * np.maximum(root.theta, root.z_node))
        & (intra_dual <= floor + eps_rel * rho1 * root.u)
        & (inter_primal <= floor + eps_rel * np.maximum(root.z_node, root.z))
        & (inter_dual <= floor + eps_rel * rho2 * root.v)
    )
    return Residuals(intra_primal, intra_dual, inter_primal, inter_dual, bool(converged.all()))


def own_residuals(norms: NormSums | None, state: State) -> dict[str, float]:
    """Return this rank's part of each residual, {} where none were measured.

    The squares of all ranks add up to the square of the residual.
    """
    if norms is None:
        return {}
    parts = (
        norms.theta_minus_z_node,
        state.rho1**2 * norms.z_node_step,
        norms.z_node_minus_z,
        state.rho2**2 * norms.z_step,
    )
    return {name: float(part.sum()) ** 0.5 for name, part in zip(RESIDUALS, parts, strict=True)}


def find_residuals(
    world: MPI.Comm, state: State, settings: Settings, norms: NormSums | None, loss: float
) -> tuple[Residuals | None, float]:
    """Return the residuals of both levels per layer, and the mean loss, alike on all ranks.

    One message of nine norms per layer and the loss. Collective on `world`.
    """
    if norms is None:
        return None, mean_loss(world, state, loss)
    buffer = np.append(np.concatenate(norms), loss)
    with agreeing(state, "Allreduce and Bcast of norms", alike_bytes(buffer.size)):
        sum_alike_(world, buffer)
    sums = NormSums(*buffer[:-1].reshape(len(norms), -1))
    numels = np.array([s.numel for s in state.layout.segments], dtype=np.float64)
    residuals = compute_residuals(sums, numels, world.size, state.rho1, state.rho2, settings)
    return residuals, float(buffer[-1]) / world.size


def mean_loss(world: MPI.Comm, state: State, loss: float) -> float:
    """Return the mean of every rank's `loss`, alike on all. Collective on `world`."""
    with agreeing(state, "Allreduce and Bcast of the loss", alike_bytes(1)):
        return mean_over_ranks(world, loss)


def balance_penalties_(state: State, residuals: Residuals) -> None:
    """Update rho1 and rho2 per layer and rescale the duals: rho u and rho v stay what they were."""
    for name, dual, primal, other in (
        ("rho1", state.u, residuals.intra_primal, residuals.intra_dual),
        ("rho2", state.v, residuals.inter_primal, residuals.inter_dual),
    ):
        rho = getattr(state, name)
        new = balanced(rho, primal, other)
        if np.any(new != rho):
            scale_(dual, state.layout, rho / new)
        setattr(state, name, new)


def balanced(rho: np.ndarray, primal: np.ndarray, dual: np.ndarray) -> np.ndarray:
    """Return the penalties of the next iteration, float64 [layers], by Boyd's residual balancing.

    Times the factor where the primal residual exceeds ten times the dual one, divided where it is
    the other way round.
    """
    smaller = np.where(dual > 10 * primal, 1 / RHO_FACTOR, 1.0)
    scale = np.where(primal > 10 * dual, RHO_FACTOR, smaller)
    return np.clip(rho * scale, RHO_MIN, RHO_MAX)
