"""Masks: one bit per group, and how they are applied to flat vectors.

Masks are bool arrays on the host, one entry per group: they are small, decisions are taken on them,
and they are sent as packed bits. Tensors are multiplied by 0/1 factors on their own device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import INSIDE, PATTERNS, Groups, Selection, gemm_view


class LayerMask(NamedTuple):
    """What a layer keeps, bool: rows [blocks * rows] and columns [blocks, columns].

    Where kernels or parts of them are pruned, `weights` [blocks, rows, columns] says it all.
    """

    rows: np.ndarray
    columns: np.ndarray
    weights: np.ndarray | None = None


class LayerFactors(NamedTuple):
    """The 0/1 factors of a layer: rows [blocks, rows, 1], columns [blocks, 1, columns], or None.

    `pruned` holds the indices of pruned rows of all blocks. `weights` [blocks, rows, columns] are
    in place of both where kernels or parts of them are pruned.
    """

    layer: int
    rows: Tensor | None = None
    columns: Tensor | None = None
    pruned: Tensor | None = None
    weights: Tensor | None = None


# Those of a mask, for the layers that do not keep everything.
Factors = tuple[LayerFactors, ...]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which groups of a flat vector of `layout` are kept: bool [groups] `bits`, and factors."""

    layout: Layout
    groups: Groups
    bits: np.ndarray
    factors: Factors

    def apply_(self, flat: Tensor) -> None:
        """Multiply `flat` by the mask in place; parameters without groups are untouched."""
        apply_factors_(flat, self.layout, self.groups, self.factors)

    def applying(self, flat: Tensor) -> Callable[[], object]:
        """Return what does the same again and again.

        On a GPU by one vector, since layers would cost a kernel or more each.
        """
        if flat.device.type == "cpu":
            views = factor_views(flat, self.layout, self.groups, self.factors)
            return partial(mask_views_, views, self.factors)
        kept = torch.ones_like(flat)
        self.apply_(kept)
        return partial(flat.mul_, kept.bool())


def make_mask(layout: Layout, groups: Groups, bits: np.ndarray, like: Tensor) -> Mask:
    """Return a mask with factors of the dtype and on the device of `like`."""
    return Mask(layout, groups, bits, build_factors(bits, groups, like.device, like.dtype))


def layer_masks(mask: np.ndarray, groups: Groups) -> list[LayerMask]:
    """Return what every layer keeps."""
    shapes = [(layer.blocks * layer.rows, (layer.blocks, layer.columns)) for layer in groups.layers]
    result = [LayerMask(*(np.ones(shape, dtype=bool) for shape in both)) for both in shapes]
    inside: dict[int, np.ndarray] = {}
    for selections in groups.kinds:
        for s in selections:
            if s.kind == "coupled":
                continue
            bits = mask[s.start : s.stop]
            rows, columns, _ = result[s.layer]
            if s.kind in INSIDE:
                found = _weights_of(bits, s, groups)
                inside[s.layer] = inside.get(s.layer, found) & found
            elif s.kind == "filter":
                rows &= bits
            elif s.kind == "channel":
                kernel = groups.layers[s.layer].kernel
                columns &= np.repeat(bits.reshape(s.selections, s.count), kernel, axis=1)
            else:
                columns &= bits.reshape(s.selections, s.count)
    # The last entry stands for slices in no group, -1.
    bits = np.append(mask, True)
    for entry in groups.coupled:
        rows, columns, _ = result[entry.layer]
        rows &= bits[entry.rows]
        columns &= bits[entry.columns]
    for number, weights in inside.items():
        rows, columns, _ = result[number]
        weights = weights & rows.reshape(len(columns), -1, 1) & columns[:, None, :]
        result[number] = LayerMask(rows, columns, weights)
    return result


def _weights_of(bits: np.ndarray, selection: Selection, groups: Groups) -> np.ndarray:
    """Return what kernels, or patterns of them, keep of a layer, bool [blocks, rows, columns]."""
    layer = groups.layers[selection.layer]
    if selection.kind == "kernel":
        kept = np.repeat(bits, layer.kernel)
    else:
        # Of several patterns what any of them has.
        kept = bits.reshape(-1, len(PATTERNS)) @ PATTERNS
    return kept.reshape(layer.blocks, layer.rows, layer.columns)


def build_factors(
    mask: np.ndarray, groups: Groups, device: torch.device, dtype: torch.dtype
) -> Factors:
    """Turn a mask into 0/1 tensors on `device`; layers that keep everything get none."""
    entries, layers = [], layer_masks(mask, groups)
    # Coupled layers share rows and columns.
    whole = [bits for layer in layers if layer.weights is None for bits in layer[:2]]
    masked = {bits.tobytes(): bits.reshape(-1) for bits in whole if not bits.all()}
    factors = put_together(list(masked.values()), device, dtype)
    pruned = put_together([np.flatnonzero(~bits) for bits in masked.values()], device)
    known = dict(zip(masked, zip(factors, pruned, strict=True), strict=True))
    inside = [w.reshape(-1) for _, _, w in layers if w is not None and not w.all()]
    parts = iter(put_together(inside, device, dtype))

    for number, (rows, columns, weights) in enumerate(layers):
        if weights is not None:
            if not weights.all():
                entries.append(LayerFactors(number, weights=next(parts).view(weights.shape)))
            continue
        blocks = len(columns)
        by_row, by_column = known.get(rows.tobytes()), known.get(columns.tobytes())
        if by_row is None and by_column is None:
            continue
        views = (
            by_row and by_row[0].view(blocks, -1, 1),
            by_column and by_column[0].view(blocks, 1, -1),
        )
        entries.append(LayerFactors(number, *views, by_row and by_row[1]))
    return tuple(entries)


def put_together(
    arrays: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return 1-D arrays of one dtype on `device`, by one copy: many small ones take a GPU long."""
    if not arrays:
        return []
    whole = torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)
    return list(whole.split([array.size for array in arrays]))


def apply_factors_(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> None:
    """Multiply `flat` by the mask in place (flat ⊙ m); parameters without groups are untouched."""
    mask_views_(factor_views(flat, layout, groups, factors), factors)


def factor_views(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> list[Tensor]:
    """Return the view of `flat` that each entry of `factors` masks, for use with `mask_views_`."""
    return [gemm_view(flat, layout, groups.layers[entry.layer]) for entry in factors]


def mask_views_(views: list[Tensor], factors: Factors) -> None:
    """Multiply each view of `factor_views` by its factors in place."""
    for view, entry in zip(views, factors, strict=True):
        if entry.weights is not None:
            view.mul_(entry.weights)
        if entry.columns is not None:
            view.mul_(entry.columns)
        if entry.rows is None:
            continue
        if view.shape[2] > 1:
            set_rows_(view.view(-1, view.shape[2]), entry.pruned, 0.0)
        else:
            view.mul_(entry.rows)


def set_rows_(target: Tensor, rows: Tensor, values: Tensor | float) -> None:
    """Set `target[rows]` to `values`."""
    if target.device.type == "cpu":
        # NumPy copies whole rows, where torch goes element by element.
        values = values.numpy() if isinstance(values, Tensor) else values
        target.numpy()[rows.numpy()] = values
    else:
        target[rows] = values


def kept_numel(mask: np.ndarray, groups: Groups) -> list[int]:
    """Return the number of kept weights of every prunable layer."""
    return [
        int((rows.reshape(len(columns), -1).sum(axis=1) * columns.sum(axis=1)).sum())
        if weights is None
        else int(weights.sum())
        for rows, columns, weights in layer_masks(mask, groups)
    ]


def mask_drift(mask: np.ndarray, previous: np.ndarray) -> float:
    """Return |m XOR m_previous| / |m| over groups."""
    return float(np.count_nonzero(mask != previous) / max(1, np.count_nonzero(mask)))
