"""Write what a run delivers: the weights of its network, and its totals for summary.json."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from prunex_mpi.base.files import METRICS, STATE, telling_disk_errors
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import run_collectively_while
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import Judged, best_of, delivered, judge
from prunex_mpi.core.metrics import density, prunable_and_kept
from prunex_mpi.core.state import Problem, RunContext, State, weights
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.text import TextSet
from prunex_mpi.methods.exchanges import metadata_bytes
from prunex_mpi.models.dummy_input import probe
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.pretrained import read_initial
from prunex_mpi.run.summary import add_up, mean_speed
from prunex_mpi.run.tensor_file import save_tensors
from prunex_mpi.settings.fields import Settings


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
    results = judge_best(topology, context)

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

    action = partial(telling_disk_errors, "the results", write)
    return run_collectively_while(topology.world, action, context.heartbeat)


def judge_best(topology: Topology, context: RunContext) -> dict[str, Any]:
    """Return what the best network by data held out reached there, and on test data if opened.

    {} where nothing is held out. Collective on `world`.
    """
    if not context.state.position.best:
        return {}
    found = Judged(*context.state.position.best)
    outcome = context.problem.task.outcome(found.loss, found.accuracy)
    results: dict[str, Any] = {"validation": {"iteration": found.iteration, **outcome}}
    if context.problem.kept_back is not None:
        with best_of(context):
            tested = judge(topology, context, context.problem.kept_back)
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
    sums = add_up(records)
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
        "seconds": sums["seconds"],
        "bytes": sums["bytes"],
        "nodes": list(topology.node_sizes),
        "model": settings.model,
        "dataset": settings.dataset,
    }


def print_result(text: str) -> None:
    """Print what a complete run ends with; a closed pipe or a full disk makes no failure of it."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("the results can't be printed: %s", error.strerror)
        # Python would try once more, and fail, when it ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
