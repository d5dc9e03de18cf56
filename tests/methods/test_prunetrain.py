"""PruneTrain: a network that becomes smaller on all ranks alike, against one that keeps zeros."""

import numpy as np
import pytest
import torch
from driving import assert_alike_on_all_ranks, by_name, difference, run_driver, simulated
from nets import CoupledNet, RandomStream
from nodes import WORLD, nodes_of
from reference_prunetrain import simulate_prunetrain, without_dead

from prunex_mpi.config.resolve import make

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

STEPS = 3
COMMON = {"method": "prunetrain", "outer_iterations": 5, "prunetrain_reconfigure_every": 2}
COMMON |= {"prunetrain_lasso_ratio": 0.6, "prunetrain_threshold": 0.25, "lr": 0.05}
COMMON |= {"lr_schedule": "constant", "warmup_ratio": 0.0}
# With 4 ranks: 2 + 2, 3 + 1.
SHAPES = (("flat", 2), ("hierarchical", 3))


def new_net(dtype=torch.float64):
    torch.manual_seed(7)
    return CoupledNet().to(dtype)


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES)
def test_program_equals_oracle(aggregation, ranks_per_node):
    settings = make(aggregation=aggregation, **COMMON)
    model = new_net()
    wanted = {**vars(settings), "steps": STEPS, "sets": CoupledNet.SETS}
    history = simulated(simulate_prunetrain, model, wanted)
    # Something goes at both reconfigurations, something stays.
    sizes = [len(expected.dead) for expected in history]
    assert 0 == sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4] < 24
    whole = sum(p.numel() for p in model.parameters())
    belongs = whole - model.fc.bias.numel()
    with nodes_of(ranks_per_node) as topology:
        runs = run_driver(topology, settings, model, RandomStream(WORLD.rank, torch.float64))
        for (record, state), expected in zip(runs, history, strict=True):
            momentum = state.optimizer.first_moment
            dead = expected.dead
            for flat, reference in (
                *((flat, expected.z) for flat in (state.theta, state.z, state.z_node)),
                (momentum, expected.momentum),
            ):
                left = without_dead(reference, CoupledNet.SETS, dead)
                found = by_name(flat, state)
                assert {n: x.shape for n, x in found.items()} == {
                    n: x.shape for n, x in left.items()
                }
                assert difference(found, left) < 1e-11
                assert_alike_on_all_ranks(flat)
            coefficient = float(state.memory["lasso_coefficient"])
            assert coefficient == pytest.approx(expected.coefficient, rel=1e-12)
            assert record["train_loss"] == pytest.approx(expected.loss, rel=1e-11)
            assert int((~state.mask.bits).sum()) == len(dead)
            kept = sum(x.numel() for x in left.values()) - left["fc.bias"].numel()
            assert record["density"] == pytest.approx(kept / belongs, rel=1e-12)
            assert state.layout.numel == sum(x.numel() for x in left.values())
            for p, x in zip(model.parameters(), state.layout.views(state.theta), strict=True):
                assert p.data_ptr() == x.data_ptr()
            names = [n for n, m in model.named_modules() if hasattr(m, "running_mean")]
            for name, module, statistics in zip(
                names, state.bn_modules, expected.statistics, strict=True
            ):
                bias = f"{name}.bias"
                pair = [
                    without_dead({**expected.z, bias: x}, CoupledNet.SETS, dead)[bias]
                    for x in statistics
                ]
                torch.testing.assert_close(
                    module.running_mean.cpu(), pair[0], rtol=1e-11, atol=1e-12
                )
                torch.testing.assert_close(
                    module.running_var.cpu(), pair[1], rtol=1e-11, atol=1e-12
                )
    assert record["status"] == "completed"


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES)
def test_bytes_fall_with_what_is_removed(aggregation, ranks_per_node):
    settings = make(aggregation=aggregation, **COMMON)
    model = new_net(torch.float32)

    def size():
        return 4 * (STEPS * sum(p.numel() for p in model.parameters()) + 2 * widths(model))

    dense = size()
    expected = [dense]
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        for k, (record, _) in enumerate(run_driver(topology, settings, model, stream), 1):
            # One number in the first step, and a bit per group when channels may go.
            bits = 3 if k in (2, 4) else 0
            wanted = expected[-1] + 8 * (k == 1)
            found = record["bytes"]
            assert (found["dense"], found["payload"], found["mask"]) == (dense, wanted, bits)
            inside = aggregation == "hierarchical" and topology.node_size > 1
            assert found["intra"] == (2 * expected[-1] if inside else 0)
            expected.append(size())
        workers = WORLD.size if aggregation == "flat" else topology.num_nodes
        ring = 0 if topology.num_nodes == 1 else (workers - 1) / workers
    assert expected[1] > expected[2] == expected[3] > expected[4]
    # Each division by the number of workers is rounded down.
    assert 2 * ring * expected[4] - STEPS - 1 <= found["sent"] <= 2 * ring * expected[4]
    assert record["mask_drift"] == 0


def widths(model):
    return sum(m.num_features for m in model.modules() if hasattr(m, "running_mean"))


def test_one_channel_of_each_set_stays():
    settings = make(**{**COMMON, "prunetrain_threshold": 100.0, "outer_iterations": 2})
    model = new_net()
    with nodes_of(2) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        *_, (record, state) = run_driver(topology, settings, model, stream)
    assert int(state.mask.bits.sum()) == len(CoupledNet.SETS)
    assert (model.conv1.out_channels, model.bn2.num_features, model.fc.in_features) == (1, 1, 1)
    assert np.isfinite(record["train_loss"])
