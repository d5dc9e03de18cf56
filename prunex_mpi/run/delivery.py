"""What a run leaves behind: the delivered weights and its totals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prunex_mpi.base.files import STATE
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.metrics import density, prunable_and_kept
from prunex_mpi.core.state import Problem, State, weights
from prunex_mpi.models.build import probe
from prunex_mpi.run.summary import add_up
from prunex_mpi.run.tensor_file import save_tensors
from prunex_mpi.settings.fields import Settings


def save_model(
    path: Path, state: State, problem: Problem, going: Callable[[], None]
) -> dict[str, Any]:
    """Write state.safetensors, the state dict of the delivered model: z masked.

    Returns what export checks the file and the model by, for summary.json. `going` is called as
    often as the file goes on.
    """
    model, image_size = problem.model, problem.train_shard.images.shape[-1]
    with weights(state, state.z):
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
        logits = probe(model, image_size)
    record = save_tensors(tensors, path / STATE, going=going)
    # What a network that became smaller while it was trained is built with.
    smaller = {"layers": state.sizes} if state.sizes else {}
    return {
        **smaller,
        "bytes": record.size,
        "crc32": record.crc32,
        "image_size": image_size,
        "mean": problem.mean.tolist(),
        "std": problem.std.tolist(),
        "probe": logits,
    }


def summarise(
    settings: Settings,
    topology: Topology,
    state: State,
    records: list[dict[str, Any]],
    status: str,
) -> dict[str, Any]:
    """Return summary.json: totals over the run, the network in force, the last one's quality."""
    last = records[-1]
    prunable, kept = prunable_and_kept(state)
    sums = add_up(records)
    return {
        "status": status,
        "method": settings.method,
        "iterations": len(records),
        "test_accuracy": last["test_accuracy"],
        "test_loss": last["test_loss"],
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
