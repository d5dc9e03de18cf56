"""What a network of somebody's own loop reads: an example batch in place of a description.

It has the face of `models/inputs.py` as far as channels are followed by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.dummy_input import evaluating

# Outputs of models of `transformers` that repeat what is inside.
CACHES = ("past_key_values", "hidden_states", "attentions")


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
        """Return what the model returns as one tensor."""
        if self.key is None:
            return as_one(self.model(tensor))
        count = len(tensor)
        fixed = {
            k: v[torch.arange(count) % len(v)].to(tensor.device) if isinstance(v, Tensor) else v
            for k, v in items_of(self.batch)
        }
        fixed[self.key] = tensor
        if isinstance(self.batch, Mapping):
            return as_one(self.model(**fixed))
        return as_one(self.model(*fixed.values()))


def items_of(batch: Any) -> list[tuple[Any, Any]]:
    """Return names, or places, and values of a batch of several tensors."""
    return list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))


def as_one(outputs: Any) -> Tensor:
    """Return all floating-point tensors among the outputs of a model as one; caches apart.

    Nothing of what a model returns may lose channels: whoever calls it may read any of it.
    """
    found = tensors_of(outputs)
    if len(found) == 1:
        return found[0]
    rows = {len(tensor) if tensor.dim() else 0 for tensor in found}
    together = len(rows) == 1 and 0 not in rows
    flat = [t.flatten(1) if together and t.dim() > 1 else t.reshape(-1) for t in found]
    return torch.cat([t[:, None] if together and t.dim() == 1 else t for t in flat], -1)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of nested outputs, in order."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = [value for name, value in outputs.items() if name not in CACHES]
    values = outputs if isinstance(outputs, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def as_read(model: nn.Module, batch: Any) -> tuple[nn.Module, Example]:
    """Return a module that takes one tensor and returns one, and an example of what it takes.

    `batch` is a tensor [n, ...], or a mapping or sequence of what `model` is called with; of these
    the first tensor is what channels are followed from. The module is `model` where that will do.
    """
    if isinstance(batch, Tensor):
        example = Example(batch.detach().cpu())
        one = example.draw(1, next(model.parameters()).dtype).to(next(model.parameters()).device)
        with evaluating(model):
            try:
                plain = isinstance(model(one), Tensor)
            # The model's own code may raise anything.
            except Exception as error:
                raise UserError(f"the model does not take example=: {one_line(error)}") from error
        return model if plain else Called(model, None, None), example
    key, tensor = next((k, v) for k, v in items_of(batch) if isinstance(v, Tensor))
    return Called(model, batch, key), Example(tensor.detach().cpu())
