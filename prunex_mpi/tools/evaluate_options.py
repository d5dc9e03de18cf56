"""Flags of `python -m prunex_mpi.evaluate`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.config.cli import convert_flag
from prunex_mpi.config.parser import (
    Parser,
    add_own_model,
    add_timeout,
    check_range,
    program_parser,
)
from prunex_mpi.settings.fields import SHARED
from prunex_mpi.settings.values import choices_shown

BATCH, CLASSES, MAX_COUNT, TIMEOUT_S = 256, 20, 10**6, 1800


# What was given, by the names of the flags; empty and None stand for what the run was tested on.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the flags of evaluate."""
    parser = program_parser(
        "evaluate",
        "Tell loss and accuracy of a network on test images, of each class as well; of text its "
        "loss, perplexity and bits per byte.",
        "Under mpirun or srun the ranks share the data.",
    )
    add = parser.add_argument
    where = "folder of a complete run, or of an exported network"
    add("network", type=Path, metavar="RUN|MODEL", help=where)
    add_own_model(parser)
    names = "{" + ",".join(choices_shown(SHARED["dataset"].metadata)) + "}"
    add("--dataset", default="", metavar=names, help="data to test on [those of the run]")
    add("--data-dir", default="", metavar="DIR", help="folder of the data [that of the run]")
    which = "0 for all [of its own data as many as the run, of others all]"
    add("--test-samples", metavar="N", help=f"images, or windows of text, to use, {which}")
    what = f"at most so many images, or windows, at once [{BATCH}]"
    add("--batch-size", type=int, default=BATCH, metavar="N", help=what)
    add("--device", default="auto", help="where to compute: auto, cpu or cuda [auto]")
    what = f"so many classes are shown, those of lowest accuracy first [{CLASSES}]"
    add("--classes", type=int, default=CLASSES, metavar="N", help=what)
    what = "write what was found there, all classes too"
    add("--json", default="", metavar="FILE", dest="json_file", help=what)
    add_timeout(parser, TIMEOUT_S)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    check_range(given, "classes", 0, MAX_COUNT)
    check_range(given, "batch_size", 1, MAX_COUNT)
    requested = ["dataset"] if given.dataset else []
    requested += ["test_samples"] if given.test_samples is not None else []
    for name in (*requested, "device", "timeout"):
        setattr(given, name, convert_flag(name, getattr(given, name)))
    return given
