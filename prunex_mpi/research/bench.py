"""The sections of the benchmark: their flags, and how they are measured one after the other.

What can't be measured here is refused first, before minutes are spent on the rest. torch is loaded
after the flags are parsed.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.files import write_json
from prunex_mpi.base.tables import Table, as_json, format_table
from prunex_mpi.config.cli import Parser, add_settings, check_range, convert_flag, program_parser
from prunex_mpi.config.resolve import make

if TYPE_CHECKING:
    from mpi4py import MPI

    from prunex_mpi.base.heartbeat import Heartbeat

ALONE, TOGETHER = ("kernels", "overhead"), ("collectives",)
# It takes minutes: only for who asks, on any number of ranks.
REQUESTED = ("ddp",)
SECTIONS = (*ALONE, *TOGETHER, *REQUESTED)
# They come first, and have flags of their own.
APART = ("compare", "figure")
# What fits the number of ranks, beside what is named.
ALL = "all"
# Settings of training that the benchmark has as well. One turn of a large model may take minutes.
USUAL = {
    **{"model": "resnet18", "groups": ["channel"], "batch_size": "32", "amp": "off"},
    **{"compile": False, "device": "auto", "timeout": "1800"},
}

# What was given, by the names of the flags; `settings` are made of those that training has too.
Options = argparse.Namespace


def build_parser() -> Parser:
    """Return the parser of the benchmark's flags."""
    parser = program_parser(
        "bench",
        "Measure kernels and overhead on one rank, collectives on several, ddp (dense SGD beside "
        "torch's) on any number.",
        "Without WHAT, and with all: everything that makes sense for the number of ranks, but ddp "
        "where it isn't named. `compare --help` tells how to compare methods of training, "
        "`figure --help` how to draw the paper's figures.",
    )
    add = parser.add_argument
    words = f"{', '.join(SECTIONS)} or {ALL} [{ALL}]; or {' or '.join(APART)}, with its own flags"
    add("what", nargs="*", metavar="WHAT", help=words)
    trained, about = ["resnet20", "resnet18"], "models that overhead and ddp train"
    add("--models", nargs="+", default=trained, metavar="NAME", help=f"{about} {trained}")
    add("--steps", type=int, default=4, metavar="N", help="steps of a turn of training [4]")
    add("--repeat", type=int, default=7, metavar="N", help="turns that are measured [7]")
    add("--threads", type=int, default=0, metavar="N", help="per rank, 0 for a fair share [0]")
    add("--json", default="", metavar="FILE", dest="json_file", help="write the tables there too")
    add_settings(parser, USUAL, USUAL)
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
    for name, least, most in (("steps", 1, 10**6), ("repeat", 1, 10**6), ("threads", 0, 4096)):
        check_range(given, name, least, most)
    requested = {name: getattr(given, name) for name in USUAL}
    values = {n: USUAL[n] if text is None else text for n, text in requested.items()}
    given.settings = make(**{name: convert_flag(name, text) for name, text in values.items()})
    if "ddp" in given.what and given.settings.amp == "fp16":
        raise UserError("ddp is measured with amp off or bf16: fp16 needs a scaler beside it")
    return given


def choose_sections(requested: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return what to measure on `ranks` ranks; raise UserError for what does not fit them."""
    for section in requested:
        if section in ALONE and ranks > 1:
            raise UserError(
                f"{section} is measured on one rank, not {ranks}; start it without mpirun"
            )
        if section in TOGETHER and ranks == 1:
            raise UserError(f"{section} needs 2 or more ranks; start it with mpirun or srun")
    if not requested or ALL in requested:
        requested = (*requested, *(ALONE if ranks == 1 else TOGETHER))
    return tuple(section for section in SECTIONS if section in requested)


def run_sections(world: "MPI.Comm", options: Options, heartbeat: "Heartbeat") -> int:
    """Measure and print, and beat as that goes on; only world rank 0 prints and writes.

    Collective on `world`.
    """
    from prunex_mpi.comm.agreement import run_collectively
    from prunex_mpi.research import measure
    from prunex_mpi.run.start import check_launched_together, find_transport, take_places

    sections_of: dict[str, Any] = {
        "kernels": measure.kernels,
        "overhead": measure.overhead,
        "collectives": measure.collectives,
        "ddp": measure.compare_with_ddp,
    }
    check_launched_together(world)
    settings = options.settings
    sections = choose_sections(options.what, world.size)
    with take_places(world, 0, settings.device, options.threads) as place:
        around = place.topology, settings, find_transport(place, settings), place.device
        bench = measure.Bench(*around, heartbeat, options.models, options.steps, options.repeat)
        heartbeat.enter("model")
        run_collectively(world, lambda: measure.check_models(bench, sections))
        machine, tables = place.describe(), []
        if world.rank == 0:
            print("\n".join(machine.values()), flush=True)
        for section in sections:
            heartbeat.enter(section)
            found: list[Table] = sections_of[section](bench)
            tables += found
            for table in found if world.rank == 0 else ():
                print(f"\n{format_table(table)}", flush=True)
        if world.rank == 0 and options.json_file:
            write_json(options.json_file, as_json(machine, tables))
    return 0
