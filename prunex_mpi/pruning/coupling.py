"""Find coupled groups: slices of parameters that must be removed together with a channel.

A dummy input runs through the model while every tensor carries labels: an integer per element, the
group of channels that the element belongs to. A convolution or a linear layer reads the labels of
its input as its columns and gives each of its rows a new label; BatchNorm ties its gamma and beta
to the labels that it normalises; an addition joins the labels that meet; reshaping, slicing,
concatenating and padding are applied to the labels as to the data. The groups of a grouped
convolution and the heads of attention are removed as a whole, and what is split into equal pieces
loses as many channels of each. A label whose absence could change anything else is pinned: that
channel is never removed.

A group is removable exactly: with all its slices at zero (gamma and beta of norms included, so that
no constant survives) its channels are zero wherever they are read, and the network without them
computes the same. LayerNorm goes on to divide by the original number of channels
(`models.slim.SlimNorm`).

The model itself runs: ATen operations of torch.export do not say which number of which Python call
counts channels, and without those half of the groups leaves 0.71 of a Swin in place of 0.27. An
operation without a rule is tried (`channel_trace.Trial`), and pins its channels, which is safe,
unless it works element by element.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.pruning.channel_trace import follow_input
from prunex_mpi.pruning.labels import (
    PINNED,
    VOID,
    Cut,
    Labels,
    Mixed,
    Request,
    Size,
    Wanted,
    distinct,
    first_along,
    varying,
)


@dataclass(frozen=True)
class ChannelSet:
    """Groups that compete with each other for being kept: `count` of them from id `start`.

    A group is `unit` channels wide: 1, or the size of an attention head or of a convolution's
    group. `name` is the first parameter whose rows they are.
    """

    name: str
    start: int
    count: int
    unit: int


@dataclass(frozen=True)
class Coupling:
    """The groups of a model: an id per row and per input channel of each parameter, -1 for none.

    `rows` is int64 [shape[0]] by the parameter's name, `columns` int64 [shape[1]]. Parameters that
    are used directly, as in additions, may have groups along another dimension: `inner` holds it
    and the ids, and `zeros` those of buffers of zeros. `positions` is the number of positions of
    one image's feature map at which a weight is applied. `excluded` are lines on what stays, and
    why. `calls` are the torch calls whose numbers depend on the channels that are left. `norms` are
    the weights of norms that read all channels, `mixed` other calls that do. Weights in
    `transposed` have the channels that they make as columns.
    """

    rows: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    sets: tuple[ChannelSet, ...]
    total: int
    positions: dict[str, int]
    excluded: tuple[str, ...]
    inner: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    calls: tuple[Request, ...] = ()
    norms: frozenset[str] = frozenset()
    mixed: tuple[Mixed, ...] = ()
    transposed: frozenset[str] = frozenset()
    inputs: Inputs | None = None
    zeros: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)

    def sides(self, reads: bool) -> dict[str, tuple[int, np.ndarray]]:
        """Return by weight the (dimension, ids) of the channels that it makes, or `reads`."""
        found = {}
        for name in self.positions:
            dim = int(reads != (name in self.transposed))
            if (ids := (self.rows, self.columns)[dim].get(name)) is not None:
                found[name] = dim, ids
        return found

    def slices(self, name: str) -> list[tuple[int, np.ndarray]]:
        """Return the (dimension, ids) pairs of the parameter `name`, [] for none."""
        found = [(0, self.rows.get(name)), (1, self.columns.get(name)), self.inner.get(name)]
        return [entry for entry in found if entry is not None and entry[1] is not None]

    def left(self, mask: np.ndarray) -> "Coupling":
        """Return the coupling of the network that keeps the groups of `mask`, with the same ids."""
        # The last entry stands for slices in no group, -1.
        stays = np.append(mask, True)

        def of(ids: np.ndarray) -> np.ndarray:
            return ids[stays[ids]]

        def of_size(wanted: Wanted) -> Wanted:
            return (wanted[0], of(wanted[1])) if isinstance(wanted, tuple) else wanted

        return replace(
            self,
            rows={name: of(ids) for name, ids in self.rows.items()},
            columns={name: of(ids) for name, ids in self.columns.items()},
            inner={name: (dim, of(ids)) for name, (dim, ids) in self.inner.items()},
            zeros={name: (dim, of(ids)) for name, (dim, ids) in self.zeros.items()},
            calls=tuple(replace(c, wanted=tuple(map(of_size, c.wanted))) for c in self.calls),
            mixed=tuple(replace(call, labels=of(call.labels)) for call in self.mixed),
        )


def find_coupling(model: nn.Module, inputs: Inputs, layers: bool = False) -> Coupling:
    """Find the coupled groups of `model`, which reads `inputs`, by one dummy input on the CPU.

    With `layers` only channels of convolutions, linear layers and BatchNorm can go, and heads of
    attention. Those of parameters that are not trained stay. Raises UserError when no group can be
    removed.
    """
    labels = follow_input(model, inputs)
    if layers:
        _keep_all_but_layers(labels)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            for known in (labels.rows, labels.columns, labels.free):
                labels.pin_labels(np.ravel(known.get(name, ())).tolist(), f"{name} is not trained")
    _settle(labels)
    return replace(_collect(labels), inputs=inputs)


# --------------------------------------------------------------------------------------------------
# Constraints between groups
# --------------------------------------------------------------------------------------------------


def _keep_all_but_layers(labels: Labels) -> None:
    """Keep the groups that are more than channels of layers, or heads."""
    names = labels.norms | labels.transposed | labels.embeddings
    known = [side[name] for side in (labels.rows, labels.columns) for name in names & side.keys()]
    sizes = [w for call in labels.calls for w in call.wanted if isinstance(w, Size)]
    found = [torch.from_numpy(ids) for ids in known] + list(labels.free.values())
    found += [call.labels for call in labels.mixed]
    found += [size.labels for size in sizes + labels.pieces if size.dim in varying(size.labels)]
    labels.pin_labels(distinct(found), "it is more than a channel of layers, or a head")


def _settle(labels: Labels) -> None:
    """Join and pin groups until every tensor stays rectangular whichever of them are removed."""
    cuts = [*labels.cuts, *(Cut(free) for free in labels.free.values())]
    changed = True
    while changed:
        changed = any([_make_rectangular(labels, cut) for cut in cuts])
        for name in labels.free.keys() & (labels.rows.keys() | labels.columns.keys()):
            changed |= labels.pin_labels(
                labels.free[name].flatten().tolist(), f"{name} is more than a weight"
            )


def _make_rectangular(labels: Labels, cut: Cut) -> bool:
    found, changed = labels.roots(cut.labels), False
    along = varying(found)
    if along and bool((found == VOID).any()):
        return labels.pin_labels(found.flatten().tolist(), "it is cut apart with zeros beside it")
    for dim in cut.fixed:
        if dim in along:
            changed |= labels.join_along(found, dim)
            found = labels.roots(found)
    along = varying(found)
    while len(along) > 1:
        # The dimension with the fewest misfits; of several, the one that leaves more groups.
        best = min(along, key=lambda d: (_misfits(found, along, d), -found.shape[d], -d))
        for dim in along:
            if dim != best:
                changed |= labels.join_along(found, dim)
                found = labels.roots(found)
        along = varying(found)
    return changed


def _misfits(found: Tensor, along: list[int], dim: int) -> int:
    """Return how many labels differ from those of a tensor that varies along `dim` only."""
    first = found
    for other in along:
        if other != dim:
            first = first.narrow(other, 0, 1)
    return int((found != first).sum())


# --------------------------------------------------------------------------------------------------
# From labels to groups
# --------------------------------------------------------------------------------------------------


def _collect(labels: Labels) -> Coupling:
    """Number the removable groups, set after set, and translate labels to their ids."""
    free = _along_one_dimension(labels)
    # How many slices each removable group has of each parameter along each dimension.
    places: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for dim, known in ((0, labels.rows), (1, labels.columns)):
        for name, found in known.items():
            for root in (labels.root(label) for label in found.tolist() if label > PINNED):
                if root not in labels.reasons:
                    places[root][name, dim] += 1
    # Of embeddings those that no layer multiplies by as well.
    transposed = labels.transposed | {n for n in labels.embeddings if not labels.positions[n]}

    def makes(name: str, dim: int) -> bool:
        return bool(dim) == (name in transposed)

    # Every group must be the outputs of some weight.
    homeless = [root for root, at in places.items() if not any(makes(*place) for place in at)]
    labels.pin_labels(homeless, "no weight makes it")
    # Groups with as many slices in the same places compete with each other, of one piece each.
    members: dict[tuple[frozenset[tuple[tuple[str, int], int]], frozenset[int]], list[int]] = {}
    pieces = _pieces(labels)
    for root, at in places.items():
        if root not in labels.reasons:
            key = frozenset(at.items()), frozenset(pieces.get(root, ()))
            members.setdefault(key, []).append(root)
    ids: dict[int, int] = {}
    sets, excluded = [], []
    rows_first = {
        name: number for number, name in enumerate(dict.fromkeys([*labels.rows, *labels.columns]))
    }
    for (found, _), roots in members.items():
        rows = {name: count for (name, dim), count in found if makes(name, dim)}
        columns = {name: count for (name, dim), count in found if not makes(name, dim)}
        name, start = min(rows, key=rows_first.__getitem__), len(ids)
        # Of weights, since vectors of norms and biases may repeat a layer's rows.
        widest = max(rows[weight] for weight in (*(rows.keys() & labels.positions.keys()), name))
        unit = min(widest, max(columns.values(), default=widest))
        sets.append(ChannelSet(name, start, len(roots), unit))
        ids.update((root, start + i) for i, root in enumerate(roots))
        if len(roots) == 1 and widest > 1:
            excluded.append(
                f"{name} [coupled]: its {widest} channels are one group, and a set keeps one"
            )

    def translate(found: np.ndarray) -> np.ndarray:
        every = [ids.get(labels.root(v), -1) if v > PINNED else -1 for v in found.tolist()]
        return np.array(every, dtype=np.int64)

    def translate_all(known: dict) -> dict:
        every = {name: translate(found) for name, found in known.items()}
        return {name: found for name, found in every.items() if (found >= 0).any()}

    rows, columns = translate_all(labels.rows), translate_all(labels.columns)
    inner, zeros = {}, {}
    for name, (dim, found) in free.items():
        if (translated := translate(found)).max() < 0:
            continue
        if name not in labels.shapes:
            zeros[name] = (dim, translated)
        elif dim < 2:
            (rows, columns)[dim][name] = translated
        else:
            inner[name] = (dim, translated)
    for name, found in labels.rows.items():
        if len(labels.shapes[name]) > 1 and name not in rows:
            roots = [labels.root(v) for v in found.tolist() if v > PINNED]
            why = [labels.reasons[root] for root in roots if root in labels.reasons]
            excluded.append(
                f"{name} [coupled]: {why[0] if why else 'it meets what cannot be removed'}"
            )
    if not sets:
        reason = excluded[0] if excluded else "it has no layer whose outputs another layer reads"
        # Those of other kinds are of convolutions.
        others = "other --groups, or " * any(len(labels.shapes[n]) > 2 for n in labels.positions)
        raise UserError(
            f"no coupled channels can be removed from the model ({reason}): choose {others}a "
            "--method that does not prune, such as local-sgd"
        )
    return Coupling(
        rows,
        columns,
        tuple(sets),
        len(ids),
        dict(labels.positions),
        tuple(excluded),
        inner,
        _numbers(labels, translate),
        frozenset(labels.norms & rows.keys()),
        tuple(replace(call, labels=translate(call.labels)) for call in _mixed(labels)),
        transposed=frozenset(transposed),
        zeros=zeros,
    )


def _pieces(labels: Labels) -> dict[int, list[int]]:
    """Return by group the numbers of the pieces that it is in, none of which may become empty."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, size in enumerate(labels.pieces):
        roots = labels.roots(size.labels)
        if size.dim in varying(roots):
            for root in np.unique(first_along(roots, size.dim)[size.start : size.stop]).tolist():
                found[root].append(number)
    return found


def _numbers(labels: Labels, translate: Callable[[np.ndarray], np.ndarray]) -> tuple[Request, ...]:
    """Return the calls whose arguments depend on the groups that are left."""

    # Many numbers are sizes of the same tensor.
    known: dict[int, dict[int, np.ndarray]] = {}

    def of(wanted: Wanted) -> Wanted:
        if not isinstance(wanted, Size):
            return wanted
        if (along := known.get(id(wanted.labels))) is None:
            roots = labels.roots(wanted.labels)
            along = {dim: first_along(roots, dim) for dim in varying(roots)}
            known[id(wanted.labels)] = along
        if wanted.dim not in along:
            return wanted.given
        sign = -1 if wanted.given < 0 else 1
        return sign, translate(along[wanted.dim][wanted.start : wanted.stop])

    found = []
    for call in labels.calls:
        wanted = tuple(map(of, call.wanted))
        if any(w is not None for w in wanted):
            found.append(replace(call, wanted=wanted))
    return tuple(found)


def _mixed(labels: Labels) -> list[Mixed]:
    """Return the calls that read several groups together, with their labels along `dim`."""
    found = [(call, labels.roots(call.labels)) for call in labels.mixed]
    # Otherwise they read a single channel or group.
    several = [(call, roots) for call, roots in found if call.dim in varying(roots)]
    return [replace(call, labels=first_along(roots, call.dim)) for call, roots in several]


def _along_one_dimension(labels: Labels) -> dict[str, tuple[int, np.ndarray]]:
    """Return (dimension, labels) of the parameters that are used directly, by name."""
    every = {name: labels.roots(own) for name, own in labels.free.items()}
    ways = {name: varying(roots) for name, roots in every.items()}
    return {n: (along[0], first_along(every[n], along[0])) for n, along in ways.items() if along}
