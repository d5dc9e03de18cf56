"""Which slices of which parameters have to go together for a channel to be removable.

One blank image runs through the model while every tensor carries labels beside it: an integer per
element, the group of channels that the element belongs to. A convolution or a linear layer reads
the labels of its input as its columns and gives each of its rows a label of its own; BatchNorm ties
its gamma and beta to the labels it normalises; an addition makes the labels that meet one group;
reshaping, slicing, concatenating and padding do to the labels what they do to the data. Where a
channel's absence could be felt, its label is pinned: it is never removed.

A group is removable exactly: with all its slices at zero (gamma and beta of BatchNorm included, so
that no constant survives) its channels are zero wherever they are read, and the network without
them computes the same.

Why not a library: torch-pruning's dependency graph (1.6) reads the graph of autograd and takes
every operation that it does not know for an element-wise one, so a wrong group shows only as a
wrong network; it offers a LayerNorm's channels, whose removal changes all others; it does not see
the channels that a zero-padded shortcut adds, and it fails on ShuffleNet. torch.fx traces symbols:
it stops at control flow and knows shapes only after a second pass. Running the model itself under a
TorchFunctionMode needs neither, and what is not known here is pinned, which is safe.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.pruning.channel_labels import PINNED, Trace


@dataclass(frozen=True)
class ChannelSet:
    """Groups that are chosen among each other: `count` of them from id `start`.

    A group is `unit` channels wide: 1, or the size of an attention head. `name` is the first
    parameter whose rows they are.
    """

    name: str
    start: int
    count: int
    unit: int


@dataclass(frozen=True)
class Coupling:
    """The groups of a model: an id per row and per input channel of each parameter, -1 for none.

    `rows` is int64 [shape[0]] by the parameter's name, `columns` int64 [shape[1]]. `positions` says
    at how many positions of one image's feature map a weight is applied, which makes its
    multiply-adds. `excluded` says what is never removed, and why.
    """

    rows: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    sets: tuple[ChannelSet, ...]
    total: int
    positions: dict[str, int]
    excluded: tuple[str, ...]


def find_coupling(model: nn.Module, image_size: int) -> Coupling:
    """Find the coupled groups of `model`, a classifier of [n, 3, image_size, image_size] images.

    Runs one blank image on the CPU in evaluation mode; the model is unchanged afterwards. Raises
    UserError when no group can be removed.
    """
    trace = Trace(model)
    parameter = next(model.parameters())
    image = torch.zeros(1, 3, image_size, image_size, dtype=parameter.dtype)
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), trace:
            trace.label(image, torch.full(image.shape, PINNED))
            output = model(image)
        trace.pin([output], "its outputs are the classes")
    finally:
        for module, mode in training:
            module.training = mode
    return _collect(trace)


def _collect(trace: Trace) -> Coupling:
    """Number the groups that are left, set after set, and translate every label."""
    pinned: dict[int, str] = {}
    for label, reason in trace.reasons.items():
        pinned.setdefault(trace.root(label), reason)
    # Where a group has slices decides which others it is chosen among.
    places: dict[int, set[tuple[str, str]]] = {}
    order: dict[int, int] = {}
    for kind, known in (("rows", trace.rows), ("columns", trace.columns)):
        for name, labels in known.items():
            for label in labels.tolist():
                root = trace.root(label) if label > PINNED else PINNED
                if root != PINNED and root not in pinned:
                    places.setdefault(root, set()).add((name, kind))
                    order.setdefault(root, len(order))
    members: dict[frozenset[tuple[str, str]], list[int]] = {}
    for root in order:
        members.setdefault(frozenset(places[root]), []).append(root)
    ids: dict[int, int] = {}
    sets = []
    rows_first = {name: number for number, name in enumerate(trace.rows)}
    for found, roots in members.items():
        name = min((n for n, kind in found if kind == "rows"), key=rows_first.__getitem__)
        start = len(ids)
        sets.append(ChannelSet(name, start, len(roots), trace.units.get(roots[0], 1)))
        ids.update((root, start + i) for i, root in enumerate(roots))

    def translate(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {}
        for name, labels in known.items():
            numbers = [ids.get(trace.root(v), -1) if v > PINNED else -1 for v in labels.tolist()]
            if max(numbers) >= 0:
                found[name] = np.array(numbers, dtype=np.int64)
        return found

    rows, columns = translate(trace.rows), translate(trace.columns)
    excluded = []
    for name, labels in trace.rows.items():
        if len(trace.shapes[name]) > 1 and name not in rows:
            why = [pinned[r] for r in map(trace.root, labels.tolist()) if r in pinned]
            excluded.append(
                f"{name} [coupled]: {why[0] if why else 'it meets what cannot be removed'}"
            )
    if not sets:
        reason = excluded[0] if excluded else "it has no layer whose outputs another layer reads"
        raise UserError(f"no coupled channels can be removed from the model ({reason})")
    return Coupling(rows, columns, tuple(sets), len(ids), dict(trace.positions), tuple(excluded))
