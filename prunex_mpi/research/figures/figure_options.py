"""Flags of `python -m prunex_mpi.bench figure`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.config.parser import Parser, program_parser

KINDS = (".svg", ".png", ".pdf")
FIGURES = {
    "5": "accuracy against time and against bytes between nodes",
    "6a": "payload per outer iteration",
    "6b": "bytes over a run, dense and pruned",
    "7": "synchronisation time per outer iteration",
    "8": "how communication time is split",
    "9": "strong scaling",
    "10": "residuals of each rank",
    "11": "residuals of each layer",
    "12": "accuracy against the keep ratio",
    "13": "sparsity patterns of layers",
}


# Which figure to draw of which runs, the file it goes to, and layers of 11 and 13.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the flags of figure."""
    parser = program_parser(
        "bench figure",
        "Draw one of the figures of the PruneX paper from runs, and print the paper's values "
        "beside those of the runs. No MPI is started.",
        "Figures: " + "; ".join(f"{number} {what}" for number, what in FIGURES.items()) + ".",
    )
    add = parser.add_argument
    add("number", metavar="N", help=", ".join(FIGURES))
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    add("--output", default="", metavar="FILE", help=".svg, .png or .pdf [figure-N.svg]")
    add("--layers", nargs="+", default=[], metavar="NAME", help="11, 13: layers [five, four]")
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    if given.number not in FIGURES:
        raise UserError(f"there is no figure {quote(given.number)}; there are {', '.join(FIGURES)}")
    if given.layers and given.number == "10":
        raise UserError(
            "--layers: ranks record norms over all layers, since a norm of each layer on each rank "
            "would be ranks times as much as layers.jsonl; figure 11 has layers, over all ranks"
        )
    if given.layers and given.number not in ("11", "13"):
        raise UserError("--layers is for figures 11 and 13; leave it away")
    given.output = given.output or f"figure-{given.number}.svg"
    if Path(given.output).suffix not in KINDS:
        names = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise UserError(f"--output {quote(given.output, 250)}: give a name that ends in {names}")
    return given
