"""Measure what phases 2 to 5 add to real training, on one rank, with no network to wait for."""

from typing import Any

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.methods import hsadmm
from prunex_mpi.run.job import set_up
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
) -> list[Table]:
    """Train each of `models` for a few outer iterations and return the share of phases 2 to 5.

    `alone` is the topology of a job of one rank. Phase 1 takes `steps` local steps, and its time is
    scaled to FULL_STEPS.
    """
    rows = []
    for name in models:
        records = train(alone, settings, transport, device, name, steps)
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
    heartbeat = Heartbeat()
    work = set_up(alone, settings, device, transport, heartbeat)
    return list(hsadmm.outer_iterations(alone, work))
