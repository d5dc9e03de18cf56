"""Tell whether and how well a job would train: `python -m prunex_mpi.doctor`, also under mpirun.

Start it as training is to be started. Nothing that starts MPI or loads torch is imported before
the flags are parsed.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.diagnosis.options import Options, parse
from prunex_mpi.run.program import run_program, watched

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.doctor", parse, doctor, argv)


def doctor(world: "MPI.Comm", options: Options) -> int:
    """Examine the job under the eyes of a watchdog. Collective on `world`."""
    with watched(world, options.settings.timeout) as watchdog:
        from prunex_mpi.diagnosis.examine import examine

        return examine(world, options, watchdog.heartbeat)


if __name__ == "__main__":
    sys.exit(main())
