"""Phases 2 to 4 of flat consensus: ADMM in which every rank agrees with z directly.

The paper's Fig. 1b, its PruneX (AR): global variable consensus (Boyd et al. 2011, section 7.1.1)
with the sparsity on z. There are no nodes and no leaders, one dual u_ij and one penalty rho1, and
parameters are pruned only once those of all ranks have been added up, so all of them travel:

    z~ = rho1 mean_ij(theta_ij + u_ij) / (lambda + rho1),   z = P(z~),   u_ij += theta_ij - z

| step                | communicator | MPI operation        | operand                      |
|---------------------|--------------|----------------------|------------------------------|
| local computation   |              |                      |                              |
| sum over all ranks  | leader: all  | Allreduce SUM        | theta + u, statistics, dense |
| projection          | leader: all  | Bcast                | mask bits                    |
| duals and residuals | world        | Allreduce SUM, Bcast | nine norms per layer         |

Phases and names are those of `hsadmm.py`; z_i is z, and v is zero throughout.
"""

import numpy as np
from torch import Tensor

from prunex_mpi.comm.counted import CountedComm, CountedComms
from prunex_mpi.core import admm
from prunex_mpi.core.exchange import exchange_, take_over_
from prunex_mpi.core.loop import Round, phase
from prunex_mpi.core.mask_choice import project_locally
from prunex_mpi.core.schedule import Stage
from prunex_mpi.core.state import KNOWN, RunContext, State, adopt_mask, freeze
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import scale_, squared_distances
from prunex_mpi.settings.fields import Settings


def agree_on_z(
    comms: CountedComms, context: RunContext, this: Round, stage: Stage
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Set z, and z_i, to the projection of z~; return how z_i, and z beside it, moved per layer.

    Squared, where it is measured; the residuals between nodes are zero. Collective on
    `leader.comm`, which holds all ranks.
    """
    state, settings = context.state, context.settings
    with phase(context, this, "inter"):
        last_z = sum_candidates_(comms, state, settings)
    with phase(context, this, "project"):
        moved = project_(comms.workers, state, stage, last_z)
        if stage.freeze:
            freeze(state, settings.after_freeze == "local-sgd")
    return moved, None if moved is None else np.zeros_like(moved)


def sum_candidates_(comms: CountedComms, state: State, settings: Settings) -> Tensor:
    """Set z to z~, dense, by the theta + u and the BatchNorm statistics of all ranks.

    Until the masks are frozen nothing is masked. Returns what z was before. Collective on
    `leader.comm`, which holds all ranks.
    """
    batchnorm.read_(state.bn_modules, state.stats, state.memory[KNOWN])
    # z_i is z, whose value is at hand: its memory may hold what this rank sends.
    candidate = admm.sum_candidate(state)
    state.z_node, state.scratch = candidate, state.z_node
    whole = state.message.fragment()
    exchange_(comms, state, settings.payload, whole)
    last_z = take_over_(state, settings, whole)
    if not state.consensus_sgd and settings.weight_decay_in == "z":
        decay = admm.decay_of_layers(settings, state.layout)
        scale_(state.z, state.layout, state.rho1 / (decay + state.rho1))
    return last_z


def project_(workers: CountedComm, state: State, stage: Stage, last_z: Tensor) -> np.ndarray | None:
    """Project z~, in z, on the sparsity; return |z^{k+1} - z^k|^2 per layer where it is measured.

    World rank 0 decides on the mask. Collective on `workers.comm`, which holds all ranks.
    """
    mask = state.mask.bits
    if stage.choose:
        if workers.comm.rank == 0:
            mask = project_locally(state.z, state, stage.strict)
        mask = workers.broadcast_bits(mask, kind="mask")
        adopt_mask(state, mask)
        state.mask.apply_(state.z)
    moved = squared_distances(state.z, last_z, state.layout) if stage.measured else None
    state.z_node.copy_(state.z)
    return moved
