"""A look at a network leaves its modes, and finds where it begins and ends by what runs."""

import pytest
import torch
from text_nets import FACTORIES, OURS, TOKENS
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.build import build_model
from prunex_mpi.models.dummy_input import (
    Ends,
    as_read,
    dummy_input,
    evaluating,
    find_ends,
    moved_in_training,
    probe,
    reads_ahead,
    transient_buffers,
    try_forward,
)
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.pruning.coupling import find_coupling

SIDE = 4


def partly_frozen() -> nn.Sequential:
    """A network of 2 classes that trains, all but its norm."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    model[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize(
    "look",
    [try_forward, probe, find_ends, find_coupling],
    ids=["try_forward", "probe", "find_ends", "find_coupling"],
)
def test_a_frozen_norm_stays_frozen(look):
    model = partly_frozen()
    before = modes(model)
    assert True in before and False in before
    look(model, Images(SIDE, 2))
    assert modes(model) == before


def test_modes_come_back_where_the_model_raises():
    model = partly_frozen()
    before = modes(model)
    with pytest.raises(RuntimeError), evaluating(model) as quiet:
        assert not any(modes(quiet))
        quiet(torch.zeros(1, 5, SIDE, SIDE))
    assert modes(model) == before


def test_a_dummy_input_is_of_the_models_dtype_and_knows_no_gradient():
    model = partly_frozen().double()
    with evaluating(model):
        assert not model(dummy_input(model, Images(SIDE))).requires_grad
    assert dummy_input(model, Images(SIDE)).dtype == torch.float64
    assert dummy_input(nn.Identity(), Images(SIDE)).shape == (1, 3, SIDE, SIDE)


CLASSES, IMAGE = 10, 8


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, CLASSES, 1)
        self.body, self.stem = nn.Conv2d(8, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(torch.relu(self.stem(x))))).mean((2, 3))


class TwoStems(nn.Module):
    """Two convolutions of the image, and a layer that evaluation does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)
        self.head, self.beside = nn.Linear(8, CLASSES), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.near(x) + self.far(x)).mean((2, 3)))


class Shifted(nn.Module):
    """The first convolution gets what the model has made of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(2 * x - 1)).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "stems", "head"),
    [
        (HeadFirst, {"stem.weight"}, "head.weight"),
        (TwoStems, {"near.weight", "far.weight"}, "head.weight"),
        (Shifted, {"stem.weight"}, "head.weight"),
    ],
)
def test_ends_are_what_runs_first_and_last(model, stems, head):
    network = model().train()
    network.get_submodule(head.removesuffix(".weight")).eval()
    assert find_ends(network, Images(IMAGE)) == Ends(frozenset(stems), head)
    assert network.training
    assert not network.get_submodule(head.removesuffix(".weight")).training


class Moving(nn.Module):
    """Keep a mean of what passes in training, and what evaluation fills."""

    def __init__(self, persistent: bool, moves: bool = True) -> None:
        super().__init__()
        self.first, self.moves = nn.Conv2d(3, 4, 3), moves
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.moves:
            self.mean.add_(x.mean())
        self.cache.fill_(x.shape[-1])
        return self.first(x - self.mean)


def test_buffers_that_training_moves_are_found():
    model = Moving(persistent=False)
    assert transient_buffers(model) == ["mean", "cache"]
    drawn = torch.get_rng_state()
    assert moved_in_training(model, Images(SIDE)) == "mean"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(model.mean) == float(model.cache) == 0
    assert moved_in_training(Moving(persistent=True), Images(SIDE)) == "mean"
    assert moved_in_training(Moving(persistent=False, moves=False), Images(SIDE)) == ""
    assert moved_in_training(nn.BatchNorm2d(3), Images(SIDE)) == ""


TINY = [f"tiny_text:{name}" for name in ("gpt", "untied", "lstm")]


@pytest.mark.parametrize("name", [*OURS, *FACTORIES, *TINY])
def test_networks_that_predict_the_next_token_read_none_ahead(name):
    assert not reads_ahead(build_model(name, TOKENS), TOKENS, 1e-4)


@pytest.mark.parametrize("context", [2, 8, 256])
def test_a_transformer_without_a_mask_reads_ahead(context):
    torch.manual_seed(0)
    inputs = Tokens(65, context)
    model = build_model("tiny_text:without_a_mask", inputs)
    for parameter in model.parameters():
        # As small as in GPT-2, where little of a change comes through.
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    assert reads_ahead(model, inputs, 1e-4)
    assert not reads_ahead(build_model("tiny_text:gpt", inputs), inputs, 1e-4)


def test_nothing_is_ahead_of_one_token_or_no_number():
    inputs = Tokens(65, 1)
    assert not reads_ahead(build_model("tiny_text:without_a_mask", inputs), inputs, 1e-4)
    model = build_model("tiny_text:untied", TOKENS)
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    assert not reads_ahead(model, TOKENS, 1e-4)


class Scaled(nn.Module):
    """A layer whose outputs are scaled by a number that a batch brings along."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * self.layer(x)


@pytest.mark.parametrize("form", [dict, tuple])
def test_an_example_may_hold_numbers_beside_a_batch(form):
    model, batch = Scaled(), {"scale": torch.tensor(2.0), "x": torch.randn(2, 3)}
    if form is tuple:
        batch = (batch["x"], batch["scale"])
    read, inputs = as_read(model, batch)
    given = inputs.draw(5, torch.float32)
    assert torch.equal(read(given), model(given, torch.tensor(2.0)))


@pytest.mark.parametrize("batch", [{}, (), {"x": 1}, 3, "x", torch.tensor(1.0), torch.zeros(0, 3)])
def test_an_example_without_a_batch_is_refused_in_a_line(batch):
    with pytest.raises(UserError, match=r"example= holds no tensor \[n, \.\.\.\] of samples"):
        as_read(Scaled(), batch)


def test_an_example_that_the_model_does_not_take_is_refused_in_a_line():
    with pytest.raises(UserError, match="does not take example=: TypeError"):
        as_read(Scaled(), {"y": torch.zeros(2, 3)})
