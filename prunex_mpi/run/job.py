"""One training job from its communicators to its last file, in the order in which things happen."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.errors import PREEMPTED, log, set_up_logging
from prunex_mpi.base.files import EXPORTED, METRICS, STATE, telling_disk_errors
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import (
    broadcast_json,
    broadcast_text,
    run_collectively,
    run_collectively_while,
    run_on_root,
)
from prunex_mpi.comm.preemption import find_deadline
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import to_toml
from prunex_mpi.core.evaluation import (
    Evaluation,
    delivered,
    density,
    evaluate_on,
    prunable_and_kept,
)
from prunex_mpi.core.state import Problem, RunContext, State, weights
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.request import Request
from prunex_mpi.data.text import TextSet
from prunex_mpi.methods.exchanges import metadata_bytes
from prunex_mpi.models.dummy_input import probe
from prunex_mpi.run import checkpoint, directory, start
from prunex_mpi.run.checkpoint_files import save_tensors
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.dry_run import dry_run
from prunex_mpi.run.kept import InMemoryCheckpoint
from prunex_mpi.run.pretrained import read_initial
from prunex_mpi.run.problem import load_dataset, share_contents
from prunex_mpi.run.summary import add_up, closing_table, mean_speed
from prunex_mpi.run.supervision import Checkpoints, check_exchange, train
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.fields import Settings


def run(
    world: MPI.Comm,
    settings: Settings,
    watchdog: Watchdog,
    received: ReceivedSignal,
    kept: InMemoryCheckpoint | None = None,
) -> int:
    """Do all that the program does once it has its settings; return the exit code.

    With `kept` it goes on from there, where a node was lost, and keeps what that takes. Collective
    on `world`.
    """
    heartbeat = watchdog.heartbeat
    heartbeat.enter("start")
    started = kept.started if kept else time.time()
    set_up_logging(world.rank, world.size)
    again = kept is not None and kept.began
    if again:
        # Where a rank was lost when all was done, those who are left may not know it.
        code = code_of_ended(world, Path(settings.run_dir))
        if code is not None:
            return code
    else:
        # Of those who are left there may be one.
        start.check_launched_together(world)
    versions = start.check_alike(world, settings)
    # Without leaders every rank is a node of its own.
    ranks_per_node = 1 if settings.method.flat else settings.ranks_per_node
    more = {"made": kept.made if kept else None, "rack_of": settings.rack_of}
    with start.take_places(world, ranks_per_node, settings.device, **more) as place:
        topology = place.topology
        if world.rank == 0:
            log.info("%s", place.layout)
        request = Request.of(settings)
        if settings.dry_run:
            known = share_contents(world, request, heartbeat)
            text = run_collectively(world, lambda: dry_run(settings, topology, known))
            if world.rank == 0:
                print(text, flush=True)
            return 0

        deadline = find_deadline(settings.time_limit, started)
        start.apply_findings(place, settings)
        transport = start.find_transport(place, settings)
        check_exchange(topology, settings)
        if settings.run_dir:
            early = partial(directory.check_run_dir, Path(settings.run_dir), settings.resume)
            run_on_root(world, early)
        heartbeat.enter("data")
        known = share_contents(world, request, heartbeat)
        start.look_at_model(world, settings, known, heartbeat)
        dataset = load_dataset(topology, request, heartbeat, known)
        restores = checkpoint.has_checkpoint(world, settings)
        parts = dataset, place.device, transport, heartbeat
        context = start.assemble(topology, settings, *parts, reads=not restores)
        log.info("%s", start.describe_training(context, dataset, world.size))
        start.log_warnings(world, context)
        heartbeat.beat(3)

        config = to_toml(context.settings, versions, settings)
        held = open_run(world, context.settings, config, again)
        with closing(dataset), held as (path, files):
            meet = partial(watchdog.share, path / "heartbeats", world.size)
            run_collectively_while(world, meet, heartbeat)
            if isinstance(dataset, TextSet):
                used = dataset.text.tokenizer
                run_on_root(world, lambda: files.keep_tokenizer(used.name, used.digest))
            if settings.resume:
                if broadcast_json(world, run_on_root(world, lambda: files.complete())):
                    log.info("%s is complete: there is nothing left to do", path)
                    return 0
                if (path / EXPORTED).is_dir() and not again:
                    text = "%s is of the network as it was before: export again in the end"
                    log.warning(text, path / EXPORTED)
                heartbeat.enter("checkpoint")
                if not (again and kept.put_back(topology, files, context)):
                    checkpoint.resume(topology, files, context, versions)
                if again:
                    kept.tell(topology, files, context)
            if kept:
                kept.begin(topology, context, str(path))
            checkpoints = Checkpoints(topology, files, settings.checkpoint_every, received)
            if kept and kept.too_few:
                checkpoints.write(context)
                status, reason = "preempted", f"{kept.loss.describe()} lost: --min-nodes"
            else:
                status, reason = train(topology, files, context, checkpoints, deadline, kept)

            heartbeat.enter("finish")
            if status == "preempted":
                totals = {"status": status, "reason": reason}
            else:
                totals = deliver(topology, files, context, status, dataset)
                checkpoints.write_last(context)
                heartbeat.enter("finish")
                totals |= {"seconds_total": time.time() - started, "resumed": restores}
                totals |= {"changes": kept.changes} if kept else {}
                totals["checkpoints"] = {"count": checkpoints.count, "seconds": checkpoints.seconds}

            # Last of all: a run that has a summary needs nothing more.
            run_on_root(world, lambda: files.write_summary(totals))
            code = PREEMPTED if status == "preempted" else 0
            if kept:
                kept.code = code
            if status == "preempted":
                log.info("stopped by %s: go on with --resume --run-dir %s", reason, path)
            elif world.rank == 0:
                print(closing_table(totals, path), flush=True)

            # Nobody leaves while another may still need the job.
            world.Barrier()
            return code


@contextmanager
def open_run(
    world: MPI.Comm, settings: Settings, config: str, takes_over: bool
) -> Iterator[tuple[Path, RunDirectory | None]]:
    """Hold the run directory on rank 0 for the time of the block; the others get None.

    One that `takes_over` has it from a rank that is lost. Collective on `world`.
    """
    # Jobs of an array begin in the same second.
    model = os.path.basename(settings.model.rstrip("/"))
    parts = time.strftime("%Y%m%d-%H%M%S"), model, os.environ.get("SLURM_JOB_ID", "")
    name = f"runs/{'-'.join(filter(None, parts))}"
    new = "" if settings.run_dir or world.rank else directory.new_folder(name)
    path = Path(broadcast_text(world, settings.run_dir or new))
    with ExitStack() as exits:

        def take() -> RunDirectory:
            if takes_over:
                # A lost rank that is stopped on another machine holds its lock still.
                (path / "lock").unlink(missing_ok=True)
            held = RunDirectory(path, config, settings.resume)
            files = exits.enter_context(closing(held))
            files.make_folder("heartbeats")
            return files

        yield path, run_on_root(world, take)


def code_of_ended(world: MPI.Comm, run: Path) -> int | None:
    """Return the exit code of a job that has said how it ended, else None. Collective on `world`.

    One that goes on with a run removes what was said before.
    """
    found = run_on_root(world, lambda: directory.read_summary(run))
    status = broadcast_json(world, found and found.get("status"))
    if not status:
        return None
    return PREEMPTED if status == "preempted" else 0


# --------------------------------------------------------------------------------------------------
# What a run delivers: the weights of its network, and its totals for summary.json
# --------------------------------------------------------------------------------------------------


def deliver(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    status: str,
    dataset: Dataset | TextSet,
) -> dict[str, Any]:
    """Write the delivered network of a run on `dataset`; return on rank 0 the run's results.

    Rank 0 has `files`; the others get None and return {}. Collective on `world`.
    """
    results = evaluate_best(topology, context)

    @telling_disk_errors("the results")
    def write() -> dict[str, Any]:
        if files is None:
            return {}
        with delivered(context):
            records = files.read_lines(METRICS)
            totals = summarise(context.settings, topology, context.state, records, status)
            model = save_model(files.path, context.state, context.problem)
            work = work_of(topology, context, totals, dataset.train_total)
        model["classes"] = list(dataset.class_names)
        results["initial"] = read_initial(files.path)
        return {**totals, **results, "work": work, "delivered": model}

    return run_collectively_while(topology.world, write, context.heartbeat)


def evaluate_best(topology: Topology, context: RunContext) -> dict[str, Any]:
    """Return what the best network by data held out reached there, and on test data if opened.

    {} where nothing is held out. Collective on `world`.
    """
    if not context.state.position.best:
        return {}
    found = Evaluation(*context.state.position.best)
    outcome = context.problem.task.outcome(found.loss, found.accuracy)
    results: dict[str, Any] = {"validation": {"iteration": found.iteration, **outcome}}
    if context.problem.kept_back is not None:
        with delivered(context):
            tested = evaluate_on(topology, context, context.problem.kept_back)
        results |= {f"test_{name}": value for name, value in tested.items()}
    return results


def work_of(
    topology: Topology, context: RunContext, totals: dict[str, Any], train_total: int
) -> dict[str, Any]:
    """Return on how many samples a run was trained, and how many others its method looked at.

    And which bytes of its payload say where values belong.
    """
    state, stream = context.state, context.problem.train
    steps, of_batch = state.position.steps_done, stream.batch_size * topology.world_size
    drawn = stream.epoch * stream.steps_per_epoch + stream.position
    counted, rounds = totals["bytes"], totals["iterations"]
    return {
        "steps": steps,
        "samples": steps * of_batch,
        "extra_samples": (drawn - steps) * of_batch,
        "epochs": steps * of_batch * context.problem.task.row / train_total,
        "metadata_bytes": metadata_bytes(context.settings, state, counted, rounds),
    }


def save_model(path: Path, state: State, problem: Problem) -> dict[str, Any]:
    """Write state.safetensors, the state dict of the delivered model: z masked.

    Returns what export checks the file and the model by, for summary.json.
    """
    model, inputs = problem.model, problem.inputs
    with weights(state, state.z):
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
        logits = probe(model, inputs)
    record = save_tensors(tensors, path / STATE)
    # What a network that became smaller while it was trained is built with.
    smaller = {"layers": state.sizes} if state.sizes else {}
    return {
        **smaller,
        "bytes": record.size,
        "crc32": record.crc32,
        **inputs.sizes(),
        "mean": problem.mean.tolist(),
        "std": problem.std.tolist(),
        "probe": logits,
        # Tells the run's data apart from others that the network is tested on.
        "data": problem.digest,
    }


def summarise(
    settings: Settings, topology: Topology, state: State, records: list[dict[str, Any]], status: str
) -> dict[str, Any]:
    """Return summary.json: totals over the run, the network in force, the last one's quality."""
    last = records[-1]
    prunable, kept = prunable_and_kept(state)
    return {
        "status": status,
        "method": settings.method.name,
        "iterations": len(records),
        **{key: value for key, value in last.items() if key.startswith("test_")},
        **mean_speed(records),
        "density": density(state),
        "parameters": state.whole.layout.numel,
        "parameters_kept": state.whole.layout.numel - prunable + kept,
        "prunable": prunable,
        "prunable_kept": kept,
        **add_up(records),
        "nodes": list(topology.node_sizes),
        "model": settings.model,
        "dataset": settings.dataset,
    }
