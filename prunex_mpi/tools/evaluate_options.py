"""Flags of `python -m prunex_mpi.evaluate`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.cli import (
    Parser,
    add_own_model,
    add_timeout,
    check_range,
    convert_flag,
    program_parser,
)
from prunex_mpi.settings.fields import SHARED
from prunex_mpi.settings.values import choices_shown

BATCH, MAX_COUNT, TIMEOUT_S = 256, 10**6, 1800
# Of a continuation, and what it has no use for.
TOKENS, TEMPERATURE = 200, 0.8
DRAWING = {"tokens": TOKENS, "temperature": TEMPERATURE, "seed": 0}
TESTING = ("dataset", "data_dir", "test_samples", "batch_size")

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
    add("--batch-size", type=int, metavar="N", help=what)
    add("--device", default="auto", help="where to compute: auto, cpu or cuda [auto]")
    what = "a language model: print how it continues TEXT, in place of testing it"
    add("--prompt", metavar="TEXT", help=what)
    add("--tokens", type=int, metavar="N", help=f"by so many tokens [{TOKENS}]")
    what = f"divide logits by it; 0: always the likeliest token [{TEMPERATURE}]"
    add("--temperature", type=float, metavar="T", help=what)
    add("--seed", type=int, metavar="N", help="another one draws other tokens [0]")
    what = "write what was found there, all classes too"
    add("--json", default="", metavar="FILE", dest="json_file", help=what)
    add_timeout(parser, TIMEOUT_S)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    _check_prompt(given)
    for name, usual in {"batch_size": BATCH, **DRAWING}.items():
        if getattr(given, name) is None:
            setattr(given, name, usual)
    for name in ("batch_size", "tokens"):
        check_range(given, name, 1, MAX_COUNT)
    check_range(given, "temperature", 0, MAX_COUNT)
    check_range(given, "seed", 0, 2**63 - 1)
    requested = ["dataset"] if given.dataset else []
    requested += ["test_samples"] if given.test_samples is not None else []
    for name in (*requested, "device", "timeout"):
        setattr(given, name, convert_flag(name, getattr(given, name)))
    return given


def _check_prompt(given: Options) -> None:
    """Raise UserError for flags of a test beside those of a continuation."""
    if given.prompt is None:
        if odd := [name for name in DRAWING if getattr(given, name) is not None]:
            raise UserError(f"--{odd[0]} is of a continuation: give --prompt TEXT too")
        return
    if odd := [name for name in TESTING if getattr(given, name) not in ("", None)]:
        flag = odd[0].replace("_", "-")
        raise UserError(f"--{flag} is of a test, and --prompt is none: give one of the two")
