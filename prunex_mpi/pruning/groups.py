"""Groups: the slices of a model's parameters that are kept or pruned together.

A convolution's weight [C_out, C_in/g, *kernel] with g = `conv.groups` is g GEMM blocks of shape
[C_out/g, C_in/g * prod(kernel)]. The groups of the paper's section 2.1 are then

- `filter`:  a row of a block;                 C_out groups in one selection
- `channel`: the columns of an input channel;  C_in/g groups in each of g selections
- `shape`:   one column (c, u, v);             C_in/g * prod(kernel) groups in each of g selections

and, beyond the paper,

- `kernel`:  the weights between an input and an output channel; C_out * C_in/g groups
- `pattern`: a square of 2x2 weights of a 3x3 kernel, with its centre (`PATTERNS`); 4 groups in each
             of C_out * C_in/g selections, which overlap: what one that is kept has stays
- `coupled`: all slices that have to go together for a channel to be removable (`coupling`), which
  competes with the channels that have slices in the same places.

`projection` chooses which are kept, `masks` applies the choice to vectors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.dummy_input import Ends
from prunex_mpi.models.layout import Layout
from prunex_mpi.models.slim import CONVOLUTIONS
from prunex_mpi.pruning.coupling import Coupling

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# The patterns of ClickTrain's 3x3 kernels, in its code's order, bool [4, 9]. (Zhang et al. 2021)
PATTERNS = np.array(
    [
        [0, 0, 0, 0, 1, 1, 0, 1, 1],
        [0, 0, 0, 1, 1, 0, 1, 1, 0],
        [0, 1, 1, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0, 0],
    ],
    dtype=bool,
)
# Kinds of which a layer's groups are no rows or columns.
INSIDE = ("kernel", "pattern")
# A pattern has a ratio of its own: one of four.
ONE_PATTERN = 1 / len(PATTERNS)
INSTEAD = (
    "give --groups coupled (from Python groups=['coupled']), which prunes linear layers and heads "
    "of attention too"
)


@dataclass(frozen=True)
class PrunableLayer:
    """A parameter as `blocks` GEMM blocks of [rows, channels * kernel]; a vector is one column."""

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

    Coupled groups belong to no layer (-1).
    """

    layer: int
    kind: str
    selections: int
    count: int
    start: int
    keep_ratio: float

    @property
    def stop(self) -> int:
        return self.start + self.selections * self.count


@dataclass(frozen=True)
class CoupledLayer:
    """The group of each row [blocks * rows] and column [columns] of a layer, -1 for none.

    `scored`: its slices count in the scores of their groups. `turned`: it reads the channels of its
    rows and makes those of its columns, as an embedding does.
    """

    layer: int
    rows: np.ndarray
    columns: np.ndarray
    scored: bool
    # Checkpoints identify a model's groups by their repr, of which this is no part.
    turned: bool = field(repr=False)


@dataclass(frozen=True)
class Budget:
    """A limit on `price[layer]` per kept weight, summed over all layers, plus `fixed`.

    Of each set at least a fraction `floor` of the groups is kept.
    """

    limit: float
    price: np.ndarray
    fixed: float
    # Checkpoints identify a model's groups by their repr, of which this is no part.
    floor: float = field(repr=False)


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
    # No part of the repr by which checkpoints identify a model's groups.
    by_gate: bool = field(default=False, repr=False)
    coupling: Coupling | None = field(default=None, repr=False, compare=False)

    @property
    def prunable_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def scored(self) -> dict[int, list[tuple[int, np.ndarray]]]:
        """By layer the (dimension, groups) of the slices that count in the scores, -1 for none.

        The columns of a grouped convolution are those of all its blocks.
        """
        found = {}
        for entry in self.coupled:
            columns = np.tile(entry.columns, self.layers[entry.layer].blocks)
            sides = [s for s in ((0, entry.rows), (1, columns)) if (s[1] >= 0).any()]
            if entry.scored and sides:
                found[entry.layer] = sides
        return found

    @cached_property
    def gates(self) -> tuple[tuple[int, bool, np.ndarray], ...]:
        """The gates of coupled groups: (layer, by row, the group of each row or column).

        A group's gate is where weights read it, or where they make it if none reads it. Rows and
        columns without a gate have the group `total`.
        """
        # Slices in no group, -1, are as if they had a gate.
        found, gated = [], np.append(np.zeros(self.total, dtype=bool), True)
        scored = [entry for entry in self.coupled if entry.scored]
        for reads in (True, False):
            known = gated.copy()
            for entry in scored:
                by_row = entry.turned == reads
                ids = entry.rows if by_row else entry.columns
                if not known[ids].all():
                    found.append((entry.layer, by_row, np.where(known[ids], self.total, ids)))
                    gated[ids] = True
        return tuple(found)


def gemm_views(flat: Tensor, layout: Layout, groups: Groups) -> list[Tensor]:
    """Return each prunable layer of `flat` as a view [blocks, rows, columns]."""
    return [gemm_view(flat, layout, layer) for layer in groups.layers]


def gemm_view(flat: Tensor, layout: Layout, layer: PrunableLayer) -> Tensor:
    """Return one prunable layer of `flat` as a view [blocks, rows, columns]."""
    piece = flat[layout.segments[layer.segment].place]
    return piece.view(layer.blocks, layer.rows, layer.columns)


# --------------------------------------------------------------------------------------------------
# Find them
# --------------------------------------------------------------------------------------------------


def find_groups(
    model: nn.Module,
    layout: Layout,
    kinds: Sequence[str],
    keep_ratios: Sequence[float],
    *,
    coupling: Coupling | None = None,
    ends: Ends | None = None,
    instead: str = INSTEAD,
) -> Groups:
    """Return the groups of `model`, with reasons for the layers that cannot be pruned.

    `keep_ratios` holds one ratio per kind but `pattern`, or one for all. Without `ends`
    the first and the last layer by definition are stem and classifier. Raises UserError when no
    group can be pruned (do `instead`).
    """
    with_ratio = [kind for kind in kinds if kind != "pattern"]
    ratios = list(keep_ratios) * (len(with_ratio) if len(keep_ratios) == 1 else 1)
    ratio_of = dict(zip(with_ratio, ratios, strict=True))
    index = {s.name: i for i, s in enumerate(layout.segments)}
    alone = [kind for kind in kinds if kind != "coupled"]
    candidates, excluded = _find_layers(model, index, alone, ends or Ends(frozenset(), ""), instead)
    names = [name for name, _, _ in candidates]
    layers = [layer for _, layer, _ in candidates]
    if coupling is not None:
        excluded += coupling.excluded
        for name in [*coupling.rows, *coupling.columns, *coupling.inner]:
            if name not in names:
                names.append(name)
                layers.append(_as_layer(index[name], model.get_parameter(name)))
    if not layers:
        raise UserError(
            f"no layer of the model can be pruned by {'+'.join(kinds)} groups "
            f"({excluded[0]}): {instead}"
        )

    gammas = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    gammas |= coupling.norms if coupling else set()
    by_kind: list[tuple[Selection, ...]] = []
    coupled: list[CoupledLayer] = []
    start = 0
    for kind in kinds:
        selections = []
        if kind == "coupled":
            for s in coupling.sets:
                keep = ratio_of[kind]
                selections.append(Selection(-1, kind, 1, s.count, start + s.start, keep))
            for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
                if coupling.slices(name):
                    scored = name in coupling.positions or name in gammas
                    shape = layout.segments[layer.segment].shape
                    places = _places_in_mask(layer, shape, coupling.slices(name), start)
                    turned = name in coupling.transposed
                    coupled.append(CoupledLayer(number, *places, scored, turned))
            start += coupling.total
        for number, (_, layer, usable) in enumerate(candidates):
            if kind in usable:
                keep = ratio_of.get(kind, ONE_PATTERN)
                selections.append(Selection(number, kind, *_extent(layer, kind), start, keep))
                start = selections[-1].stop
        if selections:
            by_kind.append(tuple(selections))
    return Groups(
        tuple(layers), tuple(by_kind), start, tuple(excluded), tuple(coupled), coupling=coupling
    )


def out_of_reach(groups: Groups, numel: int) -> str:
    """Return a warning if groups of convolutions hold less than half of the parameters, or ""."""
    kinds = [selections[0].kind for selections in groups.kinds]
    if not kinds or "coupled" in kinds or 2 * groups.prunable_numel >= numel:
        return ""
    found = f"{groups.prunable_numel:,} of the {numel:,} parameters"
    return (
        f"{'+'.join(kinds)} groups are of convolutions, which have {found} to prune: all others "
        f"stay, and are sent whole; {INSTEAD}"
    )


def _find_layers(
    model: nn.Module, index: dict[str, int], kinds: Sequence[str], ends: Ends, instead: str
) -> tuple[list[tuple[str, PrunableLayer, list[str]]], list[str]]:
    """Return (name, layer, usable kinds) of the convolutions, and reasons for what is excluded."""
    if not kinds:
        return [], []
    weighted = [
        (f"{name}.weight" if name else "weight", module)
        for name, module in model.named_modules()
        if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    convs = [(name, module) for name, module in weighted if isinstance(module, CONVOLUTIONS)]
    if not convs:
        raise UserError(
            f"the model has no convolution layer to prune by {'+'.join(kinds)} groups: {instead}"
        )
    classifier = ends.head or weighted[-1][0]
    stems = ends.stems or {convs[0][0]}
    excluded = [
        f"{name}.weight: transposed convolutions are not pruned"
        for name, module in model.named_modules()
        if isinstance(module, TRANSPOSED)
    ]
    candidates: list[tuple[str, PrunableLayer, list[str]]] = []
    for name, conv in convs:
        if name not in index:
            why = _why_not_trained(conv.weight)
            excluded += [f"{name} [{kind}]: its weight is {why}" for kind in kinds]
            continue
        layer = _as_layer(index[name], conv.weight, conv.groups)
        ends_here, shape = (name in stems, name == classifier), conv.weight.shape[2:]
        reasons = {kind: _why_not(layer, kind, shape, *ends_here) for kind in kinds}
        excluded += [f"{name} [{kind}]: {reason}" for kind, reason in reasons.items() if reason]
        if usable := [kind for kind, reason in reasons.items() if not reason]:
            candidates.append((name, layer, usable))
    return candidates, excluded


def _why_not_trained(weight: Tensor) -> str:
    """Return why the weight of a layer is not a trained parameter of its own."""
    if not isinstance(weight, nn.Parameter):
        return "computed from other parameters"
    # A shared weight is pruned under its first name.
    return "another layer's" if weight.requires_grad else "not trained"


def _as_layer(segment: int, weight: Tensor, conv_groups: int = 1) -> PrunableLayer:
    return PrunableLayer(
        segment=segment,
        blocks=conv_groups,
        rows=weight.shape[0] // conv_groups,
        channels=weight.shape[1] if weight.dim() > 1 else 1,
        kernel=math.prod(weight.shape[2:]),
    )


def _places_in_mask(
    layer: PrunableLayer, shape: tuple[int, ...], slices: list[tuple[int, np.ndarray]], start: int
) -> list[np.ndarray]:
    """Return the places in the mask of the groups of one parameter's rows and columns."""
    rows = np.full(layer.blocks * layer.rows, -1)
    # The columns of all blocks of a grouped convolution are in the same groups.
    columns = np.full(shape[1:], -1)
    for dim, ids in slices:
        if dim == 0:
            rows = ids
        else:
            columns[:] = ids.reshape([-1 if d == dim else 1 for d in range(1, len(shape))])
    return [np.where(ids < 0, -1, ids + start) for ids in (rows, columns.reshape(-1))]


def _why_not(
    layer: PrunableLayer, kind: str, shape: tuple[int, ...], first: bool, classifier: bool
) -> str:
    if kind == "filter":
        return "its outputs are the network's" if classifier else ""
    if kind == "pattern" and shape != (3, 3):
        return "its kernels are not 3x3"
    if first:
        return "its input channels are the image's"
    if kind == "pattern":
        return ""
    if _extent(layer, kind)[1] == 1:
        return "one input channel per convolution group (depthwise): nothing to choose from"
    return ""


def _extent(layer: PrunableLayer, kind: str) -> tuple[int, int]:
    if kind == "filter":
        return 1, layer.blocks * layer.rows
    if kind in INSIDE:
        kernels = layer.blocks * layer.rows * layer.channels
        return (1, kernels) if kind == "kernel" else (kernels, len(PATTERNS))
    return layer.blocks, layer.channels if kind == "channel" else layer.columns
