"""Flags of `python -m prunex_mpi.report`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.config.parser import Parser, program_parser

PAGE = "report.html"


# What was given, by the names of the flags.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the flags of report."""
    parser = program_parser(
        "report",
        "Show what happened in runs: one HTML page with pictures and tables that needs no network. "
        "Runs that are still going or ended badly are shown as well.",
        "Of several runs the curves are drawn together.",
    )
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a file that bench compare --json has written",
    )
    add(
        "--output",
        default="",
        metavar="FILE",
        help=f"where the page goes [{PAGE} in the folder of the one run, else in this folder]",
    )
    add("--png", default="", metavar="DIR", help="write the pictures into this folder as well")
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    return build_parser().parse_all(argv)
