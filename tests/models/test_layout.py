"""Flat vectors: every parameter has its place in them, and the model lives there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models import layout as layouts
from prunex_mpi.models.layout import (
    Layout,
    bits_digest,
    build_layout,
    flatten_,
    squared_distances,
    tiles,
)


class Tied(nn.Module):
    """A module used twice, a frozen parameter, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.again = self.inner
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.again(self.inner(x))


def test_shared_modules_count_once_and_frozen_or_empty_parameters_not_at_all():
    layout = build_layout(Tied())
    names = [s.name for s in layout.segments]
    # What has no element has nothing to train.
    assert names == ["gain", "inner.weight", "inner.bias"]
    assert layout.numel == 1 + 9 + 3


def test_embeddings_are_those_that_no_other_layer_shares():
    model = nn.ModuleDict({"in": nn.Embedding(7, 3), "out": nn.Linear(3, 7, bias=False)})
    model["place"], model["fixed"] = nn.Embedding(4, 3), nn.Embedding(2, 3)
    model["fixed"].requires_grad_(False)
    # One that is used in two places is still looked up alone.
    model["again"] = model["in"]
    names = [s.name for s in build_layout(model).embeddings]
    assert names == ["in.weight", "place.weight"]
    model["out"].weight = model["in"].weight
    assert build_layout(model).embeddings == ()


class Sharing(nn.Module):
    """Two layers, of which `share` returns tensors of one memory: a parameter and something."""

    def __init__(self, share: Callable[[Tensor], Tensor | nn.Parameter]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        shared = share(self.first.weight.detach())
        if isinstance(shared, nn.Parameter):
            self.second.weight = shared
        else:
            self.register_buffer("view", shared)


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (nn.Parameter, "first.weight and second.weight"),
        (lambda w: nn.Parameter(w.t()), "first.weight and second.weight"),
        (lambda w: nn.Parameter(w, requires_grad=False), "first.weight and second.weight"),
        (lambda w: w[1:2], "first.weight and view"),
        (lambda w: w.view(torch.int32)[::2], "first.weight and view"),
        (lambda w: nn.Parameter(torch.zeros(1, 4).expand(4, 4)), "elements of second.weight"),
    ],
)
def test_what_shares_memory_with_a_parameter_is_refused(share, names):
    with pytest.raises(UserError, match=f"{names} share memory"):
        build_layout(Sharing(share))


def test_parts_of_one_memory_that_do_not_overlap_are_taken():
    model, both = nn.ParameterDict(), torch.zeros(4, 6)
    model["top"], model["bottom"] = nn.Parameter(both[:2]), nn.Parameter(both[2:])
    layout = build_layout(model)
    flatten_(model, layout)
    assert build_layout(model) == layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_model_computes_and_differentiates_in_the_flat_vectors(dtype):
    torch.manual_seed(0)
    model = Tied().to(dtype)
    x = torch.rand(4, 3, dtype=dtype)
    before = model(x)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    layout = build_layout(model)
    theta, grad = flatten_(model, layout)
    assert theta.dtype == grad.dtype == dtype
    assert torch.equal(grad, torch.zeros_like(grad))
    assert torch.equal(model(x), before)

    model(x).sum().backward()
    for one, other in zip(layout.views(grad), expected, strict=True):
        torch.testing.assert_close(one, other)
    theta.zero_()
    assert torch.equal(model(x), torch.zeros_like(before))
    # The frozen parameter is none of ours.
    assert torch.equal(model.frozen, torch.ones_like(model.frozen))


@pytest.mark.parametrize("kind", ["half", "bfloat16", "mixed", "frozen"])
def test_what_mpi_cannot_add_up_is_refused(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if kind == "half":
        model.half()
    elif kind == "bfloat16":
        model.bfloat16()
    elif kind == "mixed":
        model[1].double()
    else:
        model.requires_grad_(False)
    with pytest.raises(UserError, match="float32 or all float64") as caught:
        build_layout(model)
    assert "\n" not in str(caught.value)


def tied_vector() -> tuple[Layout, Tensor]:
    layout = build_layout(Tied())
    return layout, torch.arange(1.0, 1 + layout.numel, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 3, 10, 2**16])
def test_tiles_cover_every_segment_once(length, monkeypatch):
    monkeypatch.setattr(layouts, "CPU_TILE", length)
    layout, flat = tied_vector()
    sums = np.zeros(len(layout.segments))
    end = 0
    for tile in tiles(layout, flat.device):
        assert tile.place.start == end
        end = tile.place.stop
        pieces = tile.pieces(flat[tile.place])
        sums[tile.layers] += [float(piece.sum()) for piece in pieces]
    assert end == layout.numel
    assert sums.tolist() == [float(view.sum()) for view in layout.views(flat)]


@pytest.mark.parametrize("length", [1, 3, 10, 2**16])
def test_squared_distances_go_segment_by_segment(length, monkeypatch):
    monkeypatch.setattr(layouts, "CPU_TILE", length)
    layout, flat = tied_vector()
    numbers = flat.numpy()
    expected = [float(np.sum(numbers[s.offset : s.offset + s.numel] ** 2)) for s in layout.segments]
    distances = squared_distances(3 * flat, flat, layout)
    assert distances.dtype == np.float64
    np.testing.assert_allclose(distances, 4 * np.array(expected), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 7, 64])
def test_a_digest_sees_every_bit(numel, dtype):
    flat = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    seen = {bits_digest(flat)}
    assert min(seen) >= 0 and max(seen) < 2**64
    assert bits_digest(flat.clone()) in seen
    integers = flat.view(torch.int32 if dtype == torch.float32 else torch.int64)
    for place in range(numel):
        for bit in (0, 1, 20, 31):
            before = int(integers[place])
            integers[place] = before ^ (1 << bit) if bit < 31 else -before - 1
            seen.add(bits_digest(flat))
            integers[place] = before
    assert len(seen) == 1 + 4 * numel


def test_rounding_up_here_and_down_there_does_not_cancel():
    flat = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = bits_digest(flat)
    integers = flat.view(torch.int32)
    for one, other in ((0, 2), (1, 3), (4, 5), (998, 6)):
        integers[one] += 1
        integers[other] -= 1
        assert bits_digest(flat) != whole
        integers[one] -= 1
        integers[other] += 1
    assert bits_digest(flat) == whole


def test_the_norm_of_a_long_vector_loses_no_small_squares():
    length = layouts.norm(torch.full((2**27,), 0.1))
    assert length.item() == pytest.approx(0.1 * 2**13.5, rel=1e-3)
