"""Which slices of which parameters have to go together for a channel to be removable.

One blank image runs through the model while every tensor carries labels beside it: an integer per
element, the group of channels that the element belongs to. A convolution or a linear layer reads
the labels of its input as its columns and gives each of its rows a label of its own; BatchNorm ties
its gamma and beta to the labels it normalises; an addition makes the labels that meet one group;
reshaping, slicing, concatenating and padding do to the labels what they do to the data. The groups
of a grouped convolution and the heads of attention go as a whole, and what is cut into equal pieces
loses as many channels of each. Where a channel's absence could be felt, its label is pinned: it is
never removed.

A group is removable exactly: with all its slices at zero (gamma and beta of norms included, so that
no constant survives) its channels are zero wherever they are read, and the network without them
computes the same. LayerNorm goes on to divide by the number of channels there were
(`models.slim.SlimLayerNorm`).

Why not a library: torch-pruning's dependency graph (1.6) reads the graph of autograd and takes
every operation that it does not know for an element-wise one, so a wrong group shows only as a
wrong network; it takes a LayerNorm's channels away, which changes all others; it leaves it to the
user to give attention another forward pass; it does not see the channels that a zero-padded
shortcut adds, and it fails on ShuffleNet. torch.fx traces symbols:
it stops at control flow and knows shapes only after a second pass. Running the model itself under a
TorchFunctionMode needs neither, and what is not known here is pinned, which is safe.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.pruning.label_shapes import numbers, settle
from prunex_mpi.pruning.labels import PINNED, Labels, varying
from prunex_mpi.pruning.places import NO_PINS, Pins
from prunex_mpi.pruning.trace import follow_image

# Plain rules everywhere: channels meet in convolutions, linear layers and BatchNorm alone.
PLAIN = frozenset([""])


@dataclass(frozen=True)
class ChannelSet:
    """Groups that are chosen among each other: `count` of them from id `start`.

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

    `rows` is int64 [shape[0]] by the parameter's name, `columns` int64 [shape[1]]. `positions` says
    at how many positions of one image's feature map a weight is applied, which makes its
    multiply-adds. `excluded` says what is never removed, and why.

    Parameters that are added or multiplied as they are may have groups along another dimension:
    `inner` holds it and the ids. `numbers` holds ids of what a module counts in an attribute, by
    (module, attribute). `norms` are the weights of LayerNorm, which reads all channels, and
    `lengths` the ids of what F.normalize divides by the length of all, by the module that does it.
    Modules of
    `swapped` are attention whose code needs the width of all heads, and are replaced when smaller.
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
        """Return (dimension, ids) of the parameter `name`, which may have none."""
        found = [(0, self.rows.get(name)), (1, self.columns.get(name)), self.inner.get(name)]
        return [entry for entry in found if entry is not None and entry[1] is not None]

    def left(self, mask: np.ndarray) -> "Coupling":
        """Return which slices of what is left of the network belong to which group of the whole.

        `mask` says which groups are left.
        """
        # The last entry stands for what belongs to no group.
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
    model: nn.Module, image_size: int, plain: frozenset[str] = frozenset(), pins: Pins = NO_PINS
) -> Coupling:
    """Find the coupled groups of `model`, a classifier of [n, 3, image_size, image_size] images.

    Runs one blank image on the CPU in evaluation mode; the model is unchanged afterwards. In the
    modules named in `plain` only plain rules hold; what calls of `pins` touch stays. Raises
    UserError when no group can be removed.
    """
    labels = follow_image(model, image_size, plain, pins)
    _pin_shared(model, labels)
    settle(labels)
    counted = numbers(labels)
    return _collect(labels, counted)


def _pin_shared(model: nn.Module, labels: Labels) -> None:
    """Pin all of the parameters that several modules have: each is made smaller by itself."""
    reason = "it meets weights that several layers share"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = labels.names[id(parameter)]
        modules = {id(model.get_submodule(n.rpartition(".")[0])) for n in (name, first)}
        if len(modules) > 1:
            for known in (labels.rows, labels.columns):
                labels.pin_labels(known.get(first, ()), reason)


def _collect(labels: Labels, counted: dict[tuple[str, str], np.ndarray]) -> Coupling:
    """Number the groups that are left, set after set, and translate every label."""
    free = _along_one_dimension(labels)
    places: dict[int, dict[tuple[str, int], int]] = {}
    for dim, known in ((0, labels.rows), (1, labels.columns)):
        for name, found in known.items():
            _find_places(labels, places, (name, dim), found)
    # A group is of some weight's rows.
    homeless = [root for root, at in places.items() if all(dim for _, dim in at)]
    labels.pin_labels(homeless, "no weight makes it")
    members: dict[frozenset[tuple[tuple[str, int], int]], list[int]] = {}
    for root, at in places.items():
        if root not in labels.reasons:
            # Where a group has slices, and how many, decides which others it is chosen among.
            members.setdefault(frozenset(at.items()), []).append(root)
    ids: dict[int, int] = {}
    sets = []
    rows_first = {name: number for number, name in enumerate(labels.rows)}
    for found, roots in members.items():
        rows = {name: count for (name, dim), count in found if dim == 0}
        columns = {name: count for (name, dim), count in found if dim == 1}
        name, start = min(rows, key=rows_first.__getitem__), len(ids)
        # Vectors of norms and biases follow the layers, whatever repeats these.
        widest = max(rows.get(name, 0) for name in (*(rows.keys() & labels.positions.keys()), name))
        unit = min(widest, max(columns.values(), default=widest))
        sets.append(ChannelSet(name, start, len(roots), unit))
        ids.update((root, start + i) for i, root in enumerate(roots))

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
    excluded = []
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
    """Count in `places` how many slices each group that can go has at `place`."""
    for label in found.tolist():
        root = labels.root(label) if label > PINNED else PINNED
        if root != PINNED and root not in labels.reasons:
            at = places.setdefault(root, {})
            at[place] = at.get(place, 0) + 1


def _lengths(labels: Labels) -> dict[str, list[np.ndarray]]:
    """Return by the module the labels of channels that are divided by the length of all."""
    found: dict[str, list[np.ndarray]] = {}
    for module, own, dim in labels.lengths:
        roots = labels.roots(own)
        # Otherwise one of a single channel is divided, or of one group.
        if dim in varying(roots):
            one = roots.movedim(dim, 0).reshape(roots.shape[dim], -1)[:, 0]
            found.setdefault(module, []).append(one.numpy())
    return found


def _along_one_dimension(labels: Labels) -> dict[str, tuple[int, np.ndarray]]:
    """Return (dimension, labels) of the parameters that are added or multiplied as they are."""
    found = {}
    for name, own in labels.free.items():
        roots = labels.roots(own)
        along = varying(roots)
        if along:
            one = roots.movedim(along[0], 0).reshape(roots.shape[along[0]], -1)[:, 0]
            found[name] = along[0], one.numpy()
    return found
