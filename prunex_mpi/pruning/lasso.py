"""The group lasso of PruneTrain, and the groups of channels that it has emptied.

The penalty on top of the loss is, over groups g of slices of weights of two and more dimensions,

    coefficient * sum_g |W[g]|                                     (Lym et al. 2019, Eq. 1 and 2)

A group is one weight's slice of a removable channel, an output or an input
(`one_group_per_layer`), or the slices of that channel in all weights together (`coupling`). The
first is what the authors' code has, where |W[g]| is the root of 1e-8 + the sum of squares: near
zero, a group shrinks in proportion and does not oscillate around zero.

An element of a weight belongs to the group of its row and to that of its column, so its subgradient
is coefficient * w (1/|W[row]| + 1/|W[column]|), where a group of norm zero adds nothing. Biases and
BatchNorm go with their group, but are not part of the penalty.

Groups keep their numbers. Once some are removed, the slices of the others follow from the mask, so
that a smaller network needs no new trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.groups import Groups

# As in the authors' code; it matters for norms below 1e-4.
SMOOTHING = 1e-8


@dataclass(frozen=True)
class Axis:
    """The groups along one dimension of a weight, viewed as [rows, channels, kernel].

    `groups` int64 [found] are the distinct groups, `slices` int64 [found, most] their slices,
    padded with the number of slices. `by_slice` int64 [slices] is the group of each slice, or the
    number of groups for none.
    """

    dim: int
    groups: Tensor
    slices: Tensor
    by_slice: Tensor


@dataclass(frozen=True)
class Member:
    """A weight in the penalty: its place in the flat vector and its axes."""

    offset: int
    shape: tuple[int, int, int]
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Lasso:
    """The penalty of one network of `total` groups, to whose squares `smoothing` is added."""

    members: tuple[Member, ...]
    total: int
    smoothing: float = 0.0


def build_lasso(layout: Layout, coupling: Coupling, device: torch.device) -> Lasso:
    """Return the penalty of a network of `layout`, with one group for each of `coupling`."""
    members = []
    for segment in layout.segments:
        if len(segment.shape) == 1:
            continue
        known = (coupling.rows.get(segment.name), coupling.columns.get(segment.name))
        known = [(dim, ids) for dim, ids in enumerate(known) if ids is not None]
        if axes := [_axis(dim, ids, coupling.total, device) for dim, ids in known]:
            shape = (*segment.shape[:2], segment.numel // (segment.shape[0] * segment.shape[1]))
            members.append(Member(segment.offset, shape, tuple(axes)))
    return Lasso(tuple(members), coupling.total)


def one_group_per_layer(lasso: Lasso) -> Lasso:
    """Return the penalty that has a group of its own for each axis of each weight of `lasso`.

    As in the authors' code, depthwise convolutions are left out.
    """
    kept = [m for m in lasso.members if m.shape[1] > 1 or any(axis.dim for axis in m.axes)]
    total = sum(axis.groups.numel() for member in kept for axis in member.axes)
    members, first = [], 0
    for member in kept:
        axes = []
        for axis in member.axes:
            numbers = torch.arange(axis.groups.numel(), device=axis.groups.device) + first
            # Maps old numbers to new ones; slices in no group keep the last.
            renumbered = numbers.new_full((lasso.total + 1,), total)
            renumbered[axis.groups] = numbers
            axes.append(replace(axis, groups=numbers, by_slice=renumbered[axis.by_slice]))
            first += len(numbers)
        members.append(replace(member, axes=tuple(axes)))
    return Lasso(tuple(members), total, SMOOTHING)


def _axis(dim: int, ids: np.ndarray, total: int, device: torch.device) -> Axis:
    found, counts = np.unique(ids[ids >= 0], return_counts=True)
    slices = np.full((found.size, counts.max()), ids.size)
    # One row per group, with its slices in order.
    order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    slices[np.arange(counts.max()) < counts[:, None]] = order
    by_slice = np.where(ids < 0, total, ids)
    return Axis(dim, *(torch.from_numpy(x).to(device) for x in (found, slices, by_slice)))


def group_norms(theta: Tensor, lasso: Lasso, scratch: Tensor) -> Tensor:
    """Return |W[g]| of every group, [total]; `scratch` is overwritten by the squares of theta.

    Each addition meets a group once, so that the same theta gives the same bits, on a GPU as well.
    """
    squares = torch.mul(theta, theta, out=scratch)
    sums = theta.new_zeros(lasso.total)
    for member, axis in _axes(lasso):
        dims = [d for d in range(3) if d != axis.dim]
        by_slice = _view(squares, member).sum(dims)
        sums.index_add_(0, axis.groups, _of_groups(by_slice, axis).sum(1))
    return sums.add_(lasso.smoothing).sqrt_()


def write_subgradient_(
    theta: Tensor, lasso: Lasso, norms: Tensor, coefficient: Tensor, gradient: Tensor
) -> None:
    """Set `gradient` to the penalty's subgradient at theta; `norms` are those of `group_norms`."""
    gradient.zero_()
    inverse = theta.new_zeros(lasso.total + 1)
    # Groups of norm zero add nothing, nor do slices in no group, the last entry.
    inverse[:-1] = torch.where(norms > 0, coefficient.to(theta.dtype) / norms, 0.0)
    for member in lasso.members:
        factors = [
            inverse[axis.by_slice].view([-1 if d == axis.dim else 1 for d in range(3)])
            for axis in member.axes
        ]
        factor = factors[0] + factors[1] if len(factors) > 1 else factors[0]
        torch.mul(_view(theta, member), factor, out=_view(gradient, member))


def coefficient_for(share: float, loss: Tensor, norms: Tensor) -> Tensor:
    """Return the coefficient that makes the penalty `share` of loss + penalty, float64 [1]."""
    return (share / (1 - share) * loss.double() / norms.double().sum()).view(1)


def emptied(
    theta: Tensor, lasso: Lasso, groups: Groups, mask: np.ndarray, threshold: float
) -> np.ndarray:
    """Return which groups of `mask` have no weight of magnitude `threshold` or more, bool [total].

    Where all groups of a set are, the largest stays.
    """
    largest = np.zeros(lasso.total)
    magnitudes = theta.abs()
    for member, axis in _axes(lasso):
        by_slice = _view(magnitudes, member).amax([d for d in range(3) if d != axis.dim])
        found = _of_groups(by_slice, axis).amax(1).double().cpu().numpy()
        ids = axis.groups.cpu().numpy()
        largest[ids] = np.maximum(largest[ids], found)
    removed = mask & (largest < threshold)
    for s in groups.kinds[0]:
        part = slice(s.start, s.stop)
        if (removed | ~mask)[part].all():
            best = np.where(mask[part], largest[part], -1.0).argmax()
            removed[s.start + best] = False
    return removed


def _axes(lasso: Lasso) -> Iterator[tuple[Member, Axis]]:
    return ((member, axis) for member in lasso.members for axis in member.axes)


def _view(flat: Tensor, member: Member) -> Tensor:
    rows, channels, kernel = member.shape
    return flat[member.offset : member.offset + rows * channels * kernel].view(member.shape)


def _of_groups(by_slice: Tensor, axis: Axis) -> Tensor:
    """Return [slices] as [groups, most slices of a group], padded with zeros."""
    return torch.cat([by_slice, by_slice.new_zeros(1)])[axis.slices]
