"""Sparsification: counts are those of the ratio, and sparse vectors add up."""

import pytest
import torch
from torch import nn

from prunex_mpi.compress.sparse import add_sparse_, kept_per_layer
from prunex_mpi.models.layout import build_layout


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [(1.0, [189, 7, 7, 7, 30, 1]), (0.1, [19, 1, 1, 1, 3, 1]), (1e-9, [1, 1, 1, 1, 1, 1])],
)
def test_counts_are_rounded_up_and_never_zero(ratio, counts):
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Linear(30, 1))
    assert kept_per_layer(build_layout(model).segments, ratio) == counts


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
