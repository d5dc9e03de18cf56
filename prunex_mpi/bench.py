"""Measure what training costs: `python -m prunex_mpi.bench`, also under mpirun.

One rank measures kernels, overhead and memory, two or more the collectives and the steps of dense
SGD beside torch's, any number the writing of checkpoints. `compare` trains with one method after
the other. The tables name the machine, the versions and the rank layout, since figures mean nothing
without.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.base.errors import UserError, nearest, quote
from prunex_mpi.run.program import run_program
from prunex_mpi.settings.cli import Parser
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import make
from prunex_mpi.tools.compare import options as compare_options

if TYPE_CHECKING:
    import torch

    from mpi4py import MPI

    from prunex_mpi.base.tables import Table
    from prunex_mpi.comm.collectives import Transport
    from prunex_mpi.comm.topology import Topology

ALONE = ("kernels", "overhead", "memory")
TOGETHER = ("collectives",)
ANYWHERE = ("checkpoint",)
# Trains for minutes: only for who asks, on two or more ranks.
ASKED = ("ddp",)
SECTIONS = (*ALONE, *TOGETHER, *ANYWHERE, *ASKED)
MAX_THREADS = 4096


@dataclass(frozen=True)
class Options:
    """What to measure; `sections` empty for everything that fits the number of ranks."""

    sections: tuple[str, ...]
    settings: Settings
    train_models: tuple[str, ...]
    steps: int
    repeat: int
    threads: int
    folder: str
    json_file: str
    child: str


def build_parser() -> Parser:
    """Return the parser of the benchmark's flags."""
    parser = Parser(
        prog="python -m prunex_mpi.bench",
        description="Measure kernels, overhead and memory on one rank, collectives and ddp (dense "
        "SGD beside torch's) on several, checkpoints on any number.",
        epilog="Without WHAT: everything that makes sense for the number of ranks, but ddp. "
        "`compare --help` tells how to compare methods of training.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(SECTIONS)} or all [all]; or compare, with flags of its own",
    )
    add("--version", action="version", version=f"prunex_mpi {__version__}")
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
    add("--repeat", type=int, default=7, metavar="N", help="turns that are measured [7]")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda [auto]")
    add("--threads", type=int, default=0, metavar="N", help="per rank, 0 for a fair share [0]")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="virtual nodes, as in training")
    add("--bucket-mib", type=float, default=32.0, metavar="X", help="size of a bucket [32]")
    add("--mpi-buffers", default="auto", metavar="NAME", help="auto, host or device [auto]")
    add("--dir", default=".", metavar="DIR", dest="folder", help="where checkpoints go [.]")
    add("--json", default="", metavar="FILE", dest="json_file", help="write the tables there too")
    # What memory starts: one measured job.
    add("--child", default="", help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name) asks for; neither torch nor MPI is loaded.

    Raises UserError with one line that names the culprit; `--help` and `--version` print and exit.
    """
    given = build_parser().parse_all(argv)
    for word in given.what:
        if word == "compare":
            raise UserError("compare comes first and alone: its flags are its own")
        if word not in (*SECTIONS, "all"):
            guess = nearest(word, (*SECTIONS, "all", "compare"))
            raise UserError(f"nothing to measure is called {quote(word)}; did you mean {guess!r}?")
    for name, low, high in (
        ("steps", 1, 10**6),
        ("repeat", 1, 10**6),
        ("threads", 0, MAX_THREADS),
    ):
        if not low <= getattr(given, name) <= high:
            value = getattr(given, name)
            raise UserError(f"--{name} must be from {low} to {high}, not {value}")
    settings = make(
        model=given.model,
        groups=given.groups,
        keep_ratio=given.keep_ratio,
        batch_size=given.batch_size,
        device=given.device,
        ranks_per_node=given.ranks_per_node,
        bucket_mib=given.bucket_mib,
        mpi_buffers=given.mpi_buffers,
    )
    wanted = tuple(s for s in SECTIONS if s in given.what and "all" not in given.what)
    return Options(
        wanted,
        settings,
        tuple(given.train_models),
        given.steps,
        given.repeat,
        given.threads,
        given.folder,
        given.json_file,
        given.child,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code, the same on every rank."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["compare"]:
        return run_program("prunex_mpi.bench", compare_options.parse, run_comparison, words[1:])
    return run_program("prunex_mpi.bench", parse, bench, words)


def run_comparison(world: "MPI.Comm", options: compare_options.Options) -> int:
    """Train with one method after the other. Collective on `world`."""
    from prunex_mpi.tools.compare.compare import compare

    return compare(world, options)


def choose_sections(asked: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Return what to measure on `ranks` ranks; raise UserError for what does not fit them."""
    for section in asked:
        if section in ALONE and ranks > 1:
            raise UserError(
                f"{section} is measured on one rank, not {ranks}; start it without mpirun"
            )
        if section in (*TOGETHER, *ASKED) and ranks == 1:
            raise UserError(f"{section} needs 2 or more ranks; start it with mpirun or srun")
    return asked or ((ALONE if ranks == 1 else TOGETHER) + ANYWHERE)


def bench(world: "MPI.Comm", options: Options) -> int:
    """Measure and print; only world rank 0 prints and writes. Collective on `world`."""
    import torch

    from prunex_mpi.base.files import prepare_file, write_json
    from prunex_mpi.base.tables import as_json, format_table
    from prunex_mpi.comm.topology import (
        describe,
        library_name,
        nodes_of,
        raise_together,
        require_same,
        together,
    )
    from prunex_mpi.models.build import build_model
    from prunex_mpi.run.devices import choose_device, lone_singleton, set_threads
    from prunex_mpi.run.job import find_transport
    from prunex_mpi.tools.bench.timing import describe_machine

    singleton = lone_singleton(world)
    raise_together(world, UserError(singleton) if singleton else None)
    settings = options.settings
    sections = choose_sections(options.sections, world.size) if not options.child else ()
    with nodes_of(world, settings.ranks_per_node) as topology:
        device = together(world, lambda: choose_device(settings.device, topology.host_rank))
        require_same(world, "the kinds of device (some ranks found no GPU)", device.type)
        threads = options.threads or set_threads(topology.core_sharers)
        torch.set_num_threads(threads)
        transport = find_transport(topology, settings, device)
        if options.child:
            from prunex_mpi.tools.bench.memory import child

            answer = together(
                world, lambda: child(topology, settings, transport, device, options.child)
            )
            if world.rank == 0:
                print(answer, flush=True)
            return 0

        # Refuse what cannot end well before minutes are spent on the rest.
        if {"overhead", "ddp"} & set(sections):
            for name in options.train_models:
                together(world, lambda name=name: build_model(name, num_classes=10, image_size=32))
        together(
            world, lambda: prepare_file("json", options.json_file) if world.rank == 0 else None
        )

        machine = {
            "machine": describe_machine(device),
            "mpi": library_name(),
            "ranks": describe(topology, f"{device}, {threads} threads"),
        }
        if world.rank == 0:
            print("\n".join(machine.values()), flush=True)
        tables = []
        for section in sections:
            found = measure(section, topology, transport, device, threads, options)
            tables += found
            for table in found if world.rank == 0 else ():
                print(f"\n{format_table(table)}", flush=True)
        if world.rank == 0 and options.json_file:
            write_json(options.json_file, as_json(machine, tables))
    return 0


def measure(
    section: str,
    topology: "Topology",
    transport: "Transport",
    device: "torch.device",
    threads: int,
    options: Options,
) -> list["Table"]:
    """Return the tables of one section. Collective on `topology.world`."""
    settings = options.settings
    if section == "kernels":
        from prunex_mpi.tools.bench.kernels import kernels

        return kernels(topology, settings, transport, device, options.repeat)
    if section == "overhead":
        from prunex_mpi.tools.bench.overhead import overhead

        return overhead(topology, settings, transport, device, options.train_models, options.steps)
    if section == "memory":
        from prunex_mpi.tools.bench.memory import memory

        return memory(settings, device, threads)
    if section == "checkpoint":
        from prunex_mpi.tools.bench.checkpoint import checkpoints

        return checkpoints(topology, settings, transport, device, options.repeat, options.folder)
    if section == "ddp":
        from prunex_mpi.tools.bench.ddp import compare_with_ddp

        models = options.train_models
        return compare_with_ddp(
            topology, settings, transport, device, models, options.steps, options.repeat
        )
    from prunex_mpi.tools.bench.collectives import collectives

    return collectives(topology, settings, transport, device, options.repeat)


if __name__ == "__main__":
    sys.exit(main())
