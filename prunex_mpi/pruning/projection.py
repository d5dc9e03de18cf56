"""Projection: which groups are kept.

A selection keeps exactly alpha groups, so in a grouped convolution each block keeps as many
channels as the others. Compositions are applied one after the other in the order given, each to
what the one before left; alpha always refers to all groups of the layer.

With W_m[g] the slice of coupled group g in tensor m, of n_m slices, its score is

    s_g = 1/|M_g| sum_m n_m |W_m[g]|^2 / |W_m|^2

over the weights and BatchNorm gammas M_g (both restricted to what belongs to groups): an average
slice counts 1, whatever the tensor's size, so that scores can be compared over sets. The alpha best
of a set are their projection in the norm that weighs every tensor like that. Biases and betas go
with their group and do not score. Instead of this score there may be that of `gates`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.gates import shares_of_budget
from prunex_mpi.pruning.groups import Groups, Selection, cut_view, gemm_views
from prunex_mpi.pruning.masks import Factors, LayerFactors, kept_numel


def kept_count(count: int, ratio: float, round_to: int = 1) -> int:
    """Return alpha in [1, count]: `ratio * count`, rounded up to a multiple of `round_to`."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    alpha = max(1, math.ceil(ratio * count - 1e-9))
    return min(count, -(-alpha // round_to) * round_to)


def group_energies(
    flat: Tensor,
    layout: Layout,
    groups: Groups,
    selections: tuple[Selection, ...],
    factors: Factors | None = None,
) -> Tensor:
    """Sum the squared elements of every group of one kind, of `flat` or of what `factors` leave.

    `flat` is read once. Returns a 1-D tensor of its dtype on the host, in the order of the mask.
    """
    views = gemm_views(flat, layout, groups)
    masks = {entry.layer: entry for entry in (factors.entries if factors else ())}
    if selections[0].kind == "coupled":
        return _coupled_scores(views, masks, groups, selections)
    energies = []
    for selection in selections:
        layer, number = groups.layers[selection.layer], selection.layer
        by_row = selection.kind == "filter"
        sums = _slice_energies(views[number], (by_row, not by_row), masks.get(number))
        if selection.kind == "channel":
            sums = sums.view(layer.blocks * layer.channels, layer.kernel).sum(dim=1)
        energies.append(sums)
    return torch.cat(energies).cpu()


def _slice_energies(view: Tensor, dims: Sequence[bool], factors: LayerFactors | None) -> Tensor:
    """Return the squares of `view`, masked, summed by row, by column or one after the other, 1-D.

    [blocks * rows], then [blocks * columns]; tile by tile, so that no squares reach the memory.
    """
    by_row = view.new_empty(view.shape[:2])
    by_column = view.new_zeros(view.shape[::2])
    for at in cut_view(view):
        squares = view[at].square()
        if factors is not None and factors.columns is not None:
            squares.mul_(factors.columns[at[0]])
        if factors is not None and factors.rows is not None:
            squares.mul_(factors.rows[at])
        if dims[0]:
            torch.sum(squares, dim=2, out=by_row[at])
        if dims[1]:
            by_column[at[0]] += squares.sum(dim=1)
    found = [
        sums.view(-1) for sums, wanted in zip((by_row, by_column), dims, strict=True) if wanted
    ]
    return torch.cat(found)


def _coupled_scores(
    views: list[Tensor],
    masks: dict[int, LayerFactors],
    groups: Groups,
    selections: tuple[Selection, ...],
) -> Tensor:
    """Return s_g of every coupled group, 1-D on the host."""
    start, stop = selections[0].start, selections[-1].stop
    scored = groups.scored
    sums = [
        _slice_energies(views[number], dims, masks.get(number)) for number, *dims in scored.tensors
    ]
    # One transfer, and float64 for what is added up on the host.
    energies = torch.cat(sums).cpu().numpy().astype(np.float64)[scored.inside]
    totals = np.bincount(scored.side, energies, len(scored.slices))
    # A tensor of zeros says nothing about its groups.
    scale = np.divide(scored.slices, totals, out=np.zeros_like(totals), where=totals > 1e-300)
    scores = np.bincount(scored.group, energies * scale[scored.side], groups.total)
    scores /= np.maximum(scored.members, 1)
    return torch.from_numpy(scores[start:stop]).to(views[0].dtype)


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
    if groups.by_gate:
        scores = scores / shares_of_budget(groups)
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
    """Return the mask without the `removed` groups of least score.

    Every set rounds up, and keeps its floor.
    """
    # Of equal scores the higher index goes first.
    order = np.lexsort((-np.arange(scores.size), scores))
    mask = np.ones(scores.size, dtype=bool)
    mask[order[:removed]] = False
    for s in groups.kinds[0]:
        kept = mask[s.start : s.stop]
        share = max(groups.budget.floor, np.count_nonzero(kept) / s.count)
        alpha = kept_count(s.count, share, _in_units(round_to, s))
        best = np.argsort(-scores[s.start : s.stop], kind="stable")[:alpha]
        kept[best] = True
    return mask


def cost(mask: np.ndarray, groups: Groups) -> float:
    """Return what the groups of `mask` cost of the budget."""
    budget = groups.budget
    return budget.fixed + float(budget.price @ kept_numel(mask, groups))
