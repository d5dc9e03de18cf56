"""PruneTrain: a network that becomes physically smaller while it is trained.

| part                     | communicator | MPI operation    | operand                            |
|--------------------------|--------------|------------------|------------------------------------|
| coefficient of the lasso | world        | Bcast, once      | one number                         |
| what is removed          | world        | Bcast, when due  | a bit per group                    |

World rank 0 decides both, so that ranks that round differently decide alike. The penalty's gradient
is what a step's gradient starts from, and goes through the same average.
"""

from dataclasses import fields

import numpy as np
from torch import Tensor, nn

from prunex_mpi.comm.collectives import Transport, bcast_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.workers import Workers
from prunex_mpi.core.state import Problem, State, Traffic, build_state, ring_bytes
from prunex_mpi.models.layout import build_layout
from prunex_mpi.models.standalone import fill_, resize_
from prunex_mpi.pruning.lasso import (
    Lasso,
    build_lasso,
    coefficient_for,
    cut,
    emptied,
    group_norms,
    remaining_coupling,
    write_subgradient_,
)
from prunex_mpi.pruning.shrink import smaller_sizes, smaller_tensors
from prunex_mpi.settings.fields import Settings

COEFFICIENT = "shared.lasso_coefficient"


def find_lasso(state: State) -> Lasso:
    """Prepare the penalty of the network as it is now."""
    coupling = remaining_coupling(state.layout, state.groups, state.mask)
    return build_lasso(state.layout, coupling, state.theta.device)


def start_gradient_(
    topology: Topology,
    workers: Workers,
    lasso: Lasso,
    loss: Tensor,
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Let `state.grad` start from the (scaled) gradient of the penalty.

    The first step of a run fixes the coefficient by the `loss` of world rank 0's first batch.
    Collective on `world` in that step.
    """
    coefficient, position = state.memory[COEFFICIENT], state.position
    norms = group_norms(state.theta, lasso, state.scratch)
    if (position.iteration, position.step) == (1, 0):
        coefficient.copy_(coefficient_for(settings.lasso_ratio, loss.detach(), norms))
        bcast_(topology.world, coefficient, transport)
        traffic.payload += coefficient.nbytes
        traffic.sent += ring_bytes(workers.ring, coefficient.nbytes, passes=1)
    write_subgradient_(state.theta, lasso, norms, state.scaler.scale(coefficient), state.grad)


def reconfigure_(
    topology: Topology,
    workers: Workers,
    lasso: Lasso,
    state: State,
    problem: Problem,
    settings: Settings,
    traffic: Traffic,
) -> bool:
    """Take the groups that the lasso has emptied out of the network; say whether there were any.

    Afterwards `state` and the model have other parameters, and what was built on the old ones (the
    lasso, an averager) is of no use any more. Collective on `world`.
    """
    removed = np.zeros(state.mask.size, dtype=bool)
    if topology.world.rank == 0:
        removed = emptied(state.theta, lasso, state.groups, state.mask, settings.prune_threshold)
    bits = np.packbits(removed)
    topology.world.Bcast(bits, root=0)
    traffic.mask += bits.nbytes
    traffic.sent += ring_bytes(workers.ring, bits.nbytes, passes=1)
    removed = np.unpackbits(bits, count=removed.size).astype(bool)
    if not removed.any():
        return False
    remove_(state, problem.model, removed, settings)
    return True


def remove_(state: State, model: nn.Module, removed: np.ndarray, settings: Settings) -> None:
    """Rebuild `model` and `state` without the groups of `removed`, bool [groups].

    Weights, BatchNorm statistics and momentum of what is left stay bit for bit.
    """
    coupling = remaining_coupling(state.layout, state.groups, state.mask)
    tensors = smaller_tensors(model, coupling, removed)
    momentum = state.optimizer.state[state.theta].get("momentum_buffer")
    if momentum is not None:
        momentum = cut(momentum, state.layout, coupling, removed)
    resize_(model, smaller_sizes(model, coupling, removed))
    fill_(model, tensors)
    _rebuild(state, model, state.mask & ~removed, settings)
    if momentum is not None:
        state.optimizer.state[state.theta]["momentum_buffer"].copy_(momentum)


def resize_to_(state: State, model: nn.Module, mask: np.ndarray, settings: Settings) -> None:
    """Give `model` and `state` the sizes that `mask` leaves; the caller sets all values afterwards.

    The model may be larger or smaller before.
    """
    resize_(model, sizes_of(state, model, mask))
    _rebuild(state, model, mask, settings)


def sizes_of(state: State, model: nn.Module, mask: np.ndarray) -> dict[str, dict[str, int]]:
    """Return what `standalone.resize_` takes to make a network with the groups of `mask` alone."""
    everything = np.ones_like(mask)
    coupling = remaining_coupling(state.layout, state.groups, everything)
    return smaller_sizes(model, coupling, ~mask)


def _rebuild(state: State, model: nn.Module, mask: np.ndarray, settings: Settings) -> None:
    """Fill `state` anew for a model of other sizes: from its weights, without momentum."""
    new = build_state(model, build_layout(model), state.groups, settings)
    new.mask, new.whole, new.memory = mask, state.whole, state.memory
    new.position, new.scaler = state.position, state.scaler
    new.optimizer.param_groups[0]["lr"] = state.optimizer.param_groups[0]["lr"]
    for field in fields(State):
        setattr(state, field.name, getattr(new, field.name))
