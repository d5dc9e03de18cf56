"""Measure what phases 2 to 5 add to training: all of them on one rank, phase 2 alone on several."""

from collections.abc import Callable
from typing import Any

from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.base.tables import Table
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.state import wires_of
from prunex_mpi.methods import hsadmm
from prunex_mpi.research.bench.workbench import Bench, make_state
from prunex_mpi.run.start import set_up
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action

AIM_PERCENT = 5.0
# A quarter of an epoch of CIFAR-10's 50,000 images on 4 ranks at batch 32.
FULL_STEPS = 98
# Outer iterations measured before and after the freeze.
MEASURED = 2


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
    return list(hsadmm.outer_iterations(bench.topology, context))


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
