"""World, node and leader communicators, made once and handed down.

The hierarchy has exactly two levels because they do different work, not the same work at two
scales: the node level averages dense vectors, the leader level agrees on masks and averages compact
payloads. A rack level would be a third communicator here (`leader.Split`), a consensus variable
z_rack with its dual, and one more phase between phases 3 and 4 of the driver; a list of levels that
the driver walks would hide which communicator carries which bytes without saving that work.
"""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.agreement import gather_text


@dataclass(frozen=True)
class Topology:
    """The communicators of one rank; `leader` is MPI.COMM_NULL except on node rank 0.

    World rank 0 is always rank 0 of its node and of the leaders. `host_rank` and `host_size` count
    the ranks that share the machine, `core_sharers` those that may use the same cores.
    """

    world: MPI.Comm
    node: MPI.Comm
    leader: MPI.Comm
    node_index: int
    node_sizes: tuple[int, ...]
    host_rank: int
    host_size: int
    core_sharers: int
    # All communicators that were made of it: who goes on without a lost node revokes them.
    made: list[MPI.Comm] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def node_size(self) -> int:
        return self.node.size

    @property
    def num_nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def is_leader(self) -> bool:
        return self.node.rank == 0

    @property
    def node_weight(self) -> float:
        """P_i / N, the weight of this node in every average over nodes."""
        return self.node.size / self.world.size


def build_topology(
    world: MPI.Comm, ranks_per_node: int = 0, made: list[MPI.Comm] | None = None
) -> Topology:
    """Split a duplicate of `world` into nodes and leaders. Collective on `world`.

    `ranks_per_node` > 0 makes virtual nodes of that many consecutive ranks (the last may be
    smaller); 0 takes what shares memory. Each communicator is put into `made` as soon as it exists.
    """
    if ranks_per_node > world.size:
        raise UserError(
            f"--ranks-per-node {ranks_per_node} is more than the job's {world.size} ranks; "
            "start more ranks or lower it"
        )
    made = [] if made is None else made
    made.append(world := world.Dup())
    made.append(host := world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank))
    host_rank, host_size = host.rank, host.size
    affinity = repr(sorted(os.sched_getaffinity(0))).encode()
    mine = np.frombuffer(hashlib.sha256(affinity).digest()[:8], dtype=np.uint64)
    everyone = np.empty(host_size, dtype=np.uint64)
    host.Allgather(mine, everyone)
    core_sharers = int(np.count_nonzero(everyone == mine))
    if ranks_per_node:
        made.remove(host)
        host.Free()
        made.append(node := world.Split(world.rank // ranks_per_node, key=world.rank))
    else:
        node = host
    leader = world.Split(0 if node.rank == 0 else MPI.UNDEFINED, key=world.rank)
    made.append(leader)
    shape = np.zeros(2, dtype=np.int64)
    if leader != MPI.COMM_NULL:
        shape[:] = leader.rank, leader.size
    node.Bcast(shape, root=0)
    sizes = np.zeros(shape[1], dtype=np.int64)
    if leader != MPI.COMM_NULL:
        leader.Allgather(np.array([node.size], dtype=np.int64), sizes)
    node.Bcast(sizes, root=0)
    shared = host_rank, host_size, core_sharers
    return Topology(world, node, leader, int(shape[0]), tuple(sizes.tolist()), *shared, made)


@contextmanager
def nodes_of(
    world: MPI.Comm, ranks_per_node: int = 0, made: list[MPI.Comm] | None = None
) -> Iterator[Topology]:
    """Have the topology of `build_topology` for the block. Collective on `world`, at both ends."""
    topology = build_topology(world, ranks_per_node, made)
    try:
        yield topology
    except UserError:
        free_topology(topology)
        raise
    free_topology(topology)


def duplicate(topology: Topology, comm: MPI.Comm) -> MPI.Comm:
    """Return a duplicate of one of the communicators. Collective on it."""
    topology.made.append(copy := comm.Dup())
    return copy


def free_topology(topology: Topology) -> None:
    """Free the communicators. Collective on each of them."""
    topology.made.clear()
    if topology.leader != MPI.COMM_NULL:
        topology.leader.Free()
    topology.node.Free()
    topology.world.Free()


def describe(topology: Topology, device: str) -> str:
    """Return the topology in one line on world rank 0, empty elsewhere. Collective on `world`."""
    here = f"{topology.node_index} {socket.gethostname()} {device}"
    ranks = [line.split(" ", 2) for line in gather_text(topology.world, here)]
    if not ranks:
        return ""
    nodes = []
    for node, size in enumerate(topology.node_sizes):
        mine = [r for r in ranks if int(r[0]) == node]
        hosts = "+".join(sorted({r[1] for r in mine}))
        places = ", ".join(dict.fromkeys(r[2] for r in mine))
        nodes.append(f"node {node} = {size} ranks on {hosts} ({places})")
    return (
        f"{topology.num_nodes} nodes, {topology.world_size} ranks, {library_name()}: "
        + "; ".join(nodes)
    )


def library_name() -> str:
    """Return the MPI library's name and version in a few words."""
    first = MPI.Get_library_version().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").rstrip("\x00").split())
