"""Show what happened in runs: `python -m prunex_mpi.report RUN [RUN ...]` writes one HTML page.

The page holds all that it shows and needs neither a network nor JavaScript. No MPI is started and
torch is not loaded; matplotlib and jinja2 are loaded after the flags are parsed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.config.cli import Parser, program_parser
from prunex_mpi.run.program import run_single_process


def build_parser() -> Parser:
    """Return the parser of the flags of report."""
    parser = program_parser(
        "report",
        "Show what happened in runs: one HTML page with pictures and tables that needs no network. "
        "Runs that are still going or ended badly are shown as well.",
        "Of several runs the curves are drawn together.",
    )
    add = parser.add_argument
    what = "folder of a run, or a file that bench compare --json has written"
    add("sources", nargs="+", type=Path, metavar="RUN", help=what)
    what = "where the page goes [report.html in the folder of the one run, else in this folder]"
    add("--output", default="", metavar="FILE", help=what)
    add("--png", default="", metavar="DIR", help="write the pictures into this folder as well")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    return build_parser().parse_all(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code."""
    return run_single_process("prunex_mpi.report", parse, report, argv)


def report(options: argparse.Namespace) -> None:
    """Read the runs, draw, write."""
    from prunex_mpi.tools.report.page import write_report

    write_report(options.sources, options.output, options.png)


if __name__ == "__main__":
    sys.exit(main())
