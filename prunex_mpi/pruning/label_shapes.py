"""What reshaping, cutting apart and putting together do to the labels of channels.

The labels go where the data go. What the code counts on is written down: a tensor must stay
rectangular when channels are gone, and numbers that a module keeps become those of what is left.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.pruning.hints import SIZED, counts
from prunex_mpi.pruning.labels import (
    PINNED,
    VOID,
    Counted,
    Cut,
    Labels,
    Use,
    distinct,
    pinned,
    tensors_in,
    thin,
    varying,
)

JOINING = ("cat", "concat", "stack")
CUTTING = ("chunk", "split", "tensor_split", "unbind", "__getitem__", "select", "narrow")


def shape(
    labels: Labels, result: object, func: Callable, args: tuple, kwargs: dict[str, object]
) -> None:
    """Do to the labels what `func` does to the data."""
    name = func.__name__
    # Indices have no channels.
    operands = [t for t in tensors_in([args, kwargs]) if labels.plain or t.is_floating_point()]
    if not operands:
        labels.label_pinned([result])
        return
    zero = all(labels.of(t)[1] for t in operands)
    if not zero and not labels.plain:
        zero = _keep_apart(labels, name, operands)
    if name in JOINING and not labels.plain:
        _align(labels, [labels.of(t)[0] for t in operands], args, kwargs, name == "stack")
    whole = distinct(labels.of(t)[0] for t in operands)
    outputs = list(tensors_in([result]))
    moved = _moved(labels, outputs, func, args, kwargs)
    if labels.plain:
        # Cutting channels apart counts them, and would cut elsewhere once some are gone.
        sound = all(distinct([m]) == whole and len(varying(m)) <= 1 for m in moved)
    elif name in CUTTING:
        sound = _cut(labels, name, args, kwargs)
    else:
        sound = True
        _count(labels, name, args, kwargs, moved)
    if not sound:
        labels.pin(operands, counts(name, plain=labels.plain))
    for tensor, found in zip(outputs, moved, strict=True):
        labels.label(tensor, found, zero)


def _moved(
    labels: Labels, outputs: Sequence[Tensor], func: Callable, args: tuple, kwargs: dict
) -> list[Tensor]:
    """Return the labels of the outputs."""
    # As views of few numbers if it can be.
    for solid in (False, True):
        try:
            found = func(*_inside(labels, args, solid), **_inside(labels, kwargs, solid))
            return list(tensors_in([found]))
        except RuntimeError:
            continue
    # Such as an operation that integers do not have.
    return [pinned(t) for t in outputs]


def _inside(labels: Labels, value: object, solid: bool) -> object:
    """Return `value` with labels in the place of tensors of numbers."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        found = labels.of(value)[0]
        return found.contiguous() if solid else found
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_inside(labels, v, solid) for v in value)
    if isinstance(value, dict):
        return {k: _inside(labels, v, solid) for k, v in value.items()}
    return value


def _keep_apart(labels: Labels, name: str, operands: Sequence[Tensor]) -> bool:
    """Pin what isn't zero beside what is, for whose readers it is not; say whether all is zero."""
    zeros = [labels.of(t)[1] for t in operands]
    if not any(zeros):
        return False
    others = [t for t, zero in zip(operands, zeros, strict=True) if not zero]
    labels.pin(others, f"{name} puts what isn't zero without it beside what is")
    return True


def _align(
    labels: Labels, found: list[Tensor], args: tuple, kwargs: dict[str, object], stacks: bool
) -> None:
    """Join what is put together along another dimension: all must stay as wide as each other.

    Where the channels of one repeat along that dimension it is one of places, such as tokens: all
    places of the others, as of a parameter with numbers of its own for each, have these channels.
    """
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not stacks:
        dim %= found[0].dim()
        ways = [varying(f) for f in found]
        places = any(way and dim not in way for way in ways)
        found = [
            piece
            for f, way in zip(found, ways, strict=True)
            for piece in (f.unbind(dim) if places and dim in way else [f.select(dim, 0)])
        ]
    if any(varying(f) for f in found):
        for other in found[1:]:
            labels.join(*thin(found[0], other))


def _count(
    labels: Labels, name: str, args: tuple, kwargs: dict[str, object], moved: list[Tensor]
) -> None:
    """Write down which sizes of a reshaped tensor are a module's, and that it is rectangular."""
    for found in moved:
        if len(varying(found)) > 1:
            labels.cuts.append(Cut(thin(found)[0]))
    if name in SIZED and len(moved) == 1:
        dims, first, given = moved[0].dim(), 0, args[1:]
        if name == "unflatten":
            # Of the dimensions that there were.
            first = kwargs.get("dim", args[1] if len(args) > 1 else 0) % args[0].dim()
            given = args[2:]
        if len(given) == 1 and isinstance(given[0], list | tuple):
            given = given[0]
        for number, size in enumerate(given or kwargs.get("sizes", ())):
            if isinstance(size, Counted) and first + number < dims:
                labels.uses.append(Use(size.source, thin(moved[0])[0], first + number))


def _cut(labels: Labels, name: str, args: tuple, kwargs: dict[str, object]) -> bool:
    """Write down what cutting a tensor apart counts on; say whether it can be kept to."""
    found = labels.of(args[0])[0]
    if name == "__getitem__":
        return _index(labels, found, args[1])
    if name in ("unbind", "select"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return _fix(labels, found, dim % found.dim())
    if name == "narrow":
        dim, start, length = (
            kwargs.get(key, args[i] if len(args) > i else None)
            for i, key in ((1, "dim"), (2, "start"), (3, "length"))
        )
        return _slice(labels, found, dim % found.dim(), slice(start, start + length))
    given = next((v for k, v in kwargs.items() if k != "dim"), args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % found.dim()
    size = found.shape[dim]
    if dim not in varying(found):
        return True
    if isinstance(given, list | tuple) and name == "split":
        return _pieces(labels, found, dim, given)
    if not isinstance(given, int) or (name != "split" and size % given):
        return False
    length = given if name == "split" else size // given
    if isinstance(length, Counted):
        labels.uses.append(Use(length.source, found.narrow(dim, 0, length), dim))
    return _equal_pieces(labels, found, dim, length)


def _index(labels: Labels, found: Tensor, index: object) -> bool:
    """Write down what `x[index]` counts on."""
    items = index if isinstance(index, tuple) else (index,)
    count = sum(item is not None and item is not Ellipsis for item in items)
    sound, dim = True, 0
    for item in items:
        if item is Ellipsis:
            dim = found.dim() - (count - dim)
        elif item is not None:
            if isinstance(item, slice):
                sound &= _slice(labels, found, dim, item)
            elif isinstance(item, int):
                sound &= _fix(labels, found, dim)
            else:
                # A tensor of truths may stand for several dimensions.
                sound &= isinstance(item, Tensor) and item.dtype == torch.int64
                sound &= _fix_beside(labels, found, dim)
            dim += 1
    return sound


def _slice(labels: Labels, found: Tensor, dim: int, item: slice) -> bool:
    size = found.shape[dim]
    start, stop, step = item.indices(size)
    if dim not in varying(found) or (start, stop, step) == (0, size, 1):
        return True
    if step != 1 or stop <= start:
        return _fix_beside(labels, found, dim)
    ends = [end for end in (item.start, item.stop) if end is not None and end != 0]
    if all(isinstance(end, Counted) and end > 0 for end in ends):
        for end in ends:
            labels.uses.append(Use(end.source, found.narrow(dim, 0, end), dim))
        return True
    equal = start % (stop - start) == 0 and _equal_pieces(labels, found, dim, stop - start)
    return equal or _fix_beside(labels, found, dim)


def _pieces(labels: Labels, found: Tensor, dim: int, sizes: Sequence[int]) -> bool:
    """Write down pieces of given sizes: a module's numbers, or all alike."""
    if all(isinstance(size, Counted) for size in sizes):
        start = 0
        for size in sizes:
            labels.uses.append(Use(size.source, found.narrow(dim, start, size), dim))
            start += size
        return True
    equal = len(set(sizes)) == 1 and _equal_pieces(labels, found, dim, sizes[0])
    return equal or _fix_beside(labels, found, dim)


def _equal_pieces(labels: Labels, found: Tensor, dim: int, length: int) -> bool:
    """Write down pieces of one length, each of which must lose as many channels as the others."""
    if found.shape[dim] % length:
        return False
    pieces = thin(found)[0].unflatten(dim, (-1, int(length)))
    labels.cuts.append(Cut(pieces, (dim,)))
    return True


def _fix(labels: Labels, found: Tensor, dim: int) -> bool:
    """Write down that one index of a dimension is taken, whose size must stay."""
    if dim in varying(found):
        labels.cuts.append(Cut(thin(found)[0], (dim,)))
    return True


def _fix_beside(labels: Labels, found: Tensor, dim: int) -> bool:
    """Let a dimension keep its size, if channels may lie along another; say whether they may.

    So do places of tokens in embeddings of them, which the code cuts apart as it likes.
    """
    return varying(found) != [dim] and _fix(labels, found, dim)


# --------------------------------------------------------------------------------------------------
# When the forward pass is over
# --------------------------------------------------------------------------------------------------


def settle(labels: Labels) -> None:
    """Join what must go together for all tensors to stay rectangular."""
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
        # The fewer it takes the better; then what leaves more to choose from.
        best = min(along, key=lambda d: (_misfits(found, along, d), -found.shape[d], -d))
        for dim in along:
            if dim != best:
                changed |= labels.join_along(found, dim)
                found = labels.roots(found)
        along = varying(found)
    return changed


def _misfits(found: Tensor, along: list[int], dim: int) -> int:
    """Return how many labels differ from those of a tensor that varies along `dim` alone."""
    first = found
    for other in along:
        if other != dim:
            first = first.narrow(other, 0, 1)
    return int((found != first).sum())


def _make_countable(labels: Labels, use: Use) -> bool:
    """Pin what a module's number counts in a way that does not tell which channels are left."""
    found = labels.roots(use.labels)
    along = varying(found)
    if use.dim in along and len(along) > 1:
        return labels.pin_labels(thin(found)[0].flatten().tolist(), "a number counts it")
    return False


def numbers(labels: Labels) -> dict[tuple[str, str], np.ndarray]:
    """Return the labels that each number of a module counts; pin those that it counts twice."""
    while True:
        known: dict[tuple[str, str], np.ndarray] = {}
        changed = False
        for use in labels.uses:
            found = labels.roots(use.labels)
            if use.dim in varying(found):
                one = found.movedim(use.dim, 0).reshape(found.shape[use.dim], -1)[:, 0].numpy()
                before = known.setdefault(use.source, one)
                if len(before) != len(one) or (before != one).any():
                    both = [v for v in (*before.tolist(), *one.tolist()) if v != PINNED]
                    changed |= labels.pin_labels(both, "one number counts it and others")
        if not changed:
            return known
        settle(labels)
