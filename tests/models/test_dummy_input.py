"""A look at a network leaves every module in its own mode."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from prunex_mpi.models.dummy_input import (
    dummy_input,
    evaluating,
    find_ends,
    probe,
    settle,
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
