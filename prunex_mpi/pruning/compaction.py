"""Compaction: gather the kept slices of a flat vector into a dense payload, and scatter them back.

The paper's section 4.4, with kept columns of the GEMM view in place of the bounding box of Eq. 15.
A plan holds the kept rows and channels of each pruned layer. In both directions rows are copied
whole and channels gathered, tile by tile, in one pass over memory.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout, tile_length
from prunex_mpi.pruning.groups import Groups, PrunableLayer
from prunex_mpi.pruning.masks import LayerMask, layer_masks, put_together, set_rows_

# A shape [rows, channels, kernel] of a layer, and which rows and channels of it are kept, bool.
View = tuple[tuple[int, int, int], np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Indices:
    """The indices of kept rows or channels, and of `pruned` ones.

    `place` is the position of each among the kept ones, arbitrary for pruned ones. `factor` is 0
    for elements of pruned ones and 1 for others, float32.
    """

    index: Tensor
    pruned: Tensor
    place: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Piece:
    """A contiguous part of the flat vector and its place in the payload.

    With a `shape` it is [rows, channels, kernel] and keeps `rows` and `channels`, None for all.
    """

    offset: int
    numel: int
    start: int
    kept: int
    shape: tuple[int, int, int] | None = None
    rows: Indices | None = None
    channels: Indices | None = None


@dataclass(frozen=True)
class Plan:
    """The place of each kept element in the payload; `digest` identifies the plan across ranks.

    `index` int64 [numel] has the places of the kept elements in the flat vector, on a GPU, where
    one kernel that reads it is faster than one or two for each layer.
    """

    pieces: tuple[Piece, ...]
    numel: int
    digest: int
    index: Tensor | None = None


def build_plan(layout: Layout, groups: Groups, mask: np.ndarray, device: torch.device) -> Plan:
    """Return the plan of `mask`, with its index tensors on `device`."""
    views = {
        layer.segment: _view_of_kept(layer, found)
        for layer, found in zip(groups.layers, layer_masks(mask, groups), strict=True)
        if not all(bits is None or bits.all() for bits in found)
    }
    known = _make_indices(views.values(), device)
    pieces: list[Piece] = []
    start = 0
    for number, segment in enumerate(layout.segments):
        piece = _whole(segment.offset, start, segment.numel)
        if number in views:
            shape, rows, channels = views[number]
            # No number of NumPy's, which JSON does not know.
            size = int(np.count_nonzero(rows) * np.count_nonzero(channels) * shape[2])
            kept = (known.get((bits.tobytes(), shape[2])) for bits in (rows, channels))
            piece = Piece(segment.offset, segment.numel, start, size, shape, *kept)
        last = pieces[-1] if pieces else None
        if piece.shape is None and last is not None and last.shape is None:
            # Neighbours that keep everything are copied at once.
            pieces[-1] = _whole(last.offset, last.start, last.numel + piece.numel)
        else:
            pieces.append(piece)
        start += piece.kept
    places = np.array([(p.offset, p.start, p.kept, *(p.shape or (0, 0, 0))) for p in pieces])
    parts = (repr(layout.segments).encode(), places.tobytes(), np.packbits(mask).tobytes())
    digest = int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "little")
    plan = Plan(tuple(pieces), start, digest)
    return with_index(plan, layout.numel, device) if device.type == "cuda" else plan


def with_index(plan: Plan, numel: int, device: torch.device) -> Plan:
    """Return the plan with its index on `device`, unless it keeps all of `numel` elements."""
    if plan.numel == numel:
        return plan
    index = torch.empty(plan.numel, dtype=torch.int64, device=device)
    pack_(torch.arange(numel, device=device), plan, index)
    return replace(plan, index=index)


def cut_plan(plan: Plan, count: int, unit: int) -> list[tuple[slice, int, Plan]]:
    """Return (place in flat vectors, start in the payload, plan from there) of `count` parts.

    A part ends after a multiple of `unit` elements of the payload, or with a layer where that has
    lost some. Small networks may leave parts empty.
    """
    ends = [_end_near(plan, number * plan.numel / count, unit) for number in range(1, count)]
    pieces, found, start, offset = list(plan.pieces), [], 0, 0
    for end in (*ends, plan.numel):
        end, mine, begin = max(end, start), [], offset
        while pieces and (pieces[0].start + pieces[0].kept <= end or pieces[0].start < end):
            p = pieces.pop(0)
            inside = min(p.kept, end - p.start)
            if inside < p.kept:
                pieces.insert(0, _whole(p.offset + inside, end, p.kept - inside))
                p = _whole(p.offset, p.start, inside)
            mine.append(replace(p, start=p.start - start))
            offset = p.offset + p.numel
        found.append((slice(begin, offset), start, Plan(tuple(mine), end - start, plan.digest)))
        start = end
    return found


def _whole(offset: int, start: int, numel: int) -> Piece:
    return Piece(offset, numel, start, numel)


def _end_near(plan: Plan, wanted: float, unit: int) -> int:
    """Return the place in the payload nearest to `wanted` at which a part may end."""
    for p in plan.pieces:
        stop = p.start + p.kept
        if wanted <= stop:
            if p.shape is not None:
                return p.start if wanted - p.start < stop - wanted else stop
            return min(max(round(wanted / unit) * unit, p.start), stop)
    return plan.numel


def _view_of_kept(layer: PrunableLayer, found: LayerMask) -> View:
    """Return the view of a layer by whose rows and channels its mask can be told.

    Layers of a single column are a single row of channels, as are those of kernels and patterns.
    """
    rows, columns, weights = found
    if weights is not None:
        return (1, layer.numel, 1), np.ones(1, dtype=bool), weights.reshape(-1)
    by_channel = columns.reshape(layer.blocks, layer.channels, layer.kernel)
    whole_channels = bool((by_channel.all(axis=2) == by_channel.any(axis=2)).all())
    all_of_one = np.ones(1, dtype=bool)
    if columns.all():
        if layer.columns == 1:
            return (1, rows.size, 1), all_of_one, rows
        return (rows.size, 1, layer.columns), rows, all_of_one
    if layer.blocks > 1:
        # Columns differ between convolution groups: keep kernels of a channel, or single weights.
        unit = by_channel[:, :, 0] if whole_channels else columns
        kept = (rows.reshape(layer.blocks, layer.rows, 1) & unit[:, None, :]).reshape(-1)
        return (1, kept.size, layer.numel // kept.size), all_of_one, kept
    if whole_channels:
        return (layer.rows, layer.channels, layer.kernel), rows, by_channel[0, :, 0]
    return (layer.rows, layer.columns, 1), rows, columns[0]


def _make_indices(views: Iterable[View], device: torch.device) -> dict[tuple[bytes, int], Indices]:
    """Return the indices of the rows and channels of `views`, by bits and kernel.

    Without those that keep all. Coupled layers share theirs.
    """
    masked = {
        (bits.tobytes(), kernel): bits
        for (_, _, kernel), *both in views
        for bits in both
        if not bits.all()
    }
    indices, factors = [], []
    for (_, kernel), bits in masked.items():
        place = np.maximum(np.cumsum(bits) - 1, 0)
        indices += [np.flatnonzero(bits), np.flatnonzero(~bits), place]
        factors.append(np.repeat(bits, kernel).astype(np.float32))
    flat = put_together(indices, device)
    found = zip(flat[::3], flat[1::3], flat[2::3], put_together(factors, device), strict=True)
    return {key: Indices(*tensors) for key, tensors in zip(masked, found, strict=True)}


def pack_(
    flat: Tensor, plan: Plan, payload: Tensor, other: Tensor | None = None, factor: float = 1.0
) -> None:
    """Gather the kept elements of `flat` [layout.numel] into `payload` [>= plan.numel].

    With `other` [layout.numel], those of flat + other. They are multiplied by `factor`.
    """
    flats = (flat,) if other is None else (flat, other)
    if plan.index is not None:
        kept = torch.index_select(flat, 0, plan.index, out=payload[: plan.numel])
        if other is not None:
            kept.add_(other.index_select(0, plan.index))
        if factor != 1:
            kept.mul_(factor)
        return
    for p in plan.pieces:
        target = payload[p.start : p.start + p.kept]
        sources = [f[p.offset : p.offset + p.numel] for f in flats]
        if p.shape is None:
            _pack_whole_(sources, target, factor)
        else:
            _pack_piece_(p, [source.view(p.shape) for source in sources], target, factor)


def _pack_whole_(sources: list[Tensor], target: Tensor, factor: float) -> None:
    # Tiles are scaled while in the cache. Sum, then scale: that fixes the rounding of float32.
    step = target.numel() if factor == 1 else tile_length(target.device)
    for start in range(0, target.numel(), max(1, step)):
        at = slice(start, start + step)
        _sum([source[at] for source in sources], target[at])
        if factor != 1:
            target[at].mul_(factor)


def _sum(sources: list[Tensor], out: Tensor | None = None) -> Tensor:
    """Return the sum of one or two tensors; a single one without `out` is returned itself."""
    if len(sources) == 2:
        return torch.add(*sources, out=out)
    return sources[0] if out is None else out.copy_(sources[0])


def _pack_piece_(p: Piece, sources: list[Tensor], target: Tensor, factor: float) -> None:
    for at, kept in _row_tiles(p, target):
        if p.rows is None:
            parts = [source[at] for source in sources]
        else:
            parts = [source.index_select(0, p.rows.index[at]) for source in sources]
        if p.channels is None:
            _sum(parts, kept)
        else:
            torch.index_select(_sum(parts), 1, p.channels.index, out=kept)
        if factor != 1:
            kept.mul_(factor)


def _row_tiles(p: Piece, payload: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield tiles of the kept rows of a piece: their places and their part of `payload`."""
    rows, channels, kernel = p.shape
    kept_rows = rows if p.rows is None else p.rows.index.numel()
    kept_channels = channels if p.channels is None else p.channels.index.numel()
    view = payload.view(kept_rows, kept_channels, kernel)
    step = max(1, tile_length(payload.device) // (channels * kernel))
    for start in range(0, kept_rows if p.kept else 0, step):
        at = slice(start, start + step)
        yield at, view[at]


def unpack_(payload: Tensor, plan: Plan, flat: Tensor) -> None:
    """Scatter `payload` into `flat`; pruned elements become exactly zero."""
    if plan.index is not None:
        flat.zero_().index_copy_(0, plan.index, payload[: plan.numel])
        return
    for p in plan.pieces:
        target, source = flat[p.offset : p.offset + p.numel], payload[p.start : p.start + p.kept]
        if p.shape is None:
            target.copy_(source)
        elif not p.kept:
            target.zero_()
        else:
            _unpack_piece_(p, source, target.view(p.shape))


def _unpack_piece_(p: Piece, source: Tensor, target: Tensor) -> None:
    for at, kept in _row_tiles(p, source):
        if p.rows is None:
            _spread(p, kept, target[at])
        elif p.channels is None:
            set_rows_(target, p.rows.index[at], kept)
        else:
            set_rows_(target, p.rows.index[at], _spread(p, kept))
    if p.rows is not None:
        set_rows_(target, p.rows.pruned, 0.0)


def _spread(p: Piece, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows with all channels, zero where pruned, from rows of kept channels."""
    if out is None:
        out = kept.new_empty(len(kept), *p.shape[1:])
    torch.index_select(kept, 1, p.channels.place, out=out)
    out.view(len(kept), -1).mul_(p.channels.factor)
    return out
