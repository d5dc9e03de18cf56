"""Masks: one bit per group, and what they do to flat vectors.

Masks are host arrays (bool, one entry per group): they are small, decisions are taken on them, and
they travel as packed bits. What multiplies tensors are 0/1 factors on the tensors' device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import Groups, cut_view, gemm_views


@dataclass(frozen=True)
class Factors:
    """The 0/1 factors of a mask, layer by layer: (index, rows, columns), None where all are kept.

    Rows are [blocks, rows, 1], columns [blocks, 1, columns].
    """

    entries: tuple[tuple[int, Tensor | None, Tensor | None], ...]


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
    entries: list[tuple[int, Tensor | None, Tensor | None]] = []
    # Coupled layers keep the same rows and columns.
    known: dict[bytes, Tensor] = {}

    def factor(bits: np.ndarray, *shape: int) -> Tensor | None:
        if bits.all():
            return None
        key = bits.tobytes()
        if key not in known:
            known[key] = torch.from_numpy(bits.reshape(-1)).to(device=device, dtype=dtype)
        return known[key].view(shape)

    for number, (rows, columns) in enumerate(layer_masks(mask, groups)):
        blocks = len(columns)
        entry = (number, factor(rows, blocks, -1, 1), factor(columns, blocks, 1, -1))
        if entry[1:] != (None, None):
            entries.append(entry)
    return Factors(tuple(entries))


def apply_factors_(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> None:
    """Multiply `flat` by the mask in place (flat ⊙ m); parameters without groups are untouched."""
    mask_views_(factor_views(flat, layout, groups, factors), factors)


def factor_views(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> list[Tensor]:
    """Return the view of `flat` that each entry of `factors` masks, for use with `mask_views_`."""
    views = gemm_views(flat, layout, groups)
    return [views[number] for number, _, _ in factors.entries]


def mask_views_(views: list[Tensor], factors: Factors) -> None:
    """Multiply each view of `factor_views` by its factors in place, tile by tile."""
    for view, (_, rows, columns) in zip(views, factors.entries, strict=True):
        if rows is None or columns is None:
            view.mul_(columns if rows is None else rows)
            continue
        for at in cut_view(view):
            mask_tile_(view[at], at, rows, columns)


def mask_tile_(
    part: Tensor, at: tuple[slice, slice], rows: Tensor | None, columns: Tensor | None
) -> None:
    """Multiply the tile `at` of a layer's view, or what was made of it, by the layer's factors."""
    if columns is not None:
        part.mul_(columns[at[0]])
    if rows is not None:
        part.mul_(rows[at])


def kept_numel(mask: np.ndarray, groups: Groups) -> list[int]:
    """Return the number of kept weights of every prunable layer."""
    return [
        int((rows.reshape(columns.shape[0], -1).sum(axis=1) * columns.sum(axis=1)).sum())
        for rows, columns in layer_masks(mask, groups)
    ]


def mask_drift(mask: np.ndarray, previous: np.ndarray) -> float:
    """Return |m XOR m_previous| / |m| over groups."""
    return float(np.count_nonzero(mask != previous) / max(1, np.count_nonzero(mask)))
