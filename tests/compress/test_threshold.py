"""The arithmetic of DGC: nothing is lost, thresholds and shares are as in the authors' code."""

import pytest
import torch
from torch import nn

from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.compress.threshold import (
    accumulate_,
    divide,
    forget_sent_,
    sample_stride,
    sampled_threshold,
    select_above_,
)
from prunex_mpi.models.layout import Layout, build_layout


def new_layout() -> Layout:
    return build_layout(nn.Sequential(nn.Linear(60, 50), nn.Linear(7, 3), nn.Linear(2, 1)))


def select(residual: torch.Tensor, layout: Layout, ratio: float, sample: float, step: int = 0):
    """Return values and positions (int64) of what is chosen, from memory filled with rubbish."""
    segments, _ = divide(layout, min(ratio, 0.99))
    room = sum(kept_per_layer(segments, ratio))
    values = torch.full((room,), float("nan"), dtype=residual.dtype)
    positions = torch.full((room,), -1, dtype=torch.int32)
    scratch, chosen = torch.full_like(residual, 9.0), torch.ones_like(residual, dtype=torch.bool)
    spare, sent = (scratch, chosen), (values, positions)
    count = select_above_(residual, segments, ratio, sample, step, spare, sent)
    return values[:count], positions[:count].long()


def noise(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def test_kernels_and_matrices_are_compressed():
    """`if param.dim() > 1` in the authors' train.py, and `compress_ratio < 1` in compression.py."""
    layout = new_layout()
    compressed, whole = divide(layout, 0.5)
    assert [s.name for s in compressed] == ["0.weight", "1.weight", "2.weight"]
    assert [s.name for s in whole] == ["0.bias", "1.bias", "2.bias"]
    assert divide(layout, 1.0) == ([], list(layout.segments))


@pytest.mark.parametrize(
    ("numel", "ratio", "sample", "stride"),
    [
        # 5,899 wanted: 129 would draw 4,572, 121 4,874, 113 5,219, 105 5,617, 97 6,080.
        (589_824, 0.001, 0.01, 97),
        # 2,000 wanted, since 2 of them are to be above: 33 would draw 1,117, 25 1,474.
        (36_864, 0.001, 0.01, 17),
        (2_304, 0.001, 0.01, 1),
        (2_000, 0.001, 0.01, 1),
        (589_824, 0.001, 1.0, 1),
        # 360,000 wanted by the share: 129 would draw 279,069; 121, 113, 105 too few, 97 371,134.
        (36_000_000, 0.25, 0.01, 97),
    ],
)
def test_samples_are_as_large_as_the_authors(numel, ratio, sample, stride):
    assert sample_stride(numel, ratio, sample) == stride
    assert stride == 1 or numel // stride >= max(numel * sample, 2 / ratio)


# 198 elements of which 20 are to be sent; every ninth of them, 22, is drawn, of these 3 are above.
NUMEL, DRAWN, SELECTS = 198, 9, 20


@pytest.mark.parametrize(
    ("sevens", "sent"),
    [
        # 3 pass 10 and 8, which are fewer than 16; at 6.4 there are 3 more.
        (13, "all"),
        (22, "first"),
        (24, "largest"),
        # Ten times lower, 1.07 is still above the rest.
        (0, "all"),
    ],
)
def test_a_threshold_that_too_few_reach_is_lowered(sevens, sent):
    """_sparsify of the authors' code: up to 16 too few, up to 26 cut, beyond the largest."""
    model = nn.Linear(NUMEL, 1, bias=False)
    layout = build_layout(model)
    residual = torch.ones(NUMEL)
    residual[::2] *= -1
    tens, others = [180, 0, 9], [i for i in range(NUMEL) if i % DRAWN][:sevens]
    residual[others] = 7.0
    residual[tens] = -10.0
    _, positions = select(residual, layout, 0.1, 0.1)
    found = sorted(positions.tolist())
    passing = sorted(tens + others)
    if sent == "all":
        assert found == passing
    elif sent == "first":
        assert len(passing) == 25 and found == passing[:SELECTS]
    else:
        assert len(passing) == 27 and len(found) == SELECTS
        assert set(tens) < set(found) < set(passing)


@pytest.mark.parametrize("sample", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 1.0])
def test_what_is_sent_and_what_is_kept_are_the_accumulated_momenta(ratio, sample):
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


def test_without_masking_momentum_is_that_of_sgd():
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
def test_a_sample_of_everything_finds_the_largest(ratio):
    layout = new_layout()
    residual = noise(layout)
    values, positions = select(residual, layout, ratio, 1.0)
    start = 0
    segments, _ = divide(layout, ratio)
    for segment, count in zip(segments, kept_per_layer(segments, ratio), strict=True):
        piece = residual[segment.offset : segment.offset + segment.numel]
        wanted = torch.topk(piece.abs(), count).indices.sort().values + segment.offset
        assert torch.equal(positions[start : start + count].sort().values, wanted)
        start += count
    assert start == values.numel()


@pytest.mark.parametrize("step", range(7))
def test_a_sample_finds_about_the_share_and_never_more(step):
    layout = new_layout()
    residual = noise(layout, 1)
    ratio, sample = 0.1, 0.03
    _, positions = select(residual, layout, ratio, sample, step)
    assert len(set(positions.tolist())) == positions.numel()
    first = layout.segments[0].numel
    assert sample_stride(first, ratio, sample) > 9
    limit = kept_per_layer(layout.segments, ratio)[0]
    found = int((positions < first).sum())
    assert 0.8 * limit <= found <= limit


def test_samples_take_turns():
    magnitudes = torch.arange(1.0, 1001.0)
    # Every tenth: 100 of them, of which 10 are above.
    found = [float(sampled_threshold(magnitudes, 0.1, 10, step)) for step in range(11)]
    assert found == [901 + step % 10 for step in range(11)]
    assert float(sampled_threshold(magnitudes, 1e-4, 1, 3)) == 1000.0


def test_zeros_stay_and_nan_travels():
    layout = new_layout()
    residual = torch.zeros(layout.numel)
    assert select(residual, layout, 0.25, 0.1)[0].numel() == 0
    residual[5] = 1e-30
    assert select(residual, layout, 0.25, 1.0)[1].tolist() == [5]
    residual[9] = float("nan")
    assert 9 in select(residual, layout, 0.25, 1.0)[1].tolist()
