"""Compaction: gather the kept elements of a flat vector in a dense payload, and scatter them back.

The paper's section 4.4, with kept elements in place of the bounding box of Eq. 15, in their order.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import Groups
from prunex_mpi.pruning.masks import Mask, kept_numel


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
