"""Measure what phases 2 to 5 add to training: time, and memory beyond plain SGD with momentum.

Time: all phases on one rank, phase 2 alone on several. Memory: in processes of their own. A child
builds the network, trains a few steps with a stand-in for its forward pass (which costs no memory
worth speaking of, so that activations hide nothing), and reports its peak; from that of the
driver, freeze and evaluation included, the parent subtracts that of plain SGD.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.records import CONSENSUS_PHASES
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.config.resolve import make, with_overrides
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.problem import build_problem, make_groups, make_model
from prunex_mpi.core.state import RunContext, build_state, wires_of
from prunex_mpi.diagnosis.devices import run_separately
from prunex_mpi.methods import hsadmm
from prunex_mpi.models.layout import build_layout, flatten_
from prunex_mpi.research.bench.workbench import IMAGE_SIZE, NUM_CLASSES, Bench, make_state
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action

AIM_PERCENT = 5.0
# A quarter of an epoch of CIFAR-10's 50,000 images on 4 ranks at batch 32.
FULL_STEPS = 98
# Outer iterations measured before and after the freeze.
MEASURED = 2

AIM_MODELS = 7
CHILD_TIMEOUT_S = 900
# While a child runs, which has its own watchdog, its parent looks alive so often.
BEAT_S = 1.0
OUTER_ITERATIONS = 4
# (rank layout, ranks, ranks per node)
LAYOUTS = (("1 rank", 1, 0), ("2 nodes x 1", 2, 1), ("1 node x 2", 2, 2))


def overhead(bench: Bench) -> list[Table]:
    """Train each of the models for a few outer iterations; return the share of phases 2 to 5.

    In a job of one rank. Phase 1 takes `bench.steps` local steps, and its time is scaled to
    FULL_STEPS.
    """
    rows = []
    for name in bench.models:
        records = train(bench, name)
        # The first iteration warms up; the one that freezes does the work of both kinds.
        stages = {
            "before": records[1 : 1 + MEASURED],
            "after": records[2 + MEASURED :],
        }
        for stage, measured in stages.items():
            phases = {
                phase: min(record["seconds"][phase] for record in measured)
                for phase in ("local", *CONSENSUS_PHASES)
            }
            local = phases["local"] * FULL_STEPS / bench.steps
            consensus = sum(phases[phase] for phase in CONSENSUS_PHASES)
            share = 100 * consensus / (local + consensus)
            milliseconds = (1e3 * phases[phase] for phase in CONSENSUS_PHASES)
            rows.append((name, stage, local, *milliseconds, share, AIM_PERCENT))
    return [
        Table(
            f"Share of phases 2 to 5 in training: 32x32 images, batch {bench.settings.batch_size}, "
            f"T = {FULL_STEPS} local steps, {'+'.join(bench.settings.groups)} groups",
            (
                "model",
                "freeze",
                "local s",
                *(f"{phase} ms" for phase in CONSENSUS_PHASES),
                "share %",
                "aim %",
            ),
            tuple(rows),
            (
                f"the driver on one rank; minimum of {MEASURED} outer iterations each",
                f"phase 1 measured over {bench.steps} steps and scaled linearly to {FULL_STEPS} "
                f"(a quarter epoch of CIFAR-10 on 4 ranks at batch 32)",
            ),
        )
    ]


def train(bench: Bench, model_name: str) -> list[dict[str, Any]]:
    """Run the driver on synthetic images; return its metrics, one record per outer iteration."""
    return bench.run_training(
        model=model_name,
        dataset="synthetic",
        image_size=32,
        train_samples=bench.steps * bench.settings.batch_size,
        test_samples=bench.settings.batch_size,
        outer_iterations=2 + 2 * MEASURED,
        local_steps=bench.steps,
        # Steps as small as these would meet the stopping test.
        eps_abs=0.0,
        eps_rel=0.0,
        warmup_iterations=0,
        keep_ramp_iterations=0,
        freeze_iteration=2 + MEASURED,
        evaluate_every=2 + 2 * MEASURED,
    )


def inside_nodes(bench: Bench) -> list[Table]:
    """Return what phase 2 takes on several ranks, with parameters to send and without.

    Collective on `world`.
    """
    topology, rows = bench.topology, []
    for name in bench.models:
        for freeze in ("before", "after"):
            ways = {
                sync: with_overrides(bench.settings, model=name, node_sync=sync)
                for sync in ("outer", "step")
            }
            best = bench.slowest_in_turns(
                {sync: Action(phase_2(bench, way, freeze)) for sync, way in ways.items()}
            )
            outer, step = best["outer"], best["step"]
            rows.append((name, freeze, 1e3 * outer, 1e3 * step, outer / step))
    return [
        Table(
            f"Phase 2 on {topology.num_nodes} nodes of {list(topology.node_sizes)} ranks",
            ("model", "freeze", "outer ms", "step ms", "times"),
            tuple(rows),
            (
                f"until the last rank has finished, minimum of {bench.repeat}, in turns",
                "--node-sync outer: Allreduce of all parameters; step: all ranks of a node hold "
                "the same, so that a digest is compared and statistics alone are sent",
            ),
        )
    ]


def phase_2(bench: Bench, settings: Settings, freeze: str) -> Callable[[], object]:
    """Return what does phase 2, `before` or `after` the duals are retired."""
    state = make_state(settings, bench.device)
    # The noise is each rank's own; ranks that average gradients hold the same.
    state.u.zero_()
    state.consensus_sgd = freeze == "after"
    node = wires_of(bench.topology, state, bench.transport).node
    return lambda: hsadmm.intra_node_consensus(node, state, settings)


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


class StandIn(nn.Module):
    """The parameters of a network under a forward pass that costs next to nothing."""

    def __init__(self, network: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.network = network
        self.num_classes = num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Map float [n, c, h, w] to logits [n, num_classes] that depend on the last weights."""
        weight = [p for p in self.parameters() if p.numel() >= self.num_classes][-1]
        return images.mean(dim=(1, 2, 3))[:, None] * weight.reshape(-1)[: self.num_classes]


def memory(bench: Bench) -> list[Table]:
    """Run the children and return their table. Does not communicate; for a job of one rank.

    Not for coupled groups, which are read from the forward pass that it replaces.
    """
    launcher = shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    settings = bench.settings
    plain: dict[int, dict[str, Any]] = {}
    rows, notes = [], []
    for name, ranks, ranks_per_node in LAYOUTS:
        for preset in ("recipe", "paper"):
            if ranks > 1 and (launcher is None or preset == "paper"):
                continue
            try:
                if ranks not in plain:
                    plain[ranks] = run_child("plain", bench, launcher, ranks, 0)
                grown = run_child(preset, bench, launcher, ranks, ranks_per_node)
            except UserError as error:
                if ranks == 1:
                    raise
                notes.append(f"{name}: not measured: {error}")
                continue
            model = grown["model_bytes"]
            beyond = grown["peak_bytes"] - plain[ranks]["peak_bytes"]
            rows.append(
                (
                    name,
                    preset,
                    plain[ranks]["peak_bytes"] / MIB,
                    grown["peak_bytes"] / MIB,
                    beyond / MIB,
                    beyond / model,
                    AIM_MODELS + 2 * settings.bucket_mib * MIB / model,
                )
            )
    where = "allocated on the GPU" if bench.device.type == "cuda" else "resident set"
    size = rows[0][4] / rows[0][5]
    return [
        Table(
            f"Memory per rank: {settings.model}, {size:.1f} MiB of parameters",
            (
                "ranks",
                "preset",
                "SGD MiB",
                "H-SADMM MiB",
                "beyond MiB",
                "times the model",
                "aim",
            ),
            tuple(rows),
            (
                f"peak {where} of processes of their own, the largest of all ranks; SGD with "
                "momentum holds theta, gradient and momentum",
                f"H-SADMM: {OUTER_ITERATIONS} outer iterations of the driver with freeze and "
                "evaluation; the forward pass is a stand-in",
                f"aim: {AIM_MODELS} times the model and two buckets of {settings.bucket_mib:g} MiB",
                *notes,
            ),
        )
    ]


def run_child(
    kind: str, bench: Bench, launcher: str | None, ranks: int, ranks_per_node: int
) -> dict[str, Any]:
    """Run one child job of `ranks` ranks and return what its rank 0 reports.

    Raises UserError (FAILURE) when the job fails or its ranks do not find each other.
    """
    settings = bench.settings
    command = [sys.executable, "-m", "prunex_mpi.bench", "memory", "--child", kind]
    flags = {
        "model": settings.model,
        "device": bench.device.type,
        "threads": bench.threads,
        "mpi-buffers": settings.mpi_buffers,
        "ranks-per-node": ranks_per_node,
        "timeout": settings.timeout,
    }
    for flag, value in flags.items():
        command.append(f"--{flag}={value}")
    command += ["--groups", *settings.groups]
    command += ["--keep-ratio", *map(str, settings.keep_ratio)]
    try:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(run_separately, command, ranks, launcher, CHILD_TIMEOUT_S)
            while not wait([job], BEAT_S).done:
                bench.heartbeat.go_on()
        done = job.result()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the child job did not end: {type(error).__name__}", FAILURE) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"peak_bytes"')]
    if done.returncode or not answers:
        lines = (done.stdout + done.stderr).strip().splitlines()
        last = lines[-1] if lines else "no output"
        raise UserError(f"the child job ended with code {done.returncode}: {last}", FAILURE)
    answer = json.loads(answers[0])
    if answer["ranks"] != ranks:
        raise UserError(f"{launcher} does not belong to the MPI library of mpi4py", FAILURE)
    return answer


def child(bench: Bench, kind: str) -> str:
    """Train as `kind` (plain | recipe | paper) says; return the answer as JSON text.

    Collective on `world`; every rank returns the same.
    """
    topology, device, settings = bench.topology, bench.device, bench.settings
    settings = make(
        "paper" if kind == "paper" else "recipe",
        model=settings.model,
        groups=settings.groups,
        keep_ratio=settings.keep_ratio,
        bucket_mib=settings.bucket_mib,
        dataset="synthetic",
        image_size=32,
        train_samples=4 * topology.world_size,
        test_samples=topology.world_size,
        batch_size=2,
        outer_iterations=OUTER_ITERATIONS,
        local_steps=2,
        lr=1e-3,
        warmup_iterations=1,
        keep_ramp_iterations=0,
        freeze_iteration=OUTER_ITERATIONS - 1,
        freeze_drift=-1.0,
        # Never meet the stopping test: every phase of the run counts.
        eps_abs=0.0,
        eps_rel=0.0,
        evaluate_every=1,
    )
    network = make_model(settings, NUM_CLASSES, IMAGE_SIZE)
    model = StandIn(network, NUM_CLASSES)
    dataset = load_dataset(topology, settings, bench.heartbeat, device)
    layout = build_layout(model)
    groups = make_groups(settings, model, layout, dataset.image_size)
    problem = build_problem(topology, settings, dataset, model, device, bench.transport)
    reset_peak(device)
    if kind == "plain":
        theta, grad = flatten_(model, layout)
        optimizer = torch.optim.SGD([theta], lr=settings.lr, momentum=0.9, fused=True)
        for _ in range(3):
            images, labels = problem.train.next()
            grad.zero_()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        element_size = theta.element_size()
    else:
        state = build_state(model, layout, groups, settings)
        context = RunContext(state, problem, settings, bench.transport, bench.heartbeat)
        for _ in hsadmm.outer_iterations(topology, context):
            pass
        element_size = state.theta.element_size()
    largest = np.array([peak_bytes(device)], dtype=np.int64)
    topology.world.Allreduce(MPI.IN_PLACE, largest, op=MPI.MAX)
    return json.dumps(
        {
            "peak_bytes": int(largest[0]),
            "model_bytes": layout.numel * element_size,
            "ranks": topology.world_size,
        }
    )


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far: building and trying the model is not what is measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Not everywhere allowed; the peak then includes building the model, for all kinds alike.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory in use since `reset_peak`: of the GPU, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss: a child inherits its parent's there.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise UserError("this system does not report VmHWM in /proc/self/status", FAILURE)
