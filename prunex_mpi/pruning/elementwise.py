"""Rules for labels: functions that work element by element, which a trial finds out.

Such a function runs again, on small random tensors in place of its own. So no list of names has to
be complete: what isn't element-wise by trial, and has no rule in `channel_trace`, pins its
channels.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.models.slim import flatten, rebuild
from prunex_mpi.pruning.labels import PINNED, VOID, Labels, distinct, thin, varying

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
