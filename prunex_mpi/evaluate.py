"""Test a run's or an exported network: `python -m prunex_mpi.evaluate RUN|MODEL`.

Also under mpirun, where the ranks share the images. Nothing that starts MPI or loads torch is
imported before the flags are parsed.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.run.program import run_program, watched
from prunex_mpi.tools.evaluate_options import Options, parse

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit code, the same on every rank."""
    return run_program("prunex_mpi.evaluate", parse, evaluate, argv)


def evaluate(world: "MPI.Comm", options: Options) -> int:
    """Test the network under the eyes of a watchdog. Collective on `world`."""
    with watched(world, options.timeout) as watchdog:
        from prunex_mpi.tools.evaluate_network import evaluate

        return evaluate(world, options, watchdog.heartbeat)


if __name__ == "__main__":
    sys.exit(main())
