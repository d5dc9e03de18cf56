"""Measure the sections of the benchmark one after the other and print their tables.

What can't be measured here is refused first, before minutes are spent on the rest.
"""

from collections.abc import Iterator, Sequence

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import prepare_file, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table, as_json, format_table
from prunex_mpi.comm.agreement import run_collectively, run_on_first
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.grouping import make_groups
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.bench import (
    beside_torch,
    communication,
    kernels,
    overhead,
    text_loop,
)
from prunex_mpi.research.bench.bench_options import Options, choose_sections
from prunex_mpi.research.bench.workbench import IMAGES, Bench
from prunex_mpi.run.problem import make_model
from prunex_mpi.run.start import check_launched_together, find_transport, take_places
from prunex_mpi.settings.fields import Settings

# What is trained on, classes and pixels of a side, where nobody has chosen it.
SMALL = Images(beside_torch.IMAGE_SIZE, IMAGES.classes)


def run_sections(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> int:
    """Measure and print, and beat as that goes on; only world rank 0 prints and writes.

    Collective on `world`.
    """
    check_launched_together(world)
    settings = options.settings
    sections = choose_sections(options.what, world.size)
    with take_places(world, settings.ranks_per_node, settings.device, options.threads) as place:
        around = place.topology, settings, find_transport(place, settings), place.device
        bench = Bench(*around, heartbeat, options.train_models, options.steps, options.repeat)
        run_on_first(world, lambda: prepare_file(options.json_file))
        heartbeat.enter("model")
        check_possible(bench, sections)

        machine = place.describe()
        if world.rank == 0:
            print("\n".join(machine.values()), flush=True)
        tables = []
        for section in sections:
            heartbeat.enter(section)
            found = measure(section, bench)
            tables += found
            for table in found if world.rank == 0 else ():
                print(f"\n{format_table(table)}", flush=True)
        if world.rank == 0 and options.json_file:
            write_json(options.json_file, as_json(machine, tables))
    return 0


def measure(section: str, bench: Bench) -> list[Table]:
    """Return the tables of one section. Collective on `world`."""
    match section:
        case "kernels":
            return kernels.kernels(bench)
        case "overhead":
            return [overhead.overhead(bench)]
        case "collectives":
            return [communication.collectives(bench)]
        case "text":
            return [text_loop.compare_with_loop(bench)]
        case _:
            return [beside_torch.compare_with_ddp(bench)]


def check_possible(bench: Bench, sections: Sequence[str]) -> None:
    """Raise UserError unless all `sections` can be measured. Collective on `world`.

    That is: their networks can be built and divided into groups, and what each of them needs is
    there.
    """

    def look() -> None:
        for section in sections:
            check_section(section, bench)
        # A few sections take the same networks.
        for settings, inputs in dict.fromkeys(_networks(sections, bench)):
            bench.heartbeat.go_on()
            try:
                network = make_model(settings, inputs)
                make_groups(settings, network, build_layout(network), inputs)
            except UserError as error:
                raise UserError(f"model {settings.model}: {error}", error.exit_code) from None

    run_collectively(bench.topology.world, look)


def check_section(section: str, bench: Bench) -> None:
    """Raise UserError where the settings don't allow a section."""
    if section == "ddp" and bench.settings.amp == "fp16":
        raise UserError("ddp is measured with amp off or bf16: fp16 needs a scaler beside it")


def _networks(sections: Sequence[str], bench: Bench) -> Iterator[tuple[Settings, Images]]:
    """Yield what is built: settings, and the images that a network reads."""
    given, whole = bench.settings, IMAGES
    trained = [with_overrides(given, model=name) for name in bench.models]
    for section in sections:
        match section:
            case "kernels" | "collectives":
                yield given, whole
            case "overhead" | "ddp":
                yield from ((s, SMALL) for s in trained)
