"""Structured sparsity: which slices of a convolution form a group, and which groups are kept.

A convolution's weight [C_out, C_in/g, *kernel] with g = `conv.groups` is g GEMM blocks of shape
[C_out/g, C_in/g * prod(kernel)]. The groups of the paper's section 2.1 are then

- `filter`:  a row of a block;                 C_out groups in one selection
- `channel`: the columns of an input channel;  C_in/g groups in each of g selections
- `shape`:   one column (c, u, v);             C_in/g * prod(kernel) groups in each of g selections

A selection keeps exactly alpha groups, so in a grouped convolution each block keeps as many
channels as the others. Compositions are applied one after the other in the order given, each to
what the one before left; alpha always refers to all groups of the layer.

- `coupled`: all slices that have to go together for a channel to be removable (`coupling`), chosen
  among the channels that have slices in the same places. With W_m[g] the slice of group g in tensor
  m, of n_m slices, its score is

      s_g = 1/|M_g| sum_m n_m |W_m[g]|^2 / |W_m|^2

  over the weights and BatchNorm gammas M_g (both restricted to what belongs to groups): an average
  slice counts 1, whatever the tensor's size,
  so that scores can be compared over sets. The alpha best of a set are their projection in the norm
  that weighs every tensor like that. Biases and betas go with their group and do not score.

Masks are host arrays (bool, one entry per group): they are small, decisions are taken on them, and
they travel as packed bits. What multiplies tensors are 0/1 factors on the tensors' device.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout


@dataclass(frozen=True)
class PrunableLayer:
    """A weight as `blocks` GEMM blocks of [rows, channels * kernel]; a vector is one column."""

    segment: int
    blocks: int
    rows: int
    channels: int
    kernel: int

    @property
    def columns(self) -> int:
        return self.channels * self.kernel

    @property
    def numel(self) -> int:
        return self.blocks * self.rows * self.columns


@dataclass(frozen=True)
class Selection:
    """The groups of one kind in one layer: `selections` independent choices among `count` each.

    Coupled groups belong to no layer (-1); each is `unit` channels wide.
    """

    layer: int
    kind: str
    selections: int
    count: int
    start: int
    keep_ratio: float
    unit: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.selections * self.count


@dataclass(frozen=True)
class CoupledLayer:
    """The place in the mask of each row [blocks * rows] and column [columns] of a layer, -1: none.

    `scored` says that its slices count in the score of their groups.
    """

    layer: int
    rows: np.ndarray
    columns: np.ndarray
    scored: bool


@dataclass(frozen=True)
class Budget:
    """A limit on `price[layer]` per kept weight, summed over all layers, plus what is `fixed`."""

    limit: float
    price: np.ndarray
    fixed: float


@dataclass(frozen=True)
class Groups:
    """All groups of a model; a mask is a bool array [total], kind after kind, layer after layer.

    With a `budget` the coupled groups are chosen among all sets at once.
    """

    layers: tuple[PrunableLayer, ...]
    kinds: tuple[tuple[Selection, ...], ...]
    total: int
    excluded: tuple[str, ...]
    coupled: tuple[CoupledLayer, ...] = ()
    budget: Budget | None = None

    @property
    def prunable_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)


@dataclass(frozen=True)
class Factors:
    """The 0/1 factors of a mask: (layer index, factor broadcastable to [blocks, rows, columns])."""

    entries: tuple[tuple[int, Tensor], ...]


def kept_count(count: int, ratio: float, round_to: int = 1) -> int:
    """Return alpha in [1, count]: `ratio * count`, rounded up to a multiple of `round_to`."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    alpha = max(1, math.ceil(ratio * count - 1e-9))
    return min(count, -(-alpha // round_to) * round_to)


def gemm_views(flat: Tensor, layout: Layout, groups: Groups) -> list[Tensor]:
    """Return each prunable layer of `flat` as a view [blocks, rows, columns]."""
    views = []
    for layer in groups.layers:
        offset = layout.segments[layer.segment].offset
        piece = flat[offset : offset + layer.numel]
        views.append(piece.view(layer.blocks, layer.rows, layer.columns))
    return views


def group_energies(
    squares: Tensor, layout: Layout, groups: Groups, selections: tuple[Selection, ...]
) -> Tensor:
    """Sum the squared elements of every group of one kind.

    `squares` is the flat vector of squared elements; returns a 1-D tensor of its dtype on the host,
    in the order of the mask.
    """
    views = gemm_views(squares, layout, groups)
    if selections[0].kind == "coupled":
        return _coupled_scores(views, groups, selections)
    energies = []
    for selection in selections:
        layer = groups.layers[selection.layer]
        view = views[selection.layer]
        if selection.kind == "filter":
            energies.append(view.sum(dim=2).reshape(-1))
        elif selection.kind == "channel":
            by_column = view.sum(dim=1).view(layer.blocks, layer.channels, layer.kernel)
            energies.append(by_column.sum(dim=2).reshape(-1))
        else:
            energies.append(view.sum(dim=1).reshape(-1))
    return torch.cat(energies).cpu()


def _coupled_scores(
    views: list[Tensor], groups: Groups, selections: tuple[Selection, ...]
) -> Tensor:
    """Return s_g of every coupled group, 1-D on the host."""
    start, stop = selections[0].start, selections[-1].stop
    scores = views[0].new_zeros(stop - start)
    members = np.zeros(stop - start)
    for entry in groups.coupled:
        if not entry.scored:
            continue
        view = views[entry.layer]
        for places, sums in (
            (entry.rows, view.sum(dim=2).reshape(-1)),
            (entry.columns, view.sum(dim=(0, 1))),
        ):
            inside = np.flatnonzero(places >= 0)
            if not inside.size:
                continue
            found = np.unique(places[inside])
            energies = sums[torch.from_numpy(inside).to(sums.device)]
            scale = found.size / energies.sum().clamp_min(torch.finfo(sums.dtype).tiny)
            target = torch.from_numpy(places[inside] - start).to(sums.device)
            scores.index_add_(0, target, energies * scale)
            members[found - start] += 1
    return scores.cpu() / torch.from_numpy(members).clamp_min(1).to(scores.dtype)


def select(
    energies: np.ndarray,
    selections: tuple[Selection, ...],
    strictness: float,
    round_to: int = 1,
    groups: Groups | None = None,
) -> np.ndarray:
    """Keep exactly alpha groups of largest energy in every selection; ties go to the lower index.

    `strictness` in [0, 1] moves every keep ratio from 1 to its target (the keep ramp). Where
    `groups` have a budget, it decides how many coupled groups are kept in all. Returns a bool array
    of the energies' length.
    """
    if groups is not None and groups.budget is not None:
        return _select_within_budget(energies, groups, strictness, round_to)
    mask = np.zeros(energies.shape, dtype=bool)
    base = selections[0].start
    for s in selections:
        alpha = kept_count(s.count, 1.0 - strictness * (1.0 - s.keep_ratio), _in_units(round_to, s))
        block = energies[s.start - base : s.stop - base].reshape(s.selections, s.count)
        kept = np.argsort(-block, axis=1, kind="stable")[:, :alpha]
        view = mask[s.start - base : s.stop - base].reshape(s.selections, s.count)
        np.put_along_axis(view, kept, True, axis=1)
    return mask


def _in_units(round_to: int, selection: Selection) -> int:
    """Return the multiple of groups that makes a multiple of `round_to` channels."""
    return round_to // math.gcd(round_to, selection.unit)


def _select_within_budget(
    scores: np.ndarray, groups: Groups, strictness: float, round_to: int
) -> np.ndarray:
    """Remove the groups of least score, of all sets, until what is left fits the budget.

    What is left falls with every group that goes, so the number to remove is found by bisection.
    """
    everything = cost(np.ones(groups.total, dtype=bool), groups)
    limit = everything - strictness * (everything - groups.budget.limit)
    low, high = 0, groups.total
    while low < high:
        removed = (low + high) // 2
        if cost(reduce_to(scores, groups, removed, round_to), groups) <= limit:
            high = removed
        else:
            low = removed + 1
    return reduce_to(scores, groups, low, round_to)


def reduce_to(scores: np.ndarray, groups: Groups, removed: int, round_to: int) -> np.ndarray:
    """Return the mask without the `removed` groups of least score, rounded up in every set."""
    # Of equal scores the higher index goes first.
    order = np.lexsort((-np.arange(scores.size), scores))
    mask = np.ones(scores.size, dtype=bool)
    mask[order[:removed]] = False
    for s in groups.kinds[0]:
        kept = mask[s.start : s.stop]
        alpha = kept_count(s.count, np.count_nonzero(kept) / s.count, _in_units(round_to, s))
        best = np.argsort(-scores[s.start : s.stop], kind="stable")[:alpha]
        kept[best] = True
    return mask


def cost(mask: np.ndarray, groups: Groups) -> float:
    """Return what the groups of `mask` cost of the budget."""
    budget = groups.budget
    return budget.fixed + float(budget.price @ kept_numel(mask, groups))


def layer_masks(mask: np.ndarray, groups: Groups) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (rows [blocks * rows], columns [blocks, columns]) as bool arrays for every layer."""
    result = [
        (
            np.ones(layer.blocks * layer.rows, dtype=bool),
            np.ones((layer.blocks, layer.columns), bool),
        )
        for layer in groups.layers
    ]
    for selections in groups.kinds:
        for s in selections:
            if s.kind == "coupled":
                continue
            bits = mask[s.start : s.stop]
            rows, columns = result[s.layer]
            if s.kind == "filter":
                rows &= bits
            elif s.kind == "channel":
                kernel = groups.layers[s.layer].kernel
                columns &= np.repeat(bits.reshape(s.selections, s.count), kernel, axis=1)
            else:
                columns &= bits.reshape(s.selections, s.count)
    # The last entry stands for what belongs to no group.
    bits = np.append(mask, True)
    for entry in groups.coupled:
        rows, columns = result[entry.layer]
        rows &= bits[entry.rows]
        columns &= bits[entry.columns]
    return result


def build_factors(
    mask: np.ndarray, groups: Groups, device: torch.device, dtype: torch.dtype
) -> Factors:
    """Turn a mask into 0/1 tensors on `device`; layers that keep everything get none."""
    entries: list[tuple[int, Tensor]] = []
    for number, (rows, columns) in enumerate(layer_masks(mask, groups)):
        layer = groups.layers[number]
        if not columns.all():
            factor = torch.from_numpy(columns).to(device=device, dtype=dtype)
            entries.append((number, factor.view(layer.blocks, 1, layer.columns)))
        if not rows.all():
            factor = torch.from_numpy(rows).to(device=device, dtype=dtype)
            entries.append((number, factor.view(layer.blocks, layer.rows, 1)))
    return Factors(tuple(entries))


def apply_factors_(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> None:
    """Multiply `flat` by the mask in place (flat ⊙ m); parameters without groups are untouched."""
    mask_views_(factor_views(flat, layout, groups, factors), factors)


def factor_views(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> list[Tensor]:
    """Return the view of `flat` that each factor multiplies, for use with `mask_views_`."""
    views = gemm_views(flat, layout, groups)
    return [views[number] for number, _ in factors.entries]


def mask_views_(views: list[Tensor], factors: Factors) -> None:
    """Multiply each view of `factor_views` by its factor in place."""
    if views:
        torch._foreach_mul_(views, [factor for _, factor in factors.entries])


def kept_numel(mask: np.ndarray, groups: Groups) -> list[int]:
    """Return the number of kept weights of every prunable layer."""
    return [
        int((rows.reshape(columns.shape[0], -1).sum(axis=1) * columns.sum(axis=1)).sum())
        for rows, columns in layer_masks(mask, groups)
    ]


def mask_drift(mask: np.ndarray, previous: np.ndarray) -> float:
    """Return |m XOR m_previous| / |m| over groups."""
    return float(np.count_nonzero(mask != previous) / max(1, np.count_nonzero(mask)))
