"""Mask agreement over the leaders: one message for all layers."""

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import State
from prunex_mpi.pruning.groups import Selection
from prunex_mpi.pruning.masks import build_factors
from prunex_mpi.pruning.projection import group_energies, select


def project_locally(flat: Tensor, state: State, strict: float) -> np.ndarray:
    """Return the support of the projection of `flat`, of `scored`; kinds one after the other."""
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        energies = _energies_left(flat, state, selections, mask).numpy()
        chosen = select(energies, selections, strict, state.groups)
        mask[selections[0].start : selections[-1].stop] = chosen
    return mask


def agree_by_vote(
    leader: Wire, flat: Tensor, state: State, strict: float, node_size: int
) -> np.ndarray:
    """Return the shared mask that keeps the most of sum_i P_i |z~_i,g|^2, alike on every leader.

    Per kind of group: Reduce SUM of one float per group to the first leader, which decides alone
    and broadcasts packed bits. `flat` is as in `project_locally`, `node_size` is P_i. Collective on
    `leader.comm`.
    """
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        energies = _energies_left(flat, state, selections, mask)
        energies *= node_size
        leader.reduce_to_first_(energies, kind="mask")
        chosen = np.zeros(energies.shape, dtype=bool)
        if leader.comm.rank == 0:
            chosen = select(energies.numpy(), selections, strict, state.groups)
        chosen = leader.broadcast_bits(chosen, "mask")
        mask[selections[0].start : selections[-1].stop] = chosen
    return mask


def agree_by_or(leader: Wire, mask: np.ndarray) -> np.ndarray:
    """Return the union of the leaders' masks (Eq. 14), as bits. Collective on `leader.comm`."""
    bits = torch.from_numpy(np.packbits(mask))
    leader.reduce_(bits, MPI.BOR, kind="mask")
    return np.unpackbits(bits.numpy(), count=mask.size).astype(bool)


def _energies_left(
    flat: Tensor, state: State, selections: tuple[Selection, ...], mask: np.ndarray
) -> Tensor:
    if state.groups.by_gate:
        return flat.to("cpu", copy=True)
    # Groups of a further kind are chosen among what the kinds before it left.
    first = selections is state.groups.kinds[0]
    factors = () if first else build_factors(mask, state.groups, flat.device, flat.dtype)
    return group_energies(flat, state.layout, state.groups, selections, factors)
