"""A look at a network leaves every module in its own mode."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.models.dummy_input import (
    dummy_input,
    evaluating,
    find_ends,
    moved_in_training,
    probe,
    settle,
    transient_buffers,
    try_forward,
)
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
    [partial(try_forward, num_classes=2), settle, probe, find_ends, find_coupling],
    ids=["try_forward", "settle", "probe", "find_ends", "find_coupling"],
)
def test_a_frozen_norm_stays_frozen(look: Callable) -> None:
    model = partly_frozen()
    before = modes(model)
    assert True in before and False in before
    look(model, image_size=SIDE)
    assert modes(model) == before


def test_modes_come_back_where_the_model_raises() -> None:
    model = partly_frozen()
    before = modes(model)
    with pytest.raises(RuntimeError), evaluating(model) as quiet:
        assert not any(modes(quiet))
        quiet(torch.zeros(1, 5, SIDE, SIDE))
    assert modes(model) == before


def test_a_dummy_input_is_of_the_models_dtype_and_knows_no_gradient() -> None:
    model = partly_frozen().double()
    with evaluating(model):
        assert not model(dummy_input(model, SIDE)).requires_grad
    assert dummy_input(model, SIDE).dtype == torch.float64
    assert dummy_input(nn.Identity(), SIDE).shape == (1, 3, SIDE, SIDE)


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


def test_transient_buffers_that_training_moves_are_found() -> None:
    model = Moving(persistent=False)
    assert transient_buffers(model) == ["mean", "cache"]
    drawn = torch.get_rng_state()
    assert moved_in_training(model, SIDE) == "mean"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(model.mean) == float(model.cache) == 0
    assert moved_in_training(Moving(persistent=True), SIDE) == ""
    assert moved_in_training(Moving(persistent=False, moves=False), SIDE) == ""
    assert moved_in_training(nn.BatchNorm2d(3), SIDE) == ""
