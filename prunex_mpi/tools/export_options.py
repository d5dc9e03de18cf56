"""Flags of `python -m prunex_mpi.export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.config.parser import Parser, add_own_model, check_range, program_parser

DEVICES = ("auto", "cpu", "cuda")
PROOF_IMAGES, REPEAT = 2000, 7
MAX_COUNT = 10**6


# What was given, by the names of the flags.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the flags of export."""
    parser = program_parser(
        "export",
        "Take out of a run's network what its masks removed; write it to RUN/model, prove that it "
        "computes the same, and measure what it saves.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a complete run")
    add_own_model(parser)
    add("--dataset", default="", metavar="NAME", help="likewise, the run's own data")
    add("--onnx", action="store_true", help="write model.onnx as well")
    add("--torch-export", action="store_true", help="write model.pt2 as well, by torch.export")
    add("--data-dir", default="", metavar="DIR", help="folder of the data, where it has moved")
    add(
        "--images",
        type=int,
        default=PROOF_IMAGES,
        metavar="N",
        help="test images, or windows of text, to compare the networks on, 0 for all of the run "
        f"[{PROOF_IMAGES}]",
    )
    add(
        "--device",
        default="auto",
        choices=DEVICES,
        help="where to measure times; auto: on the CPU, and on a GPU where there is one [auto]",
    )
    add(
        "--repeat",
        type=int,
        default=REPEAT,
        metavar="N",
        help=f"turns of each measurement, whose median counts; 0 measures no times [{REPEAT}]",
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    check_range(given, "images", 0, MAX_COUNT)
    check_range(given, "repeat", 0, MAX_COUNT)
    return given
