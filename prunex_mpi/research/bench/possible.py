"""Refuse what can't be measured here, before minutes are spent on the rest."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import together
from prunex_mpi.core.problem import make_groups, make_model
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.bench import beside_torch as ddp
from prunex_mpi.research.bench import checkpoint, model
from prunex_mpi.research.bench.bench_options import Options
from prunex_mpi.research.bench.intervals import PRUNED
from prunex_mpi.research.bench.kernels import IMAGE_SIZE, NUM_CLASSES
from prunex_mpi.research.bench.storage import find_images
from prunex_mpi.run.start import Place
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import with_overrides

# What is trained on, classes and pixels of a side, where nobody has chosen it.
SMALL = NUM_CLASSES, ddp.IMAGE_SIZE


def refuse_impossible(
    place: Place, sections: Sequence[str], options: Options, heartbeat: Heartbeat
) -> None:
    """Raise UserError unless all `sections` can be measured. Collective on `world`.

    That is: their networks can be built and divided into groups, and what each of them needs is
    there.
    """

    def look() -> None:
        for section in sections:
            refuse(section, place, options)
        # A few sections take the same networks.
        for settings, size in dict.fromkeys(_networks(sections, place, options)):
            heartbeat.go_on()
            try:
                network = make_model(settings, *size)
                make_groups(settings, network, build_layout(network), size[1])
            except UserError as error:
                raise UserError(f"model {settings.model}: {error}", error.exit_code) from None

    together(place.topology.world, look)


def refuse(section: str, place: Place, options: Options) -> None:
    """Raise UserError where ranks, device, flags or machine don't allow a section."""
    topology, settings = place.topology, options.settings
    if section == "model" and topology.num_nodes == 1:
        raise UserError("model needs 2 or more nodes; on one machine give --ranks-per-node 1")
    if section == "ddp" and place.device.type != "cpu":
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
            os.rmdir(checkpoint.make_folder(options.folder))


def _networks(
    sections: Sequence[str], place: Place, options: Options
) -> Iterator[tuple[Settings, tuple[int, int]]]:
    """Yield what is built: settings, and classes and pixels of a side."""
    given, whole = options.settings, (NUM_CLASSES, IMAGE_SIZE)
    trained = [with_overrides(given, model=name) for name in options.train_models]
    for section in sections:
        match section:
            case "kernels" | "memory" | "collectives":
                yield given, whole
            case "checkpoint":
                yield given, (NUM_CLASSES, checkpoint.IMAGE_SIZE)
            case "overhead":
                # On several ranks phase 2 alone is measured, which is not trained.
                size = SMALL if place.topology.world_size == 1 else whole
                yield from ((s, size) for s in trained)
            case "ddp":
                pruned = {**PRUNED, "keep_ratio": given.keep_ratio}
                yield from ((with_overrides(s, **pruned), SMALL) for s in trained)
            case "model":
                small = [with_overrides(given, model=name) for name in model.SMALL]
                yield from ((s, whole) for s in (*small, given, *trained))
            case "data":
                with closing(find_images(given)) as images:
                    size = images.num_classes, images.image_size
                yield from ((s, size) for s in trained)
