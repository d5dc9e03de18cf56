"""Virtual nodes of every shape for parallel tests, and what their ranks hold."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm import topology as comm
from prunex_mpi.comm.topology import Topology

WORLD = MPI.COMM_WORLD
# With 4 ranks: 4 nodes of 1, 2 of 2, 3 + 1 and 1 of 4; with fewer ranks, what is left of these.
NODE_SHAPES = (1, 2, 3, 4)


def nodes_of(ranks_per_node: int, rack_of: str = "") -> AbstractContextManager[Topology]:
    """Build nodes of `ranks_per_node` ranks, or of all where there are fewer; free them after."""
    return comm.nodes_of(WORLD, min(ranks_per_node, WORLD.size), rack_of=rack_of)


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return what rank `rank` holds: small integers, so that every order of summation is exact.

    Four of them fit into int8.
    """
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 32, (size,), generator=generator).to(dtype)


def total(size: int, dtype: torch.dtype, ranks: Iterable[int] = range(WORLD.size)) -> Tensor:
    """Return the sum of what these ranks hold, by default of all."""
    return torch.stack([numbers(rank, size, dtype) for rank in ranks]).sum(0).to(dtype)
