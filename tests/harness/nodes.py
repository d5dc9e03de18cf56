"""Virtual nodes of every shape for parallel tests."""

from contextlib import AbstractContextManager

from mpi4py import MPI

from prunex_mpi.comm import topology as comm
from prunex_mpi.comm.topology import Topology

WORLD = MPI.COMM_WORLD
# With 4 ranks: 4 nodes of 1, 2 of 2, 3 + 1 and 1 of 4; with fewer ranks, what is left of these.
NODE_SHAPES = (1, 2, 3, 4)


def nodes_of(ranks_per_node: int, lanes: int = 1) -> AbstractContextManager[Topology]:
    """Build nodes of `ranks_per_node` ranks, or of all where there are fewer; free them after."""
    return comm.nodes_of(WORLD, min(ranks_per_node, WORLD.size), lanes)


def with_leaders() -> list[tuple[int, int]]:
    """Return (ranks per node, leaders per node) for all shapes, and as many leaders as can be."""
    several = [(ranks, 2) for ranks in NODE_SHAPES if ranks > 1 and least_of(ranks) >= 2]
    several += [(ranks, ranks) for ranks, _ in several if least_of(ranks) == ranks > 2]
    return [(ranks, 1) for ranks in NODE_SHAPES] + several


def least_of(ranks_per_node: int) -> int:
    """Return the ranks of the smallest node."""
    return WORLD.size % min(ranks_per_node, WORLD.size) or min(ranks_per_node, WORLD.size)
