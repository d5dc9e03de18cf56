"""Labels of channels: which group each element of each tensor belongs to, and who is one group.

`trace` lets them follow a forward pass; the modules `label_layers`, `label_shapes` and
`label_attention` say what operations do to them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# Labels of elements that belong to no group: constant zeros, as of padding, bind nothing; what is
# PINNED stays.
VOID = -1
PINNED = 0
# Of larger parameters than this the elements get no labels of their own.
LARGEST_FREE = 2**21


class Counted(int):
    """A number that a module keeps in an attribute: `source` is (module, attribute)."""

    source: tuple[str, str]


@dataclass(frozen=True)
class Cut:
    """Labels of a tensor that must stay rectangular: they may differ along one dimension alone.

    Along those of `fixed`, whose sizes the model's code counts, they may not.
    """

    labels: Tensor
    fixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Use:
    """A number of a module's that is the size of `labels` along `dim`."""

    source: tuple[str, str]
    labels: Tensor
    dim: int


class Labels:
    """Labels of all tensors that a forward pass makes, and which of them became one group."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        # Tensors are kept alive, so that no id is given twice.
        self.known: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self.parent = [PINNED]
        self.reasons: dict[int, str] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.columns: dict[str, np.ndarray] = {}
        # Of parameters that are added or multiplied as they are, a label per element.
        self.free: dict[str, Tensor] = {}
        self.positions: dict[str, int] = {}
        self.norms: set[str] = set()
        # What is divided by its length along a dimension, and the module whose code does it.
        self.lengths: list[tuple[str, Tensor, int]] = []
        self.cuts: list[Cut] = []
        self.uses: list[Use] = []
        # With plain rules, channels meet in convolutions, linear layers and BatchNorm alone.
        self.plain = False

    def label(self, tensor: Tensor, labels: Tensor, zero: bool = True) -> None:
        """Let `labels` stand for `tensor`; with `zero`, a removed group is zero in it."""
        self.known[id(tensor)] = (tensor, labels, zero)

    def of(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return labels and whether a removed group is zero; what nothing is known of is pinned."""
        found = self.known.get(id(tensor))
        if found is not None:
            return self.roots(found[1]), found[2]
        name = self.names.get(id(tensor))
        if name is None or self.plain or tensor.numel() > LARGEST_FREE:
            return pinned(tensor), False
        if name not in self.free:
            labels = self.fresh(tensor.numel())
            self.free[name] = torch.from_numpy(labels).view(tensor.shape)
        return self.roots(self.free[name]), True

    def label_pinned(self, results: Iterable[object]) -> None:
        """Let every element of the tensors in `results` be one that stays."""
        for tensor in tensors_in(results):
            self.label(tensor, pinned(tensor), zero=False)

    def fresh(self, count: int) -> np.ndarray:
        """Return `count` new labels."""
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """Return the label that stands for all that were joined with `label`."""
        while self.parent[label] != label:
            self.parent[label] = self.parent[self.parent[label]]
            label = self.parent[label]
        return label

    def roots(self, labels: Tensor) -> Tensor:
        """Return the labels that stand for `labels`, PINNED for what stays; a view as they are."""
        if self.plain:
            return labels
        values, places = thin(labels)[0].unique(return_inverse=True)
        found = [self.root(v) if v > PINNED else v for v in values.tolist()]
        found = [PINNED if v in self.reasons else v for v in found]
        return torch.tensor(found)[places].expand(labels.shape)

    def join(self, first: np.ndarray | Tensor, second: np.ndarray | Tensor) -> bool:
        """Make labels that meet, element by element, one group; say whether anything changed."""
        total = len(self.parent) + 1
        # Pairs as single numbers, which sort fast; VOID counts from 0.
        pairs = (np.asarray(first) - VOID) * total + (np.asarray(second) - VOID)
        changed = False
        for pair in np.unique(pairs).tolist():
            a, b = pair // total + VOID, pair % total + VOID
            if VOID in (a, b) or a == b:
                continue
            if PINNED in (a, b):
                changed |= self.pin_labels([max(a, b)], "it meets what cannot be removed")
                continue
            a, b = sorted((self.root(a), self.root(b)))
            if a != b:
                changed = True
                self.parent[b] = a
                if b in self.reasons:
                    self.reasons.setdefault(a, self.reasons[b])
        return changed

    def join_along(self, labels: Tensor, dim: int) -> bool:
        """Make all labels along `dim` one group; say whether anything changed."""
        few = thin(labels)[0]
        return self.join(few.narrow(dim, 0, 1).expand(few.shape), few)

    def pin(self, tensors: Iterable[object], reason: str) -> bool:
        """Never remove what appears in `tensors`; say whether anything changed."""
        found = [thin(self.of(t)[0])[0].unique().tolist() for t in tensors_in(tensors)]
        return any([self.pin_labels(labels, reason) for labels in found])

    def pin_all(self, reason: str) -> None:
        """Never remove any group that there is so far."""
        self.pin_labels(range(PINNED + 1, len(self.parent)), reason)

    def pin_labels(self, labels: Iterable[int], reason: str) -> bool:
        """Never remove the groups of `labels`; say whether anything changed."""
        before = len(self.reasons)
        for label in labels:
            if label > PINNED:
                self.reasons.setdefault(self.root(int(label)), reason)
        return len(self.reasons) > before

    def note(
        self, known: dict[str, np.ndarray], parameter: Tensor | None, labels: np.ndarray
    ) -> bool:
        """Set or join labels of a parameter's rows or columns; say whether it is the model's."""
        if parameter is None:
            return True
        name = self.names.get(id(parameter))
        if name is None:
            return False
        if name in known:
            self.join(known[name], labels)
        else:
            known[name] = labels
        return True

    def count(self, name: str, positions: int) -> None:
        """Add to the positions at which the weight `name` is applied."""
        self.positions[name] = self.positions.get(name, 0) + positions


def pinned(tensor: Tensor) -> Tensor:
    """Return labels that keep all of `tensor`; a view of one element."""
    return torch.tensor(PINNED).expand(tensor.shape)


def thin(*labels: Tensor) -> list[Tensor]:
    """Return labels of one shape with a single entry in the dimensions that repeat in all."""
    found = list(labels)
    for dim in range(labels[0].dim()):
        if all(t.stride(dim) == 0 for t in found):
            found = [t.narrow(dim, 0, 1) for t in found]
    return found


def distinct(labels: Iterable[Tensor]) -> set[int]:
    """Return all labels that occur."""
    return {label for tensor in labels for label in thin(tensor)[0].unique().tolist()}


def varying(labels: Tensor) -> list[int]:
    """Return the dimensions along which labels differ."""
    few = thin(labels)[0]
    return [d for d in range(few.dim()) if bool((few != few.narrow(d, 0, 1)).any())]


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Walk tensors in nested arguments and results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def by_position(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a function with operands by position and `dim` by that name."""
    given = dict(kwargs)
    if "axis" in given:
        given["dim"] = given.pop("axis")
    for position, names in enumerate((("input", "tensors", "self"), ("other",))):
        name = next((n for n in names if n in given), "")
        if name and len(args) == position:
            args = (*args, given.pop(name))
    return args, given
