"""Run a network on a dummy input: try it, take its fingerprint, find its first and last layers."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.inputs import Inputs, Tokens
from prunex_mpi.models.slim import CONVOLUTIONS


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Have every module in training or evaluation mode again, as before, when the block ends."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put `model` into evaluation mode, without gradients; restore the mode of every module."""
    with keeping_modes(model), torch.no_grad():
        # Its value is not used here or elsewhere: train() of a user's module may return nothing.
        model.eval()
        yield model


@contextmanager
def keeping(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Give `buffers` the values of before when the block ends."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch: code of somebody's own may draw from any."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


@contextmanager
def keeping_draws(device: torch.device | None = None) -> Iterator[None]:
    """Have these generators afterwards as they were before the block, also torch's of `device`."""
    draws = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = device is not None and device.type == "cuda"
    on_device = torch.cuda.get_rng_state(device) if on_gpu else None
    try:
        yield
    finally:
        random.setstate(draws[0])
        np.random.set_state(draws[1])
        torch.set_rng_state(draws[2])
        if on_gpu:
            torch.cuda.set_rng_state(on_device, device)


def dummy_input(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return one image or window of zeros, of the dtype and device of `model`."""
    parameter = next(model.parameters(), torch.empty(0))
    return inputs.zeros(parameter)


def try_forward(model: nn.Module, inputs: Inputs) -> None:
    """Run one input; raise ValueError unless the output has the shape of its logits.

    The model's own code may raise anything, as for the last of the tokens, which is in a window.
    """
    with evaluating(model):
        output = model(inputs.ramp(next(model.parameters(), torch.empty(0))))
    wanted = inputs.output_shape()
    if not isinstance(output, Tensor) or output.shape != wanted:
        found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"it returns {found} for one {inputs.unit}, not {list(wanted)}")


def probe(model: nn.Module, inputs: Inputs) -> list[float]:
    """Return the logits of a fixed input in evaluation mode, a fingerprint of the network."""
    with evaluating(model):
        logits = model(inputs.ramp(next(model.parameters())))
    return inputs.fingerprint(logits)


def reads_ahead(model: nn.Module, inputs: Tokens, within: float) -> bool:
    """Return whether other tokens change logits before them, by more than `within` of the largest.

    The last third of a window is replaced, since what one token changes may be lost in rounding.
    """
    window = inputs.ramp(next(model.parameters()))
    before = 2 * inputs.context // 3
    other = window.clone()
    other[:, before:] = 0
    with evaluating(model):
        # One by one: some networks share out what they can do among all tokens of a batch.
        first, second = model(window), model(other)
    least = within * first.nan_to_num(0, 0, 0).abs().max()
    # What is not a number is no larger.
    return bool(((first - second)[:, :before].abs() > least).any())


def transient_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are not persistent, which no state dict holds."""
    kept = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name not in kept]


def moved_in_training(model: nn.Module, inputs: Inputs) -> str:
    """Return a buffer that a forward pass in training changes, "" for none.

    Those of BatchNorm don't count, nor integers that are persistent, nor what an evaluation fills,
    as a cache.
    """
    known = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers()}
    transient = transient_buffers(model)
    names = [
        name
        for name, buffer in model.named_buffers()
        if id(buffer) not in known and (buffer.is_floating_point() or name in transient)
    ]
    if not names:
        return ""
    # For one image BatchNorm may get a single value per channel, which it refuses.
    two = inputs.draw(2, next(model.parameters()).dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            other = deepcopy(model)
            with evaluating(other):
                other(two)
            before = {name: other.get_buffer(name).clone() for name in names}
            other.train()
            other(two)
            return next((n for n in names if not torch.equal(other.get_buffer(n), before[n])), "")
        # Training will report it.
        except Exception:
            return ""


@dataclass(frozen=True)
class Ends:
    """The names of the weights that read the image, and of the one that makes the classes."""

    stems: frozenset[str]
    head: str


def find_ends(model: nn.Module, inputs: Inputs) -> Ends:
    """Return the weights that read the image and the one that makes the classes, by a dummy input.

    The convolution that runs first reads the image, and so do others that get it unchanged. The
    last layer with as many outputs as the model makes the classes, "" for none.
    """
    image = dummy_input(model, inputs)
    ran: list[tuple[str, nn.Module, bool]] = []

    def note(name: str, module: nn.Module, args: tuple) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        ran.append((name, module, given is not None and given.data_ptr() == image.data_ptr()))

    with ExitStack() as hooks, evaluating(model):
        for name, module in model.named_modules():
            if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
                weight = f"{name}.weight" if name else "weight"
                hooks.enter_context(module.register_forward_pre_hook(partial(note, weight)))
        classes = model(image).shape[-1]
    convs = [(name, reads) for name, module, reads in ran if isinstance(module, CONVOLUTIONS)]
    stems = {name for name, reads in convs if reads} | {name for name, _ in convs[:1]}
    heads = [name for name, module, _ in ran if module.weight.shape[0] == classes]
    return Ends(frozenset(stems), heads[-1] if heads else "")


# --------------------------------------------------------------------------------------------------
# Somebody's own loop: an example batch in place of a description of inputs
# --------------------------------------------------------------------------------------------------

# Outputs of models of `transformers` that repeat what is inside.
CACHES = ("past_key_values", "hidden_states", "attentions")


@dataclass(frozen=True)
class Example:
    """Samples like those of `tensor`, [n, ...], on the CPU: numbers, or integers such as tokens.

    It has the face of `Inputs` as far as channels are followed by it.
    """

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

    The others are those of the example, by name or place; numbers stay as they are.
    """

    def __init__(self, model: nn.Module, batch: Any, key: Any) -> None:
        super().__init__()
        self.model = model
        self.batch, self.key = batch, key

    def forward(self, tensor: Tensor) -> Tensor:
        """Return what the model returns as one tensor."""
        if self.key is None:
            return as_one(self.model(tensor))
        fixed = {k: _as_many(v, tensor) for k, v in items_of(self.batch)}
        fixed[self.key] = tensor
        if isinstance(self.batch, Mapping):
            return as_one(self.model(**fixed))
        return as_one(self.model(*fixed.values()))


def items_of(batch: Any) -> list[tuple[Any, Any]]:
    """Return names, or places, and values of a batch of several tensors."""
    return list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))


def _as_many(value: Any, tensor: Tensor) -> Any:
    """Return a part of a batch, on the device of `tensor` and of as many samples, if it has any."""
    if has_samples(value):
        value = value[torch.arange(len(tensor)) % len(value)]
    return value.to(tensor.device) if isinstance(value, Tensor) else value


def has_samples(value: Any) -> bool:
    """Return whether a part of a batch is a tensor of samples [n, ...]."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0


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
    the first tensor of samples is what channels are followed from. The module is `model` where that
    will do. Raises UserError where there is no such tensor, or the model does not take it.
    """
    several = isinstance(batch, Mapping | Sequence)
    given = items_of(batch) if several else [(None, batch)]
    key, tensor = next(((k, v) for k, v in given if has_samples(v)), (None, None))
    if tensor is None:
        raise UserError(
            "example= holds no tensor [n, ...] of samples: give a batch as the model takes it"
        )
    example, parameter = Example(tensor.detach().cpu()), next(model.parameters())
    one = example.draw(1, parameter.dtype).to(parameter.device)
    read = Called(model, batch, key) if several else model
    with evaluating(model):
        try:
            plain = isinstance(read(one), Tensor)
        # The model's own code may raise anything.
        except Exception as error:
            raise UserError(f"the model does not take example=: {one_line(error)}") from error
    return read if plain else Called(model, None, None), example
