"""Follow a forward pass: label every tensor that it makes, and know in which module's code it is.

`coupling` builds groups from the labels that a dummy image leaves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.dummy_input import dummy_input, evaluating
from prunex_mpi.models.slim import norm_dim
from prunex_mpi.pruning import label_layers
from prunex_mpi.pruning.label_shapes import TEMPLATES, shape
from prunex_mpi.pruning.labels import (
    NUMBER,
    PINNED,
    Counted,
    Labels,
    by_position,
    mixes,
    tensors_in,
)

# --------------------------------------------------------------------------------------------------
# Where a forward pass is
# --------------------------------------------------------------------------------------------------

# A module's name and the number, from 0, of a torch function that its own code calls.
Call = tuple[str, int]


@dataclass(frozen=True)
class Pins:
    """Calls that work at full size only: keep their arguments, or all channels made before them."""

    arguments: frozenset[Call] = frozenset()
    all_before: frozenset[Call] = frozenset()


NO_PINS = Pins()


class Places:
    """The stack of modules whose forward is running, innermost last, with their call counts."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.calls: list[int] = []

    @property
    def module(self) -> str:
        """The innermost module, whose code is running; "" is the whole model."""
        return self.inside[-1] if self.inside else ""

    def count(self) -> Call:
        """Count a call of the code that is running and return it."""
        if not self.inside:
            return "", -1
        self.calls[-1] += 1
        return self.inside[-1], self.calls[-1] - 1

    def enter(self, name: str) -> None:
        """Push the module `name`."""
        self.inside.append(name)
        self.calls.append(0)

    def leave(self) -> None:
        """Pop the innermost module."""
        self.inside.pop()
        self.calls.pop()


class Failing(TorchFunctionMode):
    """Record in `call` the torch function call that raises."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.call: Call | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = self.places.count()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.call = call
            raise


@contextmanager
def following(model: nn.Module, places: Places) -> Iterator[None]:
    """Keep `places` up to date in forward passes of `model`; one that raises leaves it as it is."""
    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: places.enter(name)),
            module.register_forward_hook(lambda *_: places.leave()),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------------------------
# Labels along it
# --------------------------------------------------------------------------------------------------

# Element-wise, zero maps to zero.
ZERO_PRESERVING = {
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "selu", "celu", "silu", "gelu"),
    *("mish", "hardswish", "tanh", "hardtanh", "hardtanh_", "softsign", "clone", "contiguous"),
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "neg"),
    *("alpha_dropout", "detach", "to", "float", "double", "type", "abs", "square"),
}
# Element-wise, zero does not map to zero.
ELEMENTWISE = {"sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_", "softplus", "exp"}
# Applied to the labels as to the data.
SHAPING = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "cat", "concat", "stack", "chunk", "split", "unbind"),
    *("__getitem__", "swapaxes", "narrow", "select", "t", "tensor_split", "broadcast_to"),
}
# The same, but not with plain rules; `zeros_like` and `zero_` keep zeros zero.
MORE_ZERO_PRESERVING = {"zeros_like", "zero_", "type_as"}
MORE_ELEMENTWISE = {"clamp", "clamp_", "masked_fill", "masked_fill_", "ones_like", "full_like"}
MORE_SHAPING = {"roll", "flip", "mT", "T", "repeat", "tile", "moveaxis", "swapdims", *TEMPLATES}
# New tensors that take only dtype and device from their argument.
NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
# Over positions, each channel by itself.
POOLING = {
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample"),
    *("boolean_dispatch",),
}
ADDITIONS = {
    *("add", "add_", "__add__", "__iadd__", "__radd__", "sub", "sub_", "__sub__", "__isub__"),
    *("rsub", "__rsub__", "subtract", "subtract_"),
}
PRODUCTS = {"mul", "mul_", "__mul__", "__imul__", "__rmul__", "multiply", "multiply_"}
# By a number.
SCALINGS = {"div", "div_", "__truediv__", "__itruediv__", "true_divide"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
MATRICES = {"matmul", "__matmul__", "bmm"}


class Trace(TorchFunctionMode):
    """Label the results of all torch functions of a forward pass."""

    def __init__(self, labels: Labels, places: Places, pins: Pins) -> None:
        super().__init__()
        self.labels, self.places, self.pins = labels, places, pins

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, call = kwargs or {}, self.places.count()
        if call in self.pins.all_before:
            self.labels.pin_all(f"{_plain_name(func)} counts them; {NUMBER}")
        result = func(*args, **kwargs)
        if call in self.pins.arguments:
            reason = f"{_plain_name(func)} counts its channels; {NUMBER}"
            self.labels.pin([args, kwargs], reason)
        if result is None and getattr(func, "__name__", "") != "__get__":
            # For example an assignment to a part of a tensor.
            self._keep(args, func, args, kwargs)
        elif any(True for _ in tensors_in([result])):
            args, kwargs = by_position(args, kwargs)
            try:
                self.follow(result, func, args, kwargs)
            except UserError:
                raise
            # An unexpected signature: nothing is known about the result.
            except Exception:
                self._keep(result, func, args, kwargs)
        return result

    def _keep(self, result: object, func, args: tuple, kwargs: dict) -> None:
        """Pin the arguments and results of a call that is not understood."""
        reason = mixes(_plain_name(func), plain=self.labels.plain)
        self.labels.keep([args, kwargs], [result], reason)

    def follow(self, result: object, func, args: tuple, kwargs: dict) -> None:
        """Label the result of `func`."""
        labels, name = self.labels, getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in CONVOLUTIONS:
            label_layers.convolve(labels, result, *args, **kwargs)
        elif name == "linear":
            label_layers.multiply(labels, result, *args, **kwargs)
        elif name == "batch_norm":
            label_layers.normalise_batch(labels, result, *args, **kwargs)
        elif name == "multi_head_attention_forward":
            label_layers.attend_module(labels, result, *args, **kwargs)
        elif name in ADDITIONS or name in PRODUCTS:
            label_layers.meet(labels, result, name in PRODUCTS, *args)
        elif name in ZERO_PRESERVING or (name in SCALINGS and isinstance(args[1], int | float)):
            labels.label(result, *labels.of(args[0]))
        elif name in ELEMENTWISE:
            labels.label(result, labels.of(args[0])[0], zero=False)
        elif name in POOLING and isinstance(result, Tensor):
            label_layers.pool(labels, result, args[0])
        elif name in ("mean", "sum", "amax"):
            label_layers.reduce(labels, result, func, args, kwargs)
        elif name == "pad":
            label_layers.pad(labels, result, *args, **kwargs)
        elif name in SHAPING:
            shape(labels, result, func, args, kwargs)
        elif labels.plain or not self._follow_more(result, name, func, args, kwargs):
            self._keep(result, func, args, kwargs)

    def _follow_more(self, result: object, name: str, func, args: tuple, kwargs: dict) -> bool:
        """Label the result of what plain rules do not know; return whether `func` is known."""
        labels = self.labels
        if name == "layer_norm" and len(args[1]) == 1:
            label_layers.normalise_layer(labels, result, *args, **kwargs)
        elif name == "group_norm":
            label_layers.normalise_groups(labels, result, *args, **kwargs)
        elif name == "instance_norm":
            label_layers.normalise_each(labels, result, *args, **kwargs)
        elif name == "normalize":
            label_layers.normalise_length(labels, result, self.places.module, *args, **kwargs)
        elif name in ("prelu", "_prelu_kernel"):
            label_layers.bend(labels, result, *args, **kwargs)
        elif name == "scaled_dot_product_attention":
            label_layers.attend(labels, result, *args, **kwargs)
        elif name in MATRICES:
            label_layers.multiply_matrices(labels, result, *args, **kwargs)
        elif name == "softmax":
            label_layers.soften(labels, result, *args, **kwargs)
        elif name in MORE_ZERO_PRESERVING:
            labels.label(result, *labels.of(args[0]))
        elif name in MORE_ELEMENTWISE:
            labels.label(result, labels.of(args[0])[0], zero=False)
        elif name in NEW:
            labels.label_pinned([result])
        elif name in MORE_SHAPING:
            shape(labels, result, func, args, kwargs)
        else:
            return False
        return True


def follow_image(model: nn.Module, image_size: int, plain: frozenset[str], pins: Pins) -> Labels:
    """Return the labels of a forward pass of `model`, on the CPU, in evaluation mode.

    Plain rules hold in the modules named in `plain` and those inside them; "" is the whole model.
    Channels that the calls in `pins` touch stay. The model is unchanged afterwards.
    """
    labels = Labels(model)
    labels.norms = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm) and norm_dim(module) is not None
    }
    image = dummy_input(model, image_size)
    labels.label(image, torch.full(image.shape, PINNED))
    numbers, rules = _numbers_named(model), _plain_within(model, labels, plain)
    places = Places()
    trace = Trace(labels, places, pins)
    with evaluating(model), numbers, rules, following(model, places), trace:
        output = model(image)
    labels.pin([output], "its outputs are the classes")
    return labels


@contextmanager
def _numbers_named(model: nn.Module) -> Iterator[None]:
    """Replace the int attributes of modules by `Counted` ones while the context lasts."""
    changed = []
    try:
        for name, module in model.named_modules():
            if is_own(module):
                for key, value in list(vars(module).items()):
                    found = _named(value, name, key)
                    if found is not value:
                        changed.append((module, key, value))
                        module.__dict__[key] = found
        yield
    finally:
        for module, key, value in changed:
            module.__dict__[key] = value


def _named(value: object, module: str, key: str) -> object:
    if type(value) is int and value > 1:
        found = Counted(value)
        found.source = (module, key)
        return found
    if type(value) in (list, tuple) and value and all(type(v) is int for v in value):
        return type(value)(_named(v, module, f"{key}.{i}") for i, v in enumerate(value))
    return value


def is_own(module: nn.Module) -> bool:
    """Return whether a module's class is not torch's own."""
    return not type(module).__module__.startswith("torch.")


@contextmanager
def _plain_within(model: nn.Module, labels: Labels, plain: frozenset[str]) -> Iterator[None]:
    """Use plain rules inside the modules named in `plain`."""
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth, labels.plain = depth + 1, True

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        labels.plain = depth > 0

    handles = []
    for name in plain:
        module = model.get_submodule(name)
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        labels.plain = False
        for handle in handles:
            handle.remove()


def _plain_name(func) -> str:
    return (resolve_name(func) or getattr(func, "__name__", "an operation")).split(".")[-1]
