"""Run a network in evaluation mode, as on a blank image, and leave it as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Have `model` in evaluation mode, without gradients; every module gets its own mode back.

    Some may be frozen while others train, and what runs may raise.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, training in modes:
            module.training = training


def dummy_input(model: nn.Module, image_size: int) -> Tensor:
    """Return an image of zeros [1, 3, image_size, image_size], of the dtype and device of `model`.

    In evaluation mode it leaves statistics and the generator untouched.
    """
    parameter = next(model.parameters(), torch.empty(0))
    return parameter.detach().new_zeros(1, 3, image_size, image_size)
