"""Train with one method after the other on the same ranks, samples and links; print one comparison.

First the settings that a plan leaves open are chosen: every row has the same number of trials, of
the same share of its length, and the best by the data held out is taken. Then all rows are trained:
seeds are the outer loop and rows the inner one, so that a machine which changes its pace in the
course of hours meets all rows alike. Each run is an ordinary one in a folder of its own, which goes
on from its checkpoints; one that diverges or fails is a row that says so. No run opens test data;
what does is the last pass of `--reveal`, when all runs are there. `reveal.json` in their folder
says of which plan, when, and of which networks. It is written before the first test datum is read;
from then on the plan, its runs and its choices stay.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.errors import (
    FAILURE,
    PREEMPTED,
    UNREADABLE,
    Diverged,
    UserError,
    log,
    quote,
    set_up_logging,
)
from prunex_mpi.base.files import (
    DIVERGED,
    read_json,
    telling_disk_errors,
    write_json,
    write_json_durably,
)
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import ReceivedSignal, catching
from prunex_mpi.base.tables import as_json, format_table
from prunex_mpi.comm.agreement import (
    broadcast_json,
    broadcast_text,
    require_same,
    run_collectively,
    run_collectively_while,
    run_on_root,
)
from prunex_mpi.config.cli import read_saved, resumed_by_tokenizer, shown
from prunex_mpi.config.resolve import FIELDS, first_difference, flat_values
from prunex_mpi.core.mask_choice import try_groups
from prunex_mpi.core.schedule import steps_with, total_steps
from prunex_mpi.data.request import Request
from prunex_mpi.data.text import TextSet
from prunex_mpi.diagnosis.devices import recorded_versions, resolve_mpi_buffers
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.plan import OWN_LENGTH, Options, Row, Run
from prunex_mpi.run import job
from prunex_mpi.run.directory import COMPLETE, new_folder, read_summary
from prunex_mpi.run.problem import load_dataset, make_model
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import Place, check_launched_together, take_places
from prunex_mpi.settings.fields import OF_THE_JOB, TEXT, Settings, key_of
from prunex_mpi.settings.values import left_open
from prunex_mpi.tools.evaluate_network import (
    Network,
    evaluate_images,
    evaluate_text,
    load_images,
    read_network,
    read_text_for,
)
from prunex_mpi.tools.evaluate_options import BATCH
from prunex_mpi.tools.report.comparison import (
    Comparison,
    Outcome,
    Quality,
    Tuning,
    outcome_from,
    read_measured,
)
from prunex_mpi.tools.report.comparison_tables import tables_of
from prunex_mpi.tools.report.read_runs import how_it_ended

REVEAL = "reveal.json"
# Of the weights that a run begins with and learns from; a run fills them in.
DIGESTS = ("init_digest", "teacher_digest")


@dataclass(frozen=True)
class Data:
    """What a comparison knows of its data; `digest` tells others apart."""

    train_total: int
    val_total: int
    digest: str


# --------------------------------------------------------------------------------------------------
# All of it, in the order in which it happens
# --------------------------------------------------------------------------------------------------


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare; world rank 0 prints and writes. Collective on `world`."""
    if not options.folder:
        name = f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = broadcast_text(world, "" if world.rank else new_folder(name))
        options = replace(options, folder=folder)
    with catching() as received:
        received.quiet = world.rank > 0
        found = run_all(world, options, received)
    run_on_root(world, lambda: show(options, found))
    # Nobody leaves while another may still need the job.
    world.Barrier()
    return FAILURE if any(run.failed for run in found.outcomes) else 0


def show(options: Options, found: Comparison) -> None:
    """Print and write; raise UserError."""
    tables = tables_of(found)
    # First of all: who reads the text through a pipe may close it.
    if options.json_file:
        whole = as_json(dict(found.machine), tables) | {"comparison": asdict(found)}
        write_json(options.json_file, whole)
    text = "\n\n".join(["\n".join(found.machine.values()), *map(format_table, tables)])
    print(text, flush=True)


def run_all(world: MPI.Comm, options: Options, received: ReceivedSignal) -> Comparison:
    """Tune and run all rows of this job's part. Collective on `world`."""
    set_up_logging(world.rank, world.size)
    check_launched_together(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    run_on_root(world, lambda: prepare(options))
    revealed = read_reveal(world, options)
    first = options.run_of(options.rows[0], options.seeds[0]).settings
    with take_places(world, options.common.get("ranks_per_node", 0), first.device) as place:
        log.info("%s; runs in %s", place.layout, options.folder)
        with watched(world, first.timeout) as watchdog:
            data = look_at_data(place, options, watchdog.heartbeat)
        closed = options.reveal or bool(revealed)
        do = partial(do_run, place, options, data=data, received=received, revealed=closed)
        tuned = options.rows if options.protocol.tunes else ()
        tunings = [Tuning(row.name, tuple(map(do, options.trials_of(row)))) for row in tuned]
        chosen = {tuning.row: tuning for tuning in tunings}
        pairs = [(row, seed) for seed in options.seeds for row in options.rows]
        outcomes = [confirm(options, do, row, seed, chosen.get(row.name)) for row, seed in pairs]
        if options.reveal:
            with watched(world, first.timeout) as watchdog:
                revealed = reveal(place, options, outcomes, watchdog.heartbeat)
        if revealed:
            outcomes = tested(options, outcomes, revealed)
        protocol = {**asdict(options.protocol), "length": str(options.protocol.length)}
        return Comparison(
            title=title_of(first, place, data),
            machine=machine_of(place, first),
            rows=tuple(row.name for row in options.rows),
            seeds=options.seeds,
            tunings=tuple(tunings),
            outcomes=tuple(outcomes),
            notes=tuple(notes_of(options, place)),
            plan=options.plan,
            protocol={**protocol, "validation": first.val_split},
            revealed=revealed.get("at", ""),
        )


def machine_of(place: Place, first: Settings) -> dict[str, str]:
    """Return what a comparison names its machine by; on a CPU there is one kind of buffers.

    Collective on `world`.
    """
    asked = first.mpi_buffers, place.device, first.timeout
    buffers, _ = resolve_mpi_buffers(place.topology, *asked)
    named = {"buffers": f"MPI buffers on the {buffers}"}
    return place.describe() | (named if place.device.type != "cpu" else {})


def title_of(first: Settings, place: Place, data: Data) -> str:
    """Return what a comparison is of, whose first row has these settings."""
    topology = place.topology
    return (
        f"Comparison: {first.model}, {first.dataset}, {data.train_total:,} to train on and "
        f"{data.val_total:,} held out, {topology.world_size} ranks on "
        f"{topology.num_nodes} nodes, batch {first.batch_size} per rank"
    )


def notes_of(options: Options, place: Place) -> list[str]:
    """Return what tables say of how settings were chosen, and of lengths."""
    protocol = options.protocol
    notes = ["settings as the rows give them; nothing was tuned"]
    if protocol.tunes:
        notes = [
            f"each row: the best of {protocol.trials} trials of {protocol.length} of its length, "
            f"seed {protocol.tune_seed}, by the data held out"
        ]
    if place.topology.num_nodes == 1:
        notes.append("one node: nothing leaves the machine; see --ranks-per-node")
    return notes


# Trains a run of the plan to its end, unless that is done. Collective on `world`.
Do = Callable[[Run], Outcome]


def confirm(options: Options, do: Do, row: Row, seed: int, tuning: Tuning | None) -> Outcome:
    """Train a row with one seed at the best point of its grid, if there is one.

    Collective on `world`.
    """
    if tuning is None:
        return do(options.run_of(row, seed))
    failed = any(run.failed for run in tuning.runs)
    if not failed and tuning.best is not None:
        return do(options.run_of(row, seed, tuning.best))
    problem = "a trial failed, so nothing is chosen" if failed else "diverged in every trial"
    lr = options.run_of(row, seed).settings.lr
    return Outcome(row.name, seed, lr, None, problem, failed=failed)


# --------------------------------------------------------------------------------------------------
# Before anything is trained: hours later would be late
# --------------------------------------------------------------------------------------------------


def has_ended(path: Path) -> bool:
    """Return whether a run has come to its end, or diverged; raise UserError."""
    return (path / DIVERGED).exists() or read_summary(path).get("status") in COMPLETE


def prepare(options: Options) -> None:
    """Raise UserError unless --dir can be written.

    Runs that are there already are gone on with or refused.
    """
    folder, where = Path(options.folder), f"--dir {quote(options.folder, 250)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None
    for run in options.all_runs():
        if (folder / run.name).exists() and not options.resume:
            raise UserError(
                f"{where}: {run.name} is there already; --resume goes on with it, or choose another"
            )


def look_at_data(place: Place, options: Options, heartbeat: Heartbeat) -> Data:
    """Load the data, without those to test on, and refuse rows that can't be trained on them.

    Raises UserError on every rank. Collective on `world`.
    """
    heartbeat.enter("data")
    first = options.run_of(options.rows[0], options.seeds[0]).settings
    with closing(load_dataset(place.topology, Request.of(first), heartbeat)) as dataset:
        text = isinstance(dataset, TextSet)
        size, inputs = len(dataset.train) if text else len(dataset.train.labels), dataset.sizes()
        check = partial(check_rows, options, size, inputs_from(inputs))
        run_collectively(place.topology.world, check)
        return Data(dataset.train_total, dataset.val_total, dataset.digest)


def check_rows(options: Options, size: int, inputs: Any) -> None:
    """Raise UserError for rows whose network can't be, or that are trained less long than others.

    `size` are the samples of this rank; how many whole steps epochs make is known with them alone.
    """
    trained: dict[str, int] = {}
    for row in options.rows:
        found = [
            options.run_of(row, options.seeds[0], number).settings
            for number in range(len(row.points))
        ]
        counts = [total_steps(s, steps_with(s, size)) * min(s.batch_size, size) for s in found]
        if len({*counts}) > 1:
            raise UserError(
                f"row {row.name}: trials must be trained on as many samples, and those of its grid "
                f"have {min(counts):,} to {max(counts):,} per rank; give what changes that "
                "(outer-iterations, steps, epochs, batch-size) beside the grid"
            )
        if not row.own_length:
            trained[row.name] = counts[0]
        try:
            model = make_model(found[0], inputs)
            try_groups(found[0], model, build_layout(model), inputs)
        except UserError as error:
            raise UserError(f"row {row.name}: {error}", error.exit_code) from None
    if len({*trained.values()}) > 1:
        least, most = min(trained, key=trained.get), max(trained, key=trained.get)
        raise UserError(
            f"rows must be trained on as many samples: {least} has {trained[least]:,} and {most} "
            f"{trained[most]:,} per rank; change outer-iterations, local-steps or local-epochs of "
            f"one, or give it {OWN_LENGTH} = true"
        )


# --------------------------------------------------------------------------------------------------
# One run
# --------------------------------------------------------------------------------------------------


def do_run(
    place: Place,
    options: Options,
    run: Run,
    data: Data,
    received: ReceivedSignal,
    revealed: bool,
) -> Outcome:
    """Train a run to its end, unless that is done, and return what came of it.

    One that fails ends no other one: it goes on where the comparison does. Raises UserError where
    the folder has another run, where the job is asked to stop, and for what is missing of a plan
    that is `revealed` or about to be. Collective on `world`.
    """
    world, path = place.topology.world, Path(options.folder) / run.name
    point = {key_of(key): _json_value(key, value) for key, value in run.point.items()}
    outcome = Outcome(run.row.name, run.settings.seed, run.settings.lr, None, "", point)
    with watched(world, run.settings.timeout) as watchdog:
        heartbeat = watchdog.heartbeat
        settings = run_collectively(world, lambda: settings_in(path, run))
        if not broadcast_json(world, run_on_root(world, lambda: has_ended(path))):
            if revealed:
                raise UserError(
                    f"--reveal: the run {run.name} is missing in {quote(options.folder, 250)}: "
                    "before, train it with --resume; after, put it back, or choose another --dir"
                )
            log.info("%s: learning rate %g", run.name, settings.lr)
            try:
                # What is printed are the tables of the comparison.
                with redirect_stdout(sys.stderr):
                    code = job.run(world, settings, watchdog, received)
            except Diverged as error:
                log.info("%s: diverged: %s", run.name, error)
            except UserError as error:
                log.warning("%s: %s", run.name, error)
                return replace(outcome, problem=f"failed: {error}", failed=True)
            else:
                if code == PREEMPTED:
                    raise UserError(
                        f"stopped: go on with --resume --dir {options.folder}", PREEMPTED
                    )
        heartbeat.enter("finish")

        def read() -> dict[str, Any]:
            return {} if world.rank else asdict(read_outcome(path, place, data, outcome))

        found = run_collectively_while(world, read, heartbeat)
        return outcome_from(broadcast_json(world, found))


def settings_in(path: Path, run: Run) -> Settings:
    """Return the settings with which a run begins, or goes on, in the folder `path`.

    Raises UserError where another run has it.
    """
    settings = replace(run.settings, run_dir=str(path), resume=True)
    if not (path / "config.toml").exists():
        return settings
    saved, requested = read_saved(str(path))
    other = first_difference({**saved, **dict.fromkeys(DIGESTS, ""), **requested}, settings)
    if other is not None:
        raise UserError(
            f"{quote(str(path), 250)} is of a run with another {other}; remove it, or choose "
            "another --dir"
        )
    of_job = {n: value for n, value in flat_values(settings).items() if n in OF_THE_JOB}
    return resumed_by_tokenizer(saved, of_job, requested)


def read_outcome(path: Path, place: Place, data: Data, outcome: Outcome) -> Outcome:
    """Return the outcome of a run that has ended; of a complete one remove the checkpoints.

    Raises UserError where its files can't be read, and for one of other ranks or other data.
    """
    summary = read_summary(path)
    if not summary:
        return replace(outcome, problem=how_it_ended(path, summary)[1])
    for what, there, here in (
        ("ranks on nodes", summary.get("nodes"), list(place.topology.node_sizes)),
        ("data", summary.get("delivered", {}).get("data"), data.digest),
    ):
        if there != here:
            raise UserError(
                f"{quote(str(path), 250)} is of a run with other {what} ({there}; here {here}); "
                "choose another --dir"
            )
    measured = read_measured(path)
    if (path / "checkpoints").exists():
        with telling_disk_errors(f"the checkpoints of {path}"):
            shutil.rmtree(path / "checkpoints")
    log.info("%s: %.4g on data held out", path.name, measured.shown)
    return replace(outcome, measured=measured)


def _json_value(name: str, value: object) -> float | str:
    """Return a value of a grid, of the setting `name`, as JSON holds it."""
    number = type(value) in (int, float) and not left_open(FIELDS[name], value)
    return value if number else shown(name, value)


# --------------------------------------------------------------------------------------------------
# The last pass: what is delivered is tested on the test data, once
# --------------------------------------------------------------------------------------------------


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

    @telling_disk_errors(REVEAL)
    def write() -> None:
        write_json_durably(Path(options.folder) / REVEAL, found)

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
