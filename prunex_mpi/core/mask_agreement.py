"""Mask agreement over the leaders and its broadcast inside a node: one message for all layers."""

import numpy as np
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import State, Traffic, ring_bytes
from prunex_mpi.pruning.projection import (
    Selection,
    apply_factors_,
    build_factors,
    group_energies,
    select,
)


def project_locally(squares: Tensor, state: State, strict: float, round_to: int) -> np.ndarray:
    """Return the support of the projection of one node's candidate (kinds one after the other).

    `squares` is the candidate squared, and is masked on the way. Does not communicate.
    """
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        energies = group_energies(squares, state.layout, state.groups, selections).numpy()
        chosen = select(energies, selections, strict, round_to, state.groups)
        _keep(mask, selections, chosen)
        _mask_squares_(squares, state, mask)
    return mask


def agree_by_vote(
    topology: Topology,
    squares: Tensor,
    state: State,
    strict: float,
    round_to: int,
    traffic: Traffic,
) -> np.ndarray:
    """Return the shared mask that keeps the most of sum_i P_i |z~_i,g|^2, alike on every leader.

    Per kind of group: Reduce SUM of one float per group to the first leader, which decides alone
    and broadcasts packed bits, since sums need not have the same bits on every rank. Collective on
    `topology.leader`; followers must not call it.
    """
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        energies = group_energies(squares, state.layout, state.groups, selections).numpy()
        energies *= topology.node_size
        total = np.empty_like(energies)
        topology.leader.Reduce(energies, total, op=MPI.SUM, root=0)
        chosen = np.zeros(energies.shape, dtype=bool)
        if topology.leader.rank == 0:
            chosen = select(total, selections, strict, round_to, state.groups)
        bits = np.packbits(chosen)
        topology.leader.Bcast(bits, root=0)
        traffic.mask += energies.nbytes + bits.nbytes
        # A Reduce and a Bcast.
        traffic.sent += ring_bytes(topology.num_nodes, energies.nbytes + bits.nbytes, passes=1)
        _keep(mask, selections, _unpack(bits, chosen.size))
        _mask_squares_(squares, state, mask)
    return mask


def agree_by_or(leader: MPI.Comm, mask: np.ndarray, traffic: Traffic) -> np.ndarray:
    """Return the union of the leaders' masks (Eq. 14): Allreduce BOR of packed bits.

    Collective on `leader`; followers must not call it.
    """
    bits = np.packbits(mask)
    leader.Allreduce(MPI.IN_PLACE, bits, op=MPI.BOR)
    traffic.mask += bits.nbytes
    traffic.sent += ring_bytes(leader.size, bits.nbytes)
    return _unpack(bits, mask.size)


def broadcast_mask(node: MPI.Comm, mask: np.ndarray, traffic: Traffic) -> np.ndarray:
    """Return the leader's mask on every rank of the node, as packed bits. Collective on `node`."""
    bits = np.packbits(mask)
    if node.size > 1:
        node.Bcast(bits, root=0)
        traffic.intra += bits.nbytes
    return _unpack(bits, mask.size)


def _unpack(bits: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(bits, count=count).astype(bool)


def _keep(mask: np.ndarray, selections: tuple[Selection, ...], chosen: np.ndarray) -> None:
    mask[selections[0].start : selections[-1].stop] = chosen


def _mask_squares_(squares: Tensor, state: State, mask: np.ndarray) -> None:
    # Only a further kind needs it: its groups are chosen among what this one left.
    if len(state.groups.kinds) > 1:
        factors = build_factors(mask, state.groups, squares.device, squares.dtype)
        apply_factors_(squares, state.layout, state.groups, factors)
