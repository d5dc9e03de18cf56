"""Tell whether and how well a job would train: `python -m prunex_mpi.doctor`, also under mpirun.

Start it as training is to be started. Nothing that starts MPI or loads torch is imported before
the flags are parsed.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.config.cli import Parser, add_timeout, convert_flag, program_parser
from prunex_mpi.config.resolve import make
from prunex_mpi.run.program import run_program, watched

if TYPE_CHECKING:
    from mpi4py import MPI


# A probe of one operation may take a minute.
TIMEOUT_S = 120.0


def build_parser() -> Parser:
    """Return the parser of the doctor's flags."""
    parser = program_parser(
        "doctor",
        "Check topology, launcher, cores, GPUs, MPI, clocks, versions and file system. Exit code 1 "
        "when training would fail.",
        "Start it as training is to be started: with mpirun or srun, on the same nodes.",
    )
    add = parser.add_argument
    add("--run-dir", default="runs", metavar="DIR", help="folder that results would go to [runs]")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda [auto]")
    add("--mpi-buffers", default="auto", metavar="NAME", help="auto, host or device [auto]")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="virtual nodes, as in training")
    add("--json", default="", metavar="FILE", dest="json_file", help="write what is found there")
    add("--quick", action="store_true", help="leave out the probe of CUDA buffers")
    add_timeout(parser, TIMEOUT_S)
    return parser


def parse(argv: Sequence[str]) -> Namespace:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    given.settings = make(
        run_dir=given.run_dir,
        device=given.device,
        mpi_buffers=given.mpi_buffers,
        ranks_per_node=given.ranks_per_node,
        timeout=convert_flag("timeout", given.timeout),
    )
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.doctor", parse, doctor, argv)


def doctor(world: "MPI.Comm", options: Namespace) -> int:
    """Examine the job under the eyes of a watchdog. Collective on `world`."""
    with watched(world, options.settings.timeout) as watchdog:
        from prunex_mpi.diagnosis.examine import examine

        return examine(world, options, watchdog.heartbeat)


if __name__ == "__main__":
    sys.exit(main())
