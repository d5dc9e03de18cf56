"""Methods that average parameters once per outer iteration, against a simulation in one process."""

import time

import pytest
import torch
from driving import (
    assert_alike_on_all_ranks,
    assert_statistics,
    by_name,
    difference,
    element_masks,
    run_driver,
    simulated,
)
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_rivals import simulate_local

from mpi4py import MPI

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import sparseloco
from prunex_mpi.methods.declared import METHODS

pytestmark = pytest.mark.mpi

STEPS, CHUNK = 2, 64
COMMON = {"outer_iterations": 4, "lr": 0.05, "lr_schedule": "constant", "warmup_ratio": 0.0}
# Running averages: the streams of these tests have nothing to estimate statistics with.
COMMON |= {"bn": "average"}
SCENARIOS = {
    "local-sgd": {"method": "local-sgd", "weight_decay": 0.05, "weight_decay_on": "weights"},
    "local-sgd-outer": {"method": "local-sgd", "node_sync": "outer"},
    "diloco": {"method": "diloco"},
    "diloco-adamw": dict(
        method="diloco",
        optimizer="adamw",
        inner_momentum="keep",
        lr=0.002,
        node_sync="outer",
        diloco_outer_warmup=2,
    ),
    "diloco-adamw-reset": dict(
        method="diloco", optimizer="adamw", lr=0.02, weight_decay=0.5, weight_decay_on="weights"
    ),
    # 14 steps: 3 of warm-up, and rounds of 2, 2, 2, 3 and 5 steps.
    "qsr": dict(
        method="qsr", outer_iterations=7, lr_schedule="cosine", warmup_ratio=0.2, qsr_alpha=0.06
    ),
    "sparseloco": {"method": "sparseloco", "sparseloco_ratio": 0.05},
    "sparseloco-outer": dict(
        method="sparseloco",
        sparseloco_ratio=0.05,
        optimizer="adamw",
        lr=0.002,
        node_sync="outer",
        sparseloco_outer_lr=0.8,
    ),
    "one-shot": {"method": "one-shot"},
    "one-shot-adamw": dict(method="one-shot", optimizer="adamw", inner_momentum="reset", lr=0.002),
    "one-shot-outer": dict(
        method="one-shot", node_sync="outer", groups=("filter", "channel"), keep_ratio=(0.6,)
    ),
    "one-shot-pattern": dict(method="one-shot", groups=("kernel", "pattern"), keep_ratio=0.25),
}
COVERED = {changes["method"] for changes in SCENARIOS.values()}
SCENARIOS |= {m.name: {"method": m.name} for m in METHODS if m.local_sgd and m.name not in COVERED}


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("ranks_per_node", "scenario"),
    [
        *((3, name) for name in SCENARIOS),
        *((2, "sparseloco-outer"), (1, "diloco")),
    ],
)
def test_program_equals_oracle(ranks_per_node, scenario, monkeypatch):
    settings = make(**{**COMMON, **SCENARIOS[scenario]})
    # The network's largest tensors have several chunks.
    monkeypatch.setattr(sparseloco, "CHUNK", CHUNK)
    wanted = {**vars(settings), "steps": STEPS, "keep_ratio": settings.keep_ratio[0]}
    wanted["chunk"] = CHUNK
    model = new_net()
    history = simulated(simulate_local, model, wanted, ranks_per_node)
    payloads = []
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = run_driver(topology, settings, model, stream, STEPS)
        for (record, state), expected in zip(runs, history, strict=True):
            for name, mask in element_masks(state).items():
                assert torch.equal(mask, expected.mask.get(name, torch.ones_like(mask))), name
            assert difference(by_name(state.z, state), expected.z) < 1e-11
            assert_alike_on_all_ranks(state.z)
            if settings.method.name == "diloco":
                velocity = by_name(state.memory["outer_momentum"], state)
                assert difference(velocity, expected.velocity) < 1e-11
            assert record["train_loss"] == pytest.approx(expected.loss, rel=1e-11)
            # As differences in bfloat16, which has eight bits.
            near = {"rtol": 0.02, "atol": 0.02} if settings.method.name == "sparseloco" else {}
            assert_statistics(state, expected.statistics, **near)
            payloads.append(record["bytes"]["payload"])
            whole = 8 * (state.layout.numel + state.stats.numel())
            assert record["bytes"]["dense"] == whole
            assert settings.method.name == "sparseloco" or payloads[0] == whole
    assert record["status"] == "completed"
    # The payload shrinks in the iteration that prunes, which is the second, and only there.
    pruned = settings.method.name == "one-shot"
    assert (payloads[1] < payloads[0]) == pruned
    assert payloads[1:] == [payloads[1]] * (len(history) - 1)
    assert (record["density"] < 0.61) == pruned


@pytest.mark.any_mpi
@pytest.mark.two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["prunex", "local-sgd"])
def test_waiting_for_the_gradients_of_the_node_is_no_local_work(method, monkeypatch):
    real, pause_s = MPI.Request.Waitall, 0.05

    class Slow(MPI.Request):
        @classmethod
        def Waitall(cls, requests):
            time.sleep(pause_s)
            real(requests)

    monkeypatch.setattr(MPI, "Request", Slow)
    # In the first outer iteration the nodes wait for more than gradients.
    settings = make(method=method, **{**COMMON, "outer_iterations": 2})
    with nodes_of(WORLD.size) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        for record, _ in run_driver(topology, settings, new_net(), stream, STEPS):
            seconds = record["seconds"]
            assert seconds["intra"] > STEPS * pause_s
            assert 0 < sum(seconds.values()) - seconds["total"] <= seconds["total"]


@pytest.mark.any_mpi
@pytest.mark.two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("node_sync", ["step", "outer"])
def test_one_choice_without_duals_is_one_shot(node_sync):
    common = {**COMMON, "payload": "int4", "groups": ("coupled",), "node_sync": node_sync}
    once = make(method="one-shot", one_shot_prune_iteration=2, **common)
    stages = {"warmup_iterations": 1, "keep_ramp_iterations": 0, "freeze_iteration": 2}
    without = make(method="prunex", prunex_duals=False, residuals="off", **stages, **common)
    with nodes_of(2 if node_sync == "outer" else 1) as topology:
        found = []
        for settings in (once, without):
            stream = RandomStream(WORLD.rank, torch.float64)
            runs = run_driver(topology, settings, new_net(), stream, STEPS)
            found.append([(state.z.clone(), record["bytes"]) for record, state in runs])
    for (z, of_one_shot), (same, sent) in zip(*found, strict=True):
        assert torch.equal(z, same)
        assert sent["payload"] == of_one_shot["payload"]
