"""World, node and leader communicators, made once and handed down.

The algorithm has exactly two levels because they do different work, not the same work at two
scales: the node level averages dense vectors, the leader level agrees on masks and averages compact
payloads. Racks are a third level of communication alone: sums over the leaders are made rack by
rack first. A consensus of the rack with a dual of its own would not know more (the derivation is in
`prunex_mpi/README.md`).
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, log
from prunex_mpi.base.limits import cores_of, cpu_limit
from prunex_mpi.comm.agreement import (
    broadcast_json,
    count_same,
    gather_counts,
    gather_text,
    run_collectively,
)

# What --rack-of has in place of a number or a pattern: switches, as Slurm's topology names them.
SLURM, SLURM_ADDRESS = "slurm", "SLURM_TOPOLOGY_ADDR"


@dataclass(frozen=True)
class Racks:
    """The leaders by racks: those of this rack, and the first ones of all racks, `between`.

    MPI.COMM_NULL on ranks that are not in them. `sizes` are the nodes of each rack, the first
    leader's rack first, `index` is this rank's.
    """

    inside: MPI.Comm
    between: MPI.Comm
    sizes: tuple[int, ...]
    index: int


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
    # Where there are several racks, and one of them has several nodes.
    racks: Racks | None = None
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
    def num_peers(self) -> int:
        """How many exchange between nodes: racks, or nodes where there are none."""
        return len(self.racks.sizes) if self.racks else self.num_nodes

    @property
    def is_leader(self) -> bool:
        return self.node.rank == 0

    @property
    def node_weight(self) -> float:
        """P_i / N, the weight of this node in every average over nodes."""
        return self.node.size / self.world.size


def build_topology(
    world: MPI.Comm, ranks_per_node: int = 0, made: list[MPI.Comm] | None = None, rack_of: str = ""
) -> Topology:
    """Split a duplicate of `world` into nodes, leaders and racks. Collective on `world`.

    `ranks_per_node` > 0 makes virtual nodes of that many consecutive ranks (the last may be
    smaller); 0 takes what shares memory. `rack_of` is the setting, "" for no racks. Each
    communicator is put into `made` as soon as it exists.
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
    core_sharers = count_same(host, repr(sorted(os.sched_getaffinity(0))))
    if ranks_per_node:
        made.remove(host)
        host.Free()
        made.append(node := world.Split(world.rank // ranks_per_node, key=world.rank))
    else:
        node = host
    leader = world.Split(0 if node.rank == 0 else MPI.UNDEFINED, key=world.rank)
    made.append(leader)
    leads = leader != MPI.COMM_NULL
    index, sizes = broadcast_json(
        node, [leader.rank, gather_counts(leader, node.size)] if leads else None
    )
    shared = host_rank, host_size, core_sharers
    several = rack_of and len(sizes) > 1
    racks = _find_racks(world, node, leader, rack_of, made) if several else None
    return Topology(world, node, leader, index, tuple(sizes), *shared, racks, made)


def _find_racks(
    world: MPI.Comm, node: MPI.Comm, leader: MPI.Comm, rack_of: str, made: list[MPI.Comm]
) -> Racks | None:
    """Split the leaders by racks; None where that changes nothing. Collective on `world`.

    Raises UserError on every rank where the rack of a node can't be told.
    """
    leads = leader != MPI.COMM_NULL
    name = run_collectively(world, lambda: rack_name(rack_of, leader.rank) if leads else "")
    names = broadcast_json(leader, gather_text(leader, name)) if leads else []
    *racks, mine = broadcast_json(node, [*names, name])
    distinct = list(dict.fromkeys(racks))
    if len(distinct) in (1, len(racks)):
        if world.rank == 0:
            what = "each is a rack of its own" if len(distinct) > 1 else f"all are in rack {name}"
            text = "--rack-of %s changes nothing: of %d nodes %s"
            log.warning(text, rack_of, len(racks), what)
        return None
    index, inside, between = distinct.index(mine), MPI.COMM_NULL, MPI.COMM_NULL
    if leads:
        made.append(inside := leader.Split(index, key=leader.rank))
        made.append(between := leader.Split(0 if inside.rank == 0 else MPI.UNDEFINED, leader.rank))
    return Racks(inside, between, tuple(map(racks.count, distinct)), index)


def rack_name(rack_of: str, node_index: int) -> str:
    """Return the name of the rack of node `node_index`, on which this runs.

    Raises UserError where it can't be told.
    """
    host = socket.gethostname()
    if rack_of.isdecimal():
        return str(node_index // int(rack_of))
    if rack_of == SLURM:
        switches, _, _ = os.environ.get(SLURM_ADDRESS, "").rpartition(".")
        if switches:
            return switches
        raise UserError(
            f"rack-of slurm: no switch in {SLURM_ADDRESS} on {host}; start with srun where Slurm "
            "has topology/tree, or give a pattern of host names"
        )
    found = re.search(rack_of, host)
    if found is None or not found[1]:
        raise UserError(
            f"rack-of {rack_of}: its group finds no rack in the host name {host}; give a pattern "
            "that fits all hosts"
        )
    return found[1]


@contextmanager
def nodes_of(
    world: MPI.Comm, ranks_per_node: int = 0, made: list[MPI.Comm] | None = None, rack_of: str = ""
) -> Iterator[Topology]:
    """Have the topology of `build_topology` for the block. Collective on `world`, at both ends."""
    topology = build_topology(world, ranks_per_node, made, rack_of)
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


def duplicate_racks(topology: Topology) -> Racks | None:
    """Return the racks with duplicates of their communicators. Collective on each of them."""
    racks = topology.racks
    if racks is None:
        return None
    inside, between = (
        comm if comm == MPI.COMM_NULL else duplicate(topology, comm)
        for comm in (racks.inside, racks.between)
    )
    return replace(racks, inside=inside, between=between)


def free_racks(racks: Racks | None) -> None:
    """Free their communicators. Collective on each of them."""
    for comm in (racks.inside, racks.between) if racks else ():
        if comm != MPI.COMM_NULL:
            comm.Free()


def free_topology(topology: Topology) -> None:
    """Free the communicators. Collective on each of them."""
    topology.made.clear()
    free_racks(topology.racks)
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
    racks = f"{list(topology.racks.sizes)} nodes in racks, " if topology.racks else ""
    return (
        f"{topology.num_nodes} nodes, {racks}{topology.world_size} ranks, {library_name()}: "
        + "; ".join(nodes)
    )


def library_name() -> str:
    """Return the MPI library's name and version in a few words."""
    first = MPI.Get_library_version().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").rstrip("\x00").split())


def set_threads(core_sharers: int, host_size: int) -> int:
    """Share the cores this rank may use among the ranks that may use the same; return threads.

    All `host_size` ranks of the machine share what it may keep busy. OMP_NUM_THREADS wins.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(cores_of(os.sched_getaffinity(0)))
        torch.set_num_threads(max(1, min(cores // core_sharers, cpu_limit() // host_size)))
    return torch.get_num_threads()
