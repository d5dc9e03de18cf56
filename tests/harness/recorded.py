"""Fabricate what runs leave behind: their directories, and the seconds of all ranks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunex_mpi.base.record_keys import RANK_PHASES, RESIDUALS
from prunex_mpi.config.resolve import make, to_toml

VERSIONS = {"prunex_mpi": "0.1.0", "torch": "2.15.0", "mpi": "Open MPI v5.0.11", "python": "3.11.7"}
# Where the ranks of a node meet; in all others all ranks do.
INSIDE = ("local", "intra")
# Milliseconds of work: of any rank, and of one that leads its node.
WORK_MS = {"local": 80, "intra": 3, "project": 1, "inter": 2, "dual": 4, "evaluate": 30}
LEADING_MS = {"project": 5, "inter": 8}
WIRE_MS = {"local": 6, "intra": 1, "project": 1, "inter": 12, "dual": 1, "evaluate": 0.5}
# The share of the broadcast in what phase 4 takes.
BROADCAST = 0.25
MIB = 2**20


@dataclass(frozen=True)
class Delay:
    """So many milliseconds more for a rank in a phase, in a `share` of the outer iterations."""

    rank: int
    phase: str
    ms: float
    share: float = 1.0


def rank_lines(
    rng: np.random.Generator, nodes: Sequence[int], iterations: int, delay: Delay | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the objects of ranks.jsonl of a job whose ranks wait for each other.

    Work is noisy: machines 3 % apart from time to time, ranks 2 %, and now and then something else
    has the processor for some milliseconds.
    """
    node = np.repeat(np.arange(len(nodes)), nodes)
    leads = np.concatenate([np.arange(size) == 0 for size in nodes])
    for k in range(1, iterations + 1):
        clock = np.zeros(len(node))
        busy, exchange = {}, {}
        pace = rng.lognormal(0, 0.03, len(nodes))[node] * rng.lognormal(0, 0.02, len(node))
        for phase in RANK_PHASES:
            ms = np.where(leads, LEADING_MS.get(phase, WORK_MS[phase]), WORK_MS[phase]) * pace
            ms = ms + (rng.random(len(node)) < 0.03) * rng.exponential(8, len(node))
            if delay is not None and delay.phase == phase and rng.random() < delay.share:
                ms[delay.rank] += delay.ms
            arrived = clock + ms
            places = node if phase in INSIDE else np.zeros_like(node)
            last = np.array([arrived[places == place].max() for place in places])
            clock = last + WIRE_MS[phase] * rng.lognormal(0, 0.1)
            busy[phase] = (ms / 1e3).tolist()
            exchange[phase] = ((clock - arrived) / 1e3).tolist()
        apart = np.exp(-k / iterations * 4)
        residuals = {
            name: (apart * rng.lognormal(0, 0.1, len(node))).tolist() for name in RESIDUALS
        }
        line = {"iteration": k, "node": node.tolist(), "work": busy, "exchange": exchange}
        line["broadcast"] = [BROADCAST * seconds for seconds in exchange["inter"]]
        hosts = {"hosts": [f"node{i:02d}" for i in range(len(nodes))]} if k == 1 else {}
        yield {**line, "residuals": residuals, **hosts}


def metrics_lines(iterations: int, freeze: int, rng: np.random.Generator) -> Iterator[dict]:
    """Yield the objects of metrics.jsonl of a run that learns and prunes."""
    for k in range(1, iterations + 1):
        done = k / iterations
        density = max(0.5, 1 - 0.7 * done)
        residual = None if k >= freeze else float(np.exp(-5 * done))
        seconds = {p: WORK_MS[p] / 1e3 * float(rng.lognormal(0, 0.1)) for p in RANK_PHASES}
        yield {
            "iteration": k,
            "seconds": {**seconds, "setup": 0.0, "total": sum(seconds.values())},
            "bytes": {
                "dense": 4 * MIB,
                "payload": int(4 * MIB * density),
                "sent": int(4 * MIB * density) + 1000,
                "racks": 0,
                "mask": 0 if k >= freeze else 1000,
                "intra": 40 * MIB,
                "control": 500,
                "evaluate": 24,
                "setup": 0,
            },
            "density": density,
            "frozen": k >= freeze,
            "residuals": dict.fromkeys(RESIDUALS, residual),
            "rho1": 1.5e-4,
            "rho2": 1.5e-5,
            "lr": 0.2 * (1 - done) + 1e-3,
            "mask_drift": 0.0 if k >= freeze else 0.3 * (1 - done),
            "train_loss": 0.3 + 2 * float(np.exp(-3 * done)),
            "test_loss": 0.4 + 2 * float(np.exp(-3 * done)),
            "test_accuracy": 0.95 - 0.8 * float(np.exp(-3 * done)),
        }


def layer_lines(iterations: int, freeze: int, layers: Sequence[str]) -> Iterator[dict]:
    """Yield the objects of layers.jsonl."""
    for k in range(1, iterations + 1):
        residual = None if k >= freeze else float(np.exp(-5 * k / iterations))
        for number, layer in enumerate(layers):
            yield {
                "iteration": k,
                "layer": layer,
                "density": 1.0 if "bn" in layer else max(0.5, 1 - 0.7 * k / iterations),
                "rho1": 1.5e-4,
                "rho2": 1.5e-5,
                "intra_primal": residual and residual * (1 + number),
                "intra_dual": residual,
                "inter_primal": residual,
                "inter_dual": residual,
            }


LAYERS = ("conv1.weight", "bn1.weight", "layer1.conv1.weight", "layer2.conv1.weight", "fc.weight")


def make_run(
    path: Path,
    *,
    iterations: int = 20,
    nodes: Sequence[int] = (2, 2),
    ranks: bool = True,
    status: str = "completed",
    delay: Delay | None = None,
    **settings: Any,
) -> Path:
    """Write the directory of a run; a status "" leaves it without a summary."""
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    freeze = max(1, 3 * iterations // 4)
    flags = {"outer_iterations": iterations, "run_dir": "runs/a", **settings}
    (path / "config.toml").write_text(to_toml(make(**flags), VERSIONS), encoding="utf-8")
    metrics = list(metrics_lines(iterations, freeze, rng))
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "layers.jsonl", layer_lines(iterations, freeze, LAYERS))
    if ranks:
        write_lines(path / "ranks.jsonl", rank_lines(rng, nodes, iterations, delay))
    if status == "preempted":
        summary: dict[str, Any] = {"status": status, "reason": "SIGTERM"}
    else:
        sums = {
            key: {name: sum(m[key][name] for m in metrics) for name in metrics[0][key]}
            for key in ("seconds", "bytes")
        }
        summary = {
            "status": status,
            "method": flags.get("method", "prunex"),
            "iterations": iterations,
            "test_accuracy": metrics[-1]["test_accuracy"],
            "test_loss": metrics[-1]["test_loss"],
            "density": metrics[-1]["density"],
            "parameters": 1000,
            "parameters_kept": 520,
            "prunable": 960,
            "prunable_kept": 480,
            **sums,
            "nodes": list(nodes),
            "model": "resnet20",
            "dataset": "digits",
            "seconds_total": sums["seconds"]["total"] + 1,
        }
    if status:
        (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return path


def write_lines(path: Path, records: Any) -> None:
    """Write one JSON object per line."""
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
