"""Structured sparsity: which slices of a model form groups.

A convolution's weight [C_out, C_in/g, *kernel] with g = `conv.groups` is g GEMM blocks of shape
[C_out/g, C_in/g * prod(kernel)]. The groups of the paper's section 2.1 are then

- `filter`:  a row of a block;                 C_out groups in one selection
- `channel`: the columns of an input channel;  C_in/g groups in each of g selections
- `shape`:   one column (c, u, v);             C_in/g * prod(kernel) groups in each of g selections

and, beyond the paper,

- `coupled`: all slices that have to go together for a channel to be removable (`coupling`), chosen
  among the channels that have slices in the same places.

Which of them are kept is chosen in `projection`, what a choice does to vectors is in `masks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from prunex_mpi.models.layout import Layout, tile_length
from prunex_mpi.pruning.coupling import Coupling


@dataclass(frozen=True)
class PrunableLayer:
    """A weight as `blocks` GEMM blocks of [rows, channels * kernel]; a vector is one column."""

    segment: int
    blocks: int
    rows: int
    channels: int
    kernel: int

    @property
    def columns(self) -> int:
        return self.channels * self.kernel

    @property
    def numel(self) -> int:
        return self.blocks * self.rows * self.columns


@dataclass(frozen=True)
class Selection:
    """The groups of one kind in one layer: `selections` independent choices among `count` each.

    Coupled groups belong to no layer (-1); each is `unit` channels wide.
    """

    layer: int
    kind: str
    selections: int
    count: int
    start: int
    keep_ratio: float
    unit: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.selections * self.count


@dataclass(frozen=True)
class CoupledLayer:
    """The place in the mask of each row [blocks * rows] and column [columns] of a layer, -1: none.

    `scored` says that its slices count in the score of their groups.
    """

    layer: int
    rows: np.ndarray
    columns: np.ndarray
    scored: bool


@dataclass(frozen=True)
class ScoredSlices:
    """The slices that score: of each of `tensors` its rows, its columns or the one, then the other.

    `tensors` holds (layer, rows score, columns score). `inside` says which slices, in this order,
    belong to a group: those have a place in the mask (`group`) and one in `slices`, the number of
    groups with slices in the same dimension of the same tensor. A group is in `members` of these.
    """

    tensors: tuple[tuple[int, bool, bool], ...]
    inside: np.ndarray
    group: np.ndarray
    side: np.ndarray
    slices: np.ndarray
    members: np.ndarray


@dataclass(frozen=True)
class Budget:
    """A limit on `price[layer]` per kept weight, summed over all layers, plus what is `fixed`.

    Of each set at least a fraction `floor` of the groups is kept.
    """

    limit: float
    price: np.ndarray
    fixed: float
    # Not shown, as checkpoints know a model's groups by what is.
    floor: float = field(default=0.0, repr=False)


@dataclass(frozen=True)
class Groups:
    """All groups of a model; a mask is a bool array [total], kind after kind, layer after layer.

    With a `budget` the coupled groups are chosen among all sets at once. `by_gate`: they are scored
    by `gates`, not by magnitude. `coupling` is what coupled groups were found as.
    """

    layers: tuple[PrunableLayer, ...]
    kinds: tuple[tuple[Selection, ...], ...]
    total: int
    excluded: tuple[str, ...]
    coupled: tuple[CoupledLayer, ...] = ()
    budget: Budget | None = None
    # These are no part of what checkpoints know a model's groups by.
    by_gate: bool = field(default=False, repr=False)
    coupling: Coupling | None = field(default=None, repr=False, compare=False)

    @property
    def prunable_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def scored(self) -> ScoredSlices:
        """The slices that count in the scores of the coupled groups."""
        tensors, places, slices = [], [np.empty(0, dtype=np.int64)], []
        members = np.zeros(self.total)
        for entry in self.coupled:
            scores = [
                entry.scored and bool((ids >= 0).any()) for ids in (entry.rows, entry.columns)
            ]
            tensors.append((entry.layer, *scores))
            # Of all blocks of a convolution in groups.
            columns = np.tile(entry.columns, self.layers[entry.layer].blocks)
            for ids, wanted in zip((entry.rows, columns), scores, strict=True):
                if wanted:
                    found = np.unique(ids[ids >= 0])
                    members[found] += 1
                    places.append(ids)
                    slices.append(found.size)
        side = np.repeat(np.arange(len(slices)), [ids.size for ids in places[1:]])
        group = np.concatenate(places)
        inside = group >= 0
        return ScoredSlices(
            tuple(t for t in tensors if any(t[1:])),
            inside,
            group[inside],
            side[inside],
            np.array(slices),
            members,
        )

    @cached_property
    def gates(self) -> tuple[tuple[int, bool, np.ndarray], ...]:
        """Each (layer, by row, the group of each row or column) that coupled groups' gates are at.

        That is the columns that read them, or, of groups that nothing reads, all their rows. Where
        there is no gate the group is `total`.
        """
        read, found = np.zeros(self.total + 1, dtype=bool), []
        for entry in self.coupled:
            ids = np.where(entry.columns < 0, self.total, entry.columns)
            if entry.scored and (ids < self.total).any():
                read[ids] = True
                found.append((entry.layer, False, ids))
        read[self.total] = True
        for entry in self.coupled:
            ids = np.where(entry.rows < 0, self.total, entry.rows)
            if entry.scored and not read[ids].all():
                found.append((entry.layer, True, np.where(read[ids], self.total, ids)))
        return tuple(found)


def gemm_views(flat: Tensor, layout: Layout, groups: Groups) -> list[Tensor]:
    """Return each prunable layer of `flat` as a view [blocks, rows, columns]."""
    return [gemm_view(flat, layout, layer) for layer in groups.layers]


def gemm_view(flat: Tensor, layout: Layout, layer: PrunableLayer) -> Tensor:
    """Return one prunable layer of `flat` as a view [blocks, rows, columns]."""
    piece = flat[layout.segments[layer.segment].place]
    return piece.view(layer.blocks, layer.rows, layer.columns)


def cut_view(view: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut a view of `gemm_views` into tiles: (blocks, rows), the rows of one block or all rows."""
    blocks, rows, columns = view.shape
    whole, length = slice(None), tile_length(view.device)
    if view.numel() <= length:
        yield whole, whole
    elif blocks == 1:
        step = max(1, length // columns)
        yield from ((whole, slice(start, start + step)) for start in range(0, rows, step))
    else:
        step = max(1, length // (rows * columns))
        yield from ((slice(start, start + step), whole) for start in range(0, blocks, step))
