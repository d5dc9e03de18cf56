"""What a run leaves behind: the delivered weights, its totals, the closing table."""

from pathlib import Path
from typing import Any

from prunex_mpi.base.files import STATE, written_record
from prunex_mpi.base.tables import format_lines
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.metrics import prunable_and_kept
from prunex_mpi.core.state import Problem, State, weights
from prunex_mpi.methods.prunetrain import sizes_of
from prunex_mpi.models.build import probe
from prunex_mpi.run.checkpoint_files import save_tensors
from prunex_mpi.settings.fields import Settings


def save_model(path: Path, state: State, problem: Problem) -> dict[str, Any]:
    """Write state.safetensors, the state dict of the delivered model: z masked.

    Returns what export checks the file and the model by, for summary.json.
    """
    model, image_size = problem.model, problem.train_shard.images.shape[-1]
    with weights(state, state.z):
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
        logits = probe(model, image_size)
    save_tensors(tensors, path / STATE)
    record = written_record(path / STATE)
    # What a network that became smaller while it was trained is built with.
    smaller = {"layers": sizes_of(state, model, state.mask)} if state.removes else {}
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
    """Return summary.json: totals over the run and the last iteration's quality."""
    last = records[-1]
    prunable, kept = prunable_and_kept(state)
    sums = add_up(records)
    return {
        "status": status,
        "method": settings.method,
        "iterations": len(records),
        "test_accuracy": last["test_accuracy"],
        "test_loss": last["test_loss"],
        "density": last["density"],
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


def add_up(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the seconds and the bytes of all records together, by phase and by kind."""
    return {
        key: {name: sum(record[key][name] for record in records) for name in records[-1][key]}
        for key in ("seconds", "bytes")
    }


def _setup_row(seconds: dict[str, float], sent: dict[str, int]) -> list[tuple[str, str]]:
    """Return the row of what the method did once to begin, where it did anything."""
    if not seconds["setup"]:
        return []
    return [("set-up of the method", f"{seconds['setup']:.2f} s, {sent['setup'] / MIB:.2f} MiB")]


def closing_table(summary: dict[str, Any], run_dir: Path) -> str:
    """Return the table that ends a run."""
    accuracy = summary["test_accuracy"]
    sent, seconds = summary["bytes"], summary["seconds"]
    dense = sent["dense"]
    share = f"{100 * sent['payload'] / dense:.1f} % of dense"
    if len(summary["nodes"]) == 1:
        share += "; one node: none of it leaves the machine"
    pruned = [("parameters", f"{summary['parameters']:,}")]
    if summary["prunable"]:
        before, after = summary["parameters"], summary["parameters_kept"]
        kept = f"{summary['prunable_kept']:,} of {summary['prunable']:,}"
        pruned = [
            ("parameters", f"{before:,} before, {after:,} after pruning"),
            ("prunable weights kept", f"{kept} (density {summary['density']:.3f})"),
        ]
    phases = ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if k != "total")
    rows = [
        ("status", f"{summary['status']} after {summary['iterations']} outer iterations"),
        (
            f"test accuracy of the {'pruned ' if summary['prunable'] else ''}model",
            "not evaluated" if accuracy is None else f"{100 * accuracy:.2f} %",
        ),
        *pruned,
        ("bytes between nodes per leader, dense", f"{dense / MIB:.2f} MiB"),
        ("bytes between nodes per leader, sent", f"{sent['payload'] / MIB:.2f} MiB ({share})"),
        ("  leaving a node, by ring algorithms", f"{sent['sent'] / MIB:.2f} MiB"),
        ("  and for mask agreement", f"{sent['mask'] / MIB:.2f} MiB"),
        ("  and for evaluation", f"{sent['evaluate'] / MIB:.2f} MiB"),
        *_setup_row(seconds, sent),
        ("bytes inside a node per leader", f"{sent['intra'] / MIB:.2f} MiB"),
        ("seconds per phase", phases),
        ("seconds in all", f"{summary['seconds_total']:.1f}"),
        ("results", str(run_dir)),
    ]
    return format_lines(rows)
