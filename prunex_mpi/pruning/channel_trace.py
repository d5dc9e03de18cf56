"""Follow a forward pass: label every tensor that it makes, and know in which module's code it is.

`coupling` builds groups from the labels that a dummy input leaves.
"""

import json
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.dummy_input import dummy_input, evaluating
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.slim import SlimNorm, as_rms_norm, call_site, flatten, norm_dim, running
from prunex_mpi.pruning import label_attention, label_layers
from prunex_mpi.pruning.elementwise import SIZE, Trial, meet
from prunex_mpi.pruning.label_shapes import TEMPLATES, shape
from prunex_mpi.pruning.labels import (
    NUMBER,
    PINNED,
    Labels,
    Site,
    by_position,
    mixes,
    tensors_in,
    turned,
)

# --------------------------------------------------------------------------------------------------
# Where a forward pass is
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What stays: the arguments of calls that work at full size only, or all channels before them.

    `layers`: so does what is more than channels of convolutions, linear layers and BatchNorm, and
    heads of attention.
    """

    layers: bool = False
    arguments: frozenset[Site] = frozenset()
    all_before: frozenset[Site] = frozenset()

    def text(self) -> str:
        """Return the rules as JSON, for `rules_of`."""
        return json.dumps([self.layers, sorted(self.arguments), sorted(self.all_before)])


NO_RULES = Rules()


def rules_of(text: str) -> Rules:
    """Return the rules that `Rules.text` made `text` of."""
    layers, *calls = json.loads(text)
    return Rules(layers, *(frozenset(map(tuple, every)) for every in calls))


class Following(TorchFunctionMode):
    """Know in which module's code of `model` torch calls are, by the frames of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        # By run of a module, since each begins to count anew.
        self.seen: dict[FrameType, Counter[str]] = {}

    def site_of(self, frame: FrameType | None) -> Site:
        """Count the torch call that `frame` makes and return where it is."""
        line, run = call_site(frame), running(frame)
        # Some make modules while they run.
        while run is not None and id(run.f_locals["self"]) not in self.names:
            run = running(run.f_back)
        if run is None:
            return "", "", 0
        seen = self.seen.setdefault(run, Counter())
        seen[line] += 1
        return self.names[id(run.f_locals["self"])], line, seen[line] - 1

    def __exit__(self, *error: Any) -> None:
        # A frame holds all that its callers do, a rank's images among them.
        self.seen.clear()
        super().__exit__(*error)


class Failing(Following):
    """Record in `site` the torch function call of `model` that raises."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.site: Site | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        site = self.site_of(sys._getframe(1))
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.site = site
            raise


# --------------------------------------------------------------------------------------------------
# Labels along it
# --------------------------------------------------------------------------------------------------

# Applied to the labels as to the data.
SHAPING = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "cat", "concat", "stack", "chunk", "split", "unbind"),
    *("__getitem__", "swapaxes", "narrow", "select", "t", "tensor_split", "broadcast_to"),
    *("roll", "flip", "mT", "T", "repeat", "repeat_interleave", "tile", "moveaxis", "swapdims"),
    *TEMPLATES,
}
RESHAPING_WEIGHTS = {"view", "reshape", "flatten", "view_as", "reshape_as"}
# F.unfold has the same name.
UNFOLD = Tensor.unfold
# New tensors that take nothing but dtype, device or shape from their argument.
NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "empty_like"}
# Over positions, each channel by itself.
POOLING = {
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample"),
    *("boolean_dispatch",),
}
REDUCTIONS = {"mean", "sum", "amax", "norm", "vector_norm", "var", "std"}
BY_NAME = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), label_layers.convolve),
    "linear": label_layers.multiply,
    "batch_norm": label_layers.normalise_batch,
    "multi_head_attention_forward": label_attention.attend_module,
    "pad": label_layers.pad,
    "group_norm": label_layers.normalise_groups,
    **dict.fromkeys(("prelu", "_prelu_kernel"), label_layers.bend),
    "scaled_dot_product_attention": label_attention.attend,
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), label_attention.multiply_matrices),
    "addmm": label_layers.add_product,
    "embedding": label_layers.embed,
    "rms_norm": label_layers.normalise_layer,
    "softmax": label_attention.soften,
    "normalize": label_layers.normalise_length,
}


class Trace(Following):
    """Label the results of all torch functions of a forward pass."""

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        super().__init__(model)
        self.labels, self.rules = Labels(model), rules
        self.trials: dict[Hashable, Trial] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, labels = kwargs or {}, self.labels
        name = resolve_name(func) or getattr(func, "__name__", "an operation")
        labels.operation, labels.given = name.split(".")[-1], (args, kwargs)
        labels.site = self.site_of(sys._getframe(1))
        if labels.site in self.rules.all_before:
            labels.pin_all(f"{labels.operation} counts them; {NUMBER}")
        result = func(*args, **kwargs)
        if labels.site in self.rules.arguments:
            labels.pin([args, kwargs], f"{labels.operation} counts its channels; {NUMBER}")
        if result is None and getattr(func, "__name__", "") != "__get__":
            # For example an assignment to a part of a tensor.
            self._keep(args, args, kwargs)
        elif any(True for _ in tensors_in([result])):
            args, kwargs = by_position(args, kwargs)
            try:
                whole = self.follow(result, func, args, kwargs)
                _request_numbers(labels, whole)
            except UserError:
                raise
            # An unexpected signature: nothing is known about the result.
            except Exception:
                self._keep(result, args, kwargs)
        return result

    def _keep(self, result: object, args: tuple, kwargs: dict) -> None:
        """Pin the arguments and results of a call that is not understood."""
        self.labels.keep([args, kwargs], [result], mixes(self.labels.operation))

    def follow(self, result: object, func, args: tuple, kwargs: dict) -> bool:
        """Label the result of `func`; return whether it works element by element."""
        labels, name = self.labels, getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if isinstance(result, Tensor) and turned(labels.weights, result) is not None:
            # It has the labels of the parameter, if it is used for anything but products.
            return False
        if name in RESHAPING_WEIGHTS and label_layers.reshape_weight(labels, result, args[0]):
            return False
        if name in BY_NAME:
            BY_NAME[name](labels, result, *args, **kwargs)
        elif name in POOLING and isinstance(result, Tensor):
            label_layers.pool(labels, result, args[0])
        elif name in REDUCTIONS:
            label_layers.reduce(labels, result, func, args, kwargs)
        elif name in SHAPING or func is UNFOLD:
            shape(labels, result, func, args, kwargs)
        elif name == "layer_norm" and len(args[1]) == 1:
            label_layers.normalise_layer(labels, result, *args, **kwargs)
        elif name in NEW:
            labels.label_pinned([result])
        else:
            return self._meet(result, func, args, kwargs)
        return False

    def _meet(self, result: object, func, args: tuple, kwargs: dict) -> bool:
        """Label the result of `func` if it works element by element; return whether it does."""
        leaves = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not any(x.dim() for x in tensors):
            # Scalars, such as a counter, have no channels.
            self.labels.label_pinned([result])
            return bool(tensors)
        # An argument may come twice, as in x * x.
        first = tuple(next(n for n, x in enumerate(leaves) if x is leaf) for leaf in leaves)
        key = func, tuple(kwargs), first, tuple(map(_kind_of, leaves))
        trial = self.trials.get(key)
        if trial is None:
            trial = self.trials[key] = Trial(func, args, kwargs)
        alike = trial.elementwise and result.shape == trial.shape_of(leaves)
        if alike:
            meet(self.labels, result, trial, leaves)
        else:
            self._keep(result, args, kwargs)
        return alike


def _kind_of(leaf: object) -> Hashable:
    """Return what a trial depends on of an argument."""
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, Hashable) else id(leaf)
    drawn = leaf.dim() and (leaf.is_floating_point() or leaf.dtype == torch.bool)
    return tuple(min(n, SIZE) for n in leaf.shape), leaf.dtype, None if drawn else id(leaf)


def _request_numbers(labels: Labels, whole: bool) -> None:
    """Record that a call gets the same numbers in a smaller network, as the scale of attention."""
    kinds = (float, int) if whole else (float,)
    labels.request([leaf if type(leaf) in kinds else None for leaf in flatten(labels.given)])


def follow_input(model: nn.Module, inputs: Inputs, rules: Rules) -> Labels:
    """Return the labels of a forward pass of `model`, on the CPU, in evaluation mode.

    What `rules` say stays, but for `Rules.layers`.
    """
    trace = Trace(model, rules)
    labels = trace.labels
    labels.norms = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if (isinstance(module, nn.LayerNorm) and norm_dim(module) is not None)
        or (isinstance(module, nn.GroupNorm) and module.num_groups == 1 and module.affine)
        or isinstance(module, SlimNorm)
    }
    labels.norms |= {f"{name}.weight" for name in find_rms_norms(model)}
    given = dummy_input(model, inputs)
    labels.label(given, torch.full(given.shape, PINNED))
    with evaluating(model), plain_norms(model), trace:
        output = model(given)
    labels.operation = ""
    labels.pin([output], "its outputs are the network's")
    return labels


def find_rms_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are RMSNorm, by name."""
    return {name: module for name, module in model.named_modules() if name and as_rms_norm(module)}


@contextmanager
def plain_norms(model: nn.Module) -> Iterator[None]:
    """Make norms written by hand, and those that became smaller, call torch's own for a while."""
    norms = [(m, as_rms_norm(m)) for m in find_rms_norms(model).values()]
    norms += [(m, m) for m in model.modules() if isinstance(m, SlimNorm) and m.centred]
    changed = [(m, norm) for m, norm in norms if not isinstance(m, nn.RMSNorm)]
    try:
        for module, norm in changed:
            module.forward = partial(_normalise, norm)
        yield
    finally:
        for module, _ in changed:
            module.__dict__.pop("forward", None)


def _normalise(norm: SlimNorm, x: Tensor) -> Tensor:
    if norm.dim is None:
        return F.group_norm(x, 1, norm.weight, norm.bias, norm.eps)
    if norm.centred:
        x = x.movedim(norm.dim, -1)
        x = F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)
        return x.movedim(-1, norm.dim)
    # As large as where channels are missing.
    share = norm.weight.numel() / norm.width
    eps = None if norm.eps is None else norm.eps / share
    return F.rms_norm(x, norm.weight.shape, norm.weight, eps) * share**-0.5
