"""Coupled groups: which channels go together, and that nothing is missed when they are gone."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from masking import mask_
from odd_models import randomise_
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import find_groups

SIDE = 8


def conv(inputs: int, outputs: int, **options: int | bool) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Body(nn.Module):
    """A stem of 6 channels, `middle` (6 to 6 channels of a feature map) and a classifier."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem, self.middle, self.fc = conv(3, 6), middle, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(self.stem(x)).mean(dim=(2, 3)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Residual(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return y.relu_()


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv(6, 2), conv(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class OneNotZero(Concatenated):
    """A branch that is zero without its inputs beside one that is not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sigmoid(self.left(x)), self.right(x)], 1)


class Squeezed(nn.Module):
    """Squeeze-and-excitation: a sigmoid is not zero at zero, its product with zero is."""

    def __init__(self, scaled: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> None:
        super().__init__()
        self.down, self.up, self.scaled = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1), scaled

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return self.scaled(x, torch.sigmoid(self.up(F.relu(self.down(scale)))))


class Positioned(Plain):
    """An embedding of positions, the same for all channels, in front of a norm or a product."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.place, self.norm = nn.Parameter(torch.randn(1, 1, SIDE, SIDE)), nn.BatchNorm2d(6)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(self.combine(x, self.place)))


class Shifted(Positioned):
    """A number that is added to all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1))


class Opaque(nn.Module):
    """Apply `operation` to the feature map."""

    def __init__(self, operation) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x)


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = conv(6, 6, groups=6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.depth(x), 2)


class Shared(Plain):
    """The same convolution twice: its inputs and outputs are one set."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class SharedWeight(nn.Module):
    """Two convolutions of one weight, each with a bias and channels of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.left, self.right = conv(6, 5), conv(5, 5), conv(5, 5)
        self.right[0].weight = self.left[0].weight
        self.wide, self.last = conv(5, 6), conv(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(self.right(self.left(self.narrow(x)))))


class Counting(Plain):
    """A number that is added to a number has no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (self.calls.sign() * 2)


class Branching(Plain):
    """What decides is a sum over all channels of the stem, so that all of them must stay."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.sum()) > -1e9 else x


DOWN = "middle.down.weight"
STEM, INNER = "stem.0.weight", "middle.inner.0.weight"


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (Plain, {STEM: 6, INNER: 6}),
        (Residual, {STEM: 6}),
        (InPlace, {STEM: 6}),
        (Concatenated, {STEM: 6, "middle.left.0.weight": 2, "middle.right.0.weight": 4}),
        (OneNotZero, {STEM: 6, "middle.right.0.weight": 4}),
        (Squeezed, {STEM: 6, DOWN: 3}),
        (partial(Squeezed, lambda x, y: x * y.expand_as(x)), {STEM: 6, DOWN: 3}),
        (partial(Squeezed, lambda x, y: x * y.flatten().reshape_as(y)), {STEM: 6, DOWN: 3}),
        (partial(Squeezed, lambda x, y: x * (1 - y)), {STEM: 6, DOWN: 3}),
        (partial(Squeezed, lambda x, y: x * torch.rsub(y, 1)), {STEM: 6, DOWN: 3}),
        (Positioned, {STEM: 6, INNER: 6}),
        (partial(Positioned, torch.mul), {STEM: 6, INNER: 6}),
        (Shifted, {STEM: 6, INNER: 6}),
        (Depthwise, {STEM: 6}),
        (Shared, {STEM: 6}),
        (
            SharedWeight,
            {
                STEM: 6,
                "middle.narrow.0.weight": 5,
                "middle.wide.0.weight": 6,
                "middle.last.0.weight": 6,
            },
        ),
        (Counting, {STEM: 6, INNER: 6}),
        (Branching, {INNER: 6}),
    ],
)
def test_channels_that_meet_are_one_set(middle, expected):
    model = Body(middle())
    assert {s.name: s.count for s in find_coupling(model, Images(SIDE)).sets} == expected
    assert_exact(model)


def test_rows_and_columns_of_a_residual_block():
    found = find_coupling(Body(Residual()), Images(SIDE))
    six = list(range(6))
    vectors = ["stem.0.bias", "stem.1.weight", "stem.1.bias"]
    vectors += ["middle.inner.0.bias", "middle.inner.1.weight", "middle.inner.1.bias"]
    assert {n: r.tolist() for n, r in found.rows.items()} == dict.fromkeys(
        [STEM, INNER, *vectors], six
    )
    columns = {n: c.tolist() for n, c in found.columns.items()}
    assert columns == {INNER: six, "fc.weight": six}
    # 3x3 with padding at every position; the classifier once.
    assert found.positions == {STEM: SIDE**2, INNER: SIDE**2, "fc.weight": 1}
    assert found.excluded == ("fc.weight [coupled]: its outputs are the network's",)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (Opaque(lambda x: torch.softmax(x, dim=1)), "fc.weight reads what isn't zero without it"),
        (Opaque(lambda x: x + 1), "fc.weight reads what isn't zero without it"),
        (Opaque(lambda x: x[:, ::2].repeat(1, 2, 1, 1)), "__getitem__ counts its channels"),
        (Opaque(lambda x: x.cumsum(1)), "cumsum mixes it with others (in middle)"),
        (Opaque(lambda x: x + torch.ones(1, 6, 1, 1)), "cannot be removed (add in middle)"),
    ],
)
def test_what_would_be_felt_is_never_removed(middle, reason):
    with pytest.raises(UserError, match="no coupled channels can be removed") as caught:
        find_coupling(Body(middle), Images(SIDE))
    assert reason in str(caught.value)
    assert "): choose other --groups, or a --method that does not prune" in str(caught.value)


class Adapted(Plain):
    """A frozen convolution beside two small ones that are trained, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.narrow, self.widen = nn.Conv2d(6, 3, 1, bias=False), nn.Conv2d(3, 6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.widen(self.narrow(x))


def test_channels_of_what_is_not_trained_stay_and_all_else_is_pruned():
    model = Body(nn.Sequential(Adapted(), conv(6, 5), conv(5, 6)))
    found = find_coupling(model, Images(SIDE))
    assert {s.name for s in found.sets} == {
        *("middle.0.narrow.weight", "middle.1.0.weight", "middle.2.0.weight")
    }
    assert f"{STEM} [coupled]: middle.0.inner.0.weight is not trained" in found.excluded
    groups = find_groups(model, build_layout(model), ("coupled",), (0.5,), coupling=found)
    assert groups.total == found.total == 14
    assert_exact(model)


def test_channels_that_became_a_single_group_are_named():
    model = Body(Opaque(lambda x: x.view(len(x), 2, 3, SIDE, SIDE)[:, :, 0].repeat(1, 3, 1, 1)))
    found = find_coupling(model, Images(SIDE))
    assert [(s.name, s.count, s.unit) for s in found.sets] == [(STEM, 1, 6)]
    wanted = f"{STEM} [coupled]: its 6 channels are one group, and a set keeps one"
    assert wanted in found.excluded


@pytest.mark.parametrize("layers", [True, False])
def test_attention_offers_its_heads_and_where_layers_alone_are_pruned_keeps_its_width(layers):
    model = build_model("vit_tiny", Images(16, 4))
    found = find_coupling(model, Images(16), layers=layers)
    names = [f"encoder.layers.encoder_layer_{i}" for i in range(6)]
    width = [] if layers else [("conv_proj.weight", 192, 1)]
    assert [(s.name, s.count, s.unit) for s in found.sets] == width + [
        entry
        for n in names
        for entry in (
            (f"{n}.self_attention.in_proj_weight", 3, 64),
            (f"{n}.mlp.0.weight", 768, 1),
        )
    ]
    head = found.rows[f"{names[0]}.self_attention.in_proj_weight"]
    first = head[0]
    assert np.array_equal(head.reshape(3, 3, 64)[:, :, 0] - first, [range(3)] * 3)
    assert np.array_equal(found.columns[f"{names[0]}.self_attention.out_proj.weight"], head[:192])
    assert any("more than a channel of layers" in text for text in found.excluded) == layers
    # The embeddings are neither rows nor columns of anything.
    assert len(found.inner) == (0 if layers else 2)


def test_the_channels_that_a_padded_shortcut_adds_are_sets_of_their_own():
    found = find_coupling(build_model("resnet20", Images(SIDE, 4)), Images(SIDE))
    streams = [s.count for s in found.sets if s.name.endswith(("conv1.weight", "conv2.weight"))]
    # 16 channels run through all stages, 16 more from the second on, 32 more in the third.
    assert sorted(streams) == sorted([16, 16, 32] + 3 * [16] + 3 * [32] + 3 * [64])
    wide = found.rows["layer3.0.conv2.weight"]
    assert np.array_equal(wide[:16], found.rows["conv1.weight"])
    assert np.array_equal(wide[16:32], found.rows["layer2.0.conv2.weight"][16:])


def test_flattened_channels_take_all_their_columns_along():
    model = nn.Sequential(conv(3, 6), nn.Flatten(), nn.Linear(6 * SIDE**2, 4))
    found = find_coupling(model, Images(SIDE))
    assert np.array_equal(found.columns["2.weight"], np.repeat(np.arange(6), SIDE**2))
    assert_exact(model)


def test_the_model_is_left_as_it_was():
    model = Body(Residual()).train()
    model.middle.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    find_coupling(model, Images(SIDE))
    assert model.training and not model.middle.training and model.fc.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def assert_exact(model: nn.Module) -> None:
    """Without half of the groups' slices, what the other half computes must not depend on them.

    Slices of removed groups are zero except, one test after the other, for one parameter, which is
    noise: nothing may read it.
    """
    randomise_(model)
    model.eval()
    found = find_coupling(model, Images(SIDE))
    removed = np.arange(found.total) % 2 == 0
    images = torch.randn(2, 3, SIDE, SIDE)
    mask_(model, found, removed)
    with torch.no_grad():
        wanted = model(images)
        # Rows of weights and of BatchNorm feed columns that are zero; columns read what is zero.
        for name, parameter in model.named_parameters():
            for dim, ids in found.slices(name):
                kept, gone = parameter.clone(), np.flatnonzero((ids >= 0) & removed[ids])
                parameter.index_fill_(dim, torch.from_numpy(gone), 9.0)
                torch.testing.assert_close(model(images), wanted)
                parameter.copy_(kept)
    assert float(wanted.std()) > 0
