"""Flags of `python -m prunex_mpi.bench`, and what is measured on how many ranks."""

import argparse
from collections.abc import Sequence

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.config.cli import convert_flag
from prunex_mpi.config.parser import Parser, add_timeout, check_range, program_parser
from prunex_mpi.config.resolve import make

ALONE = ("kernels", "overhead")
TOGETHER = ("collectives",)
# It takes minutes: only for who asks, on any number of ranks.
ASKED = ("ddp",)
# Likewise, on one rank.
ASKED_ALONE = ("text",)
SECTIONS = (*ALONE, *TOGETHER, *ASKED, *ASKED_ALONE)
# They come first, and have flags of their own.
APART = ("compare", "figure")
# What fits the number of ranks, beside what is named.
ALL = "all"
MAX_COUNT, MAX_THREADS = 10**6, 4096
# One turn of a large model may take minutes.
TIMEOUT_S = 1800.0


# What was given, by the names of the flags; `settings` are made of those that training has too.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the benchmark's flags."""
    parser = program_parser(
        "bench",
        "Measure kernels, overhead and text (dense beside a plain torch loop) on one rank, "
        "collectives on several, ddp (dense SGD beside torch's) on any number.",
        "Without WHAT, and with all: everything that makes sense for the number of ranks, but "
        "ddp and text where they aren't named. "
        "`compare --help` tells how to compare methods of training, `figure --help` how to draw "
        "the paper's figures.",
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(SECTIONS)} or {ALL} [{ALL}]; or {' or '.join(APART)}, with its own flags",
    )
    add("--model", default="resnet152", metavar="NAME", help="model to measure [resnet152]")
    add(
        "--models",
        nargs="+",
        default=["resnet20", "resnet18"],
        metavar="NAME",
        dest="train_models",
        help="models that overhead and ddp train [resnet20 resnet18]",
    )
    add("--groups", nargs="+", default=["channel"], metavar="KIND", help="groups [channel]")
    add("--keep-ratio", nargs="+", type=float, default=[0.5], metavar="X", help="[0.5]")
    add("--batch-size", type=int, default=32, metavar="N", help="per rank, in training [32]")
    add("--steps", type=int, default=4, metavar="N", help="steps of a turn of training [4]")
    add("--amp", default="off", metavar="TYPE", help="off or bf16, in ddp and overhead [off]")
    add("--compile", action="store_true", help="torch.compile the networks of ddp and overhead")
    add("--repeat", type=int, default=7, metavar="N", help="turns that are measured [7]")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda [auto]")
    add("--threads", type=int, default=0, metavar="N", help="per rank, 0 for a fair share [0]")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="virtual nodes, as in training")
    add("--mpi-buffers", default="auto", metavar="NAME", help="auto, host or device [auto]")
    add("--json", default="", metavar="FILE", dest="json_file", help="write the tables there too")
    add_timeout(parser, TIMEOUT_S)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    for word in given.what:
        if word in APART:
            raise UserError(f"{word} comes first and alone: its flags are its own")
        if word not in (*SECTIONS, ALL):
            names = (*SECTIONS, ALL, *APART)
            guess = meant(word, names, f"; there are {', '.join(names)}")
            raise UserError(f"nothing to measure is called {quote(word)}{guess}")
    check_range(given, "steps", 1, MAX_COUNT)
    check_range(given, "repeat", 1, MAX_COUNT)
    check_range(given, "threads", 0, MAX_THREADS)
    given.settings = make(
        model=given.model,
        groups=given.groups,
        keep_ratio=given.keep_ratio,
        batch_size=given.batch_size,
        amp=given.amp,
        compile=given.compile,
        device=given.device,
        ranks_per_node=given.ranks_per_node,
        mpi_buffers=given.mpi_buffers,
        timeout=convert_flag("timeout", given.timeout),
    )
    return given


def choose_sections(asked: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return what to measure on `ranks` ranks; raise UserError for what does not fit them."""
    for section in asked:
        if section in (*ALONE, *ASKED_ALONE) and ranks > 1:
            raise UserError(
                f"{section} is measured on one rank, not {ranks}; start it without mpirun"
            )
        if section in TOGETHER and ranks == 1:
            raise UserError(f"{section} needs 2 or more ranks; start it with mpirun or srun")
    if not asked or ALL in asked:
        asked = (*asked, *(ALONE if ranks == 1 else TOGETHER))
    return tuple(section for section in SECTIONS if section in asked)
