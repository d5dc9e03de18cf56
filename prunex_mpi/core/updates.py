"""The arithmetic of phases 2 and 5, each vector read once: tile by tile, see `models.layout`."""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.core.state import State
from prunex_mpi.models.layout import (
    Layout,
    one_or_all,
    spare_tile,
    sum_tile_norms,
    tile_norms,
    tiles,
)
from prunex_mpi.settings.fields import Settings


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

    `decay` is that of each segment, [segments]. `total` is the sum of theta + u over `ranks` ranks,
    in the memory of `scratch`; without it the mean is this rank's own theta + u.
    """
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
            tile.scale_(part, one_or_all(left))
    return state.scratch


def step_duals_(state: State, measured: bool) -> np.ndarray | None:
    """u += theta - z_i, v += z_i - z; where `measured` return squared norms, [7, layers].

    Of theta - z_i, theta, z_i, u, z_i - z, z and v, in this order. While z is under way v waits
    for it.
    """
    found, spare = [], spare_tile(state.theta)
    for tile in tiles(state.layout, state.theta.device):
        flats = (state.theta, state.z_node, state.u, state.z, state.v)
        theta, z_node, u, z, v = (flat[tile.place] for flat in flats)
        gap = torch.sub(theta, z_node, out=spare[: theta.numel()])
        u.add_(gap)
        if state.position.under_way:
            continue
        norms = tile_norms(tile, gap, theta, z_node, u) if measured else []
        torch.sub(z_node, z, out=gap)
        v.add_(gap)
        norms += tile_norms(tile, gap, z, v) if measured else []
        found.append(norms)
    return sum_tile_norms(found, state.layout, state.theta.device) if measured else None
