"""OmniReduce over MPI: the sum of dense SGD with the bytes of the blocks that hold anything."""

import copy
import math

import numpy as np
import pytest
import torch
from driving import (
    COMMON,
    SHAPES,
    STEPS,
    assert_alike_on_all_ranks,
    exchange_alone,
    run_driver,
)
from nets import RandomStream
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.config.resolve import make
from prunex_mpi.methods.omnireduce import OmniReduce

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

SIZE = 12


class Table(nn.Module):
    """Rows chosen by the images: all others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(64, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[(x[:, 0, 0, 0] * 16).floor().long() % 64]


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_only_blocks_that_hold_anything_travel(aggregation, ranks_per_node, monkeypatch):
    torch.manual_seed(2)
    model = Table()
    touched, found, records = [], {}, {}
    real = OmniReduce.exchange_

    def watched(exchange, grad):
        touched.append((grad != 0).numpy())
        real(exchange, grad)

    monkeypatch.setattr(OmniReduce, "exchange_", watched)
    with nodes_of(ranks_per_node) as topology:
        for method, size in (
            ("dense", {}),
            ("omnireduce", {"omnireduce_block_size": SIZE, "omnireduce_block_ratio": 1.0}),
        ):
            settings = make(method=method, aggregation=aggregation, **size, **COMMON)
            stream = RandomStream(WORLD.rank, torch.float64)
            runs = list(run_driver(topology, settings, copy.deepcopy(model), stream))
            found[method], records[method] = runs[-1][1].z, [record for record, _ in runs]
            assert_alike_on_all_ranks(runs[-1][1].theta)
        is_member = aggregation == "flat" or topology.is_leader
    torch.testing.assert_close(found["omnireduce"], found["dense"], rtol=1e-13, atol=1e-15)

    mine = np.array(touched if is_member else np.zeros((2 * STEPS, 320)), dtype=np.int64)
    union = np.empty_like(mine)
    WORLD.Allreduce(mine, union)
    if not is_member:
        return
    payload = []
    for step in union:
        # 26 blocks of 12 elements and one of 8.
        blocks = [step[i : i + SIZE] for i in range(0, 320, SIZE)]
        payload.append(8 * sum(block.size for block in blocks if block.any()))
    sums = [sum(payload[:STEPS]), sum(payload[STEPS:])]
    assert [r["bytes"]["payload"] for r in records["omnireduce"]] == sums
    assert [r["bytes"]["mask"] for r in records["omnireduce"]] == [STEPS * 4] * 2
    assert [r["bytes"]["payload"] for r in records["dense"]] == [8 * 320 * STEPS] * 2
    if WORLD.size == 1:
        assert sum(sums) < 0.6 * 2 * 8 * 320 * STEPS
    assert 0 < sum(sums) < 2 * 8 * 320 * STEPS


def test_nothing_at_all_is_no_message():
    """A gradient of zeros, which a frozen model has: no block travels."""

    class Constant(Table):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0 * super().forward(x)

    with nodes_of(2) as topology:
        settings = make(method="omnireduce", omnireduce_block_ratio=1.0, weight_decay=0.0, **COMMON)
        model = Constant()
        before = model.rows.detach().clone()
        stream = RandomStream(WORLD.rank, torch.float64)
        for record, state in run_driver(topology, settings, model, stream):
            assert record["bytes"]["payload"] == 0
            assert record["bytes"]["mask"] > 0
            assert torch.equal(state.theta.view(64, 5), before)


# Elements and the size of a block: whole blocks only, one over, one short, less than a block.
BLOCKS = [(64, 8), (65, 8), (63, 8), (5, 8), (8, 8), (37, 1), (37, 37)]


ALL = {"method": "omnireduce", "omnireduce_block_ratio": 1.0}


@pytest.mark.parametrize(("numel", "size"), BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.two_ranks
def test_every_block_is_found_by_any_of_its_elements(numel, size, dtype):
    model = nn.Linear(numel, 1, bias=False)
    exchange = exchange_alone(model, dtype, omnireduce_block_size=size, **ALL)
    traffic, grad = exchange.link.traffic, exchange.state.grad
    for value in (1e-45 if dtype == torch.float32 else 5e-324, -1.0, math.inf, math.nan):
        for i in range(numel):
            before = traffic.payload
            grad.fill_(-0.0)
            grad[i] = value
            wanted = grad.clone()
            exchange.exchange_(grad)
            torch.testing.assert_close(grad, wanted, rtol=0, atol=0, equal_nan=True)
            block = min(size, numel - i // size * size)
            assert traffic.payload - before == block * grad.element_size()
    assert traffic.mask == 4 * numel * math.ceil(math.ceil(numel / size) / 8)
