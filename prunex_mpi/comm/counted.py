"""What a message needs besides its tensor: whom it goes to, how, and where it is counted.

A `CountedComm` is made from one communicator: whoever is handed one, a link, communicates over its
`comm` and nowhere else. Each message is sent, counted and timed in one call.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.units import dealt_bytes, ring_bytes, shifted_bytes
from prunex_mpi.comm import collectives
from prunex_mpi.comm.agreement import gather_counts
from prunex_mpi.comm.collectives import Transport, between_nodes
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import Clock, Traffic

COUNT_BYTES = 8


@dataclass(frozen=True)
class CountedComm:
    """A communicator with all that a message on it needs besides its tensor.

    `comm` is MPI.COMM_NULL on ranks that have no part in it. `weight` is what this rank's
    contribution counts: a plain sum of weighted ones is the mean. `ring` is the number of ranks in
    a ring of which a part lies between nodes, 1 where nothing leaves a node, and `inside` how many
    of them this node has. `kind` names the count of `traffic` that operands add to.
    """

    comm: MPI.Comm
    weight: float
    ring: int
    transport: Transport
    traffic: Traffic
    clock: Clock
    kind: str = "payload"
    inside: int = 1

    @property
    def is_member(self) -> bool:
        return self.comm != MPI.COMM_NULL

    @property
    def peers(self) -> int:
        """How many exchange between nodes: racks, or the ranks of the ring."""
        return len(self.transport.racks.sizes) if self.transport.racks else self.ring

    def reduce_(self, flat: Tensor, op: MPI.Op = MPI.SUM, kind: str = "") -> None:
        """Reduce `flat` in place on every rank (Allreduce). Collective on `comm`."""
        counted = self.count(flat.nbytes, kind=kind)
        with self.clock.exchanging(flat.device, "Allreduce", counted):
            collectives.allreduce_(self.comm, flat, self.transport, op)

    def reduce_parts_(self, parts: Sequence[Tensor], ready: Sequence[Callable[[], None]]) -> None:
        """Reduce the parts of a vector in place, each after its `ready`, and count them as one.

        Waiting for messages begins when the last part is there. Collective on `comm`.
        """
        counted = self.count(sum(part.nbytes for part in parts)) | {"buckets": len(parts)}
        for operand, last in collectives.staged_parts(parts, ready, self.transport):
            waiting = self.clock.exchanging(parts[-1].device, "rest of Allreduce", counted)
            with waiting if last else nullcontext():
                collectives.reduce_operand_(self.comm, operand, self.transport)

    def reduce_to_first_(self, flat: Tensor, kind: str = "") -> None:
        """Sum `flat` in place on rank 0; the others keep theirs. Collective on `comm`."""
        counted = self.count(flat.nbytes, passes=1, kind=kind)
        with self.clock.exchanging(flat.device, "Reduce", counted):
            collectives.reduce_(self.comm, flat, self.transport)

    def reduce_by_first_(self, flat: Tensor, finish_: Callable[[], None]) -> None:
        """Sum `flat` on rank 0, which alone calls `finish_` before everyone gets the result.

        A Reduce and a Bcast count as the Allreduce that they are. Collective on `comm`.
        """
        counted = self.count(flat.nbytes)
        with self.clock.exchanging(flat.device, "Reduce", counted):
            collectives.reduce_(self.comm, flat, self.transport)
        if self.comm.rank == 0:
            finish_()
        with self.clock.exchanging(flat.device, "Bcast"):
            collectives.bcast_(self.comm, flat, self.transport)

    def broadcast_(self, flat: Tensor, kind: str = "") -> None:
        """Hand rank 0's `flat` to every rank, in place. Collective on `comm`."""
        counted = self.count(flat.nbytes, passes=1, kind=kind)
        with self.clock.exchanging(flat.device, "Bcast", counted):
            collectives.bcast_(self.comm, flat, self.transport)

    def broadcast_bits(self, bools: np.ndarray, kind: str = "") -> np.ndarray:
        """Return rank 0's bool array on every rank, sent as packed bits. Collective on `comm`."""
        bits = torch.from_numpy(np.packbits(bools))
        self.broadcast_(bits, kind)
        return np.unpackbits(bits.numpy(), count=bools.size).astype(bool)

    def wait_(self, requests: list[MPI.Request], flat: Tensor) -> None:
        """Wait for the reductions of all parts of `flat` under way, and count them as one."""
        counted = self.count(flat.nbytes) | {"buckets": len(requests)}
        with self.clock.exchanging(flat.device, "rest of Iallreduce", counted):
            MPI.Request.Waitall(requests)

    def gather_(self, mine: Tensor, everyone: Tensor, kind: str = "") -> None:
        """Gather `mine` [n] of every rank into `everyone` [comm.size, n]. Collective on `comm`."""
        counted = self.count(mine.nbytes, self.comm.size * mine.nbytes, passes=1, kind=kind)
        with self.clock.exchanging(mine.device, "Allgather", counted):
            collectives.allgather_(self.comm, mine, everyone, self.transport)

    def alltoall_(self, mine: Tensor, received: Tensor) -> None:
        """Send row r of `mine` [comm.size, n] to rank r, receive as many. Collective on `comm`."""
        sent = dealt_bytes(self.ring, self.inside, mine.nbytes, passes=0)
        counted = self.count_sent(mine.nbytes, sent)
        with self.clock.exchanging(mine.device, "Alltoall", counted):
            collectives.alltoall_(self.comm, mine, received, self.transport)

    def alltoall_parts_(
        self,
        mine: Tensor,
        leaving: Sequence[int],
        received: Tensor,
        arriving: Sequence[int],
        kind: str = "",
    ) -> None:
        """Send `leaving[r]` elements of `mine` to each other rank r, receive `arriving[r]` of it.

        Collective on `comm`.
        """
        # Of what goes to others some may stay in the node.
        leaves = self.inside * (self.ring - self.inside) * mine.nbytes // max(1, self.ring - 1)
        counted = self.count_sent(mine.nbytes, leaves, kind)
        with self.clock.exchanging(mine.device, "Alltoallv", counted):
            collectives.alltoallv_(self.comm, mine, leaving, received, arriving, self.transport)

    def sendrecv_(self, mine: Tensor, to: int, received: Tensor, source: int) -> None:
        """Send `mine` to rank `to`, receive as much from `source`. Collective on `comm`.

        They are as far away on all ranks, counted around; where each rank is a node they need not
        be.
        """
        distance = (to - self.comm.rank) % self.comm.size
        sent = shifted_bytes(self.ring, self.inside, distance, mine.nbytes)
        counted = self.count_sent(mine.nbytes, sent)
        with self.clock.exchanging(mine.device, "Sendrecv", counted):
            collectives.sendrecv_(self.comm, mine, to, received, source, self.transport)

    def reduce_halves_(self, flat: Tensor) -> None:
        """Sum a float16 or bfloat16 vector in place, alike on all ranks. Collective on `comm`."""
        sent = dealt_bytes(self.ring, self.inside, flat.nbytes, passes=1)
        counted = self.count_sent(flat.nbytes, sent)
        with self.clock.exchanging(flat.device, "sum of shares", counted):
            collectives.allreduce_halves_(self.comm, flat, self.transport)

    def gather_counts(self, count: int) -> list[int]:
        """Return every rank's `count`, alike on all. Collective on `comm`."""
        counted = self.count(COUNT_BYTES, self.comm.size * COUNT_BYTES, passes=1)
        with self.clock.exchanging(torch.device("cpu"), "Allgather", counted):
            return gather_counts(self.comm, count)

    def gather_parts_(
        self, mine: Tensor, counts: Sequence[int], everyone: Tensor, kind: str = ""
    ) -> None:
        """Gather `counts[r]` elements of each rank r into `everyone`. Collective on `comm`."""
        counted = self.count(mine.nbytes, sum(counts) * mine.element_size(), passes=1, kind=kind)
        with self.clock.exchanging(mine.device, "Allgatherv", counted):
            collectives.allgatherv_(self.comm, mine, counts, everyone, self.transport)

    def count(
        self,
        operand: int,
        travelling: int | None = None,
        passes: int = 2,
        kind: str = "",
        summed: int = 0,
    ) -> dict[str, int]:
        """Count, and return, `operand` bytes of this rank and `travelling` ones in the ring.

        With racks there are two rings: of two passes the first in the rack has `summed` bytes,
        where these are others.
        """
        kind = kind or self.kind
        if self.kind == "intra" and self.comm.size == 1:
            # Nothing travels inside a node of one rank.
            return {}
        counted = {kind: operand}
        setattr(self.traffic, kind, getattr(self.traffic, kind) + operand)
        if kind not in ("evaluate", "setup", "control") and self.ring > 1:
            travelling = operand if travelling is None else travelling
            if racks := self.transport.racks:
                between = ring_bytes(self.peers, travelling, passes)
                inside = travelling if passes == 1 else (summed or travelling) + travelling
                inside = ring_bytes(racks.sizes[racks.index], inside, 1)
                counted |= {"sent": inside + between, "racks": between}
                self.traffic.racks += between
            else:
                counted["sent"] = ring_bytes(self.ring, travelling, passes)
            self.traffic.sent += counted["sent"]
        return counted

    def count_sent(self, operand: int, sent: int, kind: str = "") -> dict[str, int]:
        """Count, and return, `operand` bytes of this rank and `sent` ones that leave its node."""
        counted = self.count(operand, travelling=0, kind=kind)
        self.traffic.sent += sent
        return counted | {"sent": sent}


@dataclass(frozen=True)
class CountedComms:
    """The counted communicators of one rank.

    `workers` speak between nodes: all ranks (flat aggregation) or the leaders of the nodes
    (hierarchical). A worker contributes its gradient, or the mean of the node that it leads, times
    its weight, 1/N or P_i/N. `node` is the rank's node, `everyone` all ranks, for what is small and
    decides.
    """

    workers: CountedComm
    node: CountedComm
    everyone: CountedComm
    flat: bool

    def sum_(self, flat: Tensor, kind: str = "") -> None:
        """Sum `flat` over all ranks in place. Collective on `world`, or `node` and `leader`."""
        if self.flat:
            self.workers.reduce_(flat, kind=kind)
        else:
            self.node.reduce_(flat, kind=kind)
            reduce_between_nodes_(self.workers, self.node, flat, kind)


def make_comms(
    topology: Topology, flat: bool, transport: Transport, traffic: Traffic, clock: Clock
) -> CountedComms:
    """Make this rank's communicators; with `flat` every rank is a worker, else the leaders are."""
    count = topology.world_size if flat else topology.num_nodes
    ring, inside = (count, topology.node_size if flat else 1) if topology.num_nodes > 1 else (1, 1)
    between = transport
    if topology.num_nodes > 1:
        between = between_nodes(transport, count if flat else topology.num_peers)
        between = replace(between, racks=topology.racks)
    workers = CountedComm(
        topology.world if flat else topology.leader,
        worker_weight(topology, flat),
        ring,
        between,
        traffic,
        clock,
        inside=inside,
    )
    node = CountedComm(topology.node, 1 / topology.node_size, 1, transport, traffic, clock, "intra")
    weight = 1 / topology.world_size
    everyone = CountedComm(topology.world, weight, ring, transport, traffic, clock)
    return CountedComms(workers, node, everyone, flat)


def worker_weight(topology: Topology, flat: bool) -> float:
    """Return what this rank's contribution counts in the mean over all ranks; followers: 0."""
    if flat:
        return 1 / topology.world_size
    return topology.node_weight if topology.is_leader else 0.0


def reduce_between_nodes_(
    leader: CountedComm, node: CountedComm, flat: Tensor, kind: str = ""
) -> None:
    """Sum `flat` over the leaders and hand the sum to every rank of each node.

    Collective on `leader.comm`, then on `node.comm`.
    """
    counted = leader.count(flat.nbytes, kind=kind)
    # What a method sends once is of one kind, in the node as well.
    for key, value in node.count(flat.nbytes, kind=kind if kind == "setup" else "").items():
        counted[key] = counted.get(key, 0) + value
    with node.clock.exchanging(flat.device, "Allreduce and Bcast", counted):
        spent = collectives.allreduce_then_bcast_(leader.comm, node.comm, flat, leader.transport)
    # Evaluating is no part of training.
    if kind != "evaluate":
        node.clock.broadcast += spent
