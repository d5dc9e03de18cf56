"""Networks whose channels meet in LayerNorm, grouped convolutions, attention and cuts."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from coupled_nets import NETWORKS, SIDE, DroppingAttention, encoder_norm_first
from masking import draw, exported, mask_, plan_of
from odd_models import randomise_, train_returns_nothing
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models import standalone
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning import channel_trace
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.masks import make_mask, pack_, unpack_
from prunex_mpi.pruning.projection import group_squared_norms, select
from prunex_mpi.pruning.removable import attempt, find_removable, find_tried, training_failure
from prunex_mpi.pruning.shrink import sizes_in_all, smaller_sizes, smaller_tensors

CLASSES = 5
# As little as export's proof allows.
EXACT = 1e-9


def describe(name: str) -> dict[str, object]:
    """Return what a network is built by."""
    sizes = {"num_classes": CLASSES, "image_size": SIDE}
    return {"name": f"coupled_nets:{name}", **sizes, "stem": ""}


@cache
def coupling_of(name: str) -> Coupling:
    """Return which channels of a network go together, found once for all tests."""
    torch.manual_seed(0)
    model = standalone.build(describe(name)).eval()
    return find_tried(model, Images(SIDE))


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_left_computes_the_same(name, tmp_path):
    description, coupling = describe(name), coupling_of(name)
    torch.manual_seed(0)
    model = standalone.build(description).eval().double()
    randomise_(model)
    # About a half, and a third or one group; code divides widths by numbers of heads.
    masks = [draw(coupling), np.ones(coupling.total, dtype=bool)]
    for s in coupling.sets:
        masks[1][s.start : s.start + max(1, s.count // 3)] = False
    images = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for number, removed in enumerate(masks):
        model.load_state_dict(state)
        mask_(model, coupling, removed)
        verdict = find_removable(model, coupling, images)
        assert np.array_equal(verdict.removed, removed)
        wanted = model(images)
        # Nothing is left to tell images apart where so little is.
        assert number or float((wanted[0] - wanted[1]).abs().max()) > 1e-3
        smaller = exported(tmp_path / str(number), model, coupling, removed, model=description)
        found = smaller.double()(images)
        limit = EXACT * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found, wanted, rtol=0, atol=limit)


# One of each kind; what a single step leaves is seen above for all.
AGAIN = ("regnet_y", "swin_v2", "vit", "own_attention", "parts", "gated", "keywords")


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in AGAIN else pytest.mark.long) for n in NETWORKS]
)
def test_what_became_smaller_becomes_smaller_again(name, tmp_path):
    coupling = coupling_of(name)
    torch.manual_seed(0)
    model = standalone.build(describe(name)).eval().double()
    randomise_(model)
    first = np.zeros(coupling.total, dtype=bool)
    for s in coupling.sets:
        first[s.start] = True
    whole = smaller_sizes(model, coupling, np.zeros_like(first))
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    before = json.loads(json.dumps(smaller_sizes(model, coupling, first)))
    tensors = smaller_tensors(model, coupling, first)
    standalone.resize_(model, before)
    standalone.fill_(model, tensors)
    # What export finds on such a network.
    coupling = find_tried(model, Images(SIDE))
    second = np.zeros(coupling.total, dtype=bool)
    for s in coupling.sets:
        second[s.start + s.count - 1] = s.count > 1
    # Nothing becomes one group or stays that could be removed before.
    assert coupling.total > 0.9 * (first.size - first.sum()) and second.any()
    images = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    # Where nothing more is removed all stays as it is.
    nothing = np.zeros_like(second)
    plan = {"model": describe(name), "layers": sizes_in_all(model, before, coupling, nothing)}
    same = exported(tmp_path / "same", model, coupling, nothing, **plan)
    torch.testing.assert_close(same.double()(images), model(images))
    mask_(model, coupling, second)
    wanted = model(images)
    plan["layers"] = sizes_in_all(model, before, coupling, second)
    found = exported(tmp_path, model, coupling, second, **plan).double()(images)
    limit = EXACT * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    # In place as well.
    sizes, tensors = (f(model, coupling, second) for f in (smaller_sizes, smaller_tensors))
    standalone.resize_(model, sizes)
    standalone.fill_(model, tensors)
    torch.testing.assert_close(model(images), wanted, rtol=0, atol=limit)
    # And back, as for a checkpoint of before.
    standalone.resize_(model, whole, grows=True)
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes


@pytest.mark.parametrize("name", NETWORKS)
def test_half_of_the_groups_leave_a_quarter_and_what_is_odd(name):
    coupling = coupling_of(name)
    torch.manual_seed(0)
    model = standalone.build(describe(name))
    layout = build_layout(model)
    groups = find_groups(model, layout, ("coupled",), (0.5,), coupling=coupling)
    fixed = ("the network's", "applied along", "all channels are multiplied by it")
    assert all(any(f in reason for f in fixed) for reason in groups.excluded), groups.excluded
    flat = torch.randn(layout.numel)
    scores = group_squared_norms(flat, layout, groups, groups.kinds[0]).numpy()
    mask = select(scores, groups.kinds[0], 1.0)
    plan = plan_of(layout, groups, mask, flat.device)
    assert plan.numel < NETWORKS[name] * layout.numel
    # What travels is what the mask leaves.
    payload, back = torch.empty(plan.numel), torch.empty_like(flat)
    pack_(flat, plan, payload)
    unpack_(payload, plan, back)
    make_mask(layout, groups, mask, flat).apply_(flat)
    assert torch.equal(back, flat)
    # And is what the smaller network has.
    tensors = smaller_tensors(model, coupling, ~mask)
    named = dict(model.named_parameters())
    assert sum(t.numel() for key, t in tensors.items() if key in named) == plan.numel


class Fixed(nn.Module):
    """Attention for half of the channels of a width that its code states."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x).reshape(len(x), -1, 2, 12)
        return self.out((y * y.flip(2)).reshape(len(x), -1, 24))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.fixed = nn.Linear(3, 24), nn.LayerNorm(24), Fixed()
        self.up, self.down, self.last = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(2).transpose(1, 2))
        x = x + self.fixed(self.norm(x))
        return self.last((x + self.down(torch.relu(self.up(x)))).mean(dim=1))


def test_where_a_modules_code_states_its_width_it_gets_another():
    model = Beside().eval()
    coupling = find_tried(model, Images(4))
    assert {s.name for s in coupling.sets} == {"first.weight", "up.weight", "fixed.into.weight"}


def test_a_number_that_counts_two_sizes_gets_both():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
            self.third, self.width, self.last = nn.Conv2d(3, 8, 1), 8, nn.Linear(24, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [f(x).reshape(len(x), self.width, -1) for f in (self.first, self.second)]
            return self.last(torch.cat([*parts, self.third(x).flatten(2)], dim=1).mean(dim=2))

    model = Twice().eval()
    coupling = find_tried(model, Images(4))
    assert len(coupling.sets) == 3 and coupling.total == 24


def test_pieces_lose_channels_apart_and_none_becomes_empty():
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Linear(12, 2)
            self.each = nn.ModuleList(nn.Conv2d(2, 3, 1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pieces = torch.relu(self.first(x)).chunk(4, dim=1)
            found = [f(piece) for f, piece in zip(self.each, pieces, strict=True)]
            return self.last(torch.cat(found, dim=1).mean(dim=(2, 3)))

    model = Pieces().eval()
    coupling = find_tried(model, Images(4))
    assert [(s.name, s.count) for s in coupling.sets][:4] == [("first.weight", 2)] * 4


@torch.no_grad()
def test_what_only_a_norm_reads_stays():
    model = encoder_norm_first(CLASSES, SIDE).eval()
    coupling = find_coupling(model, Images(SIDE))
    for key, ids in coupling.columns.items():
        model.get_parameter(key)[:, torch.from_numpy(ids == 0)] = 0
    assert coupling.rows["patch.weight"][0] == 0
    images = torch.randn(2, 3, SIDE, SIDE)
    assert not find_removable(model, coupling, images).removed.any()


class Bottleneck(nn.Module):
    """A residual block of convolutions before attention: sets of channels in another order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.inside = nn.Sequential(nn.Conv2d(width, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.out, self.norm = nn.Conv2d(16, width, 1), nn.LayerNorm(width)
        self.attention = DroppingAttention(width, heads)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.out(torch.relu(self.inside(x)))).flatten(2).transpose(1, 2)
        return self.last((x + self.attention(self.norm(x))).mean(dim=1))


def test_whatever_is_removed_the_code_runs():
    """Of the width and of the heads the same share goes in the first trial."""
    model = Bottleneck(48, 4).eval()
    coupling = find_tried(model, Images(SIDE))
    for seed in range(5):
        assert attempt(model, coupling, draw(coupling, seed), Images(SIDE)) is None


def test_a_call_that_nobody_has_thought_of_pins_what_it_gets(monkeypatch):
    def stumble(*_: object) -> None:
        raise KeyError("dim")

    monkeypatch.setattr(channel_trace.label_shapes, "reduce", stumble)
    first, last = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = first, nn.Conv2d(8, 8, 3), last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)).mean((2, 3)))

    coupling = find_coupling(Averaged(), Images(SIDE))
    assert [s.name for s in coupling.sets] == ["first.weight"]
    assert any("mean mixes it with others" in line for line in coupling.excluded)


def test_a_train_that_returns_nothing_is_no_obstacle():
    model = train_returns_nothing(CLASSES, SIDE)
    model.train()
    coupling = find_tried(model, Images(SIDE))
    assert model.training and not model[1].training
    assert training_failure(model, coupling, Images(SIDE)) == ""


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("whole", [True, False])
def test_what_torch_has_compiled_is_refused_in_one_line(whole):
    body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    if whole:
        model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 1), body, *ends))
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 1), torch.jit.script(body), *ends)
    with pytest.raises(UserError, match=r"torch\.jit has compiled"):
        find_tried(model, Images(4))
