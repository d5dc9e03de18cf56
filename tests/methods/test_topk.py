"""Top-k: nothing is lost."""

import pytest
import torch
from driving import exchange_alone
from torch import nn

from prunex_mpi.methods.exchange import RESIDUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_the_largest_of_each_layer_move_and_the_rest_stays(ratio, dtype):
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Linear(30, 1))
    exchange = exchange_alone(model, dtype, method="topk", topk_ratio=ratio)
    layout, sent = exchange.state.layout, exchange.state.grad
    before = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    exchange.exchange_(sent.copy_(before))
    after = exchange.state.memory[RESIDUAL]
    # Bit for bit: no element is in both, and their sum is what there was.
    assert torch.equal(sent + after, before)
    assert not torch.any((sent != 0) & (after != 0))
    assert len(set(exchange.sent.positions.tolist())) == sum(exchange.counts)
    for segment, count in zip(layout.segments, exchange.counts, strict=True):
        place = segment.place
        assert int((sent[place] != 0).sum()) == count
        kept = after[place].abs().max()
        assert sent[place][sent[place] != 0].abs().min() >= kept
