"""DGC: thresholds, shares and the warm-up as in the authors' code, and nothing is lost."""

from math import log
from types import SimpleNamespace

import pytest
import torch
from driving import exchange_alone
from torch import nn

from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.config.resolve import make
from prunex_mpi.methods import dgc
from prunex_mpi.methods.dgc import (
    MOMENTUM,
    ratio_of,
    sample_stride,
    sampled_threshold,
    warmup_steps,
)
from prunex_mpi.methods.exchange import RESIDUAL
from prunex_mpi.models.layout import Layout, build_layout


@pytest.fixture
def worker(monkeypatch):
    """Return a maker of one worker alone, of a ratio and a share of the gradient that is drawn."""

    def make_worker(ratio: float, sample: float, model: nn.Module | None = None) -> dgc.Dgc:
        monkeypatch.setattr(dgc, "SAMPLE", sample)
        changes = {"dgc_ratio": ratio, "weight_decay": 0.0}
        changes |= {"dgc_warmup_epochs": 0} if ratio < 1 else {}
        return exchange_alone(model or new_model(), method="dgc", **changes)

    return make_worker


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 50), nn.Linear(7, 3), nn.Linear(2, 1))


def select(of: dgc.Dgc, residual: torch.Tensor, step: int = 0):
    """Return values and positions (int64) of what is chosen, from memory filled with rubbish."""
    of.state.position.step = step
    of.state.memory[RESIDUAL].copy_(residual)
    of.sent.values.fill_(float("nan"))
    of.sent.positions.fill_(-1)
    of.state.scratch.fill_(9.0)
    of.chosen.fill_(True)
    count = len(of.select_(of.options.ratio))
    return of.sent.values[:count], of.sent.positions[:count].long()


def noise(layout: Layout, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.numel, generator=generator, dtype=torch.float64)


def test_kernels_and_matrices_are_compressed():
    """`if param.dim() > 1` in the authors' train.py, and `compress_ratio < 1` in compression.py."""
    layout = build_layout(new_model())
    compressed, whole = dgc.divide(layout, 0.5)
    assert [s.name for s in compressed] == ["0.weight", "1.weight", "2.weight"]
    assert [s.name for s in whole] == ["0.bias", "1.bias", "2.bias"]
    assert dgc.divide(layout, 1.0) == ([], list(layout.segments))


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
def test_samples_are_as_large_as_the_authors(numel, ratio, sample, stride, monkeypatch):
    monkeypatch.setattr(dgc, "SAMPLE", sample)
    assert sample_stride(numel, ratio) == stride
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
def test_a_threshold_that_too_few_reach_is_lowered(sevens, sent, worker):
    """_sparsify of the authors' code: up to 16 too few, up to 26 cut, beyond the largest."""
    residual = torch.ones(NUMEL)
    residual[::2] *= -1
    tens, others = [180, 0, 9], [i for i in range(NUMEL) if i % DRAWN][:sevens]
    residual[others] = 7.0
    residual[tens] = -10.0
    _, positions = select(worker(0.1, 0.1, nn.Linear(NUMEL, 1, bias=False)), residual)
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
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.99])
def test_what_is_sent_and_what_is_kept_are_the_accumulated_momenta(ratio, sample, worker):
    """The closed form: each element's momentum counts from the step at which it was sent last."""
    one = worker(ratio, sample)
    layout, (momentum, residual) = (
        one.state.layout,
        (one.state.memory[k] for k in (MOMENTUM, RESIDUAL)),
    )
    compressed = torch.zeros(layout.numel, dtype=torch.bool)
    for segment in one.compressed:
        compressed[segment.place] = True
    sent, added = torch.zeros(2, layout.numel, dtype=torch.float64)
    for step in range(6):
        one.state.position.step = step
        gradient = noise(layout, step)
        corrected = 0.9 * momentum + gradient * compressed
        added += corrected
        found = gradient.clone()
        one.exchange_(found)
        sent += found * compressed
        positions = compressed & (found != 0)
        assert not momentum[positions].any() and not residual[positions].any()
        assert torch.equal(momentum[~positions], corrected[~positions])
    assert sent.any()
    torch.testing.assert_close(sent + residual, added, rtol=1e-13, atol=1e-13)


def test_what_travels_whole_has_the_momentum_of_sgd(worker):
    one = worker(1.0, 0.01)
    total = torch.zeros(one.state.layout.numel, dtype=torch.float64)
    weight = torch.zeros_like(total, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    for step in range(5):
        weight.grad = noise(one.state.layout, step)
        found = weight.grad.clone()
        optimizer.step()
        one.exchange_(found)
        total += found
    torch.testing.assert_close(total, -weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.01, 0.25])
def test_a_sample_of_everything_finds_the_largest(ratio, worker):
    one = worker(ratio, 1.0)
    residual = noise(one.state.layout)
    values, positions = select(one, residual)
    start = 0
    for segment, count in zip(one.compressed, kept_per_layer(one.compressed, ratio), strict=True):
        piece = residual[segment.place]
        wanted = torch.topk(piece.abs(), count).indices.sort().values + segment.offset
        assert torch.equal(positions[start : start + count].sort().values, wanted)
        start += count
    assert start == values.numel()


@pytest.mark.parametrize("step", range(7))
def test_a_sample_finds_about_the_share_and_never_more(step, worker):
    ratio = 0.1
    one = worker(ratio, 0.03)
    _, positions = select(one, noise(one.state.layout, 1), step)
    assert len(set(positions.tolist())) == positions.numel()
    first = one.compressed[0].numel
    assert sample_stride(first, ratio) > 9
    limit = kept_per_layer(one.compressed, ratio)[0]
    found = int((positions < first).sum())
    assert 0.8 * limit <= found <= limit


def test_samples_take_turns():
    magnitudes = torch.arange(1.0, 1001.0)
    # Every tenth: 100 of them, of which 10 are above.
    found = [float(sampled_threshold(magnitudes, 0.1, 10, step)) for step in range(11)]
    assert found == [901 + step % 10 for step in range(11)]
    assert float(sampled_threshold(magnitudes, 1e-4, 1, 3)) == 1000.0


def test_zeros_stay_and_nan_travels(worker):
    one = worker(0.25, 0.1)
    residual = torch.zeros(one.state.layout.numel, dtype=torch.float64)
    assert select(one, residual)[0].numel() == 0
    one = worker(0.25, 1.0)
    residual[5] = 1e-30
    assert select(one, residual)[1].tolist() == [5]
    residual[9] = float("nan")
    assert 9 in select(one, residual)[1].tolist()


@pytest.mark.parametrize(
    ("outer_iterations", "steps", "wanted"),
    [(800, 25, 400), (1600, 25, 400), (64, 25, 40), (4, 25, 2), (4, 4, 0)],
)
def test_the_warm_up_is_four_epochs_but_a_small_part_of_the_run(outer_iterations, steps, wanted):
    """An epoch has 100 steps; 5 of 200 epochs are the authors'."""
    settings = make(method="dgc", outer_iterations=outer_iterations, dgc_ratio=0.001)
    train = SimpleNamespace(steps_per_epoch=100)
    position = SimpleNamespace(steps_done=0, step=0)
    context = SimpleNamespace(
        settings=settings,
        problem=SimpleNamespace(train=train, steps=steps),
        state=SimpleNamespace(position=position),
    )
    assert warmup_steps(context) == wanted
    shares = {}
    for position.step in range(wanted + 1):
        shares.setdefault(round(-5 * log(ratio_of(context), 1000), 6), position.step)
    # Equally long parts, as far as there are steps.
    parts = range(5) if wanted >= 4 else [0, 2] if wanted else []
    assert shares == {float(p + 1): p * wanted // 4 for p in parts} | {5.0: wanted}
