"""Measure the sections of the benchmark one after the other and print their tables.

What can't be measured here is refused first, before minutes are spent on the rest.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import prepare_file, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table, as_json, format_table
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.problem import make_groups, make_model
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.bench import beside_torch, communication, kernels, overhead, storage
from prunex_mpi.research.bench.bench_options import Options, choose_sections
from prunex_mpi.research.bench.workbench import IMAGE_SIZE, NUM_CLASSES, Bench
from prunex_mpi.run.start import check_launched_together, find_transport, take_places
from prunex_mpi.settings.fields import Settings

# What is trained on, classes and pixels of a side, where nobody has chosen it.
SMALL = NUM_CLASSES, beside_torch.IMAGE_SIZE


def run_sections(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> int:
    """Measure and print, and beat as that goes on; only world rank 0 prints and writes.

    Collective on `world`.
    """
    check_launched_together(world)
    settings = options.settings
    sections = choose_sections(options.sections, world.size) if not options.child else ()
    with take_places(world, settings.ranks_per_node, settings.device, options.threads) as place:
        bench = Bench(
            place.topology,
            settings,
            find_transport(place, settings),
            place.device,
            heartbeat,
            options.train_models,
            options.steps,
            options.repeat,
            place.threads,
            options.folder,
        )
        if options.child:
            # One of the jobs that `memory` starts.
            answer = run_collectively(world, lambda: overhead.child(bench, options.child))
            if world.rank == 0:
                print(answer, flush=True)
            return 0
        run_collectively(
            world, lambda: prepare_file("json", options.json_file) if world.rank == 0 else None
        )
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
            alone = bench.topology.world_size == 1
            return overhead.overhead(bench) if alone else overhead.inside_nodes(bench)
        case "memory":
            return overhead.memory(bench)
        case "data":
            return storage.data(bench)
        case "collectives":
            return communication.collectives(bench)
        case "checkpoint":
            return storage.checkpoints(bench)
        case "model":
            return communication.cost_model(bench)
        case _:
            return [*beside_torch.compare_with_ddp(bench), beside_torch.intervals(bench)]


def check_possible(bench: Bench, sections: Sequence[str]) -> None:
    """Raise UserError unless all `sections` can be measured. Collective on `world`.

    That is: their networks can be built and divided into groups, and what each of them needs is
    there.
    """

    def look() -> None:
        for section in sections:
            refuse(section, bench)
        # A few sections take the same networks.
        for settings, size in dict.fromkeys(_networks(sections, bench)):
            bench.heartbeat.go_on()
            try:
                network = make_model(settings, *size)
                make_groups(settings, network, build_layout(network), size[1])
            except UserError as error:
                raise UserError(f"model {settings.model}: {error}", error.exit_code) from None

    run_collectively(bench.topology.world, look)


def refuse(section: str, bench: Bench) -> None:
    """Raise UserError where ranks, device, flags or machine don't allow a section."""
    topology, settings = bench.topology, bench.settings
    if section == "model" and topology.num_nodes == 1:
        raise UserError("model needs 2 or more nodes; on one machine give --ranks-per-node 1")
    if section == "ddp" and bench.device.type != "cpu":
        raise UserError("ddp is measured on the CPU, where gloo is at home; give --device cpu")
    if section == "memory" and "coupled" in settings.groups:
        raise UserError(
            "bench memory replaces the network's forward pass, which coupled groups are read from; "
            "give other --groups"
        )
    if section == "checkpoint":
        if shutil.which("dd") is None:
            raise UserError("checkpoint is measured against dd, which is not here; name the others")
        if topology.world.rank == 0:
            os.rmdir(storage.make_folder(bench.folder))


def _networks(sections: Sequence[str], bench: Bench) -> Iterator[tuple[Settings, tuple[int, int]]]:
    """Yield what is built: settings, and classes and pixels of a side."""
    given, whole = bench.settings, (NUM_CLASSES, IMAGE_SIZE)
    trained = [with_overrides(given, model=name) for name in bench.models]
    for section in sections:
        match section:
            case "kernels" | "memory" | "collectives":
                yield given, whole
            case "checkpoint":
                yield given, (NUM_CLASSES, storage.CHECKPOINT_IMAGE_SIZE)
            case "overhead":
                # On several ranks phase 2 alone is measured, which is not trained.
                size = SMALL if bench.topology.world_size == 1 else whole
                yield from ((s, size) for s in trained)
            case "ddp":
                pruned = {**beside_torch.PRUNED, "keep_ratio": given.keep_ratio}
                yield from ((with_overrides(s, **pruned), SMALL) for s in trained)
            case "model":
                small = [with_overrides(given, model=name) for name in communication.SMALL]
                yield from ((s, whole) for s in (*small, given, *trained))
            case "data":
                with closing(storage.find_images(given)) as images:
                    size = images.num_classes, images.image_size
                yield from ((s, size) for s in trained)
