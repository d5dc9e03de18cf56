"""Go on without the nodes that were lost: shrink the job, in the same processes, and train on.

A rank learns of a loss by an error of MPI in whatever it does then, from the failed rank itself or
since another rank has revoked the communicator (ULFM). It leaves all that it was at, revokes what
was made of the job's communicator, so that nobody waits for ever, and all who are left shrink that
to themselves. Nodes of which a rank is missing leave as a whole. The others run the job anew on the
smaller communicator, from what they keep in memory (`kept`).
"""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import gather_counts, run_collectively
from prunex_mpi.run import job
from prunex_mpi.run.kept import InMemoryCheckpoint, LostNodes, born
from prunex_mpi.run.program import tell_together
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.fields import Settings

NAME = "prunex_mpi.train"
# What Open MPI's mpirun sets with --with-ft ulfm.
ENABLED = "OMPI_MCA_mpi_ft_enable"
# For a process that is killed to be gone, with what it holds.
GONE_S, LOOK_S = 5.0, 0.01


def run(
    world: MPI.Comm, settings: Settings, watchdog: Watchdog, received: ReceivedSignal
) -> NoReturn:
    """Do what `job.run` does, again where nodes were lost; leave with the exit code.

    Collective on `world`.
    """
    run_collectively(world, check_support)
    kept, here, told = InMemoryCheckpoint(settings), world, 0
    while True:
        try:
            # The others may be in any collective on `here` where one rank ends.
            ending = here.Dup()
            kept.code = job.run(here, kept.settings, watchdog, received, kept)
            leave(here, watchdog, kept.code)
        except UserError as error:
            if here is world:
                raise
            end_together(ending, watchdog, error)
        except MPI.Exception as error:
            at = time.time()
            if kept.code is not None:
                # Another job may have the run by now.
                end_at_once(kept.code)
            watchdog.leave_if_lost()
            # What was under way holds on to its memory as long as the error is there.
            left, stay, loss = shrink(here, kept, error)
        if not kept.began:
            text = f"{loss.describe()} was lost before training began; start the job again"
            end_together(left, watchdog, UserError(text, FAILURE))
        if stay == MPI.COMM_NULL:
            text = f"rank {here.rank} on {socket.gethostname()} leaves, as its node is not whole"
            print(f"prunex_mpi: {text}", file=sys.stderr, flush=True)
            # As one that has failed: the others have gone on without it.
            os.kill(os.getpid(), signal.SIGKILL)
        if kept.loss is not None and len(kept.changes) == told:
            # Another one was lost before that was told.
            kept.loss = together(kept.loss, loss)
        else:
            kept.loss, kept.lost_at, told = loss, at, len(kept.changes)
        # Virtual nodes may not be larger than what is left.
        most = min(kept.settings.ranks_per_node, stay.size)
        kept.settings = replace(kept.settings, ranks_per_node=most)
        here = stay
        watchdog.move(here.rank)


def check_support() -> None:
    """Raise UserError where MPI ends the job when a rank fails, or can't tell."""
    if os.environ.get(ENABLED) != "1":
        raise UserError(
            "on-node-loss continue: this MPI ends the job when a process fails; start it with Open "
            "MPI's mpirun --with-ft ulfm, or leave it away"
        )


def leave(world: MPI.Comm, watchdog: Watchdog, code: int) -> NoReturn:
    """End this process, with all that are left, without MPI_Finalize. Collective on `world`.

    That waits for those who are lost, and with its detector of failures MPI may not come to it.
    """
    watchdog.close()
    with suppress(MPI.Exception):
        # Who has passed it has left, and counts as one that failed.
        world.Barrier()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End this process without MPI_Finalize."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_together(world: MPI.Comm, watchdog: Watchdog, error: UserError) -> NoReturn:
    """Print an error on rank 0 and leave with its exit code. Collective on `world`.

    Rank 0 of the whole job, which does it otherwise, may be gone.
    """
    # Another loss meanwhile is no matter any more.
    with suppress(MPI.Exception):
        tell_together(NAME, world, error)
    leave(world, watchdog, error.exit_code)


def shrink(
    world: MPI.Comm, kept: InMemoryCheckpoint, error: MPI.Exception
) -> tuple[MPI.Comm, MPI.Comm, LostNodes]:
    """Return the communicators of all ranks that are left and of those that go on, and the loss.

    The second is COMM_NULL on ranks whose node has lost one. Raises `error` where nobody is lost:
    then it is another one. Collective on what is left of `world`.
    """
    for comm in (*kept.made, world):
        if comm != MPI.COMM_NULL:
            comm.Revoke()
    kept.made.clear()
    left = world
    while True:
        left = left.Shrink()
        if left.size == world.size:
            raise error
        stay, loss, done = MPI.COMM_NULL, LostNodes((), ()), False
        with suppress(MPI.Exception):
            ranks = gather_counts(left, world.rank)
            # A rank that was to learn that training begins may be one that does not know.
            began = np.array([kept.began], dtype=np.int64)
            left.Allreduce(MPI.IN_PLACE, began, op=MPI.MIN)
            kept.began = bool(began[0])
            fence(kept, ranks)
            whole, loss = divide(kept, ranks, world.size)
            stay = left.Split(0 if world.rank in whole else MPI.UNDEFINED, key=left.rank)
            done = True
        # Where another one was lost meanwhile, all begin again.
        with suppress(MPI.Exception):
            if left.Agree(int(done)):
                if kept.began:
                    # By their numbers from now on: another loss may come before they meet anew.
                    kept.members = [kept.members[rank] for rank in sorted(whole)]
                return left, stay, loss
        left.Revoke()


def divide(kept: InMemoryCheckpoint, ranks: list[int], size: int) -> tuple[list[int], LostNodes]:
    """Return which of the `ranks` that are left of `size` go on, and what is lost.

    Nodes go as a whole; where none is whole all go on, to write a checkpoint.
    """
    gone = tuple(sorted(set(range(size)) - set(ranks)))
    if not kept.began:
        return ranks, LostNodes((), gone)
    broken = tuple(sorted({kept.members[rank].node for rank in gone}))
    whole = [rank for rank in ranks if kept.members[rank].node not in broken]
    nodes = {kept.members[rank].node for rank in whole}
    kept.too_few = len(nodes) < kept.settings.min_nodes or not whole
    stay = whole or ranks
    lost = (kept.members[rank].rank for rank in set(range(size)) - set(stay))
    return stay, LostNodes(broken, tuple(sorted(lost)))


def together(first: LostNodes, second: LostNodes) -> LostNodes:
    """Return both losses as one, by the numbers from before the first."""
    nodes, ranks = {*first.nodes, *second.nodes}, {*first.ranks, *second.ranks}
    return LostNodes(tuple(sorted(nodes)), tuple(sorted(ranks)))


def fence(kept: InMemoryCheckpoint, ranks: list[int]) -> None:
    """Kill what was declared lost and is on this machine still: a process that is stopped.

    It would hold the run directory, and write into it once it wakes.
    """
    host, end = socket.gethostname(), time.monotonic() + GONE_S
    for rank, member in enumerate(kept.members):
        if rank in ranks or member.host != host or member.born != born(member.pid):
            continue
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member.pid, signal.SIGKILL)
        while born(member.pid) == member.born and time.monotonic() < end:
            time.sleep(LOOK_S)
