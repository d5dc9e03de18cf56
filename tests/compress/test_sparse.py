"""Sparsification: nothing is lost, and counts are those of the ratio."""

import pytest
import torch
from torch import nn

from prunex_mpi.compress.sparse import (
    add_sparse_,
    kept_per_layer,
    select_top_,
)
from prunex_mpi.models.layout import Layout, build_layout


def new_layout() -> Layout:
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Linear(30, 1))
    return build_layout(model)


def select(accumulated: torch.Tensor, layout: Layout, ratio: float):
    counts = kept_per_layer(layout.segments, ratio)
    values = accumulated.new_empty(sum(counts))
    positions = torch.empty(sum(counts), dtype=torch.int32)
    select_top_(accumulated, layout, counts, values, positions)
    return counts, values, positions


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [(1.0, [189, 7, 7, 7, 30, 1]), (0.1, [19, 1, 1, 1, 3, 1]), (1e-9, [1, 1, 1, 1, 1, 1])],
)
def test_counts_are_rounded_up_and_never_zero(ratio, counts):
    assert kept_per_layer(new_layout().segments, ratio) == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_the_largest_of_each_layer_move_and_the_rest_stays(ratio, dtype):
    layout = new_layout()
    before = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    after = before.clone()
    counts, values, positions = select(after, layout, ratio)
    sent = torch.zeros_like(before)
    add_sparse_(sent, values.view(1, -1), positions.view(1, -1))
    # Bit for bit: no element is in both, and their sum is what there was.
    assert torch.equal(sent + after, before)
    assert not torch.any((sent != 0) & (after != 0))
    assert len(set(positions.tolist())) == sum(counts)
    for segment, count in zip(layout.segments, counts, strict=True):
        place = slice(segment.offset, segment.offset + segment.numel)
        assert int((sent[place] != 0).sum()) == count
        kept = after[place].abs().max()
        assert sent[place][sent[place] != 0].abs().min() >= kept


def test_sparse_vectors_add_up_where_they_meet():
    flat = torch.full((6,), 9.0)
    lists = [[3.0], [4.0, 5.0]], [[1], [0, 1]]
    vectors = ([torch.tensor(x) for x in kind] for kind in lists)
    add_sparse_(flat, *vectors)
    assert flat.tolist() == [13.0, 17.0, 9.0, 9.0, 9.0, 9.0]
    values = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    positions = torch.tensor([[0, 3], [3, 5]], dtype=torch.int32)
    add_sparse_(flat, values, positions)
    assert flat.tolist() == [14.0, 17.0, 9.0, 21.0, 9.0, 29.0]
