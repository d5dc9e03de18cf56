"""Train and prune a network over MPI: `mpirun -n 4 python -m prunex_mpi.train [flags]`.

The algorithm itself is in methods/hsadmm.py, the course of a job in run/job.py. Nothing that starts
MPI or loads torch is imported before the flags are parsed.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.run.program import run_program, watched
from prunex_mpi.settings.cli import parse
from prunex_mpi.settings.fields import Settings

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.train", parse, train, argv)


def train(world: "MPI.Comm", settings: Settings) -> int:
    """Train under the eyes of a watchdog. Collective on `world`."""
    with watched(world, settings.timeout) as watchdog:
        from prunex_mpi.comm.preemption import catching
        from prunex_mpi.run.job import run

        with catching(settings.preempt_signals, world.rank) as received:
            return run(world, settings, watchdog, received)


if __name__ == "__main__":
    sys.exit(main())
