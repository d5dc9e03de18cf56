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

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from prunex_mpi.models.layout import Layout


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
class Budget:
    """A limit on `price[layer]` per kept weight, summed over all layers, plus what is `fixed`."""

    limit: float
    price: np.ndarray
    fixed: float


@dataclass(frozen=True)
class Groups:
    """All groups of a model; a mask is a bool array [total], kind after kind, layer after layer.

    With a `budget` the coupled groups are chosen among all sets at once.
    """

    layers: tuple[PrunableLayer, ...]
    kinds: tuple[tuple[Selection, ...], ...]
    total: int
    excluded: tuple[str, ...]
    coupled: tuple[CoupledLayer, ...] = ()
    budget: Budget | None = None

    @property
    def prunable_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)


def gemm_views(flat: Tensor, layout: Layout, groups: Groups) -> list[Tensor]:
    """Return each prunable layer of `flat` as a view [blocks, rows, columns]."""
    views = []
    for layer in groups.layers:
        offset = layout.segments[layer.segment].offset
        piece = flat[offset : offset + layer.numel]
        views.append(piece.view(layer.blocks, layer.rows, layer.columns))
    return views
