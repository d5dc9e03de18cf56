"""Phase 5's message: residuals of both levels and the loss, of this rank and of all."""

import numpy as np

from mpi4py import MPI

from prunex_mpi.comm.agreement import mean_over_ranks, sum_alike_
from prunex_mpi.core.residuals import RESIDUALS, NormSums, Residuals, compute_residuals
from prunex_mpi.core.state import State
from prunex_mpi.settings.fields import Settings


def own_residuals(norms: NormSums | None, state: State) -> dict[str, float]:
    """Return what this rank contributes to each residual: its norm over all layers.

    All but `intra_primal` are the same on all ranks of a node. Nothing where none were measured.
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
    """Return the residuals of both levels per layer, and the mean loss over all ranks.

    One message of nine norms per layer, of the loss alone where none were measured; alike on all
    ranks, since the stopping test and the penalties are decided on it. Collective on `world`.
    """
    if norms is None:
        return None, mean_loss(world, state, loss)
    buffer = np.append(np.concatenate(norms), loss)
    with state.position.clock.agreeing(state.theta.device, "Allreduce and Bcast of norms"):
        sum_alike_(world, buffer)
    sums = NormSums(*buffer[:-1].reshape(len(norms), -1))
    numels = np.array([s.numel for s in state.layout.segments], dtype=np.float64)
    rhos, epsilons = (state.rho1, state.rho2), (settings.eps_abs, settings.eps_rel)
    residuals = compute_residuals(sums, numels, world.size, *rhos, *epsilons)
    return residuals, float(buffer[-1]) / world.size


def mean_loss(world: MPI.Comm, state: State, loss: float) -> float:
    """Return the mean of every rank's `loss`, alike on all. Collective on `world`."""
    with state.position.clock.agreeing(state.theta.device, "Allreduce and Bcast of the loss"):
        return mean_over_ranks(world, loss)
