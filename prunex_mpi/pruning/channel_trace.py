"""Follow a forward pass: label every tensor that it makes, and know in which module's code it is.

`coupling` builds groups from the labels that a dummy input leaves.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
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
from prunex_mpi.models.slim import (
    SlimNorm,
    as_rms_norm,
    call_site,
    flatten,
    norm_dim,
    rebuild,
    running,
)
from prunex_mpi.pruning import label_layers, label_shapes
from prunex_mpi.pruning.labels import (
    PINNED,
    VOID,
    Labels,
    Site,
    by_position,
    distinct,
    mixes,
    tensors_in,
    thin,
    turned,
    varying,
)

# --------------------------------------------------------------------------------------------------
# Where a forward pass is
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Labels along it
# --------------------------------------------------------------------------------------------------

# Applied to the labels as to the data.
SHAPING = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "cat", "concat", "stack", "chunk", "split", "unbind"),
    *("__getitem__", "swapaxes", "narrow", "select", "t", "tensor_split", "broadcast_to"),
    *("roll", "flip", "mT", "T", "repeat", "repeat_interleave", "tile", "moveaxis", "swapdims"),
    *label_shapes.TEMPLATES,
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
    "multi_head_attention_forward": label_layers.attend_module,
    "pad": label_shapes.pad,
    "group_norm": label_layers.normalise_groups,
    **dict.fromkeys(("prelu", "_prelu_kernel"), label_layers.bend),
    "scaled_dot_product_attention": label_layers.attend,
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), label_layers.multiply_matrices),
    "addmm": label_layers.add_product,
    "embedding": label_layers.embed,
    "rms_norm": label_layers.normalise_layer,
    "softmax": label_layers.soften,
    "normalize": label_layers.normalise_length,
}


class Trace(Following):
    """Label the results of all torch functions of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.labels = Labels(model)
        self.trials: dict[Hashable, Trial] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, labels = kwargs or {}, self.labels
        name = resolve_name(func) or getattr(func, "__name__", "an operation")
        labels.operation, labels.given = name.split(".")[-1], (args, kwargs)
        labels.site = self.site_of(sys._getframe(1))
        result = func(*args, **kwargs)
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
            label_shapes.pool(labels, result, args[0])
        elif name in REDUCTIONS:
            label_shapes.reduce(labels, result, func, args, kwargs)
        elif name in SHAPING or func is UNFOLD:
            label_shapes.shape(labels, result, func, args, kwargs)
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


def follow_input(model: nn.Module, inputs: Inputs) -> Labels:
    """Return the labels of a forward pass of `model`, on the CPU, in evaluation mode."""
    trace = Trace(model)
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


# --------------------------------------------------------------------------------------------------
# Functions that work element by element, which a trial finds out
#
# Such a function runs again, on small random tensors in place of its own. So no list of names has
# to be complete: what isn't element-wise by trial, and has no rule, pins its channels.
# --------------------------------------------------------------------------------------------------

# Largest size of a dimension in a trial, and how far random numbers reach.
SIZE, SPREAD = 7, 3.0


class Trial:
    """A torch call that runs on tensors drawn in place of its own.

    `operands` are the places, among all arguments, of the tensors that the result depends on, but
    for those without dimensions. `elementwise`: each element of the result depends on the elements
    in its place only, and in all places alike.
    """

    def __init__(self, func: Callable, args: tuple, kwargs: dict) -> None:
        self.func, self.given = func, (args, kwargs)
        self.leaves, seen = flatten(self.given), {}
        # The first place of each tensor.
        self.first = [
            seen.setdefault(id(x), place) if isinstance(x, Tensor) and x.dim() else None
            for place, x in enumerate(self.leaves)
        ]
        self.operands: list[int] = list(seen.values())
        self.generator = torch.Generator().manual_seed(0)
        self.drawn = {place: self._draw(self.leaves[place]) for place in self.operands}
        self.known: dict[frozenset[int], bool | None] = {}
        try:
            self.elementwise = self._is_elementwise()
        # A function may raise anything where its arguments have other sizes.
        except Exception:
            self.elementwise = False

    def _draw(self, x: Tensor) -> Tensor:
        """Return a small random tensor in place of `x`; one of whole numbers is cut only."""
        small = x.detach()[tuple(slice(SIZE) for _ in x.shape)]
        if x.is_floating_point():
            return SPREAD * torch.randn(small.shape, generator=self.generator).to(x.dtype)
        if x.dtype == torch.bool:
            return torch.rand(small.shape, generator=self.generator) < 0.5
        return small

    def _run(self, values: dict[int, Tensor]) -> Tensor:
        """Return the result for other operands, by place; random numbers are the same each time."""
        values = {place: x.clone() for place, x in (self.drawn | values).items()}
        leaves = [
            leaf if place is None else values[place]
            for place, leaf in zip(self.first, self.leaves, strict=True)
        ]
        args, kwargs = rebuild(self.given, iter(leaves))
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(0)
        try:
            return self.func(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)

    def _is_elementwise(self) -> bool:
        before = self._run({})
        if not isinstance(before, Tensor) or not (
            before.is_floating_point() or before.dtype == torch.bool
        ):
            return False
        others = {place: self._draw(self.leaves[place]) for place in self.operands}
        # Some give nothing but their dtype, as in `x.to(weight)`, or their shape.
        used = [p for p in self.operands if not _same(before, self._run({p: others[p]}))]
        self.operands = used or [p for p in self.operands if self.drawn[p].shape == before.shape]
        if not self.operands or before.shape != self.shape_of(self.drawn):
            return False
        for place in self.operands:
            own = self.drawn[place]
            half = torch.rand(own.shape, generator=self.generator) < 0.5
            for changed in (half, ~half):
                after = self._run({place: torch.where(changed, others[place], own)})
                stays = ~changed.expand(before.shape)
                if not _same(before[stays], after[stays]):
                    return False
        # A mask of places would show, and so would random numbers.
        alike = {
            p: x.flatten()[:1].view([1] * x.dim()).expand(x.shape) for p, x in self.drawn.items()
        }
        everywhere = self._run(alike)
        # By vector instructions or others the last bit may differ.
        first = everywhere.flatten()[:1].expand_as(everywhere)
        return torch.allclose(everywhere.float(), first.float(), rtol=1e-2, equal_nan=True)

    def shape_of(self, tensors: Sequence[Any] | dict[int, Tensor]) -> torch.Size:
        """Return the shape of the result for operands at their places in `tensors`."""
        return torch.broadcast_shapes(*(tensors[place].shape for place in self.operands))

    def is_zero(self, zeros: Collection[int]) -> bool | None:
        """Return whether the result is zero where the operands of these places are.

        None where it is no number, or its slope is infinite: no number comes back by gradients.
        """
        which = frozenset(zeros)
        if which not in self.known:
            self.known[which] = bool(which) and self._is_zero(which)
        return self.known[which]

    def _is_zero(self, which: frozenset[int]) -> bool | None:
        values = {place: torch.zeros_like(self.drawn[place]) for place in which}
        found = self._run(values)
        # What masks are filled with may be infinite.
        infinite = any(_is_infinite(leaf) for leaf in self.leaves)
        if found.isnan().any() or not (infinite or found.isfinite().all()):
            return None
        if found.count_nonzero():
            return False
        leaves = [x.requires_grad_() for x in values.values() if x.is_floating_point()]
        with torch.enable_grad():
            found = self._run(values)
            if found.requires_grad and leaves:
                nothing = torch.zeros_like(found)
                slopes = torch.autograd.grad(found, leaves, nothing, allow_unused=True)
                if any(slope is not None and slope.isnan().any() for slope in slopes):
                    return None
        return True


def _is_infinite(leaf: object) -> bool:
    number = isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.numel() == 1)
    return number and math.isinf(leaf)


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors are equal, where that is no number in both as well."""
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def meet(labels: Labels, result: Tensor, trial: Trial, leaves: list[Any]) -> None:
    """Join the groups that an element-wise operation combines; `leaves` are its arguments.

    What makes no number of zeros, as 0 / 0, pins them.
    """
    found = {place: labels.of(leaves[place])[0] for place in trial.operands}
    zeros = {p for p, own in found.items() if labels.of(leaves[p])[1] and _is_labelled(own)}
    if len(found) > 1:
        sizes = {place: _true_shape(leaves[place]) for place in found}
        if len(found) == 2 and zeros and trial.is_zero(zeros):
            scaled = _keep_fixed(labels, list(found.values()), list(sizes.values()))
            if scaled is not None:
                labels.label(result, scaled.expand(result.shape))
                return
        # What is the same for all channels stays where one of them is removed; parameters first.
        for place in sorted(found, key=lambda p: id(leaves[p]) not in labels.names):
            others = [own for p, own in found.items() if p != place]
            if _is_shared(sizes[place], others):
                labels.pin_labels(distinct([found.pop(place)]), "it is the same for all channels")
                zeros.discard(place)
    zero = trial.is_zero(zeros)
    if zero is None:
        reason = f"{labels.operation} of zeros is no number, or has no slope"
        labels.keep([leaves[place] for place in trial.operands], [result], reason)
        return
    labelled = thin(*(own.expand(result.shape) for own in found.values()))
    for first, second in itertools.combinations(labelled, 2):
        labels.join(first, second)
    joined = torch.stack(labelled).amax(0)
    for place, own in zip(found, labelled, strict=True):
        joined = torch.where(own == PINNED, PINNED, joined)
        if trial.is_zero({place}):
            joined = torch.where(own == VOID, VOID, joined)
    if not trial.is_zero(found):
        joined = torch.where(joined == VOID, PINNED, joined)
    labels.label(result, joined.expand(result.shape), zero)


def _is_labelled(found: Tensor) -> bool:
    return bool((thin(found)[0] != PINNED).any())


def _true_shape(x: Tensor) -> list[int]:
    """Return the shape of `x` before it was expanded."""
    return [1 if stride == 0 else n for n, stride in zip(x.shape, x.stride(), strict=True)]


def _keep_fixed(labels: Labels, found: list[Tensor], sizes: list[list[int]]) -> Tensor | None:
    """Return the labels of a product with what stays, such as the angles of rotary positions.

    Where that is the same along some dimension of channels, as along heads, all channels along the
    others become one group. None where there is no such dimension.
    """
    for one, other, size in ((*found, sizes[0]), (*found[::-1], sizes[1])):
        shape = _shape_beside(size, other)
        along = varying(other)
        whole = [d for d in along if shape[d] != 1]
        if whole and len(whole) < len(along) and bool((thin(one)[0] == PINNED).all()):
            for dim in whole:
                labels.join_along(other, dim)
            return labels.roots(other)
    return None


def _shape_beside(size: list[int], other: Tensor) -> list[int]:
    """Return the shape `size` in the dimensions of `other`."""
    return [1] * (other.dim() - len(size)) + size[max(0, len(size) - other.dim()) :]


def _is_shared(size: list[int], others: list[Tensor]) -> bool:
    """Return whether a tensor of shape `size` is broadcast along the channels of all `others`."""
    along = [(other, d) for other in others for d in varying(other)]
    return bool(along) and all(_shape_beside(size, other)[d] == 1 for other, d in along)
