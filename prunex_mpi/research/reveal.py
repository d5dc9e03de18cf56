"""The last pass of a comparison: its networks are tested on the test data, once.

`reveal.json` in the folder of the runs says of which plan, when, and of which networks. It is
written before the first test datum is read; from then on the plan, its runs and its choices stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import read_json, telling_disk_errors, write_json_durably
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import broadcast_json, run_collectively, run_on_root
from prunex_mpi.research.plan import Options
from prunex_mpi.run.directory import read_summary
from prunex_mpi.run.start import Place
from prunex_mpi.settings.fields import TEXT
from prunex_mpi.tools.evaluate_network import (
    Network,
    evaluate_images,
    evaluate_text,
    load_images,
    read_network,
    read_text_for,
)
from prunex_mpi.tools.evaluate_options import BATCH
from prunex_mpi.tools.report.comparison import Outcome, Quality

REVEAL = "reveal.json"


def read_reveal(world: MPI.Comm, options: Options) -> dict[str, Any]:
    """Return what `reveal.json` says, {} where the plan is not revealed.

    Raises UserError on every rank where another plan was, or this one not to its end and that is
    not asked for. Collective on `world`.
    """

    def read() -> dict[str, Any]:
        file = Path(options.folder) / REVEAL
        try:
            found = read_json(file)
            plan, at, results = (found[key] for key in ("plan", "at", "results"))
            if not isinstance(found["networks"], dict):
                raise ValueError
            for quality in results.values():
                Quality(**quality)
        except FileNotFoundError:
            return {}
        except (AttributeError, OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{file} can't be read; choose another --dir", UNREADABLE) from None
        if plan != options.plan:
            raise UserError(
                f"--dir {quote(options.folder, 250)}: another plan ({plan}, here {options.plan}) "
                f"was revealed there at {at}: what is changed after that begins anew; choose "
                "another --dir"
            )
        if not (results or options.reveal):
            raise UserError(f"{file}: a --reveal did not come to its end; finish it with --reveal")
        return found

    return broadcast_json(world, run_on_root(world, read))


def reveal(
    place: Place, options: Options, outcomes: Sequence[Outcome], heartbeat: Heartbeat
) -> dict[str, Any]:
    """Test the networks of these runs, unless that was done; return what `reveal.json` says.

    Raises UserError on every rank where other networks were tested. Collective on `world`.
    """
    world = place.topology.world
    before = read_reveal(world, options)
    names = [name_of(options, run) for run in outcomes if run.measured]

    def look() -> dict[str, int]:
        found = {name: checksum(Path(options.folder) / name) for name in names}
        if before and before["networks"] != found:
            raise UserError(
                f"--reveal was done at {before['at']} with other networks; what is changed after "
                "that begins anew: choose another --dir"
            )
        return found

    networks = broadcast_json(world, run_on_root(world, look))
    if before.get("results"):
        log.info("the test data were looked at %s, and are not again", before["at"])
        return before
    # What can't be read is told while there is time to put it back.
    for name in names:
        read_delivered(world, options, name, heartbeat)
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = before or {"plan": options.plan, "at": at, "networks": networks, "results": {}}

    def write() -> None:
        note = partial(write_json_durably, Path(options.folder) / REVEAL, found)
        telling_disk_errors(REVEAL, note)

    run_on_root(world, write)
    found = broadcast_json(world, found)
    found["results"] = test_all(place, options, names, heartbeat)
    run_on_root(world, write)
    return found


def name_of(options: Options, run: Outcome) -> str:
    """Return the name of the folder that has the network of a run."""
    row = next(row for row in options.rows if row.name == run.row)
    return options.run_of(row, run.seed).name


def checksum(path: Path) -> int:
    """Return the checksum of the network of a run; raise UserError where it is missing."""
    summary = read_summary(path)
    if "delivered" not in summary:
        raise UserError(f"{path} has no network any more; train it again", UNREADABLE)
    return int(summary["delivered"]["crc32"])


def tested(
    options: Options, outcomes: Sequence[Outcome], found: Mapping[str, Any]
) -> list[Outcome]:
    """Return the outcomes with what was `found` of their networks on the test data."""
    return [
        replace(run, test=Quality(**found["results"][name_of(options, run)]))
        if run.measured
        else run
        for run in outcomes
    ]


def read_delivered(world: MPI.Comm, options: Options, name: str, heartbeat: Heartbeat) -> Network:
    """Return a network, of which the plan may name the model. Collective on `world`."""
    heartbeat.enter("model")
    folder, given = Path(options.folder) / name, options.named("model")
    return run_collectively(world, lambda: read_network(folder, given))


def test_all(
    place: Place, options: Options, names: Sequence[str], heartbeat: Heartbeat
) -> dict[str, Any]:
    """Return how good each network is on the test data. Collective on `world`."""
    world, results = place.topology.world, {}
    images, texts = None, {}
    for name in names:
        network = read_delivered(world, options, name, heartbeat)
        moved = {key: options.common[key] for key in ("data_dir",) if key in options.common}
        data = {**network.data, **moved}
        if data["dataset"] == TEXT:
            # All read the same text; the vocabulary tells the tokenizer, too.
            key = network.classes
            if key not in texts:
                texts = {key: read_text_for(place, network, data, heartbeat)}
            samples = data["test_samples"]
            found = evaluate_text(place, network, texts[key], samples, BATCH, heartbeat)
        else:
            images = images or load_images(place, network, data, heartbeat, mode="auto")
            found = evaluate_images(place, network, images, BATCH, heartbeat)
        quality = Quality(found.get("accuracy"), found["loss"])
        log.info("%s: %.4g on the test set", name, quality.shown)
        results[name] = asdict(quality)
    if images is not None:
        images.close()
    return results
