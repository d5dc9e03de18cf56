"""Groups of real networks, and the projection against brute force over all supports."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from masking import project
from reference import groups_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import Layout, build_layout, flatten_
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import Groups, find_groups, out_of_reach
from prunex_mpi.pruning.masks import make_mask, mask_drift
from prunex_mpi.pruning.projection import (
    add_gradients_,
    add_hessian_products_,
    kept_count,
    kept_weights,
    prune_by_gradient_flow,
    prune_by_magnitude,
    select,
    with_budget,
)


class Convolutions(nn.Module):
    """Convolutions of every sort behind the first; they need not fit each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.plain = nn.Conv2d(4, 3, 2)
        self.pointwise = nn.Conv2d(5, 4, 1)
        self.grouped = nn.Conv2d(6, 4, (1, 2), groups=2)
        self.depthwise = nn.Conv2d(3, 6, 2, groups=3)
        self.signal = nn.Conv1d(3, 2, 2)
        self.volume = nn.Conv3d(2, 2, (1, 1, 2))
        self.head = nn.Linear(4, 2)


def prepare(
    model: nn.Module,
    kinds: Sequence[str],
    ratios: Sequence[float] = (0.5,),
) -> tuple[Layout, Groups]:
    layout = build_layout(model)
    return layout, find_groups(model, layout, kinds, ratios)


def group_elements(shape: Sequence[int], conv_groups: int, kind: str) -> list[list[np.ndarray]]:
    """Return the flat indices of each group of a weight, one list per independent selection."""
    every = groups_of(torch.empty(shape), kind, conv_groups)
    return [[mask.view(-1).nonzero().view(-1).numpy() for mask in selection] for selection in every]


@pytest.mark.parametrize("kind", ["filter", "channel", "shape", "kernel"])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.67])
def test_projection_keeps_alpha_groups_and_the_most_energy_of_all_supports(kind, ratio):
    model = Convolutions().double()
    layout, groups = prepare(model, [kind], [ratio])
    modules = dict(model.named_modules())
    torch.manual_seed(int(ratio * 100))
    flat = torch.randn(layout.numel, dtype=torch.float64)
    result, _ = project(flat, layout, groups)
    squares, support = flat.square().numpy(), result.numpy() != 0
    assert torch.equal(result[support], flat[support])
    for selection in groups.kinds[0]:
        segment = layout.segments[groups.layers[selection.layer].segment]
        piece = slice(segment.offset, segment.offset + segment.numel)
        conv = modules[segment.name.removesuffix(".weight")]
        for candidates in group_elements(segment.shape, conv.groups, kind):
            alpha = math.ceil(ratio * len(candidates))
            kept = [bool(support[piece][g].all()) for g in candidates]
            assert kept == [bool(support[piece][g].any()) for g in candidates]
            assert sum(kept) == alpha
            energy = [squares[piece][g].sum() for g in candidates]
            best = max(sum(c) for c in itertools.combinations(energy, alpha))
            assert np.dot(kept, energy) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("kind", ["filter", "channel", "shape"])
def test_ties_go_to_the_lower_index_and_never_to_more_groups(kind):
    layout, groups = prepare(Convolutions(), [kind])
    for value in (0.0, 1.0):
        _, mask = project(torch.full((layout.numel,), value), layout, groups)
        for s in groups.kinds[0]:
            alpha = math.ceil(s.count / 2)
            expected = [[True] * alpha + [False] * (s.count - alpha)] * s.selections
            assert mask[s.start : s.stop].reshape(s.selections, s.count).tolist() == expected


@pytest.mark.parametrize("count", [3, 30, 64, 512, 4608, 20480])
def test_percent_ratios_of_the_keep_ramp_end_at_the_exact_ceiling(count):
    for percent in range(1, 101):
        target = 1.0 - 1.0 * (1.0 - percent / 100)
        assert kept_count(count, target) == max(1, -(-percent * count // 100))
    assert kept_count(count, 1e-6) == 1


def test_each_kind_has_its_ratio():
    _, groups = prepare(Convolutions(), ["filter", "channel"], [0.5, 0.25])
    found = {(s.kind, s.keep_ratio) for s in itertools.chain(*groups.kinds)}
    assert found == {("filter", 0.5), ("channel", 0.25)}


def test_drift_counts_changed_groups_against_kept_ones():
    old, new = np.array([1, 1, 0, 0], dtype=bool), np.array([1, 0, 1, 0], dtype=bool)
    assert mask_drift(new, old) == 1.0
    assert mask_drift(old, old) == 0.0
    assert mask_drift(old, np.ones(4, dtype=bool)) == 1.0
    assert mask_drift(np.ones(4, dtype=bool), old) == 0.5


CLASSES = 7
CLASSIFIERS = (
    *("convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mobilenet_v2", "resnet18"),
    *("regnet_y_400mf", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_0", "vgg11_bn"),
    "vit_b_16",
)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_conv_layer_of_a_classifier_has_groups_or_a_reason(name):
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    # Without memory where the network allows it: only shapes matter.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = torchvision.models.get_model(name, num_classes=CLASSES, **options)
    for kind in ("filter", "channel", "shape"):
        if name == "vit_b_16" and kind != "filter":
            with pytest.raises(UserError, match="no layer of the model can be pruned"):
                prepare(model, [kind])
        else:
            assert_reasons(model, kind)


def assert_reasons(model: nn.Module, kind: str) -> None:
    """Assert that each convolution is pruned, or has the reason that it should have."""
    convs = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    layout, groups = prepare(model, [kind])
    pruned = {layout.segments[layer.segment].name for layer in groups.layers}
    assert [s.layer for s in groups.kinds[0]] == list(range(len(groups.layers)))
    reasons = dict(text.split(f".weight [{kind}]: ") for text in groups.excluded)
    assert not pruned & {f"{n}.weight" for n in reasons}
    assert pruned | {f"{n}.weight" for n in reasons} == {f"{n}.weight" for n in convs}
    for conv_name, conv in convs.items():
        one_column = conv.weight[0].numel() == 1 if kind == "shape" else conv.weight.shape[1] == 1
        if kind != "filter" and conv.in_channels == 3:
            assert "the image's" in reasons[conv_name]
        elif kind != "filter" and one_column:
            assert "depthwise" in reasons[conv_name]
        elif kind == "filter" and conv.out_channels == CLASSES:
            assert "the network's" in reasons[conv_name]
        else:
            assert conv_name not in reasons


def test_weights_that_two_layers_share_are_pruned_under_the_first_name():
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(4)))
    model[2].weight = model[1].weight
    model[3].weight.requires_grad_(False)
    model.append(weight_norm(nn.Conv2d(4, 4, 1)))
    layout, groups = prepare(model, ["channel"])
    assert [layout.segments[layer.segment].name for layer in groups.layers] == ["1.weight"]
    assert groups.excluded[1:] == (
        "2.weight [channel]: its weight is another layer's",
        "3.weight [channel]: its weight is not trained",
        "4.weight [channel]: its weight is computed from other parameters",
    )


def test_compositions_leave_out_a_kind_that_no_layer_has():
    with torch.device("meta"):
        model = torchvision.models.vit_b_16(num_classes=CLASSES)
    _, groups = prepare(model, ["filter", "channel"])
    # Its only convolution reads the image: filters are all that can be pruned.
    assert [[s.kind for s in selections] for selections in groups.kinds] == [["filter"]]
    assert len(groups.excluded) == 1


def test_classes_are_kept_when_linear_layers_stand_before_a_convolutional_classifier():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(4, 4))
    model.append(nn.Conv2d(8, CLASSES, 1))
    layout, groups = prepare(model, ["filter"])
    assert [layout.segments[layer.segment].name for layer in groups.layers] == [
        "0.weight",
        "1.weight",
    ]
    assert [text.split(" ")[0] for text in groups.excluded] == ["3.weight"]


def test_frozen_convolutions_are_named_and_stay_the_first():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    layout, groups = prepare(model, ["channel"])
    # The input of the second convolution is not the image.
    assert [layout.segments[layer.segment].name for layer in groups.layers] == ["1.weight"]
    assert [text.split(" ")[0] for text in groups.excluded] == ["0.weight"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "no convolution layer .*give --groups coupled"),
        (nn.Conv2d(3, 4, 3), "image's.*give --groups coupled"),
    ],
)
def test_nothing_to_prune_is_a_user_error(model, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare(model, ["channel"])
    assert "\n" not in str(caught.value)


def test_groups_of_convolutions_that_reach_little_say_so():
    convolutions = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    layout, groups = prepare(nn.Sequential(*convolutions, nn.Linear(64, 64)), ["channel"])
    line = out_of_reach(groups, layout.numel)
    assert "576 of the 4,968 parameters" in line
    assert "--groups coupled" in line
    layout, groups = prepare(nn.Sequential(*convolutions, nn.Linear(64, 2)), ["channel"])
    assert out_of_reach(groups, layout.numel) == ""
    layout, groups = coupled_groups()
    assert out_of_reach(groups, 10 * layout.numel) == ""


class Coupled(nn.Module):
    """Two sets: the stem's 4 channels, and 6 channels that a depthwise convolution passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.wide, self.depth = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 3, groups=6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depth(self.wide(torch.relu(self.norm(self.stem(x))))))
        return self.fc(x.mean(dim=(2, 3)))


def coupled_groups(
    ratio: float = 0.5, keep_by: str = "groups", floor: float = 0.0
) -> tuple[Layout, Groups]:
    model = Coupled().double()
    layout = build_layout(model)
    coupling = find_coupling(model, Images(8))
    groups = find_groups(model, layout, ["coupled"], [ratio], coupling=coupling)
    if keep_by != "groups":
        groups = with_budget(groups, layout, keep_by, floor)
    return layout, groups


@pytest.mark.parametrize("keep_by", ["parameters", "multiply-adds"])
@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("schedule_progress", [0.0, 0.5, 1.0])
def test_a_budget_is_spent_on_the_groups_of_highest_score(keep_by, ratio, schedule_progress):
    layout, groups = coupled_groups(ratio, keep_by)
    # Of one image of 8x8: the stem at 6x6 positions, 1x1 at 6x6, depthwise at 4x4.
    prices = {"stem.weight": 36, "wide.weight": 36, "depth.weight": 16, "fc.weight": 1}
    if keep_by == "parameters":
        prices = {s.name: 1 for s in layout.segments}

    def cost(mask: np.ndarray) -> float:
        flat = torch.ones(layout.numel, dtype=torch.float64)
        make_mask(layout, groups, mask, flat).apply_(flat)
        views = zip((s.name for s in layout.segments), layout.views(flat), strict=True)
        return sum(prices.get(name, 0) * float(view.sum()) for name, view in views)

    everything = cost(np.ones(groups.total, dtype=bool))
    # On the ramp part of what is to go in the end.
    limit = everything - schedule_progress * (everything - ratio * everything)
    for seed in range(6):
        scores = np.random.default_rng(seed).random(groups.total)
        mask = select(scores, groups.kinds[0], schedule_progress, groups)
        assert cost(mask) <= limit
        assert mask.all() == (schedule_progress == 0)
        for s in groups.kinds[0]:
            kept = mask[s.start : s.stop]
            assert kept.any()
            own = scores[s.start : s.stop]
            assert kept.all() or own[kept].min() > own[~kept].max()
        # Keeping the best one of those removed as well would cost too much.
        best = np.argmax(np.where(mask, -1, scores))
        larger = mask.copy()
        larger[best] = True
        assert mask.all() or cost(larger) > limit


def test_a_budget_below_one_channel_per_set_is_refused():
    with pytest.raises(UserError, match=r"0\.01 of the parameters can't be reached: .* raise it"):
        coupled_groups(0.01, "parameters")


@pytest.mark.parametrize("floor", [0.3, 0.5])
def test_a_budget_leaves_every_set_its_floor(floor):
    _, groups = coupled_groups(0.72, "parameters", floor)
    least = [math.ceil(floor * s.count) for s in groups.kinds[0]]
    reached = set()
    for seed in range(20):
        # The first set is worth next to nothing, or the second.
        scores = np.random.default_rng(seed).random(groups.total)
        poor = groups.kinds[0][seed % 2]
        scores[poor.start : poor.stop] *= 1e-3
        mask = select(scores, groups.kinds[0], 1.0, groups)
        kept = [int(mask[s.start : s.stop].sum()) for s in groups.kinds[0]]
        assert all(k >= n for k, n in zip(kept, least, strict=True))
        reached |= {i for i in (0, 1) if kept[i] == least[i]}
    assert reached


def test_a_floor_that_a_budget_has_no_room_for_is_refused():
    with pytest.raises(UserError, match=r"raise it, or lower --keep-floor"):
        coupled_groups(0.5, "parameters", 0.9)


# --------------------------------------------------------------------------------------------------
# Single weights
# --------------------------------------------------------------------------------------------------


def new_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def new_batches() -> list:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(5, 1, 3, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (5,), generator=generator),
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0])
def test_magnitude_keeps_the_largest_of_each_layer(ratio):
    model = new_net()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    pruned = prune_by_magnitude(theta, layout, ratio)
    kept = 0
    for segment, value, gone in zip(
        layout.segments, layout.views(theta), layout.views(pruned), strict=True
    ):
        if len(segment.shape) == 1:
            assert not gone.any()
            continue
        count = int((~gone).sum())
        assert count == max(1, -(-round(1000 * ratio) * segment.numel // 1000))
        kept += count
        if gone.any():
            assert value[~gone].abs().min() >= value[gone].abs().max()
    assert kept == kept_weights(layout, ratio, "magnitude")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(1).unsqueeze(-1).expand(-1, -1, 4) + torch.arange(4)
        found, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.fc(found.mean(dim=1))


class FlashAttention(Attention):
    """Insists on a kernel that has no second derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().forward(x)


def test_a_model_without_second_derivatives_is_refused():
    model = FlashAttention()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    total = torch.zeros_like(theta)
    batches = [(images.float(), labels) for images, labels in new_batches()]
    with pytest.raises(UserError, match=r"twice.*use --pactrain-score magnitude"):
        add_hessian_products_(total, theta, layout, model, F.cross_entropy, batches)


def test_attention_is_differentiated_twice():
    model = Attention()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    batches = [(images.float(), labels) for images, labels in new_batches()]
    slope, product, near = (torch.zeros_like(theta) for _ in range(3))
    add_gradients_(slope, layout, model, F.cross_entropy, batches)
    add_hessian_products_(product, slope, layout, model, F.cross_entropy, batches)
    theta.add_(slope, alpha=1e-2)
    add_gradients_(near, layout, model, F.cross_entropy, batches)
    assert product.any()
    error = torch.linalg.vector_norm((near - slope) / 1e-2 - product)
    assert error < 0.05 * torch.linalg.vector_norm(product)


def test_scores_that_are_not_finite_are_refused():
    layout = build_layout(new_net())
    theta = torch.ones(layout.numel)
    product = torch.full_like(theta, torch.nan)
    with pytest.raises(UserError, match="not finite"):
        prune_by_gradient_flow(theta, product, layout, 0.5)
