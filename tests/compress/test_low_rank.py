"""Low-rank factors: what is sent and what is left are the matrix, full rank is exact."""

import pytest
import torch
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.compress.low_rank import (
    Split,
    largest_rank,
    multiply_,
    new_right_factors,
    orthonormalise_,
    project_left_,
    project_right_,
    split_layout,
)
from prunex_mpi.compress.sparse import move_whole_, put_whole_
from prunex_mpi.models.layout import build_layout


def new_layout():
    return build_layout(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)))


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64)


def compress(flat: torch.Tensor, right: torch.Tensor, split: Split) -> torch.Tensor:
    """Return what one worker alone would receive; what is left stays in `flat`."""
    left, whole = flat.new_empty(split.left_numel), flat.new_empty(split.whole_numel)
    move_whole_(flat, split.whole, whole)
    project_left_(flat, right, split, left)
    orthonormalise_(left, split)
    project_right_(flat, left, split, right)
    received = torch.full_like(flat, 9.0)
    multiply_(received, left, right, split)
    put_whole_(received, split.whole, whole)
    return received


def test_tensors_are_divided_by_what_pays():
    layout = new_layout()
    # 8 x 27, 8, 8, 8, 5 x 8, 5
    split = split_layout(layout, 2)
    assert [s.name for s in split.matrices] == ["0.weight", "2.weight"]
    assert [s.name for s in split.whole] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert (split.left_numel, split.right_numel, split.whole_numel) == (26, 70, 29)
    # 4 x (5 + 8) > 5 x 8 and 4 x (8 + 27) < 8 x 27.
    assert [s.name for s in split_layout(layout, 4).matrices] == ["0.weight"]
    for segment in split.matrices:
        rows, columns = segment.shape[0], segment.numel // segment.shape[0]
        best = largest_rank(segment)
        assert best * (rows + columns) < rows * columns <= (best + 1) * (rows + columns)
        assert best < min(rows, columns)


def test_a_rank_that_compresses_nothing_is_refused_by_name():
    split_layout(new_layout(), 6)
    with pytest.raises(UserError, match=r"powersgd-rank 7 is too large .* 0\.weight, 8 x 27.* 6$"):
        split_layout(new_layout(), 7)
    with pytest.raises(UserError, match="no matrix in the model"):
        split_layout(build_layout(nn.Sequential(nn.BatchNorm2d(8), nn.Linear(9, 1))), 1)


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_what_is_sent_and_what_is_left_are_the_gradient(rank):
    layout = new_layout()
    split = split_layout(layout, rank)
    before = noise(layout.numel)
    residual = before.clone()
    received = compress(residual, new_right_factors(split, 3, before), split)
    torch.testing.assert_close(received + residual, before, rtol=1e-13, atol=1e-13)
    for segment in layout.segments:
        left = residual[segment.offset : segment.offset + segment.numel]
        assert bool(left.any()) == (segment in split.matrices)
    # What is left is orthogonal to what was sent: a projection.
    for sent, left in zip(split.matrix_views(received), split.matrix_views(residual), strict=True):
        assert (sent.T @ left).abs().max() < 1e-12
        assert torch.linalg.matrix_rank(sent) == rank


def test_repeated_steps_find_the_best_approximation():
    """The warm start makes one matrix's steps a power iteration on it."""
    layout = new_layout()
    split = split_layout(layout, 2)
    before = noise(layout.numel)
    right = new_right_factors(split, 0, before)
    errors = []
    for _ in range(60):
        residual = before.clone()
        compress(residual, right, split)
        errors.append([float(m.norm()) for m in split.matrix_views(residual)])
    best = [float(torch.linalg.svdvals(m)[2:].norm()) for m in split.matrix_views(before)]
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert all(first > 1.05 * b for first, b in zip(errors[0], best, strict=True))


def test_first_factors_follow_the_seed():
    split = split_layout(new_layout(), 2)
    like = torch.empty(0)
    first, again, other = (new_right_factors(split, seed, like) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.numel(), first.dtype) == (split.right_numel, torch.float32)


def test_zeros_and_their_factors_recover():
    layout = new_layout()
    split = split_layout(layout, 2)
    right = new_right_factors(split, 0, noise(1))
    zero = torch.zeros(layout.numel, dtype=torch.float64)
    assert not compress(zero, right, split).any()
    assert not right.any()
    before = noise(layout.numel)
    residual = before.clone()
    received = compress(residual, right, split)
    assert all(m.any() for m in split.matrix_views(received))
    torch.testing.assert_close(received + residual, before, rtol=1e-13, atol=1e-13)
