"""Measure what training costs: `python -m prunex_mpi.bench`, also under mpirun.

One rank measures kernels and overhead, two or more the collectives and the steps of dense SGD
beside torch's. `compare` trains with one method after the other; `figure` draws one of the paper's
figures from runs, without MPI. The tables name the machine, the versions and the rank layout.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.research import bench as sections
from prunex_mpi.research import plan
from prunex_mpi.run.program import run_program, run_single_process, watched

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code, the same on every rank."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["compare"]:
        return run_program("prunex_mpi.bench", plan.parse, compare, words[1:])
    if words[:1] == ["figure"]:
        from prunex_mpi.research import figures

        return run_single_process("prunex_mpi.bench", figures.parse, figures.figure, words[1:])
    return run_program("prunex_mpi.bench", sections.parse, bench, words)


def bench(world: "MPI.Comm", options: sections.Options) -> int:
    """Measure and print under the eyes of a watchdog. Collective on `world`."""
    with watched(world, options.settings.timeout) as watchdog:
        return sections.run_sections(world, options, watchdog.heartbeat)


def compare(world: "MPI.Comm", options: plan.Options) -> int:
    """Train with one method after the other. Collective on `world`."""
    from prunex_mpi.research.compare import compare

    return compare(world, options)


if __name__ == "__main__":
    sys.exit(main())
