"""Labels of channels: the group of each element of each tensor, and which groups were joined.

`channel_trace` follows a forward pass with them; `label_layers` and `label_shapes` hold the rules
for operations. At the end are the reasons why channels stay, with hints on what to write instead.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.models.slim import flatten

# Elements in no group: VOID is constant zero, as padding, and constrains nothing; PINNED stays.
VOID = -1
PINNED = 0
# A larger parameter gets no labels for its elements.
LARGEST_FREE = 2**21


@dataclass(frozen=True)
class Cut:
    """Labels of a tensor that must stay rectangular: they may vary along one dimension only.

    They may not vary along the dimensions in `fixed`, whose sizes the model's code relies on.
    """

    labels: Tensor
    fixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Size:
    """An argument that is the size of `labels` along `dim`, from `start` to `stop`.

    It is `given` in the whole network, which may be below zero, and stays so where labels do not
    vary along `dim`.
    """

    labels: Tensor
    dim: int
    given: int
    start: int = 0
    stop: int | None = None


# (module, line of its own code, number, from 0, of a torch call in that line).
Site = tuple[str, str, int]


# What an argument must be: a size, which `coupling` turns into a sign and the ids that it counts; a
# number; anything.
Wanted = Size | tuple[int, np.ndarray] | float | None


@dataclass(frozen=True)
class Request:
    """A call of a module's code with numbers: what is wanted of each argument.

    `pieces`: instead these are the sizes of what the call cuts its first argument into.
    """

    site: Site
    wanted: tuple[Wanted, ...]
    pieces: bool = False


@dataclass(frozen=True)
class Mixed:
    """A call that reads all channels of its argument number `place` together, along `dim`.

    Where it is `filled` it gets zeros for those that are absent, and `numbers` as in the whole
    network; what it returns is without them along `back`, None where that has no channels.
    `coupling` turns the `labels` of the argument into ids along `dim`.
    """

    site: Site
    place: int
    labels: Tensor | np.ndarray | None
    dim: int
    filled: bool
    back: int | None
    numbers: tuple[float | None, ...]


@dataclass(frozen=True)
class Standardised:
    """A tensor made of a weight, whose fan-in is normalised for each output, times a gain.

    `mixed` is the call that does so, None before it.
    """

    tensor: Tensor
    weight: Tensor
    gain: Tensor | None = None
    mixed: Mixed | None = None


class Labels:
    """The labels of all tensors of a forward pass, as a union-find forest of groups."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        # Matrices by where their memory begins, for `turned`.
        self.weights = {p.data_ptr(): p for p in model.parameters() if p.dim() == 2}
        # Tensor, labels and whether a removed group is zero; labels are roots since `changes` was
        # the last number. Keeps the tensors alive, so that no id is reused.
        self.known: dict[int, tuple[Tensor, Tensor, bool, int]] = {}
        self.changes = 0
        self.parent = [PINNED]
        self.reasons: dict[int, str] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.columns: dict[str, np.ndarray] = {}
        # A label per element of parameters that are used directly, as in additions and products.
        self.free: dict[str, Tensor] = {}
        self.positions: dict[str, int] = {}
        self.norms: set[str] = set()
        # Weights [inputs, outputs], and embeddings.
        self.transposed: set[str] = set()
        self.embeddings: set[str] = set()
        self.mixed: list[Mixed] = []
        self.standardised: dict[int, Standardised] = {}
        # Buffers of zeros that no state dict holds, which may have any size.
        self.zeros = {
            id(buffer): name for name, buffer in model.named_buffers() if is_blank(model, name)
        }
        self.cuts: list[Cut] = []
        self.calls: list[Request] = []
        # What tensors are cut into, none of which may become empty.
        self.pieces: list[Size] = []
        # The call that is being followed: its name, "" for none, where it is, and its arguments as
        # they were given.
        self.operation = ""
        self.site: Site = ("", "", 0)
        self.given: tuple[tuple, dict] = ((), {})

    def label(self, tensor: Tensor, labels: Tensor, zero: bool = True) -> None:
        """Set the labels of `tensor`; `zero`: its elements of a removed group are zero."""
        self.known[id(tensor)] = (tensor, labels, zero, -1)

    def of(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return labels and whether a removed group is zero; an unknown tensor is pinned."""
        found = self.known.get(id(tensor))
        if found is not None:
            _, labels, zero, changes = found
            if changes != self.changes:
                labels = self.roots(labels)
                self.known[id(tensor)] = (tensor, labels, zero, self.changes)
            return labels, zero
        if (weight := turned(self.weights, tensor)) is not None:
            found, zero = self.of(weight)
            return found.t(), zero
        name = self._free_name(tensor)
        if name is None:
            return pinned(tensor), False
        if name not in self.free:
            labels = self.fresh(tensor.numel())
            self.free[name] = torch.from_numpy(labels).view(tensor.shape)
        return self.roots(self.free[name]), True

    def _free_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter, or buffer of zeros, whose elements may have labels."""
        if tensor.numel() > LARGEST_FREE:
            return None
        return self.names.get(id(tensor), self.zeros.get(id(tensor)))

    def label_pinned(self, results: Iterable[object]) -> None:
        """Set all labels of the tensors in `results` to PINNED."""
        for tensor in tensors_in(results):
            self.label(tensor, pinned(tensor), zero=False)

    def keep(self, tensors: Iterable[object], results: Iterable[object], reason: str) -> None:
        """Keep all groups of a call's arguments, and label its results as what stays."""
        self.pin(tensors, reason)
        self.label_pinned(results)

    def fresh(self, count: int) -> np.ndarray:
        """Return `count` new labels."""
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """Return the representative of the group of `label`."""
        while self.parent[label] != label:
            self.parent[label] = self.parent[self.parent[label]]
            label = self.parent[label]
        return label

    def roots(self, labels: Tensor) -> Tensor:
        """Return the representatives of `labels`, PINNED for groups that stay, strides kept."""
        values, places = _ranked(thin(labels)[0])
        found = [self.root(v) if v > PINNED else v for v in values.tolist()]
        found = [PINNED if v in self.reasons else v for v in found]
        return torch.tensor(found, dtype=torch.int64)[places].expand(labels.shape)

    def join(self, first: np.ndarray | Tensor, second: np.ndarray | Tensor) -> bool:
        """Join the groups of paired labels; return whether anything changed."""
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
                self.changes += 1
                self.parent[b] = a
                if b in self.reasons:
                    self.reasons.setdefault(a, self.reasons[b])
        return changed

    def join_along(self, labels: Tensor, dim: int) -> bool:
        """Join all labels along `dim`; return whether anything changed."""
        few = thin(labels)[0]
        return self.join(_first(few, dim).expand(few.shape), few)

    def pin(self, tensors: Iterable[object], reason: str) -> None:
        """Keep all groups that occur in `tensors`."""
        for tensor in tensors_in(tensors):
            name = None if id(tensor) in self.known else self._free_name(tensor)
            if name is not None and name not in self.free:
                # All elements stay: one label does for them.
                self.free[name] = torch.from_numpy(self.fresh(1))[0].expand(tensor.shape)
            self.pin_labels(distinct([self.of(tensor)[0]]), reason)

    def pin_labels(self, labels: Iterable[int], reason: str) -> bool:
        """Keep the groups of `labels`; return whether anything changed."""
        before = len(self.reasons)
        for label in labels:
            if label > PINNED:
                self.reasons.setdefault(self.root(int(label)), self._with_call(reason))
        self.changes += len(self.reasons) - before
        return len(self.reasons) > before

    def _with_call(self, reason: str) -> str:
        """Return a reason with the operation and the module whose code calls it."""
        module = self.site[0]
        if not self.operation or (module and f"{module}." in reason):
            return reason
        name = "" if self.operation in reason else f"{self.operation} "
        return f"{reason} ({name}in {module or 'the model'})"

    def note(
        self, known: dict[str, np.ndarray], parameter: Tensor | None, labels: np.ndarray
    ) -> bool:
        """Set or join the labels of a parameter's rows or columns.

        Return whether it is a parameter of the model; None counts as one.
        """
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

    def request(self, wanted: Sequence[Wanted], pieces: bool = False) -> None:
        """Record what is wanted of the arguments of the call that is being followed."""
        # Torch's own modules are resized by their attributes.
        if self.site[1] and any(w is not None for w in wanted):
            self.calls.append(Request(self.site, tuple(wanted), pieces))

    def mix(self, x: Tensor, dim: int, filled: bool = True, back: int | None = None) -> bool:
        """Record that the call being followed reads all channels of `x`, along `dim`, together.

        Return False where what is removed isn't zero, or zeros can't be put into the call.
        """
        found, zero = self.of(x)
        own, leaves = thin(found)[0], flatten(self.given)
        place = next((n for n, leaf in enumerate(leaves) if leaf is x), None)
        if not zero or place is None:
            return False
        numbers = tuple(leaf if type(leaf) in (int, float) else None for leaf in leaves)
        self.mixed.append(Mixed(self.site, place, own, dim % x.dim(), filled, back, numbers))
        self.keep_rectangular(own)
        return True

    def keep_rectangular(self, labels: Tensor, fixed: tuple[int, ...] = ()) -> None:
        """Record that a tensor stays rectangular, and the dimensions whose sizes stay."""
        if fixed or len(varying(labels)) > 1:
            self.cuts.append(Cut(thin(labels)[0], fixed))

    def count(self, name: str, positions: int) -> None:
        """Add to the number of positions at which the weight `name` is applied."""
        self.positions[name] = self.positions.get(name, 0) + positions


def is_blank(model: nn.Module, name: str) -> bool:
    """Return whether a buffer is zero and in no state dict."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    buffer = getattr(module, attribute)
    kept = attribute not in module._non_persistent_buffers_set
    return not kept and buffer.is_floating_point() and buffer.dim() > 0 and not buffer.any()


def turned(weights: dict[int, nn.Parameter], tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter whose transposed view `tensor` is, if any."""
    weight = weights.get(tensor.data_ptr()) if tensor.dim() == 2 else None
    if weight is None or tensor is weight or tensor.shape != weight.shape[::-1]:
        return None
    return weight if tensor.stride() == weight.stride()[::-1] else None


def pinned(tensor: Tensor) -> Tensor:
    """Return PINNED labels of the shape of `tensor`, as a view of one element."""
    return torch.tensor(PINNED).expand(tensor.shape)


def thin(*labels: Tensor) -> list[Tensor]:
    """Return labels of one shape, narrowed to size 1 in dimensions that are expanded in all."""
    found = list(labels)
    for dim in range(labels[0].dim()):
        if all(t.stride(dim) == 0 for t in found):
            found = [_first(t, dim) for t in found]
    return found


def distinct(labels: Iterable[Tensor]) -> set[int]:
    """Return the set of labels that occur."""
    return {label for tensor in labels for label in _ranked(thin(tensor)[0])[0].tolist()}


def _ranked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `unique` with `return_inverse` does, without sorting many labels."""
    low, high = map(int, labels.aminmax()) if labels.numel() else (0, 0)
    if labels.numel() <= high - low:
        return labels.unique(return_inverse=True)
    places = labels - low
    present = torch.zeros(high - low + 1, dtype=torch.int64)
    present[places.flatten()] = 1
    ranks = present.cumsum(0) - 1
    return present.nonzero().flatten() + low, ranks[places]


def varying(labels: Tensor) -> list[int]:
    """Return the dimensions along which labels vary."""
    few = thin(labels)[0]
    return [d for d in range(few.dim()) if bool((few != _first(few, d)).any())]


def _first(labels: Tensor, dim: int) -> Tensor:
    """Return the first slice of labels along `dim`, an empty one where there is none."""
    return labels.narrow(dim, 0, min(1, labels.shape[dim]))


def first_along(labels: Tensor, dim: int) -> np.ndarray:
    """Return the first label at each index of `dim`, int64 [size of dim]."""
    for other in range(labels.dim()):
        if other != dim:
            labels = labels.narrow(other, 0, 1)
    return labels.flatten().numpy()


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    return (leaf for leaf in flatten(list(values)) if isinstance(leaf, Tensor))


def by_position(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return arguments with operands by position, and `axis` renamed to `dim`."""
    given = dict(kwargs)
    if "axis" in given:
        given["dim"] = given.pop("axis")
    for position, names in enumerate((("input", "tensors", "self"), ("other",))):
        name = next((n for n in names if n in given), "")
        if name and len(args) == position:
            args = (*args, given.pop(name))
    return args, given


# --------------------------------------------------------------------------------------------------
# Reasons and hints; test_channel_trace tries each hint on a network
# --------------------------------------------------------------------------------------------------

NUMBER = "where a number does, write -1 or x.shape[1]"
RESHAPING = ("view", "reshape", "expand", "unflatten")
CUTTING = ("chunk", "split", "tensor_split", "unbind", "__getitem__", "select", "narrow")
INSTEAD = {
    "local_response_norm": "nn.BatchNorm2d",
    "instance_norm": "nn.BatchNorm2d",
    "lp_pool2d": "nn.AvgPool2d",
    "conv_transpose2d": "nn.Upsample and nn.Conv2d",
    "einsum": "matmul or a product",
    "rms_norm": "nn.RMSNorm",
}


def mixes(name: str) -> str:
    """Return the reason that an operation mixes channels, with a hint."""
    hint = f"; take {INSTEAD[name]} instead" if name in INSTEAD else ""
    return f"{name} mixes it with others{hint}"


def counts(name: str) -> str:
    """Return the reason that an operation relies on the number of channels, with a hint."""
    hint = f"; {NUMBER}" if name in RESHAPING else ""
    if name in CUTTING:
        hint = "; cut it into equal pieces, as chunk does"
    return f"{name} counts its channels{hint}"
