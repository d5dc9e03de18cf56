"""The arithmetic of DGC: nothing is lost, thresholds find the largest, shares fall in stages."""

import pytest
import torch
from torch import nn

from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.compress.threshold import (
    accumulate_,
    forget_sent_,
    ratio_at,
    sampled_threshold,
    select_above_,
)
from prunex_mpi.models.layout import Layout, build_layout


def new_layout() -> Layout:
    return build_layout(nn.Sequential(nn.Linear(60, 50), nn.Linear(7, 3), nn.Linear(2, 1)))


def select(residual: torch.Tensor, layout: Layout, ratio: float, sample: float, step: int = 0):
    """Return values and positions (int64) of what is chosen, from memory filled with rubbish."""
    room = sum(kept_per_layer(layout, ratio))
    values = torch.full((room,), float("nan"), dtype=residual.dtype)
    positions = torch.full((room,), -1, dtype=torch.int32)
    scratch, chosen = torch.full_like(residual, 9.0), torch.ones_like(residual, dtype=torch.bool)
    count = select_above_(
        residual, layout, ratio, sample, step, (scratch, chosen), (values, positions)
    )
    return values[:count], positions[:count].long()


def noise(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def test_the_share_falls_in_four_stages() -> None:
    shares = [ratio_at(step, 8, 0.001) for step in range(10)]
    stages = [0.25, 0.0625, 0.015625, 0.00390625]
    assert shares == [stage for stage in stages for _ in range(2)] + [0.001, 0.001]
    assert [ratio_at(step, 4, 0.02) for step in range(5)] == [0.25, 0.0625, 0.02, 0.02, 0.02]
    assert ratio_at(0, 8, 0.5) == 0.5
    assert ratio_at(0, 0, 0.001) == 0.001
    # Fewer steps than stages: the middle of each.
    assert [ratio_at(step, 2, 0.001) for step in range(3)] == [0.25, 0.015625, 0.001]


@pytest.mark.parametrize("sample", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 1.0])
def test_what_is_sent_and_what_is_kept_are_the_accumulated_momenta(ratio, sample) -> None:
    """The closed form: each element's momentum counts from the step at which it was sent last."""
    layout, factor = new_layout(), 0.9
    momentum, residual = torch.zeros(2, layout.numel, dtype=torch.float64)
    sent, added = torch.zeros(2, layout.numel, dtype=torch.float64)
    for step in range(6):
        gradient = noise(layout, step).double()
        accumulate_(momentum, residual, gradient, factor)
        added += momentum
        values, positions = select(residual, layout, ratio, sample, step)
        assert torch.equal(values, residual[positions])
        before = momentum.clone()
        forget_sent_(momentum, residual, positions.int())
        sent[positions] += values
        assert not momentum[positions].any()
        others = torch.ones(layout.numel, dtype=torch.bool)
        others[positions] = False
        assert torch.equal(momentum[others], before[others])
    assert sent.any()
    torch.testing.assert_close(sent + residual, added, rtol=1e-13, atol=1e-13)


def test_without_masking_momentum_is_that_of_sgd() -> None:
    layout = new_layout()
    # In float64: torch's step may fuse what rounds twice here.
    momentum, residual = torch.zeros(2, layout.numel, dtype=torch.float64)
    weight = torch.zeros(layout.numel, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    for step in range(5):
        gradient = noise(layout, step).double()
        accumulate_(momentum, residual, gradient, 0.9)
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(residual, -weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.01, 0.25])
def test_a_sample_of_everything_finds_the_largest(ratio: float) -> None:
    layout = new_layout()
    residual = noise(layout)
    values, positions = select(residual, layout, ratio, 1.0)
    start = 0
    for segment, count in zip(layout.segments, kept_per_layer(layout, ratio), strict=True):
        piece = residual[segment.offset : segment.offset + segment.numel]
        wanted = torch.topk(piece.abs(), count).indices.sort().values + segment.offset
        assert torch.equal(positions[start : start + count].sort().values, wanted)
        start += count
    assert start == values.numel()


@pytest.mark.parametrize("step", range(7))
def test_a_sample_finds_about_the_share_and_never_more(step: int) -> None:
    layout = new_layout()
    residual = noise(layout, 1)
    ratio, sample = 0.1, 0.1
    values, positions = select(residual, layout, ratio, sample, step)
    assert len(set(positions.tolist())) == positions.numel()
    first = layout.segments[0].numel
    limit = kept_per_layer(layout, ratio)[0]
    found = int((positions < first).sum())
    assert 0.5 * limit < found <= limit
    # Whatever was left is smaller, where the threshold or the limit cut.
    kept = residual[:first].abs().clone()
    kept[positions[positions < first]] = 0
    assert values[positions < first].abs().min() >= kept.max()


def test_samples_take_turns() -> None:
    magnitudes = torch.arange(1.0, 1001.0)
    # Every tenth: 100 of them, of which 10 are above.
    found = [float(sampled_threshold(magnitudes, 0.1, 0.1, step)) for step in range(11)]
    assert found == [901 + step % 10 for step in range(11)]
    # A hundredth would hold one to be sent: there must be two.
    assert float(sampled_threshold(magnitudes, 0.1, 0.01, 0)) == 901.0
    assert float(sampled_threshold(magnitudes, 1e-4, 0.01, 3)) == 1000.0


def test_more_than_the_share_above_the_threshold_are_cut_to_the_largest() -> None:
    """The sample of the first layer sees small elements only."""
    layout = new_layout()
    residual = torch.zeros(layout.numel)
    first = layout.segments[0].numel
    residual[:first] = torch.arange(first, dtype=torch.float32) + 2
    residual[0:first:10] = 1.0
    limit = kept_per_layer(layout, 0.01)[0]
    assert float(sampled_threshold(residual[:first], 0.01, 0.1, 0)) == 1.0
    _, positions = select(residual, layout, 0.01, 0.1)
    wanted = [i for i in range(first) if i % 10][-limit:]
    assert sorted(positions.tolist()) == wanted


def test_zeros_stay_and_nan_travels() -> None:
    layout = new_layout()
    residual = torch.zeros(layout.numel)
    assert select(residual, layout, 0.25, 0.1)[0].numel() == 0
    residual[5] = 1e-30
    assert select(residual, layout, 0.25, 1.0)[1].tolist() == [5]
    residual[9] = float("nan")
    assert 9 in select(residual, layout, 0.25, 1.0)[1].tolist()
