"""Train and prune a network over MPI: `mpirun -n 4 python -m prunex_mpi.train [flags]`.

The algorithm itself is in hsadmm.py, the course of a job in job.py. Nothing that starts MPI or
loads torch is imported before the flags are parsed.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.run.program import abort_on_exceptions, end_job, run_program
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.cli import parse
from prunex_mpi.settings.fields import Settings

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.train", parse, train, argv)


def train(world: "MPI.Comm", settings: Settings) -> int:
    """Train under the eyes of a watchdog. Collective on `world`."""
    from prunex_mpi.comm.preemption import catching
    from prunex_mpi.run.job import run

    heartbeat = Heartbeat()
    watchdog = Watchdog(heartbeat, world.rank, settings.timeout, lambda: end_job(world))
    with closing(watchdog), catching(settings.preempt_signals) as received:
        abort_on_exceptions(world, heartbeat, watchdog.first_to_report)
        return run(world, settings, heartbeat, watchdog, received)


if __name__ == "__main__":
    sys.exit(main())
