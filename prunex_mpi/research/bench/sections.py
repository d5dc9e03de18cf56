"""Measure the sections of the benchmark one after the other and print their tables."""

from mpi4py import MPI

from prunex_mpi.base.files import prepare_file, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table, as_json, format_table
from prunex_mpi.comm.agreement import together
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.research.bench.bench_options import Options, choose_sections
from prunex_mpi.run.start import Place, find_transport, refuse_lone_singleton, take_places


def bench(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> int:
    """Measure and print, and beat as that goes on; only world rank 0 prints and writes.

    Collective on `world`.
    """
    refuse_lone_singleton(world)
    settings = options.settings
    sections = choose_sections(options.sections, world.size) if not options.child else ()
    with take_places(world, settings.ranks_per_node, settings.device, options.threads) as place:
        transport = find_transport(place, settings)
        if options.child:
            run_child(place, transport, options, heartbeat)
            return 0
        # A process whose memory is measured loads nothing more.
        from prunex_mpi.research.bench.possible import refuse_impossible

        together(
            world, lambda: prepare_file("json", options.json_file) if world.rank == 0 else None
        )
        heartbeat.enter("model")
        refuse_impossible(place, sections, options, heartbeat)

        machine = place.describe()
        if world.rank == 0:
            print("\n".join(machine.values()), flush=True)
        tables = []
        for section in sections:
            heartbeat.enter(section)
            found = measure(section, place, transport, options, heartbeat)
            tables += found
            for table in found if world.rank == 0 else ():
                print(f"\n{format_table(table)}", flush=True)
        if world.rank == 0 and options.json_file:
            write_json(options.json_file, as_json(machine, tables))
    return 0


def run_child(place: Place, transport: Transport, options: Options, heartbeat: Heartbeat) -> None:
    """Do what `memory` has started this job for; rank 0 prints the answer. Collective."""
    from prunex_mpi.research.bench.memory import child

    topology, settings = place.topology, options.settings
    answer = together(
        topology.world,
        lambda: child(topology, settings, transport, place.device, options.child, heartbeat),
    )
    if topology.world.rank == 0:
        print(answer, flush=True)


def measure(
    section: str, place: Place, transport: Transport, options: Options, heartbeat: Heartbeat
) -> list[Table]:
    """Return the tables of one section. Collective on `world`."""
    topology, device, settings = place.topology, place.device, options.settings
    models, steps, repeat = options.train_models, options.steps, options.repeat
    where = topology, settings, transport, device
    # Imported one by one: `memory` measures what a process takes that has loaded nothing more.
    match section:
        case "kernels":
            from prunex_mpi.research.bench.block_codes import block_codes
            from prunex_mpi.research.bench.kernels import kernels

            tables = kernels(*where, repeat, heartbeat)
            return [*tables, block_codes(device, repeat, heartbeat)]
        case "overhead":
            from prunex_mpi.research.bench.overhead import inside_nodes, overhead

            if topology.world_size > 1:
                return inside_nodes(*where, models, repeat, heartbeat)
            return overhead(*where, models, steps, heartbeat)
        case "memory":
            from prunex_mpi.research.bench.memory import memory

            return memory(settings, device, place.threads, heartbeat)
        case "data":
            from prunex_mpi.research.bench.storage import data

            return data(*where, models, repeat, heartbeat)
        case "collectives":
            from prunex_mpi.research.bench.communication import collectives

            return collectives(*where, repeat, heartbeat)
        case "checkpoint":
            from prunex_mpi.research.bench.checkpoint import checkpoints

            return checkpoints(*where, repeat, options.folder, heartbeat)
        case "model":
            from prunex_mpi.research.bench.model import model

            return model(*where, models, repeat, heartbeat)
        case _:
            from prunex_mpi.research.bench.beside_torch import compare_with_ddp
            from prunex_mpi.research.bench.intervals import intervals

            what = *where, models, steps, repeat, heartbeat
            return [*compare_with_ddp(*what), intervals(*what)]
