"""Masks: one bit per group, and the elements of flat vectors that they prune.

Masks are bool arrays on the host, one entry per group: they are small, decisions are taken on them,
and they are sent as packed bits. What they prune is a bool vector on the device of the others.

Compaction is the paper's section 4.4: kept elements, in their order, in place of the bounding box
of Eq. 15.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True, eq=False)
class Mask:
    """Which groups of flat vectors are kept: bool [groups] `bits`, and factors 0 and 1, or None."""

    bits: np.ndarray
    factors: Tensor | None

    def apply_(self, flat: Tensor) -> None:
        """Set what is pruned to zero in place; parameters without groups are untouched."""
        if self.factors is not None:
            flat.mul_(self.factors)


def make_mask(layout: Layout, groups: Groups, bits: np.ndarray, like: Tensor) -> Mask:
    """Return the mask of `bits` for flat vectors like this one."""
    pruned = find_pruned(bits, layout, groups, like.device)
    if pruned is None:
        return Mask(bits, None)
    # A CPU multiplies by numbers five times as fast as it looks at bits; a GPU reads less.
    kept = pruned.logical_not_()
    return Mask(bits, kept if kept.is_cuda else kept.to(like.dtype))


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


def find_pruned(
    bits: np.ndarray, layout: Layout, groups: Groups, device: torch.device
) -> Tensor | None:
    """Return which elements of a flat vector are pruned, bool [layout.numel] on `device`.

    None where a mask keeps everything.
    """
    masked = [
        (layer, found)
        for layer, found in zip(groups.layers, layer_masks(bits, groups), strict=True)
        if not all(kept is None or kept.all() for kept in found)
    ]
    if not masked:
        return None
    gone = [
        ~kept.reshape(-1)
        for _, (rows, columns, weights) in masked
        for kept in ((rows, columns) if weights is None else (weights,))
    ]
    # By one copy: many small ones take a GPU long.
    together = torch.from_numpy(np.concatenate(gone)).to(device)
    parts = iter(together.split([part.size for part in gone]))
    pruned = torch.zeros(layout.numel, dtype=torch.bool, device=device)
    for layer, (_, _, weights) in masked:
        view = gemm_view(pruned, layout, layer)
        if weights is None:
            rows, columns = next(parts), next(parts)
            view.copy_(rows.view(layer.blocks, -1, 1) | columns.view(layer.blocks, 1, -1))
        else:
            view.copy_(next(parts).view(view.shape))
    return pruned


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


# --------------------------------------------------------------------------------------------------
# Compaction: gather the kept elements in a dense payload, and scatter them back
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What of the part `place` of flat vectors travels; `digest` identifies the plan across ranks.

    `index` int64 [numel] has the places of the kept elements in that part, None where all are.
    """

    place: slice
    numel: int
    digest: int
    index: Tensor | None


def build_plan(layout: Layout, mask: Mask) -> Plan:
    """Return the plan of `mask`, with its index on the device of the factors."""
    index = None if mask.factors is None else mask.factors.nonzero().view(-1)
    numel = layout.numel if index is None else index.numel()
    parts = (repr(layout.segments).encode(), np.packbits(mask.bits).tobytes())
    digest = int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "little")
    return Plan(slice(0, layout.numel), numel, digest, index)


def count_kept(layout: Layout, groups: Groups, mask: np.ndarray) -> int:
    """Return the number of elements of the plan of `mask`."""
    return layout.numel - groups.prunable_numel + sum(kept_numel(mask, groups))


def ends_of_parts(numel: int, count: int, unit: int) -> list[int]:
    """Return the ends of `count` parts of a payload, after multiples of `unit` but the last.

    Small networks may leave parts empty.
    """
    ends = [round(number * numel / count / unit) * unit for number in range(1, count)]
    return [min(end, numel) for end in ends] + [numel]


def cut_plan(plan: Plan, count: int, unit: int) -> list[tuple[slice, int, Plan]]:
    """Return (place in flat vectors, start in the payload, plan) of `count` parts of a plan."""
    found, offset = [], plan.place.start
    for start, end in pairwise([0, *ends_of_parts(plan.numel, count, unit)]):
        stop, index = end, None
        if plan.index is not None:
            # What is pruned behind a part's last element is in that part.
            stop = plan.place.stop if end == plan.numel else int(plan.index[end])
            index = plan.index[start:end] - offset
        place = slice(offset, stop)
        found.append((place, start, Plan(place, end - start, plan.digest, index)))
        offset = stop
    return found


def pack_(
    flat: Tensor, plan: Plan, payload: Tensor, other: Tensor | None = None, factor: float = 1.0
) -> None:
    """Gather the kept elements of `flat` [layout.numel] into `payload` [>= plan.numel].

    With `other` [layout.numel], those of flat + other. They are multiplied by `factor`.
    """
    kept = payload[: plan.numel]
    if plan.index is None:
        kept.copy_(flat[plan.place])
    else:
        torch.index_select(flat[plan.place], 0, plan.index, out=kept)
    if other is not None:
        part = other[plan.place]
        kept.add_(part if plan.index is None else part.index_select(0, plan.index))
    if factor != 1:
        kept.mul_(factor)


def unpack_(payload: Tensor, plan: Plan, flat: Tensor) -> None:
    """Scatter `payload` into `flat`; pruned elements become exactly zero."""
    part, kept = flat[plan.place], payload[: plan.numel]
    if plan.index is None:
        part.copy_(kept)
    else:
        part.zero_().index_copy_(0, plan.index, kept)
