"""Structured sparsity: which slices of a convolution form a group, and which groups are kept.

A convolution's weight [C_out, C_in/g, *kernel] with g = `conv.groups` is g GEMM blocks of shape
[C_out/g, C_in/g * prod(kernel)]. The groups of the paper's section 2.1 are then

- `filter`:  a row of a block;                 C_out groups in one selection
- `channel`: the columns of an input channel;  C_in/g groups in each of g selections
- `shape`:   one column (c, u, v);             C_in/g * prod(kernel) groups in each of g selections

A selection keeps exactly alpha groups, so in a grouped convolution each block keeps as many
channels as the others. Compositions are applied one after the other in the order given, each to
what the one before left; alpha always refers to all groups of the layer.

Masks are host arrays (bool, one entry per group): they are small, decisions are taken on them, and
they travel as packed bits. What multiplies tensors are 0/1 factors on the tensors' device.
"""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.errors import UserError
from prunex_mpi.layout import Layout

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class PrunableLayer:
    """A convolution weight as `blocks` GEMM blocks of [rows, channels * kernel]."""

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
    """The groups of one kind in one layer: `selections` independent choices among `count` each."""

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
class Groups:
    """All groups of a model; a mask is a bool array [total], kind after kind, layer after layer."""

    layers: tuple[PrunableLayer, ...]
    kinds: tuple[tuple[Selection, ...], ...]
    total: int
    excluded: tuple[str, ...]

    @property
    def prunable_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)


@dataclass(frozen=True)
class Factors:
    """The 0/1 factors of a mask: (layer index, factor broadcastable to [blocks, rows, columns])."""

    entries: tuple[tuple[int, Tensor], ...]


def find_groups(
    model: nn.Module,
    layout: Layout,
    kinds: Sequence[str],
    keep_ratios: Sequence[float],
    layer_keep_ratios: Sequence[tuple[str, float]] = (),
) -> Groups:
    """List the groups of every convolution and say which cannot be pruned and why.

    `keep_ratios` holds one ratio per kind, or one for all; `layer_keep_ratios` are (fnmatch pattern
    on the parameter's name, ratio) pairs of which the last match wins. Raises UserError when the
    model has no convolution, when no group can be pruned or when a pattern matches no layer.
    """
    ratios = list(keep_ratios) * (len(kinds) if len(keep_ratios) == 1 else 1)
    index = {s.name: i for i, s in enumerate(layout.segments)}
    weighted = [
        (f"{name}.weight" if name else "weight", module)
        for name, module in model.named_modules()
        if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    convs = [(name, module) for name, module in weighted if isinstance(module, CONVOLUTIONS)]
    if not convs:
        raise UserError("the model has no convolution layer to prune; choose a convolutional model")
    for pattern, _ in layer_keep_ratios:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in convs):
            raise UserError(f"--layer-keep-ratio: no convolution matches {pattern!r}")
    classifier = weighted[-1][0]
    transposed = [
        f"{name}.weight: transposed convolutions are not pruned"
        for name, module in model.named_modules()
        if isinstance(module, TRANSPOSED)
    ]

    layers: list[PrunableLayer] = []
    excluded = transposed
    candidates: list[tuple[str, PrunableLayer, list[str]]] = []
    for position, (name, conv) in enumerate(convs):
        if name not in index:
            excluded += [f"{name} [{kind}]: its weight is not trained" for kind in kinds]
            continue
        weight = conv.weight
        layer = PrunableLayer(
            segment=index[name],
            blocks=conv.groups,
            rows=weight.shape[0] // conv.groups,
            channels=weight.shape[1],
            kernel=math.prod(weight.shape[2:]),
        )
        usable = []
        for kind in kinds:
            reason = _why_not(layer, kind, position == 0, name == classifier)
            if reason:
                excluded.append(f"{name} [{kind}]: {reason}")
            else:
                usable.append(kind)
        if usable:
            candidates.append((name, layer, usable))
    if not candidates:
        raise UserError(
            f"no layer of the model can be pruned by {'+'.join(kinds)} groups "
            f"({excluded[0]}); choose other --groups"
        )

    by_kind: list[tuple[Selection, ...]] = []
    start = 0
    layers = [layer for _, layer, _ in candidates]
    for kind, ratio in zip(kinds, ratios, strict=True):
        selections = []
        for number, (name, layer, usable) in enumerate(candidates):
            if kind not in usable:
                continue
            matching = [r for p, r in layer_keep_ratios if fnmatch.fnmatchcase(name, p)]
            blocks, count = _extent(layer, kind)
            keep = matching[-1] if matching else ratio
            selections.append(Selection(number, kind, blocks, count, start, keep))
            start += blocks * count
        if selections:
            by_kind.append(tuple(selections))
    return Groups(tuple(layers), tuple(by_kind), start, tuple(excluded))


def _why_not(layer: PrunableLayer, kind: str, first: bool, classifier: bool) -> str:
    if kind == "filter":
        return "its outputs are the classes" if classifier else ""
    if first:
        return "its input channels are the image's"
    if _extent(layer, kind)[1] == 1:
        return "one input channel per convolution group (depthwise): nothing to choose from"
    return ""


def _extent(layer: PrunableLayer, kind: str) -> tuple[int, int]:
    if kind == "filter":
        return 1, layer.blocks * layer.rows
    return layer.blocks, layer.channels if kind == "channel" else layer.columns


def kept_count(count: int, ratio: float, round_to: int = 1) -> int:
    """Return alpha in [1, count]: `ratio * count`, rounded up to a multiple of `round_to`."""
    # The subtraction keeps 0.1 * 30 = 3.0000000000000004 at three.
    alpha = max(1, math.ceil(ratio * count - 1e-9))
    return min(count, -(-alpha // round_to) * round_to)


def gemm_views(flat: Tensor, layout: Layout, groups: Groups) -> list[Tensor]:
    """Return each prunable layer of `flat` as a view [blocks, rows, columns]."""
    views = []
    for layer in groups.layers:
        offset = layout.segments[layer.segment].offset
        piece = flat[offset : offset + layer.numel]
        views.append(piece.view(layer.blocks, layer.rows, layer.columns))
    return views


def group_energies(
    squares: Tensor, layout: Layout, groups: Groups, selections: tuple[Selection, ...]
) -> Tensor:
    """Sum the squared elements of every group of one kind.

    `squares` is the flat vector of squared elements; returns a 1-D tensor of its dtype on the host,
    in the order of the mask.
    """
    views = gemm_views(squares, layout, groups)
    energies = []
    for selection in selections:
        layer = groups.layers[selection.layer]
        view = views[selection.layer]
        if selection.kind == "filter":
            energies.append(view.sum(dim=2).reshape(-1))
        elif selection.kind == "channel":
            by_column = view.sum(dim=1).view(layer.blocks, layer.channels, layer.kernel)
            energies.append(by_column.sum(dim=2).reshape(-1))
        else:
            energies.append(view.sum(dim=1).reshape(-1))
    return torch.cat(energies).cpu()


def select(
    energies: np.ndarray, selections: tuple[Selection, ...], strictness: float, round_to: int = 1
) -> np.ndarray:
    """Keep exactly alpha groups of largest energy in every selection; ties go to the lower index.

    `strictness` in [0, 1] moves every keep ratio from 1 to its target (the keep ramp). Returns a
    bool array of the energies' length.
    """
    mask = np.zeros(energies.shape, dtype=bool)
    base = selections[0].start
    for s in selections:
        alpha = kept_count(s.count, 1.0 - strictness * (1.0 - s.keep_ratio), round_to)
        block = energies[s.start - base : s.stop - base].reshape(s.selections, s.count)
        kept = np.argsort(-block, axis=1, kind="stable")[:, :alpha]
        view = mask[s.start - base : s.stop - base].reshape(s.selections, s.count)
        np.put_along_axis(view, kept, True, axis=1)
    return mask


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
            bits = mask[s.start : s.stop]
            rows, columns = result[s.layer]
            if s.kind == "filter":
                rows &= bits
            elif s.kind == "channel":
                kernel = groups.layers[s.layer].kernel
                columns &= np.repeat(bits.reshape(s.selections, s.count), kernel, axis=1)
            else:
                columns &= bits.reshape(s.selections, s.count)
    return result


def build_factors(
    mask: np.ndarray, groups: Groups, device: torch.device, dtype: torch.dtype
) -> Factors:
    """Turn a mask into 0/1 tensors on `device`; layers that keep everything get none."""
    entries: list[tuple[int, Tensor]] = []
    for number, (rows, columns) in enumerate(layer_masks(mask, groups)):
        layer = groups.layers[number]
        if not columns.all():
            factor = torch.from_numpy(columns).to(device=device, dtype=dtype)
            entries.append((number, factor.view(layer.blocks, 1, layer.columns)))
        if not rows.all():
            factor = torch.from_numpy(rows).to(device=device, dtype=dtype)
            entries.append((number, factor.view(layer.blocks, layer.rows, 1)))
    return Factors(tuple(entries))


def apply_factors_(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> None:
    """Multiply `flat` by the mask in place (flat ⊙ m); parameters without groups are untouched."""
    mask_views_(factor_views(flat, layout, groups, factors), factors)


def factor_views(flat: Tensor, layout: Layout, groups: Groups, factors: Factors) -> list[Tensor]:
    """Return the view of `flat` that each factor multiplies, for use with `mask_views_`."""
    views = gemm_views(flat, layout, groups)
    return [views[number] for number, _ in factors.entries]


def mask_views_(views: list[Tensor], factors: Factors) -> None:
    """Multiply each view of `factor_views` by its factor in place."""
    if views:
        torch._foreach_mul_(views, [factor for _, factor in factors.entries])


def kept_numel(mask: np.ndarray, groups: Groups) -> list[int]:
    """Return the number of kept weights of every prunable layer."""
    return [
        int((rows.reshape(columns.shape[0], -1).sum(axis=1) * columns.sum(axis=1)).sum())
        for rows, columns in layer_masks(mask, groups)
    ]


def mask_drift(mask: np.ndarray, previous: np.ndarray) -> float:
    """Return |m XOR m_previous| / |m| over groups."""
    return float(np.count_nonzero(mask != previous) / max(1, np.count_nonzero(mask)))
