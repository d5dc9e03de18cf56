"""The driver of flat consensus: ADMM in which every rank agrees with z directly.

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

from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.wire import Wires
from prunex_mpi.core import admm
from prunex_mpi.core.evaluation import check_divergence
from prunex_mpi.core.exchange import exchange_, take_over_
from prunex_mpi.core.loop import measures_residuals, phase, rounds, split_local
from prunex_mpi.core.mask_agreement import project_locally
from prunex_mpi.core.schedule import Stage, find_stage, may_stop
from prunex_mpi.core.state import KNOWN, RunContext, State, adopt_mask, freeze, wires_of
from prunex_mpi.core.statistics import find_reference_
from prunex_mpi.core.steps import Rounds
from prunex_mpi.methods.hsadmm import end_iteration, local_computation, update_duals
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import scale_, squared_distances
from prunex_mpi.settings.fields import Settings


def outer_iterations(topology: Topology, context: RunContext) -> Rounds:
    """Train from `position` on; yield as `hsadmm.outer_iterations`. Collective on `world`.

    The residuals between nodes are zero. Raises Diverged on every rank.
    """
    state, settings, position = context.state, context.settings, context.state.position
    wires = wires_of(topology, state, context.transport)
    for this in rounds(context):
        measured = measures_residuals(context, this)
        stage = find_stage(this.k, settings, state.frozen, position, measured)
        with phase(context, this, "local"):
            loss = yield from local_computation(None, context)
            if loss is None:
                return
            check_divergence(topology, context, loss)
        split_local(context, this, waiting="intra")
        with phase(context, this, "inter"):
            sum_candidates_(wires, state, settings)
        with phase(context, this, "project"):
            moved = project_(wires, state, settings, stage)
            if stage.freeze:
                freeze(state, settings.after_freeze == "local-sgd")
        with phase(context, this, "dual"):
            still = None if moved is None else np.zeros_like(moved)
            norms = None if state.consensus_sgd else update_duals(state, moved, still)
            this.residuals.update(admm.own_residuals(norms, state))
            residuals, loss = admm.find_residuals(topology.world, state, settings, norms, loss)

        converged = may_stop(stage, settings, state.frozen) and admm.converges(residuals)
        yield end_iteration(topology, context, this, stage, loss, residuals, converged)
        if converged:
            return


def sum_candidates_(wires: Wires, state: State, settings: Settings) -> None:
    """Set z to z~, dense, by the theta + u and the BatchNorm statistics of all ranks.

    Until the masks are frozen nothing is masked. What z was before is `last_z`. Collective on
    `leader.comm`, which holds all ranks.
    """
    find_reference_(wires, state)
    batchnorm.read_(state.bn_modules, state.stats, state.memory[KNOWN])
    # z_i is z, whose value is at hand: its memory may hold what this rank sends.
    candidate = admm.sum_candidate(state)
    state.z_node, state.scratch = candidate, state.z_node
    whole = state.message.fragment()
    exchange_(wires, state, settings.payload, whole)
    take_over_(state, settings, whole, state.position.iteration)
    if not state.consensus_sgd and settings.weight_decay_in == "z":
        decay = admm.decay_of_layers(settings, state.layout)
        scale_(state.z, state.layout, state.rho1 / (decay + state.rho1))


def project_(wires: Wires, state: State, settings: Settings, stage: Stage) -> np.ndarray | None:
    """Project z~, in z, on the sparsity; return |z^{k+1} - z^k|^2 per layer where it is measured.

    World rank 0 decides on the mask. Collective on `leader.comm`, which holds all ranks.
    """
    workers = wires.workers
    mask = state.mask.bits
    if stage.choose:
        if workers.comm.rank == 0:
            mask = project_locally(state.z, state, stage.strict)
        mask = workers.broadcast_bits(mask, kind="mask")
        adopt_mask(state, mask)
        state.mask.apply_(state.z)
    moved = None
    if stage.measured:
        moved = squared_distances(state.z, state.last_z, state.layout)
    state.z_node.copy_(state.z)
    return moved
