"""What a network of somebody's own loop reads: an example batch in place of a description.

It has the face of `models/inputs.py` as far as channels are followed by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunex_mpi.models.dummy_input import evaluating


@dataclass(frozen=True)
class Example:
    """Samples like those of `tensor`, [n, ...], on the CPU: numbers, or integers such as tokens."""

    tensor: Tensor

    unit = counted = "sample"

    def zeros(self, like: Tensor) -> Tensor:
        """Return one sample of zeros, of the dtype and device of `like` unless of integers."""
        return self._as(torch.zeros_like(self.tensor[:1]), like.dtype).to(like.device)

    def ramp(self, like: Tensor) -> Tensor:
        """Return the first sample."""
        return self._as(self.tensor[:1], like.dtype).to(like.device)

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first samples, repeated where there are fewer than `count`, on the CPU."""
        places = torch.arange(count) % len(self.tensor)
        return self._as(self.tensor[places], dtype)

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype) if self.tensor.is_floating_point() else tensor


class Called(nn.Module):
    """Give `model`, which takes a batch of several tensors, one of them alone; return one tensor.

    The others are those of the example, by name or place.
    """

    def __init__(self, model: nn.Module, batch: Any, key: Any) -> None:
        super().__init__()
        self.model = model
        self.batch, self.key = batch, key

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the logits, or the first tensor of what the model returns."""
        if self.key is None:
            return first_tensor(self.model(tensor))
        count = len(tensor)
        fixed = {
            k: v[torch.arange(count) % len(v)].to(tensor.device) if isinstance(v, Tensor) else v
            for k, v in items_of(self.batch)
        }
        fixed[self.key] = tensor
        if isinstance(self.batch, Mapping):
            return first_tensor(self.model(**fixed))
        return first_tensor(self.model(*fixed.values()))


def items_of(batch: Any) -> list[tuple[Any, Any]]:
    """Return names, or places, and values of a batch of several tensors."""
    return list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))


def first_tensor(outputs: Any) -> Tensor:
    """Return the logits among the outputs of a model: it, what is named so, or the first tensor."""
    if isinstance(outputs, Tensor):
        return outputs
    if (logits := getattr(outputs, "logits", None)) is not None:
        return logits
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return next(first_tensor(value) for value in values if value is not None)


def as_read(model: nn.Module, batch: Any) -> tuple[nn.Module, Example]:
    """Return a module that takes one tensor and returns one, and an example of what it takes.

    `batch` is a tensor [n, ...], or a mapping or sequence of what `model` is called with; of these
    the first tensor is what channels are followed from. The module is `model` where that will do.
    """
    if isinstance(batch, Tensor):
        example = Example(batch.detach().cpu())
        with evaluating(model):
            plain = isinstance(model(example.draw(1, next(model.parameters()).dtype)), Tensor)
        return model if plain else Called(model, None, None), example
    key, tensor = next((k, v) for k, v in items_of(batch) if isinstance(v, Tensor))
    return Called(model, batch, key), Example(tensor.detach().cpu())
