"""Messages in parts (`--fragments`), against a simulation in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from driving import SMALL_BUCKETS, assert_alike_on_all_ranks, node_sizes_of, run_driver
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_streaming import Simulation

from prunex_mpi.config.resolve import make

pytestmark = pytest.mark.mpi

STEPS = 6
COMMON = {"outer_iterations": 4, "lr": 0.05, "lr_schedule": "constant", "warmup_ratio": 0.0}
COMMON |= {"bn": "average", "local_steps": STEPS, "evaluate_every": 100, "weight_decay": 0.01}
SCENARIOS = {
    "local-sgd": {"method": "local-sgd", "node_sync": "outer"},
    "local-sgd int4": {"method": "local-sgd", "payload": "int4"},
    "local-sgd int2 behind": {"method": "local-sgd", "payload": "int2", "overlap_steps": 1},
    "diloco": {"method": "diloco"},
    "diloco behind": {"method": "diloco", "overlap_steps": 2},
    "diloco int4 behind alpha": {
        "method": "diloco",
        "payload": "int4",
        "overlap_steps": 2,
        "diloco_alpha": 0.5,
    },
    "diloco behind alpha outer": {
        "method": "diloco",
        "node_sync": "outer",
        "overlap_steps": 1,
        "diloco_alpha": 0.3,
        "inner_momentum": "keep",
    },
}


# The others differ in one of what these have.
OFTEN = ("local-sgd", "diloco int4 behind alpha")


def seldom():
    return [n if n in OFTEN else pytest.param(n, marks=pytest.mark.long) for n in SCENARIOS]


def near(mine, theirs):
    return float((mine.cpu() - theirs).norm() / theirs.norm()) < 1e-11


@pytest.mark.parametrize("fragments", [2, 3])
@pytest.mark.parametrize("scenario", seldom())
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_program_equals_oracle(ranks_per_node, scenario, fragments):
    if ranks_per_node > WORLD.size:
        pytest.skip("covered by a smaller node size: the job has fewer ranks")
    settings = make(**COMMON, **SCENARIOS[scenario], fragments=fragments)
    options = settings.options
    diloco = settings.method.name == "diloco"
    wanted = {**vars(settings), "steps": STEPS, "bucket_bytes": SMALL_BUCKETS.bucket_bytes}
    wanted["outer"] = (options.outer_lr, options.outer_momentum) if diloco else None
    wanted["alpha"] = options.alpha if diloco and options.alpha >= 0 else None
    model = new_net()
    sizes = node_sizes_of(WORLD.size, ranks_per_node)
    streams = [RandomStream(r, torch.float64) for r in range(WORLD.size)]
    history = Simulation(model, streams, sizes, F.cross_entropy, SimpleNamespace(**wanted)).run()
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = run_driver(topology, settings, model, stream, STEPS)
        for number, ((_, state), expected) in enumerate(zip(runs, history, strict=True), 1):
            assert near(state.z, expected.z), number
            # After the last exchange nobody goes on from z.
            if number < settings.outer_iterations:
                assert near(state.theta, expected.theta[WORLD.rank]), number
            if diloco:
                assert near(state.memory["shared.outer_momentum"], expected.velocity)
            assert_alike_on_all_ranks(state.z)
