"""Messages in parts (`--fragments`), against a simulation in one process."""

import json
from itertools import product

import pytest
import torch
from driving import SMALL_BUCKETS, assert_alike_on_all_ranks, run_driver, simulated
from nets import CoupledNet, RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_streaming import simulate_in_parts

from prunex_mpi.config.resolve import make
from prunex_mpi.core import exchange

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

STEPS = 6
COMMON = {"outer_iterations": 4, "lr": 0.05, "lr_schedule": "constant", "warmup_ratio": 0.0}
COMMON |= {"bn": "average", "local_steps": STEPS, "evaluate_every": 100, "weight_decay": 0.01}
SCENARIOS = {
    "local-sgd": {"method": "local-sgd", "node_sync": "outer"},
    "local-sgd int4": {"method": "local-sgd", "payload": "int4"},
    "local-sgd int2 behind": {"method": "local-sgd", "payload": "int2", "overlap_steps": 1},
    "diloco": {"method": "diloco"},
    "diloco behind": {"method": "diloco", "overlap_steps": 2},
    "diloco int4 behind alpha": dict(
        method="diloco", payload="int4", overlap_steps=2, diloco_alpha=0.5, diloco_outer_warmup=3
    ),
    "diloco behind alpha outer": dict(
        method="diloco", node_sync="outer", overlap_steps=1, diloco_alpha=0.3, inner_momentum="keep"
    ),
}
# Pruned in the second iteration.
PRUNED = {"method": "one-shot", "groups": ("coupled",), "one_shot_prune_iteration": 2}
FROZEN = {"groups": ("coupled",), "warmup_iterations": 1, "keep_ramp_iterations": 0}
FROZEN |= {"freeze_iteration": 2, "method": "prunex", "residuals": "off"}
SCENARIOS |= {
    "one-shot": PRUNED,
    "one-shot int4 behind": {**PRUNED, "payload": "int4", "overlap_steps": 1},
    "prunex outer": {**FROZEN, "node_sync": "outer"},
    "prunex int4 behind": {**FROZEN, "payload": "int4", "overlap_steps": 1},
}


# The others differ in one of what these have. Fragments and ranks per node.
OFTEN = {"local-sgd": (2, 1), "diloco int4 behind alpha": (3, 2)}
OFTEN |= {"one-shot": (3, 2), "prunex int4 behind": (2, 1)}


def seldom() -> list:
    """Yield scenario, fragments and ranks per node; each is seen with two scenarios."""
    for name, *shape in product(SCENARIOS, (2, 3), (1, 2)):
        often = OFTEN.get(name) == tuple(shape)
        yield pytest.param(name, *shape, marks=[] if often else pytest.mark.long)


def near(mine, theirs):
    return float((mine.cpu() - theirs).norm() / theirs.norm()) < 1e-11


@pytest.mark.parametrize(("scenario", "fragments", "ranks_per_node"), [*seldom()])
def test_program_equals_oracle(scenario, fragments, ranks_per_node):
    if ranks_per_node > WORLD.size:
        pytest.skip("covered by a smaller node size: the job has fewer ranks")
    settings = make(**COMMON, **SCENARIOS[scenario], fragments=fragments)
    options = settings.options
    diloco = settings.method.name == "diloco"
    wanted = {**vars(settings), "steps": STEPS, "bucket_bytes": SMALL_BUCKETS.bucket_bytes}
    wanted["outer"] = None
    if diloco:
        wanted["outer"] = options.outer_lr, options.outer_momentum, options.outer_warmup
    wanted["alpha"] = options.alpha if diloco and options.alpha >= 0 else None
    pruned = settings.method.name == "one-shot"
    wanted["prune_iteration"] = options.prune_iteration if pruned else 0
    wanted["freeze_iteration"] *= settings.method.name == "prunex"
    wanted["sets"], wanted["keep_ratio"] = CoupledNet.SETS, settings.keep_ratio[0]
    torch.manual_seed(7)
    model = CoupledNet().double() if settings.groups == ("coupled",) else new_net()
    history = simulated(simulate_in_parts, model, wanted, ranks_per_node)
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = run_driver(topology, settings, model, stream, STEPS)
        for number, ((_, state), expected) in enumerate(zip(runs, history, strict=True), 1):
            if expected is None:
                continue
            assert near(state.z, expected.z), number
            # After an exchange at once theta is still what it was sent as.
            if number not in (wanted["prune_iteration"], settings.outer_iterations):
                assert near(state.theta, expected.theta[WORLD.rank]), number
            if diloco:
                assert near(state.memory["outer_momentum"], expected.velocity)
            assert_alike_on_all_ranks(state.z)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("payload", ["fp32", "int4"])
def test_as_many_bytes_leave_as_at_once_and_no_more_than_a_part_between_two_steps(
    payload, monkeypatch
):
    """In any window of a third of an outer iteration leaves about a third of the message."""
    found, sent = {}, []
    real = exchange.exchange_

    def noted(comms, state, payload, fragment, *rest):
        before = state.position.traffic.payload
        real(comms, state, payload, fragment, *rest)
        now = STEPS * (state.position.iteration - 1) + state.position.step
        if fragment.number:
            sent.append((now, state.position.traffic.payload - before))

    for fragments in (1, 3):
        settings = make(**COMMON, method="diloco", payload=payload, fragments=fragments)
        with nodes_of(1) as topology, monkeypatch.context() as patched:
            patched.setattr(exchange, "exchange_", noted)
            stream = RandomStream(WORLD.rank, torch.float64)
            runs = run_driver(topology, settings, new_net(), stream, STEPS)
            found[fragments] = [record["bytes"] for record, _ in runs]
    assert found[1] == found[3]
    whole = found[1][0]["payload"]
    # The last outer iteration sends all at its end.
    assert [now for now, _ in sent] == list(range(2, 3 * STEPS + 1, STEPS // 3))
    # Parts end after whole blocks, and statistics, one block of them, go with the last.
    most = whole / 3 + {"fp32": 2 * 128 * 8, "int4": 66 + 256}[payload]
    assert max(size for _, size in sent) < most < whole
    for first in range(3 * STEPS):
        window = [size for now, size in sent if first <= now < first + STEPS // 3]
        assert sum(window) < most


def test_parts_of_a_network_that_has_become_smaller_are_measured_by_the_whole_one():
    found = []
    for fragments in (1, 3):
        settings = make(**COMMON, **PRUNED, remove_dropped=True, fragments=fragments)
        with nodes_of(1) as topology:
            stream = RandomStream(WORLD.rank, torch.float64)
            runs = run_driver(topology, settings, CoupledNet().double(), stream, STEPS)
            counted = [json.loads(json.dumps(record["bytes"])) for record, _ in runs]
        found.append([of["dense"] for of in counted])
        assert counted[-1]["payload"] < counted[0]["payload"] or WORLD.size == 1
    assert found[0] == found[1] == [found[0][0]] * 4
