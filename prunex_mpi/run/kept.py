"""What each rank keeps in memory, so that those who are left go on when a node is lost.

At the end of each outer iteration a rank copies what the ranks have in common: z and all that goes
with it, as a checkpoint that goes on on other nodes does. Every rank keeps all of it, since nobody
knows who will be left. Of the last two, since one rank may have finished an outer iteration that
another one has not.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError, log
from prunex_mpi.base.files import NODES
from prunex_mpi.comm.agreement import (
    broadcast_json,
    broadcast_text,
    digests_agree,
    gather_text,
    run_collectively,
)
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.lasting import Numbers, Tensors, fit_network, lasting, left_of
from prunex_mpi.core.memory import SUM
from prunex_mpi.core.state import RunContext
from prunex_mpi.models.layout import bits_digest
from prunex_mpi.run.checkpoint import common_contents, put_common
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Member:
    """One rank of the job as it was before a loss."""

    rank: int
    node: int
    host: str
    pid: int
    born: str


@dataclass(frozen=True)
class LostNodes:
    """Which nodes and ranks do not go on, by their numbers before."""

    nodes: tuple[int, ...]
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """Return it in words."""
        kind, numbers = ("node", self.nodes) if self.nodes else ("rank", self.ranks)
        return f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def born(pid: int) -> str:
    """Return when a process of this machine began, "" where there is none: numbers come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # A process that has ended and that nobody has asked for holds nothing any more.
    return "" if fields[0] == "Z" else fields[19]


@dataclass
class Snapshot:
    """What ranks had in common `at` (Unix time), before outer iteration `iteration`.

    `ranks` is how many, `sizes` are those of the files then.
    """

    at: float
    iteration: int
    ranks: int
    tensors: Tensors
    numbers: Numbers
    left: str
    sizes: dict[str, list[int]]


@dataclass
class InMemoryCheckpoint:
    """What outlives the loss of a node on one rank.

    `settings` are those to go on with once the run has `began`, `trains_since` when ranks as they
    are now went on with it, `made` the communicators in use,
    `members` the ranks by number; `loss` what was lost just now and `lost_at` when, `too_few` that
    fewer nodes are left than a run may have; `changes` tell of all that was lost. The run has ended
    with the exit `code` once that is there. But for times and communicators it is the same
    everywhere.
    """

    settings: Settings
    began: bool = False
    trains_since: float = 0.0
    started: float = field(default_factory=time.time)
    made: list[MPI.Comm] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    loss: LostNodes | None = None
    lost_at: float = 0.0
    too_few: bool = False
    changes: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None

    def begin(self, topology: Topology, context: RunContext, path: str) -> None:
        """Note who is there, and how to go on with the run in `path`. Collective on `world`."""
        self.settings = replace(context.settings, run_dir=path, resume=True)
        me = topology.world.rank, topology.node_index
        here = json.dumps([*me, socket.gethostname(), os.getpid(), born(os.getpid())])
        lines = broadcast_json(topology.world, gather_text(topology.world, here))
        self.members = [Member(*json.loads(line)) for line in lines]
        self.began, self.trains_since = True, time.time()

    def keep(self, topology: Topology, files: RunDirectory | None, context: RunContext) -> None:
        """Copy what ranks have in common, in place of the last but one. Collective on `world`."""
        state, helper = context.state, context.helper
        sizes = broadcast_json(topology.world, files.lengths() if files else None)
        tensors, numbers = common_contents(state, context.problem, helper is None or helper.at_rest)
        old = self.snapshots.pop(0).tensors if len(self.snapshots) == 2 else {}
        for key, tensor in tensors.items():
            there = old.get(key)
            if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype:
                # Memory that is there already: new pages would cost more than the copy.
                tensors[key] = there.copy_(tensor)
            else:
                tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
        iteration = state.position.iteration
        common = tensors, numbers, left_of(state), sizes
        self.snapshots.append(Snapshot(time.time(), iteration, topology.world_size, *common))

    def put_back(self, topology: Topology, files: RunDirectory | None, context: RunContext) -> bool:
        """Go on from the last outer iteration that all have finished, if there is one.

        Of what each rank had not sent yet the part of those who are gone is lost. Raises UserError
        where not all ranks hold the same then. Collective on `world`.
        """
        world, state = topology.world, context.state
        newest = np.array([self.snapshots[-1].iteration if self.snapshots else 0], dtype=np.int64)
        world.Allreduce(MPI.IN_PLACE, newest, op=MPI.MIN)
        if not newest[0]:
            # One rank at least has not come to the end of its first outer iteration in this job.
            self.snapshots = []
            return False
        found = [s for s in self.snapshots if s.iteration == newest[0]]
        left = broadcast_text(world, found[0].left if found else "")

        def fit() -> None:
            if not found:
                raise UserError(
                    "the ranks that are left have no outer iteration in common", FAILURE
                )
            if reason := fit_network(left, context):
                raise UserError(f"what was kept does not fit the network: {reason}", FAILURE)
            if files is not None:
                files.rewind(found[0].sizes)

        run_collectively(world, fit)

        def parts() -> Iterator[tuple[Tensors, Numbers]]:
            yield found[0].tensors, found[0].numbers

        put_common(topology, parts, found[0].ranks, context)
        if not digests_agree(world, bits_digest(state.z)):
            raise UserError("the ranks that go on do not hold the same parameters", FAILURE)
        self.snapshots = found
        return True

    def tell(self, topology: Topology, files: RunDirectory | None, context: RunContext) -> None:
        """Log and note what was lost, and who goes on."""
        iteration, now = context.state.position.iteration, time.time()
        ranks, nodes = topology.world_size, topology.num_nodes
        # What was done since is done again.
        since = max([self.trains_since, *(s.at for s in self.snapshots[-1:])])
        change = {"time": now, "iteration": iteration, "seconds": now - self.lost_at}
        change |= {"lost_seconds": max(self.lost_at - since, 0.0)}
        change |= {"lost_nodes": self.loss.nodes, "lost_ranks": self.loss.ranks}
        what = f"{self.loss.describe()} lost"
        if any(e.elsewhere == SUM for e in lasting(context.state, context.problem.model).values()):
            what += " with what had not been sent yet"
        self.changes.append(change | {"nodes": nodes, "ranks": ranks})
        if files is not None:
            files.append(NODES, self.changes[-1:])
        log.info(
            "%s: %d nodes with %d ranks go on from outer iteration %d after %.2g s, with %d "
            "samples per step",
            what,
            nodes,
            ranks,
            iteration,
            now - self.lost_at,
            context.problem.train.batch_size * ranks,
        )
