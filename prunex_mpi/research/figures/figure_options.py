"""Flags of `python -m prunex_mpi.bench figure`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.config.parser import Parser, program_parser
from prunex_mpi.research.picture_files import check_file_kind

FIGURES = {
    "5": "accuracy against time and against bytes between nodes",
    "6a": "payload per outer iteration",
    "6b": "bytes over a run, dense and pruned",
    "7": "synchronisation time per outer iteration",
    "8": "how communication time is split",
    "9": "strong scaling: measured, and beyond that modelled",
    "10": "residuals of each rank",
    "11": "residuals of each layer",
    "12": "accuracy against the keep ratio",
    "13": "sparsity patterns of layers",
}


MAX_GBIT = 10**6


@dataclass(frozen=True)
class Options:
    """Which figure to draw of which runs, and the file it goes to.

    `layers` are those of figure 13, () for four of them; the link is that of figure 9's model,
    whose rate is 0 where nothing is to be modelled.
    """

    number: str
    runs: tuple[Path, ...]
    output: str
    layers: tuple[str, ...]
    link_gbit: float


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
    add("runs", nargs="+", metavar="RUN", help="folders of runs")
    add("--output", default="", metavar="FILE", help=".svg, .png or .pdf [figure-N.svg]")
    add("--layers", nargs="+", default=[], metavar="NAME", help="13: layers [four of them]")
    add(
        "--link-gbit",
        type=float,
        default=0.0,
        metavar="X",
        help="9: rate between nodes to model more ranks with, in Gbit/s, 0 for none [0]",
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without `figure`) asks for; nothing heavy is loaded.

    Raises UserError with one line that names the culprit; `--help` and `--version` print and exit.
    """
    given = build_parser().parse_all(argv)
    if given.number not in FIGURES:
        raise UserError(f"there is no figure {quote(given.number)}; there are {', '.join(FIGURES)}")
    for flag, number in (("layers", "13"), ("link_gbit", "9")):
        if getattr(given, flag) and given.number != number:
            raise UserError(f"--{flag.replace('_', '-')} is for figure {number}; leave it away")
    if not 0 <= given.link_gbit <= MAX_GBIT:
        raise UserError(f"--link-gbit must be from 0 to {MAX_GBIT:,}")
    output = given.output or f"figure-{given.number}.svg"
    check_file_kind("--output", output)
    return Options(
        given.number,
        tuple(map(Path, given.runs)),
        output,
        tuple(given.layers),
        given.link_gbit,
    )
