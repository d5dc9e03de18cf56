"""How the loss depends on each coupled channel as a whole.

Put a factor a_c, which is 1, on a channel where it is read: its derivative is the sum of G W over
the weights that read it, W being a weight and G its gradient. A channel that no weight reads has it
on its rows.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import Groups, cut_view, gemm_views


def gate_gradients(grad: Tensor, weights: Tensor, layout: Layout, groups: Groups) -> Tensor:
    """Return the loss's derivative by the factor of each group, 1-D like `grad`.

    `grad` and `weights` are flat.
    """
    mine, theirs = gemm_views(grad, layout, groups), gemm_views(weights, layout, groups)
    sums = [_sum_products(mine[at], theirs[at], by_row) for at, by_row, _ in groups.gates]
    places = torch.from_numpy(np.concatenate([ids for _, _, ids in groups.gates]))
    found = grad.new_zeros(groups.total + 1)
    return found.index_add_(0, places.to(grad.device, non_blocking=True), torch.cat(sums))[:-1]


def _sum_products(first: Tensor, second: Tensor, by_row: bool) -> Tensor:
    """Return the products summed by row [blocks * rows], or by column [columns] of all blocks."""
    rows, columns = first.new_empty(first.shape[:2]), first.new_zeros(first.shape[2])
    for at in cut_view(first):
        products = first[at] * second[at]
        if by_row:
            torch.sum(products, dim=2, out=rows[at])
        else:
            columns += products.sum(dim=(0, 1))
    return rows.view(-1) if by_row else columns


def shares_of_budget(groups: Groups) -> np.ndarray:
    """Return what the slices of each group cost of the budget while nothing is dropped."""
    price = np.zeros(groups.total)
    for entry in groups.coupled:
        layer, each = groups.layers[entry.layer], groups.budget.price[entry.layer]
        for ids, elements in (
            (entry.rows, layer.columns),
            (entry.columns, layer.blocks * layer.rows),
        ):
            np.add.at(price, ids[ids >= 0], each * elements)
    return price
