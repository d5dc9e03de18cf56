"""Measure what phases 2 to 5 add to training: all on one rank, phase 2 alone on several."""

from collections.abc import Callable
from typing import Any

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import wires_of
from prunex_mpi.methods import hsadmm
from prunex_mpi.research.bench.communication import slowest_of_ranks
from prunex_mpi.research.bench.kernels import make_state
from prunex_mpi.run.assembly import set_up
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import with_overrides

AIM_PERCENT = 5.0
# A quarter of an epoch of CIFAR-10's 50,000 images on 4 ranks at batch 32.
FULL_STEPS = 98
CONSENSUS = ("intra", "project", "inter", "dual")
# Outer iterations measured before and after the freeze.
MEASURED = 2


def overhead(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    models: tuple[str, ...],
    steps: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Train each of `models` for a few outer iterations and return the share of phases 2 to 5.

    `alone` is the topology of a job of one rank. Phase 1 takes `steps` local steps, and its time is
    scaled to FULL_STEPS.
    """
    rows = []
    for name in models:
        records = train(alone, settings, transport, device, name, steps, heartbeat)
        # The first iteration warms up; the one that freezes does the work of both kinds.
        stages = {
            "before": records[1 : 1 + MEASURED],
            "after": records[2 + MEASURED :],
        }
        for stage, measured in stages.items():
            phases = {
                phase: min(record["seconds"][phase] for record in measured)
                for phase in ("local", *CONSENSUS)
            }
            local = phases["local"] * FULL_STEPS / steps
            consensus = sum(phases[phase] for phase in CONSENSUS)
            rows.append(
                (
                    name,
                    stage,
                    local,
                    *(1e3 * phases[phase] for phase in CONSENSUS),
                    100 * consensus / (local + consensus),
                    AIM_PERCENT,
                )
            )
    return [
        Table(
            f"Share of phases 2 to 5 in training: 32x32 images, batch {settings.batch_size}, "
            f"T = {FULL_STEPS} local steps, {'+'.join(settings.groups)} groups",
            (
                "model",
                "freeze",
                "local s",
                *(f"{phase} ms" for phase in CONSENSUS),
                "share %",
                "aim %",
            ),
            tuple(rows),
            (
                f"the driver on one rank; minimum of {MEASURED} outer iterations each",
                f"phase 1 measured over {steps} steps and scaled linearly to {FULL_STEPS} "
                f"(a quarter epoch of CIFAR-10 on 4 ranks at batch 32)",
            ),
        )
    ]


def train(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    model_name: str,
    steps: int,
    heartbeat: Heartbeat,
) -> list[dict[str, Any]]:
    """Run the driver on synthetic images and return its metrics, one record per outer iteration."""
    settings = with_overrides(
        settings,
        model=model_name,
        dataset="synthetic",
        image_size=32,
        train_samples=steps * settings.batch_size,
        test_samples=settings.batch_size,
        outer_iterations=2 + 2 * MEASURED,
        local_steps=steps,
        # No test of accuracy here: a small rate keeps any model finite.
        lr=1e-3,
        # Steps as small as these would meet the stopping test.
        eps_abs=0.0,
        eps_rel=0.0,
        warmup_iterations=0,
        keep_ramp_iterations=0,
        freeze_iteration=2 + MEASURED,
        evaluate_every=2 + 2 * MEASURED,
    )
    work = set_up(alone, settings, device, transport, heartbeat)
    return list(hsadmm.outer_iterations(alone, work))


def inside_nodes(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    models: tuple[str, ...],
    repeat: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Return what phase 2 takes on several ranks, with parameters to send and without.

    Collective on `topology.world`.
    """
    rows = []
    for name in models:
        for freeze in ("before", "after"):
            ways = [with_overrides(settings, model=name, node_sync=s) for s in ("outer", "step")]
            phases = [phase_2(topology, way, transport, device, freeze) for way in ways]
            # In turns, so that whatever else the machine does hits both alike.
            times = [
                [slowest_of_ranks(topology.world, run, 1, device, heartbeat) for run in phases]
                for _ in range(repeat)
            ]
            outer, step = (min(taken) for taken in zip(*times, strict=True))
            rows.append((name, freeze, 1e3 * outer, 1e3 * step, outer / step))
    return [
        Table(
            f"Phase 2 on {topology.num_nodes} nodes of {list(topology.node_sizes)} ranks",
            ("model", "freeze", "outer ms", "step ms", "times"),
            tuple(rows),
            (
                f"until the last rank has finished, minimum of {repeat}, in turns",
                "--node-sync outer: Allreduce of all parameters; step: all ranks of a node hold "
                "the same, so that a digest is compared and statistics alone are sent",
            ),
        )
    ]


def phase_2(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    freeze: str,
) -> Callable[[], object]:
    """Return what does phase 2, `before` or `after` the duals are retired."""
    state = make_state(settings, device)
    # The noise is each rank's own; ranks that average gradients hold the same.
    state.u.zero_()
    state.consensus_sgd = freeze == "after"
    node = wires_of(topology, state, transport).node
    return lambda: hsadmm.intra_node_consensus(node, state, settings)
