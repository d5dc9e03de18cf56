"""Train and prune a network over MPI: `mpirun -n 4 python -m prunex_mpi.train [flags]`.

The algorithm is in methods/hsadmm.py, the course of a job in run/job.py. Signals are noted before
anything slow is imported, MPI and torch are imported after the flags are parsed.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from prunex_mpi.base.signals import ReceivedSignal, catching

if TYPE_CHECKING:
    from mpi4py import MPI

    from prunex_mpi.settings.fields import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code, the same on every rank."""
    with catching() as received:
        from prunex_mpi.config.cli import read_flags
        from prunex_mpi.run.program import run_program

        return run_program("prunex_mpi.train", read_flags, partial(train, received=received), argv)


def train(world: "MPI.Comm", settings: "Settings", received: ReceivedSignal) -> int:
    """Train under the eyes of a watchdog. Collective on `world`."""
    from prunex_mpi.run.program import watched

    received.quiet = world.rank > 0
    with watched(world, settings.timeout) as watchdog:
        from prunex_mpi.run import job, survival

        run = survival.run if settings.on_node_loss == "continue" else job.run
        return run(world, settings, watchdog, received)


if __name__ == "__main__":
    sys.exit(main())
