"""Write the physically smaller network of a run: `python -m prunex_mpi.export RUN`.

RUN/model then holds model.safetensors, plan.json and load_model.py, which loads them with nothing
but torch, torchvision and safetensors. No MPI is started, and torch is loaded after the flags are
parsed.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.config.cli import Parser, add_own_model, check_range, program_parser
from prunex_mpi.run.program import run_single_process

DEVICES = ("auto", "cpu", "cuda")
PROOF_IMAGES, REPEAT = 2000, 7
MAX_COUNT = 10**6


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
    what = "write a folder that transformers loads as well, of a language model"
    add("--transformers", action="store_true", help=what)
    add(
        "--gguf", action="store_true", help="write model.gguf for llama.cpp as well, by that folder"
    )
    add("--data-dir", default="", metavar="DIR", help="folder of the data, where it has moved")
    what = f"images or windows to compare the networks on, 0 for all of the run [{PROOF_IMAGES}]"
    add("--images", type=int, default=PROOF_IMAGES, metavar="N", help=what)
    what = "where to measure times; auto: on the CPU, and on a GPU where there is one [auto]"
    add("--device", default="auto", choices=DEVICES, help=what)
    what = (
        "turns of each measurement, whose median counts, fewer beyond half a minute; 0 measures no "
        f"times [{REPEAT}]"
    )
    add("--repeat", type=int, default=REPEAT, metavar="N", help=what)
    return parser


def parse(argv: Sequence[str]) -> Namespace:
    """Return what `argv`, without the words before, asks for; raise UserError in one line."""
    given = build_parser().parse_all(argv)
    check_range(given, "images", 0, MAX_COUNT)
    check_range(given, "repeat", 0, MAX_COUNT)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Export a run and return the exit code."""
    return run_single_process("prunex_mpi.export", parse, export, argv)


def export(options: Namespace) -> None:
    """Read the run, take out what can go, write and prove it."""
    from prunex_mpi.tools.export_run import export

    export(options)


if __name__ == "__main__":
    sys.exit(main())
