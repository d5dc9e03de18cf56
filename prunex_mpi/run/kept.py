"""What each rank keeps in memory, so that those who are left go on when a node is lost.

At the end of each outer iteration a rank copies what the ranks have in common: z and all that goes
with it, as a checkpoint that goes on on other nodes does (`snapshot`). Every rank keeps all of it,
since nobody knows who will be left. Of the last two, since one rank may have finished an outer
iteration that another one has not.
"""

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError, one_line
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import (
    broadcast_text,
    digests_agree,
    gather_text,
    run_collectively,
)
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.removal import fit_network
from prunex_mpi.core.state import OWN, RunContext
from prunex_mpi.models.layout import bits_digest
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.snapshot import Numbers, Tensors, common_contents, put_common
from prunex_mpi.settings.fields import Settings

NODES = "nodes.jsonl"
# For new ranks to start Python, torch and MPI: then they end, and others are started.
JOIN_LIMIT_S = 120
# What a new rank runs: whatever it waits for, it does not outlive its limit until it has joined.
NEWCOMER = f"""import signal, sys
signal.alarm({JOIN_LIMIT_S})
from prunex_mpi.train import main
sys.exit(main())"""
# Tags of the messages that new ranks are ready, with the port where they can be met, and that the
# others come there.
READY, COME = 11, 12
PORT_BYTES = 4096
LOST_EARLY = "a new rank was lost as it started"
# No outer iteration.
NONE = 2**62


class Grown(UserError):
    """End what all ranks are at, in good order, as new ones join them."""


@dataclass(frozen=True)
class Member:
    """One rank of the job as it was before a loss."""

    node: int
    host: str
    pid: int
    born: str


@dataclass(frozen=True)
class Loss:
    """Which nodes and ranks do not go on, by their numbers before."""

    nodes: tuple[int, ...]
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """Return it in words."""
        what = "ranks", self.ranks
        if self.nodes:
            what = "nodes", self.nodes
        name = what[0] if len(what[1]) > 1 else what[0][:-1]
        return f"{name} {', '.join(map(str, what[1]))}"


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

    `sizes` are those of the files then.
    """

    at: float
    iteration: int
    tensors: Tensors
    numbers: Numbers
    left: str
    sizes: dict[str, list[int]]


@dataclass
class Kept:
    """What outlives the loss of a node on one rank.

    `settings` are those to go on with once the run has `began`, `made` the communicators in use,
    `members` the ranks by number; `loss` what was lost just now and `lost_at` when, `too_few` that
    fewer nodes are left than a run may have; `new_ranks` how many have just joined, `missing` the
    hosts of ranks that are to be replaced and since when, the first first, `start` how some of them
    are started, on world rank 0 alone, and `port` where they can be met, "" until they are ready;
    `changes` tell of all that was lost and has joined. But for times and communicators it is the
    same everywhere.
    """

    settings: Settings
    began: bool = False
    started: float = field(default_factory=time.time)
    made: list[MPI.Comm] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    loss: Loss | None = None
    lost_at: float = 0.0
    too_few: bool = False
    new_ranks: int = 0
    missing: list[tuple[str, float]] = field(default_factory=list)
    start: "Start | None" = None
    port: str = ""
    changes: list[dict[str, Any]] = field(default_factory=list)


class Start:
    """Start a process in place of each of `missing`, on its host, behind the training.

    In a thread, since MPI waits for ever for one that dies as it starts. `comm` leads to those who
    were started.
    """

    def __init__(self, missing: Sequence[str], command: Sequence[str]) -> None:
        self.count, self.hosts = len(missing), Counter(missing)
        self.command = list(command)
        self.at = time.monotonic()
        self.comm: MPI.Intercomm | None = None
        self.error = ""
        self.thread = threading.Thread(target=self._spawn, name="newcomers", daemon=True)
        self.thread.start()

    def _spawn(self) -> None:
        try:
            # By this rank alone: the others would wait with it, all of them in vain.
            self.comm = MPI.COMM_SELF.Spawn_multiple(
                [sys.executable] * len(self.hosts),
                [self.command] * len(self.hosts),
                list(self.hosts.values()),
                [MPI.Info.Create({"host": host}) for host in self.hosts],
                root=0,
            )
        except MPI.Exception as error:
            self.error = one_line(error)

    def ready(self) -> str:
        """Return the port where the new ranks can be met, "" where they are not ready yet."""
        try:
            if self.comm is not None and self.comm.Iprobe(source=0, tag=READY):
                port = np.zeros(PORT_BYTES, dtype=np.uint8)
                self.comm.Recv(port, source=0, tag=READY)
                return port.tobytes().rstrip(b"\0").decode()
        except MPI.Exception as error:
            self.error = one_line(error)
        if self.comm is not None and self.late():
            # MPI does not tell of those who die before anything was exchanged with them.
            self.error = f"nothing was heard of them for {JOIN_LIMIT_S} s"
        return ""

    def late(self) -> bool:
        """Return whether the new ranks have had the time to join."""
        return not self.error and time.monotonic() - self.at > JOIN_LIMIT_S

    def hangs(self) -> bool:
        """Return whether a new rank died in MPI_Init, and MPI waits for it in the thread."""
        return self.comm is None and self.late()

    def call(self) -> bool:
        """Have the new ranks wait at their port; return whether they still can."""
        try:
            self.comm.Send(np.ones(1, dtype=np.uint8), dest=0, tag=COME)
        except MPI.Exception:
            return False
        return True

    def give_up(self) -> None:
        """Have the new ranks leave, as far as they can be reached."""
        if self.comm is not None:
            self.comm.Revoke()


def begin(topology: Topology, context: RunContext, path: str, kept: Kept) -> None:
    """Note who is there, and how to go on with the run in `path`. Collective on `world`."""
    problem = context.problem
    colours = {
        "image_mean": tuple(problem.mean.tolist()),
        "image_std": tuple(problem.std.tolist()),
    }
    kept.settings = replace(context.settings, run_dir=path, resume=True, **colours)
    here = json.dumps([topology.node_index, socket.gethostname(), os.getpid(), born(os.getpid())])
    lines = broadcast_text(topology.world, "\n".join(gather_text(topology.world, here)))
    kept.members = [Member(*json.loads(line)) for line in lines.split("\n")]
    kept.began = True


def keep(topology: Topology, files: RunDirectory | None, context: RunContext, kept: Kept) -> None:
    """Copy what the ranks have in common, in place of the last but one; replace those who are lost.

    Raises Grown on every rank once the new ones are ready. Where one is lost as it starts the run
    has to stop, as `context.stop` says then. Collective on `world`.
    """
    state, behind, world = context.state, context.behind, topology.world
    told = json.dumps([files.lengths(), *replace_missing(kept)]) if files else ""
    sizes, kept.port, hangs = json.loads(broadcast_text(world, told))
    if hangs:
        # With the thread inside MPI ranks could make no communicators, to go on after a loss.
        context.stop.reason = LOST_EARLY
    if kept.port and behind is not None:
        behind.finish()
    tensors, numbers = common_contents(state, context.problem, behind is None or behind.at_rest)
    left = np.packbits(state.mask).tobytes().hex() if state.removes else ""
    old = kept.snapshots.pop(0).tensors if len(kept.snapshots) == 2 else {}
    for key, tensor in tensors.items():
        there = old.get(key)
        if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype:
            # Memory that is there already: new pages would cost more than the copy.
            tensors[key] = there.copy_(tensor)
        else:
            tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
    iteration = state.position.iteration
    kept.snapshots.append(Snapshot(time.time(), iteration, tensors, numbers, left, sizes))
    if kept.port:
        raise Grown("new ranks join")


def replace_missing(kept: Kept) -> tuple[str, bool]:
    """Start new ranks where it is time to; return the port of those who are ready, else "".

    And whether MPI waits for one for ever. On world rank 0 alone.
    """
    after, now = kept.settings.regrow_after, time.time()
    if kept.start is None:
        due = [host for host, at in kept.missing if after and now - at >= after]
        if due:
            flags = [*without_folder(sys.argv[1:]), "--resume", "--run-dir", kept.settings.run_dir]
            kept.start = Start(due, ["-c", NEWCOMER, *flags])
        return "", False
    port, hangs = kept.start.ready(), kept.start.hangs()
    if kept.start.error:
        log.warning("new ranks failed before they joined (%s); later again", kept.start.error)
        kept.start.give_up()
        kept.missing = [(host, now) for host, _ in kept.missing]
    if hangs or kept.start.error:
        kept.start = None
    return port, hangs


def without_folder(flags: Sequence[str]) -> list[str]:
    """Return flags without those that say which folder a run is in, and that it goes on."""
    rest, skips = [], False
    for flag in flags:
        if not skips and flag != "--resume" and not flag.startswith("--run-dir"):
            rest.append(flag)
        skips = flag == "--run-dir"
    return rest


def put_back(
    topology: Topology, files: RunDirectory | None, context: RunContext, kept: Kept
) -> bool:
    """Go on from the last outer iteration that all who have one have finished, if there is one.

    Of what each rank had not sent yet the part of those who are gone is lost; those who are new
    have none. Raises UserError where not all ranks hold the same then. Collective on `world`.
    """
    world, state = topology.world, context.state
    newest = np.array([kept.snapshots[-1].iteration if kept.snapshots else NONE], dtype=np.int64)
    world.Allreduce(MPI.IN_PLACE, newest, op=MPI.MIN)
    if newest[0] == NONE:
        return False
    found = [s for s in kept.snapshots if s.iteration == newest[0]]
    left = broadcast_text(world, found[0].left if found else "")

    def fit() -> None:
        if kept.snapshots and not found:
            raise UserError("the ranks that are left have no outer iteration in common", FAILURE)
        if reason := fit_network(left, context):
            raise UserError(f"what was kept does not fit the network: {reason}", FAILURE)
        if files is not None:
            files.rewind(found[0].sizes)

    run_collectively(world, fit)

    def parts(going: Callable[[], None]) -> Iterator[tuple[Tensors, Numbers]]:
        going()
        for snapshot in found:
            yield snapshot.tensors, snapshot.numbers

    put_common(topology, parts, world.size - kept.new_ranks, context)
    if not digests_agree(world, bits_digest(state.z, state.spare)):
        raise UserError("the ranks that go on do not hold the same parameters", FAILURE)
    kept.snapshots = found
    return True


def tell(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    kept: Kept,
) -> None:
    """Log and note what was lost, or how many have joined, and who goes on."""
    iteration = context.state.position.iteration
    ranks, nodes, seconds = topology.world_size, topology.num_nodes, time.time() - kept.lost_at
    # What was done since is done again.
    since = kept.snapshots[-1].at if kept.snapshots and kept.loss else kept.lost_at
    change: dict[str, Any] = {"time": time.time(), "iteration": iteration, "seconds": seconds}
    change["lost_seconds"] = max(kept.lost_at - since, 0.0)
    if kept.new_ranks:
        change["joined"] = kept.new_ranks
        what = f"{kept.new_ranks} ranks joined"
    elif kept.loss is None:
        change["failed"] = len(kept.missing)
        what = "the new ranks failed as they joined"
    else:
        change |= {"lost_nodes": kept.loss.nodes, "lost_ranks": kept.loss.ranks}
        what = f"{kept.loss.describe()} lost"
        if any(key.startswith(OWN) for key in context.state.memory):
            what += " with what had not been sent yet"
    kept.changes.append(change | {"nodes": nodes, "ranks": ranks})
    if files is not None:
        files.append_line(NODES, kept.changes[-1])
    log.info(
        "%s: %d nodes with %d ranks go on from outer iteration %d after %.2g s, with %d samples "
        "per step",
        what,
        nodes,
        ranks,
        iteration,
        seconds,
        context.problem.train.batch_size * ranks,
    )
