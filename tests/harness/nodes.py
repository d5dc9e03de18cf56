"""Virtual nodes of every shape for parallel tests."""

from contextlib import AbstractContextManager

from mpi4py import MPI

from prunex_mpi.comm import topology as comm
from prunex_mpi.comm.topology import Topology

WORLD = MPI.COMM_WORLD
# With 4 ranks: 4 nodes of 1, 2 of 2, 3 + 1 and 1 of 4; with fewer ranks, what is left of these.
NODE_SHAPES = (1, 2, 3, 4)


def nodes_of(ranks_per_node: int, rack_of: str = "") -> AbstractContextManager[Topology]:
    """Build nodes of `ranks_per_node` ranks, or of all where there are fewer; free them after."""
    return comm.nodes_of(WORLD, min(ranks_per_node, WORLD.size), rack_of=rack_of)
