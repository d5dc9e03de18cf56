"""Show what happened in runs: `python -m prunex_mpi.report RUN [RUN ...]` writes one HTML page.

The page holds all that it shows and needs neither a network nor JavaScript. No MPI is started and
torch is not loaded; matplotlib and jinja2 are loaded after the flags are parsed.
"""

import sys
from collections.abc import Sequence

from prunex_mpi.base.single_process import run_single_process
from prunex_mpi.tools.report.report_options import Options, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code."""
    return run_single_process("prunex_mpi.report", parse, report, argv)


def report(options: Options) -> None:
    """Read the runs, draw, write."""
    from prunex_mpi.tools.report.write_report import write_report

    write_report(options)


if __name__ == "__main__":
    sys.exit(main())
