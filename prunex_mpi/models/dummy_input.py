"""Run a network on a dummy input: try it, take its fingerprint, find its first and last layers."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from prunex_mpi.models.inputs import Inputs, Tokens
from prunex_mpi.models.slim import CONVOLUTIONS


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put `model` into evaluation mode, without gradients; restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Its value is not used here or elsewhere: train() of a user's module may return nothing.
        model.eval()
        with torch.no_grad():
            yield model
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keeping(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Give `buffers` the values of before when the block ends."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)


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
    """Return a transient buffer that a forward pass in training changes, "" for none.

    What an evaluation fills, as a cache, doesn't count.
    """
    names = transient_buffers(model)
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
