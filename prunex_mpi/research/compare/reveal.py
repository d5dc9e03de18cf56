"""The last pass of a comparison: its networks are tested on the test images, once.

`reveal.json` in the folder of the runs says of which plan, when, and of which networks. It is
written before the first test image is read; from then on the plan, its runs and its choices stay.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import read_text, telling_disk_errors, write_json_durably
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import broadcast_json, broadcast_text, run_collectively, run_on_first
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.data import digest_of_images
from prunex_mpi.research.compare.outcomes import Outcome, Quality
from prunex_mpi.research.compare.plan import named
from prunex_mpi.run.directory import read_summary
from prunex_mpi.run.start import Place
from prunex_mpi.settings.fields import TEXT
from prunex_mpi.tools.evaluate_network import (
    Network,
    judge,
    judge_text,
    load_images,
    read_network,
    read_text_for,
)
from prunex_mpi.tools.evaluate_options import BATCH

REVEAL = "reveal.json"


def read_reveal(world: MPI.Comm, options: Options) -> dict[str, Any]:
    """Return what `reveal.json` says, {} where the plan is not revealed.

    Raises UserError on every rank where another plan was, or this one not to its end and that is
    not asked for. Collective on `world`.
    """

    def read() -> dict[str, Any]:
        if not options.folder:
            return {}
        file = Path(options.folder) / REVEAL
        try:
            found = json.loads(read_text(file))
            plan, at, results = (found[key] for key in ("plan", "at", "results"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError):
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

    return broadcast_json(world, run_on_first(world, read))


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
        found = _networks(options, names)
        if before and before["networks"] != found:
            raise UserError(
                f"--reveal was done at {before['at']} with other networks; what is changed after "
                "that begins anew: choose another --dir"
            )
        return found

    networks = broadcast_json(world, run_on_first(world, look))
    if before.get("results"):
        log.info("the test data were looked at %s, and are not again", before["at"])
        return before
    # What can't be read is told while there is time to put it back.
    for name in networks:
        _read(world, options, name, heartbeat)
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = before or {"plan": options.plan, "at": at, "networks": networks, "results": {}}
    _write(world, options, found)
    found["results"], found["images"] = _test(place, options, list(networks), heartbeat)
    _write(world, options, found)
    return broadcast_json(world, found)


def name_of(options: Options, run: Outcome) -> str:
    """Return the name of the folder that has the network of a run."""
    return next(row for row in options.rows if row.name == run.row).run_name(run.seed)


def tested(
    options: Options, outcomes: Sequence[Outcome], found: Mapping[str, Any]
) -> tuple[Outcome, ...]:
    """Return the outcomes with what was `found` of their networks on the test images."""
    return tuple(
        replace(run, test=Quality(**found["results"][name_of(options, run)]))
        if run.measured
        else run
        for run in outcomes
    )


def _networks(options: Options, names: Sequence[str]) -> dict[str, int]:
    """Return the checksum of each network; raise UserError where one is missing."""
    found = {}
    for name in names:
        folder = Path(options.folder) / name
        summary = read_summary(folder)
        if "delivered" not in summary:
            raise UserError(f"{folder} has no network any more; train it again", UNREADABLE)
        found[name] = int(summary["delivered"]["crc32"])
    return found


def _read(world: MPI.Comm, options: Options, name: str, heartbeat: Heartbeat) -> Network:
    """Return a network, of which the plan may name the model. Collective on `world`."""
    given = named("model", options.common, options.rows)
    heartbeat.enter("model")
    return run_collectively(world, lambda: read_network(Path(options.folder) / name, given))


def _test(
    place: Place, options: Options, names: Sequence[str], heartbeat: Heartbeat
) -> tuple[dict[str, Any], str]:
    """Return how good each network is, and what tells its images apart. Collective on `world`."""
    world, results = place.topology.world, {}
    dataset, told = None, ""
    text, read = None, ()
    for name in names:
        network = _read(world, options, name, heartbeat)
        moved = {key: options.common[key] for key in ("data_dir",) if key in options.common}
        data = {**network.data, **moved}
        if data["dataset"] == TEXT:
            # The vocabulary tells the tokenizer, too.
            if (data["data_dir"], network.classes) != read:
                text = read_text_for(place, network, data, heartbeat)
                read = data["data_dir"], network.classes
            samples = data["test_samples"]
            found = judge_text(place, network, text, samples, BATCH, heartbeat)
            results[name] = _quality_of(found)
            continue
        if dataset is None:
            dataset = load_images(place, network, data, heartbeat, mode="auto")
            first = digest_of_images(dataset.test, 1)
            told = broadcast_text(world, f"{dataset.test_total} {dataset.digest} {first}")
        found = judge(place, network, dataset, BATCH, heartbeat)
        results[name] = _quality_of(found)
    for name, quality in results.items():
        log.info("%s: %.4g on the test set", name, Quality(**quality).shown)
    if dataset is not None:
        dataset.close()
    return results, told


def _quality_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return asdict(Quality(found.get("accuracy"), found["loss"]))


def _write(world: MPI.Comm, options: Options, found: Mapping[str, Any]) -> None:
    file = Path(options.folder) / REVEAL
    write = partial(write_json_durably, file, dict(found))
    run_on_first(world, lambda: telling_disk_errors(REVEAL, write))
