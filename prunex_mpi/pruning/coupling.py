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
(`models.slim.SlimLayerNorm`).

Why not a library: torch-pruning's dependency graph (1.6) reads autograd's graph and takes every
operation that it does not know for an element-wise one, so a wrong group shows only as a wrong
network; it removes channels of LayerNorm, which changes all others; users must rewrite the forward
pass of attention; it misses the channels that a zero-padded shortcut adds, and it fails on
ShuffleNet. torch.fx traces symbols: it stops at control flow and knows shapes only after a second
pass. Running the model itself under a TorchFunctionMode needs neither, and an operation that is
unknown here pins its channels, which is safe.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.pruning.channel_trace import NO_PINS, Pins, follow_input
from prunex_mpi.pruning.labels import PINNED, VOID, Cut, Labels, Use, first_along, thin, varying

# Plain rules everywhere: convolutions, linear layers and BatchNorm only.
PLAIN = frozenset([""])


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
    and the ids. `positions` is the number of positions of one image's feature map at which a weight
    is applied, from which follow its multiply-adds. `excluded` are lines on what stays, and why.

    `numbers` holds the ids that a module's attribute counts, by (module, attribute). `norms` are
    the weights of LayerNorm, which reads all channels, and `lengths` the ids of F.normalize, which
    does too, by the module that calls it. Modules in `swapped` are attention whose code relies on
    the width of all heads; in a smaller network they are replaced.
    """

    rows: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    sets: tuple[ChannelSet, ...]
    total: int
    positions: dict[str, int]
    excluded: tuple[str, ...]
    inner: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    numbers: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    norms: frozenset[str] = frozenset()
    lengths: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    swapped: frozenset[str] = frozenset()

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

        return replace(
            self,
            rows={name: of(ids) for name, ids in self.rows.items()},
            columns={name: of(ids) for name, ids in self.columns.items()},
            inner={name: (dim, of(ids)) for name, (dim, ids) in self.inner.items()},
            numbers={key: of(ids) for key, ids in self.numbers.items()},
            lengths={name: tuple(map(of, every)) for name, every in self.lengths.items()},
        )


def find_coupling(
    model: nn.Module, inputs: Inputs, plain: frozenset[str] = frozenset(), pins: Pins = NO_PINS
) -> Coupling:
    """Find the coupled groups of `model`, which reads `inputs`.

    Runs one dummy input on the CPU in evaluation mode; the model is unchanged afterwards. In the
    modules named in `plain` only plain rules hold; channels that the calls in `pins` touch stay.
    Raises UserError when no group can be removed.
    """
    labels = follow_input(model, inputs, plain, pins)
    _pin_shared(model, labels)
    _settle(labels)
    counted = _numbers(labels)
    return _collect(labels, counted)


# --------------------------------------------------------------------------------------------------
# Constraints between groups
# --------------------------------------------------------------------------------------------------


def _pin_shared(model: nn.Module, labels: Labels) -> None:
    """Pin all of the parameters that several modules have: each is made smaller by itself."""
    reason = "it meets weights that several layers share"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = labels.names[id(parameter)]
        modules = {id(model.get_submodule(n.rpartition(".")[0])) for n in (name, first)}
        if len(modules) > 1:
            for known in (labels.rows, labels.columns):
                labels.pin_labels(known.get(first, ()), reason)


def _settle(labels: Labels) -> None:
    """Join and pin groups until every tensor stays rectangular whichever of them are removed."""
    cuts = [*labels.cuts, *(Cut(free) for free in labels.free.values())]
    changed = True
    while changed:
        changed = any([_make_rectangular(labels, cut) for cut in cuts])
        changed |= any([_make_countable(labels, use) for use in labels.uses])
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


def _make_countable(labels: Labels, use: Use) -> bool:
    """Pin channels that a module's number counts in a tensor that varies along several dims."""
    found = labels.roots(use.labels)
    along = varying(found)
    if use.dim in along and len(along) > 1:
        return labels.pin_labels(thin(found)[0].flatten().tolist(), "a number counts it")
    return False


def _numbers(labels: Labels) -> dict[tuple[str, str], np.ndarray]:
    """Return the labels that each module's number counts; pin them where it counts others too."""
    while True:
        known: dict[tuple[str, str], np.ndarray] = {}
        changed = False
        for use in labels.uses:
            found = labels.roots(use.labels)
            if use.dim in varying(found):
                one = first_along(found, use.dim)
                before = known.setdefault(use.source, one)
                if len(before) != len(one) or (before != one).any():
                    both = [v for v in (*before.tolist(), *one.tolist()) if v != PINNED]
                    changed |= labels.pin_labels(both, "one number counts it and others")
        if not changed:
            return known
        _settle(labels)


# --------------------------------------------------------------------------------------------------
# From labels to groups
# --------------------------------------------------------------------------------------------------


def _collect(labels: Labels, counted: dict[tuple[str, str], np.ndarray]) -> Coupling:
    """Number the removable groups, set after set, and translate labels to their ids."""
    free = _along_one_dimension(labels)
    places: dict[int, dict[tuple[str, int], int]] = {}
    for dim, known in ((0, labels.rows), (1, labels.columns)):
        for name, found in known.items():
            _find_places(labels, places, (name, dim), found)
    # Every group must be rows of some weight.
    homeless = [root for root, at in places.items() if all(dim for _, dim in at)]
    labels.pin_labels(homeless, "no weight makes it")
    members: dict[frozenset[tuple[tuple[str, int], int]], list[int]] = {}
    for root, at in places.items():
        if root not in labels.reasons:
            # Groups with as many slices in the same places compete with each other.
            members.setdefault(frozenset(at.items()), []).append(root)
    ids: dict[int, int] = {}
    sets, excluded = [], []
    rows_first = {name: number for number, name in enumerate(labels.rows)}
    for found, roots in members.items():
        rows = {name: count for (name, dim), count in found if dim == 0}
        columns = {name: count for (name, dim), count in found if dim == 1}
        name, start = min(rows, key=rows_first.__getitem__), len(ids)
        # Of weights, since vectors of norms and biases may repeat a layer's rows.
        widest = max(rows.get(name, 0) for name in (*(rows.keys() & labels.positions.keys()), name))
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
    inner = {}
    for name, (dim, found) in free.items():
        if (translated := translate(found)).max() < 0:
            continue
        if dim < 2:
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
        raise UserError(f"no coupled channels can be removed from the model ({reason})")
    return Coupling(
        rows,
        columns,
        tuple(sets),
        len(ids),
        dict(labels.positions),
        tuple(excluded),
        inner,
        translate_all(counted),
        frozenset(labels.norms & rows.keys()),
        {name: tuple(map(translate, every)) for name, every in _lengths(labels).items()},
    )


def _find_places(
    labels: Labels,
    places: dict[int, dict[tuple[str, int], int]],
    place: tuple[str, int],
    found: np.ndarray,
) -> None:
    """Count in `places` the slices that each removable group has at `place`."""
    for label in found.tolist():
        root = labels.root(label) if label > PINNED else PINNED
        if root != PINNED and root not in labels.reasons:
            at = places.setdefault(root, {})
            at[place] = at.get(place, 0) + 1


def _lengths(labels: Labels) -> dict[str, list[np.ndarray]]:
    """Return by module the labels of the channels that its F.normalize reads together."""
    found: dict[str, list[np.ndarray]] = {}
    for module, own, dim in labels.lengths:
        roots = labels.roots(own)
        # Otherwise the length is of a single channel or group.
        if dim in varying(roots):
            found.setdefault(module, []).append(first_along(roots, dim))
    return found


def _along_one_dimension(labels: Labels) -> dict[str, tuple[int, np.ndarray]]:
    """Return (dimension, labels) of the parameters that are used directly, by name."""
    found = {}
    for name, own in labels.free.items():
        roots = labels.roots(own)
        along = varying(roots)
        if along:
            found[name] = along[0], first_along(roots, along[0])
    return found
