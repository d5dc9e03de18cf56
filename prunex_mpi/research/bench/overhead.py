"""Measure what phases 2 to 5 add to training, on one rank."""

from typing import Any

from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.base.tables import Table
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.research.bench.workbench import Bench
from prunex_mpi.run.start import set_up
from prunex_mpi.run.supervision import outer_iterations

AIM_PERCENT = 5.0
# A quarter of an epoch of CIFAR-10's 50,000 images on 4 ranks at batch 32.
FULL_STEPS = 98
# Outer iterations measured before and after the freeze.
MEASURED = 2


def overhead(bench: Bench) -> Table:
    """Train each of the models for a few outer iterations; return the share of phases 2 to 5.

    In a job of one rank. Phase 1 takes `bench.steps` local steps, and its time is scaled to
    FULL_STEPS.
    """
    rows = []
    for name in bench.models:
        records = train(bench, name)
        # The first iteration warms up; the one that freezes does the work of both kinds.
        stages = {"before": records[1 : 1 + MEASURED], "after": records[2 + MEASURED :]}
        for stage, measured in stages.items():
            local, *consensus = (
                min(record["seconds"][phase] for record in measured)
                for phase in ("local", *CONSENSUS_PHASES)
            )
            local *= FULL_STEPS / bench.steps
            share = 100 * sum(consensus) / (local + sum(consensus))
            rows.append((name, stage, local, *(1e3 * s for s in consensus), share, AIM_PERCENT))
    milliseconds = [f"{phase} ms" for phase in CONSENSUS_PHASES]
    return Table(
        f"Share of phases 2 to 5 in training: 32x32 images, batch {bench.settings.batch_size}, "
        f"T = {FULL_STEPS} local steps, {'+'.join(bench.settings.groups)} groups",
        ("model", "freeze", "local s", *milliseconds, "share %", "aim %"),
        tuple(rows),
        (
            f"the driver on one rank; minimum of {MEASURED} outer iterations each",
            f"phase 1 measured over {bench.steps} steps and scaled linearly to {FULL_STEPS} "
            f"(a quarter epoch of CIFAR-10 on 4 ranks at batch 32)",
        ),
    )


def train(bench: Bench, model_name: str) -> list[dict[str, Any]]:
    """Run the driver on synthetic images; return its metrics, one record per outer iteration."""
    settings = with_overrides(
        bench.settings,
        # No test of accuracy: a small rate keeps any model finite.
        lr=1e-3,
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
    context = set_up(bench.topology, settings, bench.device, bench.transport, bench.heartbeat)
    return list(outer_iterations(bench.topology, context))
