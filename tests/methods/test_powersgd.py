"""PowerSGD of one worker: what is sent and what is left are the matrix, full rank is exact."""

import pytest
import torch
from driving import exchange_alone
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.methods.exchange import RESIDUAL
from prunex_mpi.methods.powersgd import RIGHT_FACTORS, PowerSgd, largest_rank, split_layout
from prunex_mpi.models.layout import build_layout


def new_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5))


def noise(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.numel(), generator=generator, dtype=like.dtype)


class Worker:
    """One worker alone: gradients go in, and what it would receive comes out."""

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        given = {"method": "powersgd", "powersgd_rank": rank, "seed": seed}
        self.exchange = exchange_alone(new_model(), **given)
        state, self.split = self.exchange.state, self.exchange.split
        self.residual, self.right = state.memory[RESIDUAL], state.memory[RIGHT_FACTORS]
        self.layout = state.layout

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what arrives of a gradient; what is left of it alone is the residual."""
        self.residual.zero_()
        flat = gradient.clone()
        self.exchange.exchange_(flat)
        return flat

    def matrices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[s.place].view(s.shape[0], -1) for s in self.split.matrices]


def test_tensors_are_divided_by_what_pays():
    layout = build_layout(new_model())
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
    layout = build_layout(new_model())
    split_layout(layout, 6)
    with pytest.raises(UserError, match=r"powersgd-rank 7 is too large .* 0\.weight, 8 x 27.* 6$"):
        split_layout(layout, 7)
    with pytest.raises(UserError, match="no matrix in the model"):
        split_layout(build_layout(nn.Sequential(nn.BatchNorm2d(8), nn.Linear(9, 1))), 1)


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_what_is_sent_and_what_is_left_are_the_gradient(rank):
    worker = Worker(rank)
    before = noise(worker.residual)
    received, residual = worker.compress(before), worker.residual
    torch.testing.assert_close(received + residual, before, rtol=1e-13, atol=1e-13)
    for segment in worker.layout.segments:
        assert bool(residual[segment.place].any()) == (segment in worker.split.matrices)
    # What is left is orthogonal to what was sent: a projection.
    for sent, left in zip(worker.matrices(received), worker.matrices(residual), strict=True):
        assert (sent.T @ left).abs().max() < 1e-12
        assert torch.linalg.matrix_rank(sent) == rank


def test_repeated_steps_find_the_best_approximation():
    """The warm start makes one matrix's steps a power iteration on it."""
    worker = Worker()
    before = noise(worker.residual)
    errors = []
    for _ in range(60):
        worker.compress(before)
        errors.append([float(m.norm()) for m in worker.matrices(worker.residual)])
    best = [float(torch.linalg.svdvals(m)[2:].norm()) for m in worker.matrices(before)]
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert all(first > 1.05 * b for first, b in zip(errors[0], best, strict=True))


def test_first_factors_follow_the_seed():
    first, again, other = (Worker(seed=seed).right for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    single = PowerSgd.memory(make(method="powersgd"), Worker().layout, torch.empty(1))
    assert single[RIGHT_FACTORS].tensor.dtype == torch.float32


def test_zeros_and_their_factors_recover():
    worker = Worker()
    before = noise(worker.residual)
    assert not worker.compress(torch.zeros_like(before)).any()
    assert not worker.right.any()
    received = worker.compress(before)
    assert all(m.any() for m in worker.matrices(received))
    torch.testing.assert_close(received + worker.residual, before, rtol=1e-13, atol=1e-13)
