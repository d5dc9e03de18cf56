"""Projection: scores of groups and of single weights, and which of them are kept.

A selection keeps exactly alpha groups, so in a grouped convolution each block keeps as many
channels as the others. Kinds are applied in the order given, each to what the one before left;
alpha always refers to all groups of the layer. Of a kernel one pattern is kept, on the keep ramp
what its best ones have together.

With W_m[g] the slice of coupled group g in tensor m, of n_m slices, its score is

    s_g = 1/|M_g| sum_m n_m |W_m[g]|^2 / |W_m|^2

over the weights and BatchNorm gammas M_g, both restricted to slices of groups: an average slice
counts 1, whatever the tensor's size, so that scores can be compared between sets. The alpha best of
a set are their projection in the norm with these weights. Biases and betas follow their group and
do not score. The alternative is the score `gates` (`core.mask_choice`).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.layout import Layout, matrices, trained_parameters
from prunex_mpi.pruning.groups import INSIDE, PATTERNS, Budget, Groups, Selection, gemm_views
from prunex_mpi.pruning.masks import kept_numel


def kept_count(count: int, ratio: float) -> int:
    """Return alpha in [1, count]: `ratio * count`, rounded up."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    return min(count, max(1, math.ceil(ratio * count - 1e-9)))


def group_squared_norms(
    flat: Tensor,
    layout: Layout,
    groups: Groups,
    selections: tuple[Selection, ...],
    pruned: Tensor | None = None,
) -> Tensor:
    """Return the sum of squares of every group of one kind, or the score of coupled groups.

    Of `flat` without what is `pruned`. 1-D of its dtype, on the host, in the order of the mask.
    """
    views = gemm_views(flat, layout, groups)
    gone = [None] * len(views) if pruned is None else gemm_views(pruned, layout, groups)
    if selections[0].kind == "coupled":
        return _coupled_scores(views, gone, groups, selections)
    squared_norms = []
    for selection in selections:
        layer, number = groups.layers[selection.layer], selection.layer
        if selection.kind in INSIDE:
            squares = _squares(views[number], gone[number]).view(-1, layer.kernel)
            patterns = torch.from_numpy(PATTERNS.T).to(squares)
            sums = squares.sum(dim=1) if selection.kind == "kernel" else squares @ patterns
            squared_norms.append(sums.view(-1))
            continue
        by_row = selection.kind == "filter"
        (sums,) = _slice_squares(views[number], (by_row, not by_row), gone[number])
        if selection.kind == "channel":
            sums = sums.view(layer.blocks * layer.channels, layer.kernel).sum(dim=1)
        squared_norms.append(sums)
    return torch.cat(squared_norms).cpu()


def _slice_squares(view: Tensor, dims: Sequence[bool], pruned: Tensor | None) -> list[Tensor]:
    """Return the squares of `view` summed by row [blocks * rows], by column or both."""
    squares = _squares(view, pruned)
    return [squares.sum(dim).view(-1) for dim, wanted in zip((2, 1), dims, strict=True) if wanted]


def _squares(view: Tensor, pruned: Tensor | None) -> Tensor:
    """Return the squares of a view, zero for what is pruned."""
    return view.square() if pruned is None else view.square().masked_fill_(pruned, 0.0)


def _coupled_scores(
    views: list[Tensor],
    gone: list[Tensor | None],
    groups: Groups,
    selections: tuple[Selection, ...],
) -> Tensor:
    """Return s_g of every coupled group, 1-D on the host."""
    start, stop = selections[0].start, selections[-1].stop
    parts, sides = [], []
    for number, found in groups.scored.items():
        dims = [dim for dim, _ in found]
        parts += _slice_squares(views[number], (0 in dims, 1 in dims), gone[number])
        sides += [ids for _, ids in found]
    # One transfer; sums on the host are float64.
    together = torch.cat(parts).cpu().numpy().astype(np.float64)
    scores, members = np.zeros(groups.total), np.zeros(groups.total)
    ends = np.cumsum([ids.size for ids in sides])[:-1]
    for ids, squares in zip(sides, np.split(together, ends), strict=True):
        inside = ids >= 0
        mine = np.unique(ids[inside])
        members[mine] += 1
        total = np.cumsum(squares[inside])[-1]
        # A tensor of zeros says nothing about its groups.
        if total > 1e-300:
            np.add.at(scores, ids[inside], squares[inside] * (mine.size / total))
    scores /= np.maximum(members, 1)
    return torch.from_numpy(scores[start:stop]).to(views[0].dtype)


# --------------------------------------------------------------------------------------------------
# The score `gates`
# --------------------------------------------------------------------------------------------------


def gate_gradients(grad: Tensor, weights: Tensor, layout: Layout, groups: Groups) -> Tensor:
    """Return the derivative of the loss by a factor on each group's channel, 1-D like `grad`.

    The sum of G W over the weights that read it, G being the gradient of W, or that make it where
    no weight does. `grad` and `weights` are flat.
    """
    mine, theirs = gemm_views(grad, layout, groups), gemm_views(weights, layout, groups)
    sums = [
        (mine[at] * theirs[at]).sum(2 if by_row else (0, 1)).view(-1)
        for at, by_row, _ in groups.gates
    ]
    places = torch.from_numpy(np.concatenate([ids for _, _, ids in groups.gates]))
    found = grad.new_zeros(groups.total + 1)
    return found.index_add_(0, places.to(grad.device, non_blocking=True), torch.cat(sums))[:-1]


# --------------------------------------------------------------------------------------------------
# Selection
# --------------------------------------------------------------------------------------------------


def select(
    squared_norms: np.ndarray,
    selections: tuple[Selection, ...],
    schedule_progress: float,
    groups: Groups | None = None,
) -> np.ndarray:
    """Return the mask that keeps the alpha groups of largest energy in every selection.

    Ties go to the lower index. `schedule_progress` in [0, 1] moves each keep ratio from 1 to its
    target (the keep ramp). A budget of `groups` decides how many coupled groups are kept in all.
    """
    if groups is not None and groups.budget is not None:
        return _select_within_budget(squared_norms, groups, schedule_progress)
    mask = np.zeros(squared_norms.shape, dtype=bool)
    base = selections[0].start
    for s in selections:
        alpha = kept_count(s.count, 1.0 - schedule_progress * (1.0 - s.keep_ratio))
        block = squared_norms[s.start - base : s.stop - base].reshape(s.selections, s.count)
        kept = np.argsort(-block, axis=1, kind="stable")[:, :alpha]
        view = mask[s.start - base : s.stop - base].reshape(s.selections, s.count)
        np.put_along_axis(view, kept, True, axis=1)
    return mask


# --------------------------------------------------------------------------------------------------
# A budget over all sets of coupled groups
# --------------------------------------------------------------------------------------------------


def with_budget(groups: Groups, layout: Layout, what: str, floor: float) -> Groups:
    """Return coupled `groups` whose keep ratio is of all the model's `what`, not of each set.

    `what` is "parameters" or "multiply-adds". Each set keeps at least the fraction
    `floor` of its groups. Raises UserError when the ratio can't be reached.
    """
    ratio = groups.kinds[0][0].keep_ratio
    positions = [groups.coupling.positions.get(s.name, 0) for s in layout.segments]
    price = np.ones(len(positions)) if what == "parameters" else np.array(positions, np.float64)
    total = float(price @ [s.numel for s in layout.segments])
    mine = [layer.segment for layer in groups.layers]
    fixed = total - float(price[mine] @ [layer.numel for layer in groups.layers])
    limited = replace(groups, budget=Budget(ratio * total, price[mine], fixed, floor))
    least = cost(reduce_to(np.zeros(groups.total), limited, groups.total), limited)
    if least > ratio * total:
        raise UserError(
            f"--keep-ratio {ratio:g} of the {what} can't be reached: with as few channels in each "
            f"set as possible, {least / total:.2g} are left; raise it"
            + (", or lower --keep-floor" if floor else "")
        )
    return limited


def _select_within_budget(
    scores: np.ndarray, groups: Groups, schedule_progress: float
) -> np.ndarray:
    """Return the mask without the groups of least score, of all sets, that fits the budget."""
    if groups.by_gate:
        scores = scores / shares_of_budget(groups)
    everything = cost(np.ones(groups.total, dtype=bool), groups)
    limit = everything - schedule_progress * (everything - groups.budget.limit)

    def fits(removed: int) -> bool:
        return cost(reduce_to(scores, groups, removed), groups) <= limit

    # The cost falls with every group removed.
    removed = bisect_left(range(groups.total), True, key=fits)
    return reduce_to(scores, groups, removed)


def reduce_to(scores: np.ndarray, groups: Groups, removed: int) -> np.ndarray:
    """Return the mask without the `removed` groups of least score, except those that sets keep.

    Every set keeps its floor.
    """
    # Of equal scores the higher index goes first.
    order = np.lexsort((-np.arange(scores.size), scores))
    mask = np.ones(scores.size, dtype=bool)
    mask[order[:removed]] = False
    for s in groups.kinds[0]:
        kept = mask[s.start : s.stop]
        share = max(groups.budget.floor, np.count_nonzero(kept) / s.count)
        alpha = kept_count(s.count, share)
        best = np.argsort(-scores[s.start : s.stop], kind="stable")[:alpha]
        kept[best] = True
    return mask


def cost(mask: np.ndarray, groups: Groups) -> float:
    """Return the cost of the groups of `mask` in the budget."""
    budget = groups.budget
    return budget.fixed + float(budget.price @ kept_numel(mask, groups))


def shares_of_budget(groups: Groups) -> np.ndarray:
    """Return each group's cost in the budget while nothing else is dropped, float64 [groups]."""
    price = np.zeros(groups.total)
    for entry in groups.coupled:
        layer, each = groups.layers[entry.layer], groups.budget.price[entry.layer]
        for ids, elements in (
            (entry.rows, layer.columns),
            (entry.columns, layer.blocks * layer.rows),
        ):
            np.add.at(price, ids[ids >= 0], each * elements)
    return price


# --------------------------------------------------------------------------------------------------
# Single weights, by gradient flow or by magnitude
#
# Weights of two or more dimensions are prunable; biases and the parameters of BatchNorm are kept,
# since they are few and every output needs its own. `pruned` is a bool vector over the flat
# parameters, true where a weight is removed.
# --------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


def kept_weights(layout: Layout, ratio: float, by: str) -> int:
    """Return the number of prunable weights kept at a keep ratio, by the score `by`."""
    sizes = [segment.numel for segment in matrices(layout)]
    if by == "magnitude":
        return sum(kept_count(size, ratio) for size in sizes)
    return kept_count(sum(sizes), ratio) if sizes else 0


def prune_by_magnitude(theta: Tensor, layout: Layout, ratio: float) -> Tensor:
    """Return `pruned`, which keeps the share `ratio` of largest magnitude of each layer."""
    pruned = torch.zeros_like(theta, dtype=torch.bool)
    for segment in matrices(layout):
        magnitudes, kept = theta[segment.place].abs(), kept_count(segment.numel, ratio)
        pruned[segment.place] = all_but_lowest(-magnitudes, kept)
    return pruned


def prune_by_gradient_flow(theta: Tensor, product: Tensor, layout: Layout, ratio: float) -> Tensor:
    """Return `pruned`, which keeps the share `ratio` of lowest score -w ⊙ (H ∇L) of all layers.

    GraSP (Wang et al. 2020, Eq. 8): the score is half the change of ∇L^T ∇L when w is removed.
    `product` is H ∇L. Raises UserError where a score is not finite.
    """
    segments = matrices(layout)
    scores = torch.cat([(theta[s.place] * product[s.place]).neg_() for s in segments])
    if not bool(torch.isfinite(scores).all()):
        raise UserError("the scores of grasp are not finite; lower the rate or check the data")
    removed = all_but_lowest(scores, kept_weights(layout, ratio, "grasp"))
    pruned = torch.zeros_like(theta, dtype=torch.bool)
    for segment, part in zip(segments, removed.split([s.numel for s in segments]), strict=True):
        pruned[segment.place] = part
    return pruned


def all_but_lowest(scores: Tensor, count: int) -> Tensor:
    """Return a bool vector that is false at exactly `count` of the lowest scores."""
    removed = torch.ones_like(scores, dtype=torch.bool)
    removed[torch.topk(scores, count, largest=False, sorted=False).indices] = False
    return removed


def add_gradients_(
    total: Tensor, layout: Layout, model: nn.Module, loss: Loss, batches: Batches
) -> None:
    """Add ∇L of each batch to `total`; the parameters' own gradients are left alone."""
    parameters = list(trained_parameters(model).values())
    for images, labels in batches:
        value = loss(model(images), labels)
        _add_(total, layout, torch.autograd.grad(value, parameters, allow_unused=True))


def add_hessian_products_(
    total: Tensor, direction: Tensor, layout: Layout, model: nn.Module, loss: Loss, batches: Batches
) -> None:
    """Add H d of each batch to `total`, d = `direction`, by differentiating ∇L^T d.

    Raises UserError for a model that cannot be differentiated twice.
    """
    parameters = list(trained_parameters(model).values())
    for images, labels in batches:
        try:
            # Only the plain kernel of attention has a second derivative.
            with sdpa_kernel(SDPBackend.MATH):
                value = loss(model(images), labels)
            slopes = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
            pairs = zip(slopes, layout.views(direction), strict=True)
            along = sum((slope * d).sum() for slope, d in pairs if slope is not None)
            products = torch.autograd.grad(along, parameters, allow_unused=True)
        except RuntimeError as error:
            raise UserError(
                f"the model cannot be differentiated twice ({one_line(error)}); "
                "use --pactrain-score magnitude"
            ) from None
        _add_(total, layout, products)


def _add_(total: Tensor, layout: Layout, parts: Iterable[Tensor | None]) -> None:
    """Add one tensor per segment, None for parameters that the loss does not depend on."""
    for view, part in zip(layout.views(total), parts, strict=True):
        if part is not None:
            view.add_(part)
