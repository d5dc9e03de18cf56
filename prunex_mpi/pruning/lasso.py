"""The group lasso of PruneTrain, and the groups of channels that it has emptied.

The penalty on top of the loss is, over groups g of slices of weights of two and more dimensions,

    coefficient * sum_g |W[g]|                                     (Lym et al. 2019, Eq. 1 and 2)

A group is one weight's slice of a removable channel, an output or an input. As in the authors'
code |W[g]| is the root of 1e-8 + the sum of squares: near zero, a group shrinks in proportion and
does not oscillate around zero. Depthwise convolutions are left out.

An element of a weight belongs to the group of its row and to that of its column, so its subgradient
is coefficient * w (1/|W[row]| + 1/|W[column]|). Biases and BatchNorm go with their channel, but are
not part of the penalty.

Channels keep their numbers. Once some are removed, the slices of the others follow from the mask,
so that a smaller network needs no new trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout, matrices
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.groups import Groups

# As in the authors' code; it matters for norms below 1e-4.
SMOOTHING = 1e-8


@dataclass(frozen=True)
class Axis:
    """The groups along one dimension of a weight, viewed as [rows, channels, kernel].

    `channels` int64 [found] are coupled groups, `slices` int64 [found, most] their slices, padded
    with the number of slices. `place` is where they are among the groups of the penalty, and
    `by_slice` int64 [slices] the number of each slice's, -1 for none.
    """

    dim: int
    channels: np.ndarray
    slices: Tensor
    place: slice
    by_slice: Tensor


@dataclass(frozen=True)
class Member:
    """A weight: its place in the flat vector, its axes, and whether the penalty is on it."""

    offset: int
    shape: tuple[int, int, int]
    axes: tuple[Axis, ...]
    penalised: bool


@dataclass(frozen=True)
class Lasso:
    """The penalty of one network, of `total` groups."""

    members: tuple[Member, ...]
    total: int


def build_lasso(layout: Layout, coupling: Coupling, device: torch.device) -> Lasso:
    """Return the penalty of a network of `layout`, whose channels are those of `coupling`."""
    members, total = [], 0
    for segment in matrices(layout):
        known = (coupling.rows.get(segment.name), coupling.columns.get(segment.name))
        penalised, axes = segment.shape[1] > 1 or known[1] is not None, []
        for dim, ids in enumerate(known):
            if ids is not None:
                axes.append(_axis(dim, ids, total, device))
                total += len(axes[-1].channels) * penalised
        if axes:
            shape = (*segment.shape[:2], segment.numel // (segment.shape[0] * segment.shape[1]))
            members.append(Member(segment.offset, shape, tuple(axes), penalised))
    return Lasso(tuple(members), total)


def _axis(dim: int, ids: np.ndarray, first: int, device: torch.device) -> Axis:
    found, numbers, counts = np.unique(ids[ids >= 0], return_inverse=True, return_counts=True)
    slices = np.full((found.size, counts.max()), ids.size)
    # One row per group, with its slices in order.
    order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    slices[np.arange(counts.max()) < counts[:, None]] = order
    by_slice = np.full(ids.size, -1)
    by_slice[ids >= 0] = first + numbers
    slices, by_slice = (torch.from_numpy(x).to(device) for x in (slices, by_slice))
    return Axis(dim, found, slices, slice(first, first + found.size), by_slice)


def group_norms(theta: Tensor, lasso: Lasso, scratch: Tensor) -> Tensor:
    """Return |W[g]| of every group, [total]; `scratch` is overwritten by the squares of theta."""
    squares = torch.mul(theta, theta, out=scratch)
    sums = theta.new_empty(lasso.total)
    for member, axis in _axes(lasso):
        if member.penalised:
            by_slice = _view(squares, member).sum([d for d in range(3) if d != axis.dim])
            torch.sum(_of_groups(by_slice, axis), 1, out=sums[axis.place])
    return sums.add_(SMOOTHING).sqrt_()


def write_subgradient_(
    theta: Tensor, lasso: Lasso, norms: Tensor, coefficient: Tensor, gradient: Tensor
) -> None:
    """Set `gradient` to the penalty's subgradient at theta; `norms` are those of `group_norms`."""
    gradient.zero_()
    inverse = theta.new_zeros(lasso.total + 1)
    # Slices in no group, the last entry, add nothing.
    inverse[:-1] = coefficient.to(theta.dtype) / norms
    for member in lasso.members:
        if member.penalised:
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
    largest = np.zeros(groups.total)
    magnitudes = theta.abs()
    for member, axis in _axes(lasso):
        by_slice = _view(magnitudes, member).amax([d for d in range(3) if d != axis.dim])
        found = _of_groups(by_slice, axis).amax(1).double().cpu().numpy()
        largest[axis.channels] = np.maximum(largest[axis.channels], found)
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
