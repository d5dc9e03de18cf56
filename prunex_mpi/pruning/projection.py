"""Projection: which groups are kept.

A selection keeps exactly alpha groups, so in a grouped convolution each block keeps as many
channels as the others. Compositions are applied one after the other in the order given, each to
what the one before left; alpha always refers to all groups of the layer.

With W_m[g] the slice of coupled group g in tensor m, of n_m slices, its score is

    s_g = 1/|M_g| sum_m n_m |W_m[g]|^2 / |W_m|^2

over the weights and BatchNorm gammas M_g (both restricted to what belongs to groups): an average
slice counts 1, whatever the tensor's size, so that scores can be compared over sets. The alpha best
of a set are their projection in the norm that weighs every tensor like that. Biases and betas go
with their group and do not score.
"""

import math

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import Groups, Selection, gemm_views
from prunex_mpi.pruning.masks import kept_numel


def kept_count(count: int, ratio: float, round_to: int = 1) -> int:
    """Return alpha in [1, count]: `ratio * count`, rounded up to a multiple of `round_to`."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    alpha = max(1, math.ceil(ratio * count - 1e-9))
    return min(count, -(-alpha // round_to) * round_to)


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
