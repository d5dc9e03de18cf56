"""The runs of a comparison: each is an ordinary run in a directory of its own, read when it ended.

A run goes on from its own checkpoints. Of its directory `config.toml`, `summary.json` or
`diverged.json`, `metrics.jsonl` and `ranks.jsonl` are read, and `network.json`, which the
comparison adds: the zeros of the delivered network, and how fast it is without them.
"""

import copy
import json
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import PREEMPTED, UNREADABLE, Diverged, UserError, listed, quote
from prunex_mpi.base.files import (
    DIVERGED,
    METRICS,
    RANKS,
    STATE,
    prepare_file,
    telling_disk_errors,
    write_json_durably,
)
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import (
    broadcast_json,
    run_collectively,
    run_collectively_while,
    run_on_first,
)
from prunex_mpi.config.cli import read_saved, resumed_by_tokenizer
from prunex_mpi.config.resolve import FIELDS, first_difference, flat_values
from prunex_mpi.core.state import every_rank_sends
from prunex_mpi.methods.exchanges import operations_of
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.layout import trained_parameters
from prunex_mpi.models.trained import digest_of as digest_of_file
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.data import Data
from prunex_mpi.research.compare.outcomes import Measured, Outcome, Point, outcome_from
from prunex_mpi.research.compare.plan import BY_SEED, Row, digest_of, name_seed, named, settings_of
from prunex_mpi.run import job
from prunex_mpi.run.directory import COMPLETE, read_summary
from prunex_mpi.run.finished_run import FinishedRun, read_finished_run
from prunex_mpi.run.pretrained import TORCHVISION
from prunex_mpi.run.problem import make_model
from prunex_mpi.run.program import watched
from prunex_mpi.settings.fields import OF_THE_JOB, Settings, key_of
from prunex_mpi.settings.values import left_open
from prunex_mpi.tools.export_run import smaller
from prunex_mpi.tools.timing import Action, wall_times

NETWORK = "network.json"
# Of the weights that a run begins with and learns from; a run fills them in.
DIGESTS = {"init_from": "init_digest", "teacher": "teacher_digest"}
FORWARD_TURNS = 15
# Of a network that was not timed.
UNTIMED = {"forward_s": 0.0, "dense_forward_s": 0.0, "forward_spread": 0.0}


@dataclass(frozen=True)
class Run:
    """A run of the plan, in the folder `name`; `timed` says that its network is timed as well."""

    name: str
    row: Row
    point: Mapping[str, Any]
    settings: Settings
    timed: bool


def trial_of(options: Options, row: Row, number: int) -> Run:
    """Return the trial of a row at point `number` of its grid."""
    seed, point = options.protocol.tune_seed, row.points[number]
    settings = settings_of(options.common, row, seed, point, options.tuning_length)
    # Timing takes longer than a short trial trains.
    return Run(f"{row.folder}-trial-{number}", row, point, settings, False)


def run_of(options: Options, row: Row, seed: int, number: int = 0) -> Run:
    """Return the run of a row with one seed at point `number` of its grid."""
    point = row.points[number]
    settings = settings_of(options.common, row, seed, point, options.length)
    return Run(row.run_name(seed), row, point, settings, True)


def trials_of(options: Options, row: Row) -> list[Run]:
    """Return all trials of a row, none where nothing is tuned."""
    return [trial_of(options, row, n) for n in range(len(row.points)) if options.tunes]


def has_ended(path: Path) -> bool:
    """Return whether a run has come to its end, or diverged; raise UserError."""
    return (path / DIVERGED).exists() or read_summary(path).get("status") in COMPLETE


# --------------------------------------------------------------------------------------------------
# Before anything is trained: hours later would be late
# --------------------------------------------------------------------------------------------------


def prepare(options: Options) -> None:
    """Raise UserError unless all can be written that --json and --dir name.

    Runs that are there already are gone on with or refused.
    """
    prepare_file(options.json_file)
    if options.sources:
        return
    folder = Path(options.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir {quote(options.folder, 250)}: {error.strerror}") from None
    for run in all_runs(options) if not options.resume else ():
        if (folder / run.name).exists():
            raise UserError(
                f"--dir {quote(options.folder, 250)}: {run.name} is there already; --resume goes "
                "on with it, or choose another"
            )
    if options.reveal:
        require_all(options)
    check_networks(options)


def all_runs(options: Options) -> list[Run]:
    """Return all trials and runs, in the order in which they are done."""
    trials = [run for row in options.rows for run in trials_of(options, row)]
    return trials + [run_of(options, row, seed) for seed in options.seeds for row in options.rows]


def require_all(options: Options) -> None:
    """Raise UserError unless all runs of the plan have ended."""
    folder = Path(options.folder)
    # Of a row that diverged in every trial there is no run.
    hopeless = [
        row
        for row in options.rows
        if (trials := trials_of(options, row))
        and all((folder / run.name / DIVERGED).exists() for run in trials)
    ]
    missing = [
        run.name
        for run in all_runs(options)
        if not (has_ended(folder / run.name) or run.row in hopeless)
    ]
    if missing:
        raise UserError(
            f"--reveal: {len(missing)} runs of the plan are missing in {quote(options.folder, 250)}"
            f" ({listed(missing)}); train them first, with --resume"
        )


def check_networks(options: Options) -> None:
    """Raise UserError where a network is not there that a run begins with or learns from.

    Runs that have ended need none, and what an earlier run leaves comes.
    """
    to_come: set[Path] = set()
    for run in all_runs(options):
        place = Path(options.folder) / run.name
        for key, path in sources_of(run).items() if not has_ended(place) else ():
            # What a run that ended well has.
            if path.resolve() in to_come or (has_ended(path) if path.is_dir() else path.exists()):
                continue
            raise UserError(
                f"row {run.row.name}, seed {run.settings.seed}: --{key_of(key)} "
                f"{quote(str(path), 250)} is neither a file nor the folder of a complete run; "
                "train it first, or correct the path",
                UNREADABLE,
            )
        to_come.add(place.resolve())


def sources_of(run: Run) -> dict[str, Path]:
    """Return the files and folders that a run begins with or learns from, by field name."""
    settings = name_seed(run.settings)
    found = {key: getattr(settings, key) for key in BY_SEED}
    return {key: Path(path) for key, path in found.items() if path not in ("", TORCHVISION)}


# --------------------------------------------------------------------------------------------------
# Train
# --------------------------------------------------------------------------------------------------


def do(
    world: MPI.Comm,
    options: Options,
    run: Run,
    data: Data,
    received: ReceivedSignal,
    revealed: bool,
) -> Outcome:
    """Train a run to its end, unless that is done, and return what came of it.

    One that fails ends no other one: it goes on where the comparison does. Raises UserError where
    the folder has another run, where the job is asked to stop, and for what is missing of a plan
    that is `revealed`. Collective on `world`.
    """
    path = Path(options.folder) / run.name
    with watched(world, run.settings.timeout) as watchdog:
        heartbeat = watchdog.heartbeat
        settings = run_collectively(world, lambda: settings_in(path, run))
        check = lambda: None if world.rank else check_sources(path, run)  # noqa: E731
        run_collectively_while(world, check, heartbeat)
        if not broadcast_json(world, run_on_first(world, lambda: has_ended(path))):
            if revealed:
                raise UserError(
                    f"the run {run.name} is missing in {quote(options.folder, 250)}, whose plan "
                    "was revealed: put it back, or begin anew with another --dir"
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
                return outcome_of(run, None, f"failed: {error}", failed=True)
            else:
                if code == PREEMPTED:
                    raise UserError(
                        f"stopped: go on with --resume --dir {options.folder}", PREEMPTED
                    )
        heartbeat.enter("finish")
        measure(world, options, run, data, heartbeat)
        read = run_on_first(world, lambda: read_outcome(path, run))
        return outcome_from(broadcast_json(world, read and asdict(read)))


def settings_in(path: Path, run: Run) -> Settings:
    """Return the settings with which a run begins, or goes on, in the folder `path`.

    Raises UserError where another run has it.
    """
    settings = replace(name_seed(run.settings), run_dir=str(path), resume=True)
    if not (path / "config.toml").exists():
        return settings
    saved, asked = read_saved(str(path))
    other = first_difference({**saved, **dict.fromkeys(DIGESTS.values(), ""), **asked}, settings)
    if other is not None:
        raise UserError(
            f"{quote(str(path), 250)} is of a run with another {other}; remove it, or choose "
            "another --dir"
        )
    of_job = {n: value for n, value in flat_values(settings).items() if n in OF_THE_JOB}
    return resumed_by_tokenizer(saved, of_job, asked)


def check_sources(path: Path, run: Run) -> None:
    """Raise UserError where a run began with other weights than are in their file now.

    Of a run that has ended it may be gone.
    """
    if not (path / "config.toml").exists():
        return
    saved, _ = read_saved(str(path))
    for key, source in sources_of(run).items():
        file = source / STATE if source.is_dir() else source
        if file.exists() and digest_of_file(file) != saved[DIGESTS[key]]:
            raise UserError(
                f"{quote(str(path), 250)} is of a run with other weights of {key_of(key)}; remove "
                "it, or choose another --dir"
            )


def measure(world: MPI.Comm, options: Options, run: Run, data: Data, heartbeat: Heartbeat) -> None:
    """Write `network.json` of a complete run that has none, and let its checkpoints go.

    Collective on `world`.
    """
    path = Path(options.folder) / run.name
    if not broadcast_json(world, run_on_first(world, lambda: is_unmeasured(path))):
        return
    given = named("model", options.common, options.rows)

    def read() -> tuple[FinishedRun, nn.Module]:
        found = read_finished_run(path, with_data=False, given=given)
        return found, make_model(found.settings, inputs_from(found.description))

    finished, dense = run_collectively_while(world, read, heartbeat)
    found: dict[str, float] = count_zeros(finished.model, dense)
    if run.timed:
        found |= forward_seconds(world, finished, dense, data, heartbeat)

    def write() -> None:
        if world.rank == 0:
            write_json_durably(path / NETWORK, found)
            if (path / "checkpoints").exists():
                shutil.rmtree(path / "checkpoints")

    run_collectively_while(world, lambda: telling_disk_errors(NETWORK, write), heartbeat)


def is_unmeasured(path: Path) -> bool:
    """Return whether a run has delivered a network that has not been measured."""
    return not (path / DIVERGED).exists() and not (path / NETWORK).exists()


def count_zeros(model: nn.Module, dense: nn.Module) -> dict[str, int]:
    """Return how many parameters of a delivered network are left, and which weights are 0.

    `weights` are the elements of matrices and kernels of the `dense` network, `zeros` those that
    are 0 in `model`, `line_zeros` those of them that fill a row or a column of a layer's
    C_out x (C_in kh kw). What has been taken out of the network was whole lines.
    """
    weights = sum(w.numel() for w in trained_parameters(dense).values() if w.dim() > 1)
    left, taken, zeros, line_zeros = 0, weights, 0, 0
    for weight in trained_parameters(model).values():
        left += int(torch.count_nonzero(weight))
        if weight.dim() < 2:
            continue
        taken -= weight.numel()
        zero = weight.detach().flatten(1) == 0
        lines = zero.all(dim=1, keepdim=True) | zero.all(dim=0, keepdim=True)
        zeros += int(zero.sum())
        line_zeros += int(lines.sum())
    counted = {"weights": weights, "zeros": zeros + taken, "line_zeros": line_zeros + taken}
    return {"parameters_left": left, **counted}


def forward_seconds(
    world: MPI.Comm, finished: FinishedRun, dense: nn.Module, data: Data, heartbeat: Heartbeat
) -> dict[str, float]:
    """Return the seconds of a forward pass of the exported network and of a dense one, in turns.

    Medians; and half the distance of the quartiles of their ratio, as a share of it. All ranks do
    the same at the same time, as in training. Collective on `world`.
    """
    images = data.batch(finished.mean, finished.std, next(dense.parameters()).dtype)
    small = exported(finished.model, images).to(data.device)
    dense, images = dense.to(data.device), images.to(data.device)
    for network in (small, dense):
        network.eval()
    world.Barrier()
    actions = {"exported": Action(lambda: small(images)), "dense": Action(lambda: dense(images))}
    with torch.no_grad():
        times = wall_times(actions, FORWARD_TURNS, data.device, heartbeat, alternate=True)
    quartiles = np.percentile(times["dense"] / times["exported"], [25, 50, 75])
    return {
        "forward_s": float(np.median(times["exported"])),
        "dense_forward_s": float(np.median(times["dense"])),
        "forward_spread": float((quartiles[2] - quartiles[0]) / (2 * quartiles[1])),
    }


def exported(model: nn.Module, images: Tensor) -> nn.Module:
    """Return a copy of `model` as `export` writes it: without the channels that masks removed.

    As it is where nothing can be taken out.
    """
    try:
        return smaller(model, images)
    except UserError as error:
        log.info("inference is measured at full size: %s", error)
        return copy.deepcopy(model)


# --------------------------------------------------------------------------------------------------
# Read
# --------------------------------------------------------------------------------------------------


def outcome_of(
    run: Run, measured: Measured | None, problem: str = "", failed: bool = False
) -> Outcome:
    """Return what came of a run."""
    settings = run.settings
    point = {key_of(key): told_of(key, value) for key, value in run.point.items()}
    digest = "" if failed else digest_of(settings)
    around = settings.seed, settings.lr, measured, problem, digest, point
    return Outcome(run.row.name, *around, failed=failed)


def told_of(name: str, value: object) -> float | str:
    """Return a value of a grid, of the setting `name`, as JSON holds it."""
    if left_open(FIELDS[name], value):
        return "auto"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(value)


def read_outcome(path: Path, run: Run) -> Outcome:
    """Return what came of a run that has ended; raise UserError where its files can't be read."""
    try:
        if (path / DIVERGED).exists():
            return outcome_of(run, None, json.loads((path / DIVERGED).read_text())["reason"])
        saved, _ = read_saved(str(path))
        settings = replace(run.settings, overlap_steps=saved["overlap_steps"])
        network = {**UNTIMED, **json.loads((path / NETWORK).read_text())}
        found = measured(settings, read_summary(path), records_in(path), network)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} can't be read ({error}); remove it to do its run again", UNREADABLE
        ) from None
    log.info("%s: %.4g on data held out", run.name, found.quality.shown)
    return outcome_of(run, found)


def records_in(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run, each with the seconds that rank 0 spent in messages.

    Where not every outer iteration has these, as of very many ranks, those of the last one count.
    """

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (path / name).read_text().splitlines()]

    seconds = {
        row["iteration"]: {phase: each[0] for phase, each in row["exchange"].items()}
        for row in lines(RANKS)
    }
    records, last = lines(METRICS), {}
    for record in records:
        last = seconds.get(record["iteration"], last)
        record["exchange"] = last
    return records


def measured(
    settings: Settings,
    summary: Mapping[str, Any],
    records: list[dict[str, Any]],
    network: Mapping[str, Any],
) -> Measured:
    """Return what a complete run measured, by its files."""
    sync_s, own_s, local_s = split_seconds(records)
    work, counted, nodes = dict(summary["work"]), summary["bytes"], summary["nodes"]
    best = summary["validation"]
    steps = work["steps"] / len(records)
    return Measured(
        accuracy=best.get("accuracy"),
        loss=best["loss"],
        **work,
        **network,
        payload_bytes=counted["payload"] + counted["mask"],
        sent_bytes=counted["sent"],
        sync_s=sync_s,
        own_s=own_s,
        local_s=local_s,
        train_s=summary["seconds"]["total"] - summary["seconds"]["evaluate"],
        parameters=summary["parameters"],
        speakers=sum(nodes) if every_rank_sends(settings) else len(nodes),
        ranks=sum(nodes),
        operations=operations(settings),
        curve=curve_of(records),
        hidden=min(1.0, max(0, settings.overlap_steps) / steps),
    )


def split_seconds(records: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds of training in messages, in the method's own work, and in steps.

    The same for all methods: every message of phases 1 to 5, votes and losses too, waiting for the
    slowest rank included; what phases 2 to 5 do besides, coding too; what phase 1 does besides.
    """
    phases = {
        phase: sum(r["seconds"][phase] for r in records) for phase in ("local", *CONSENSUS_PHASES)
    }
    messages = {phase: sum(r["exchange"].get(phase, 0.0) for r in records) for phase in phases}
    own = sum(phases[phase] - messages[phase] for phase in CONSENSUS_PHASES)
    return sum(messages.values()), own, phases["local"] - messages["local"]


def curve_of(records: list[dict[str, Any]]) -> tuple[Point, ...]:
    """Return where the run was whenever it was evaluated."""
    sent, seconds, compute, found = 0, 0.0, 0.0, []
    for record in records:
        spent = record["seconds"]
        sent += record["bytes"]["sent"]
        seconds += spent["total"] - spent["evaluate"]
        compute += sum(split_seconds([record])[1:])
        if record["val_loss"] is not None:
            quality = record.get("val_accuracy"), record["val_loss"]
            found.append(Point(record["iteration"], sent, seconds, *quality, compute))
    return tuple(found)


def operations(settings: Settings) -> str:
    """Return what a run calls to send between nodes, in the order of its messages."""
    words = " ".join(operation for _, _, operation, _ in operations_of(settings))
    return ", ".join(dict.fromkeys(re.findall(r"All\w+|Reduce|Bcast", words)))
