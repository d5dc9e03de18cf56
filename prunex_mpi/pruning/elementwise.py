"""Find by trial whether a torch function works element by element, and whether zeros stay zero.

It runs again, on small random tensors in place of its own. So no list of names has to be complete:
what isn't element-wise by trial, and has no rule in `channel_trace`, pins its channels.
"""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from prunex_mpi.models.slim import flatten, rebuild

# Largest size of a dimension in a trial, and how far random numbers reach.
SIZE, SPREAD = 7, 3.0


class Trial:
    """A torch call that runs on tensors drawn in place of its own.

    `operands` are the places, among all arguments, of the tensors that the result depends on, but
    for those without dimensions. `elementwise`: each element of the result depends on the elements
    in its place only, and in all places alike.
    """

    def __init__(self, result: object, func: Callable, args: tuple, kwargs: dict) -> None:
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
            self.elementwise = self._is_elementwise(result)
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            args, kwargs = rebuild(self.given, iter(leaves))
            return self.func(*args, **kwargs)

    def _is_elementwise(self, result: object) -> bool:
        if not isinstance(result, Tensor) or not (
            result.is_floating_point() or result.dtype == torch.bool
        ):
            return False
        before = self._run({})
        others = {place: self._draw(self.leaves[place]) for place in self.operands}
        # Some give nothing but their dtype, as in `x.to(weight)`, or their shape.
        used = [p for p in self.operands if not _same(before, self._run({p: others[p]}))]
        self.operands = used or [p for p in self.operands if self.leaves[p].shape == result.shape]
        drawn, whole = (
            torch.broadcast_shapes(*(tensors[p].shape for p in self.operands))
            for tensors in (self.drawn, self.leaves)
        )
        if not self.operands or (before.shape, result.shape) != (drawn, whole):
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
