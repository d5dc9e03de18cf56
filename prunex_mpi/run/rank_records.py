"""The rows of ranks.jsonl: what each rank did in an outer iteration, brought together on rank 0."""

import socket
from typing import Any

import numpy as np

from prunex_mpi.base.phases import PHASES
from prunex_mpi.comm.agreement import gather_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.residuals import RESIDUALS

PARTS = ("work", "exchange")
# So many ranks have a row in each outer iteration; of N times as many every Nth one has one.
RANKS_EACH = 64
# Of seconds behind the point, of residuals all that count.
DIGITS = 6


class RankRecords:
    """Gather one row of numbers per rank and outer iteration, into memory that is allocated once.

    Making one is collective on `world`.
    """

    def __init__(self, topology: Topology) -> None:
        self.world = topology.world
        self.begins, self.every = True, -(-self.world.size // RANKS_EACH)
        columns = len(PARTS) * len(PHASES) + 1 + len(RESIDUALS)
        self.mine = np.zeros(columns)
        self.everyone = np.zeros((self.world.size if self.world.rank == 0 else 0, columns))
        nodes = np.zeros(self.world.size, dtype=np.int64)
        self.world.Gather(np.array([topology.node_index], dtype=np.int64), nodes, root=0)
        self.nodes: list[int] = nodes.tolist()
        names = gather_text(self.world, socket.gethostname())
        # Of a node of virtual ones too: all its ranks share a machine, or its first rank's counts.
        hosts = dict(reversed(list(zip(self.nodes, names, strict=False))))
        self.hosts = [hosts[node] for node in sorted(hosts)]

    def gather(self, iteration: int, rank: dict[str, Any]) -> dict[str, Any] | None:
        """Return the object of an outer iteration on world rank 0, None on the others.

        None there too where this iteration has none. `rank` is what `rank_record` returns; its
        residuals are empty on all ranks or on none. The first object also names the hosts.
        Collective on `world`.
        """
        if iteration % self.every and not self.begins:
            return None
        self.begins = False
        values = [rank[part][phase] for part in PARTS for phase in PHASES]
        values.append(rank["broadcast"])
        self.mine[: len(values)] = values
        self.mine[len(values) :] = [rank["residuals"].get(name, 0.0) for name in RESIDUALS]
        self.world.Gather(self.mine, self.everyone, root=0)
        if self.world.rank:
            return None
        columns = iter(self.everyone.T)
        row: dict[str, Any] = {"iteration": iteration, "node": self.nodes}
        if self.hosts:
            row["hosts"], self.hosts = self.hosts, []
        for part in PARTS:
            row[part] = {phase: rounded(next(columns)) for phase in PHASES}
        row["broadcast"] = rounded(next(columns))
        found = {
            name: [float(f"{x:.{DIGITS}g}") for x in next(columns).tolist()] for name in RESIDUALS
        }
        row["residuals"] = found if rank["residuals"] else None
        return row


def rounded(seconds: np.ndarray) -> list[float]:
    """Return seconds as they are written, without a zero below zero."""
    return [round(s, DIGITS) + 0.0 for s in seconds.tolist()]
