"""Physical shrinkage: gather the kept slices of a flat vector into a dense payload and back.

The paper's section 4.4, with kept columns of the GEMM view in place of the bounding box of Eq. 15.
A plan holds one index set per pruned layer; pack and unpack are one indexed copy per layer straight
between the flat vector and the payload, without temporaries.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import Groups, PrunableLayer
from prunex_mpi.pruning.masks import layer_masks


@dataclass(frozen=True)
class Piece:
    """A run of the flat vector and its place in the payload.

    With `index`, the run seen as `shape` keeps the entries `index` of dimension `dim`.
    """

    offset: int
    numel: int
    start: int
    kept: int
    shape: tuple[int, ...] = ()
    dim: int = 0
    index: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """Where each kept element travels; `digest` identifies the layout across ranks."""

    pieces: tuple[Piece, ...]
    numel: int
    digest: int


def build_plan(layout: Layout, groups: Groups, mask: np.ndarray, device: torch.device) -> Plan:
    """Derive the index sets of `mask` and place them on `device`."""
    by_segment = {
        layer.segment: (layer, rows, columns)
        for layer, (rows, columns) in zip(groups.layers, layer_masks(mask, groups), strict=True)
    }
    pieces: list[Piece] = []
    start = 0
    for number, segment in enumerate(layout.segments):
        piece = Piece(segment.offset, segment.numel, start, segment.numel)
        if number in by_segment:
            layer, rows, columns = by_segment[number]
            if not (rows.all() and columns.all()):
                piece = _indexed_piece(segment.offset, start, layer, rows, columns, device)
        last = pieces[-1] if pieces else None
        if piece.index is None and last is not None and last.index is None:
            # Neighbours that keep everything travel as one copy.
            pieces[-1] = Piece(
                last.offset, last.numel + piece.numel, last.start, last.kept + piece.kept
            )
        else:
            pieces.append(piece)
        start += piece.kept
    bits = np.packbits(mask).tobytes()
    places = [(p.offset, p.start, p.kept, p.shape, p.dim) for p in pieces]
    shapes = repr((layout.segments, places)).encode()
    digest = int.from_bytes(hashlib.sha256(shapes + bits).digest()[:8], "little")
    return Plan(tuple(pieces), start, digest)


def _indexed_piece(
    offset: int,
    start: int,
    layer: PrunableLayer,
    rows: np.ndarray,
    columns: np.ndarray,
    device: torch.device,
) -> Piece:
    """Choose the view of a layer in which the kept weights are whole entries of one dimension."""
    out_channels = layer.blocks * layer.rows
    by_channel = columns.reshape(layer.blocks, layer.channels, layer.kernel)
    whole_channels = bool((by_channel.all(axis=2) == by_channel.any(axis=2)).all())
    if columns.all():
        shape, dim, kept = (out_channels, layer.columns), 0, rows
    elif rows.all() and layer.blocks == 1 and whole_channels:
        shape, dim = (layer.rows, layer.channels, layer.kernel), 1
        kept = by_channel[0, :, 0]
    elif rows.all() and layer.blocks == 1:
        shape, dim, kept = (layer.rows, layer.columns), 1, columns[0]
    else:
        # Rows and columns at once, or columns that differ between convolution groups: runs of one
        # channel's kernel, or single weights.
        unit = by_channel[:, :, 0] if whole_channels else columns
        kept = rows.reshape(layer.blocks, layer.rows, 1) & unit[:, None, :]
        kept = kept.reshape(-1)
        run = layer.numel // kept.size
        shape, dim = ((kept.size, run) if run > 1 else (kept.size,)), 0
    index = torch.from_numpy(np.flatnonzero(kept)).to(device)
    size = layer.numel // shape[dim] * index.numel()
    return Piece(offset, layer.numel, start, size, shape, dim, index)


def pack_(flat: Tensor, plan: Plan, payload: Tensor) -> None:
    """Gather the kept elements of `flat` [layout.numel] into `payload` [>= plan.numel]."""
    for p in plan.pieces:
        source, target = flat[p.offset : p.offset + p.numel], payload[p.start : p.start + p.kept]
        if p.index is None:
            target.copy_(source)
        else:
            out = target.view(*p.shape[: p.dim], p.index.numel(), *p.shape[p.dim + 1 :])
            torch.index_select(source.view(p.shape), p.dim, p.index, out=out)


def unpack_(payload: Tensor, plan: Plan, flat: Tensor) -> None:
    """Scatter `payload` into `flat`; what the mask pruned becomes exactly zero."""
    for p in plan.pieces:
        target, source = flat[p.offset : p.offset + p.numel], payload[p.start : p.start + p.kept]
        if p.index is None:
            target.copy_(source)
        else:
            target.zero_()
            values = source.view(*p.shape[: p.dim], p.index.numel(), *p.shape[p.dim + 1 :])
            target.view(p.shape).index_copy_(p.dim, p.index, values)
