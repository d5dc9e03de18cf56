"""Whole runs whose tensors lie on a GPU, as far as that can be told on a machine without one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from nodes import WORLD, nodes_of
from pretended import GPU, pretended_gpu
from small_runs import PRUNING, SCENARIOS, small_run

from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.run.checkpoint import contents, put_all, put_common
from prunex_mpi.run.job import save_model
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.two_ranks,
    pytest.mark.skipif(WORLD.size != 2, reason="two nodes of a rank do all that more would do"),
]

COUPLED = {**PRUNING, "groups": ("coupled",)}
# What the scenarios of small runs leave out.
MORE = {
    "removal": {**COUPLED, "remove_dropped": True, "freeze_iteration": 2, "model_ema_decay": 0.5},
    "frozen": {**COUPLED, "freeze_iteration": 2, "optimizer": "muon", "clip_grad": 1.0},
    "gates": {**COUPLED, "score": "gates", "payload": "int2", "val_split": 0.25},
    "shrink": {**COUPLED, "optimizer": "adamw"},
    "fp16": {**PRUNING, "amp": "fp16", "clip_grad": 1.0, "mask_agreement": "or"},
    "changed": {**PRUNING, "augment": "resized-crop", "transforms": ("color-jitter",)},
    "diloco": {"method": "diloco"},
    "dgc": {"method": "dgc"},
    "powersgd": {"method": "powersgd"},
    "omnireduce": {"method": "omnireduce"},
    "all blocks": {"method": "omnireduce", "omnireduce_block_ratio": 1.0},
    "bf16": {"method": "bf16"},
    "terngrad": {"method": "terngrad"},
    "lion": {"method": "lion"},
    "adacgd": {"method": "adacgd"},
    "pactrain_ternary": {
        **{"method": "pactrain", "pactrain_prune_iteration": 1, "pactrain_stable_window": 1},
        "pactrain_ternary": True,
    },
}


def run_there(scenario: str, changes: dict) -> dict[str, int]:
    """Train on the GPU, one rank per node, keep and restore it all; return what was waited for."""
    with pretended_gpu() as waits, nodes_of(1) as topology:
        place = GPU, build_transport(GPU, 2**-10, "host")
        with small_run(topology, scenario, place=place, **changes) as context:
            records = list(outer_iterations(topology, context))
            assert len(records) == context.settings.outer_iterations
            trained = dict(waits)
            kept = contents(topology, context.state, context.problem)
            put_all(topology, *kept, context)
            put_common(topology, lambda: iter([kept]), WORLD.size, context)
            with TemporaryDirectory() as folder:
                save_model(Path(folder), context.state, context.problem)
    return trained


@pytest.mark.parametrize("scenario", [*SCENARIOS, *MORE])
def test_nothing_that_lies_elsewhere_is_taken_for_what_lies_on_a_gpu(scenario):
    changes = MORE.get(scenario, {})
    base = "dense" if "method" in changes else "recipe"
    run_there(base if changes else scenario, {"local_steps": 1, **changes})


@pytest.mark.parametrize("scenario", ["recipe", "local sgd", "flat consensus"])
def test_a_local_step_waits_for_no_gpu(scenario):
    few, many = (run_there(scenario, {"local_steps": steps}) for steps in (1, 2))
    assert few == many
