"""Rules for labels: reshaping, slicing, splitting and concatenating.

Labels move as the data do. What the code relies on is recorded for `coupling.settle`: tensors must
stay rectangular when channels are gone, and numbers that a module keeps must count what is left.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunex_mpi.pruning.labels import (
    CUTTING,
    RESHAPING,
    Counted,
    Cut,
    Labels,
    Use,
    counts,
    distinct,
    pinned,
    tensors_in,
    thin,
    varying,
)

# The second operand gives nothing but its shape.
TEMPLATES = ("expand_as", "view_as", "reshape_as")
JOINING = ("cat", "concat", "stack")


def shape(
    labels: Labels, result: object, func: Callable, args: tuple, kwargs: dict[str, object]
) -> None:
    """Label the results of `func` by applying it to the labels of its arguments."""
    name = func.__name__
    # Index tensors have no channels.
    given = args[:1] if name in TEMPLATES else [args, kwargs]
    operands = [t for t in tensors_in(given) if labels.plain or t.is_floating_point()]
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
        # Splitting channels would split elsewhere once some are gone.
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
    """Return the labels of the outputs, as expanded views where possible."""
    for solid in (False, True):
        try:
            found = func(*_inside(labels, args, solid), **_inside(labels, kwargs, solid))
            return list(tensors_in([found]))
        except RuntimeError:
            continue
    # For example an operation that integers do not have.
    return [pinned(t) for t in outputs]


def _inside(labels: Labels, value: object, solid: bool) -> object:
    """Return `value` with float tensors replaced by their labels."""
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
    """Pin operands that aren't zero without their group, unless none is; return whether any is."""
    zeros = [labels.of(t)[1] for t in operands]
    if not any(zeros):
        return False
    others = [t for t, zero in zip(operands, zeros, strict=True) if not zero]
    labels.pin(others, f"{name} puts what isn't zero without it beside what is")
    return True


def _align(
    labels: Labels, found: list[Tensor], args: tuple, kwargs: dict[str, object], stacks: bool
) -> None:
    """Join the channels of tensors concatenated along another dimension: widths must stay equal.

    Where the labels of one do not vary along that dimension, it holds positions, such as tokens:
    then all positions of the others, such as a parameter of embeddings, have the same channels.
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
    """Record that a reshaped tensor is rectangular, and which sizes are a module's numbers."""
    for found in moved:
        if len(varying(found)) > 1:
            labels.cuts.append(Cut(thin(found)[0]))
    if name in RESHAPING and len(moved) == 1:
        dims, first, given = moved[0].dim(), 0, args[1:]
        if name == "unflatten":
            # `dim` counts the dimensions before.
            first = kwargs.get("dim", args[1] if len(args) > 1 else 0) % args[0].dim()
            given = args[2:]
        if len(given) == 1 and isinstance(given[0], list | tuple):
            given = given[0]
        for number, size in enumerate(given or kwargs.get("sizes", ())):
            if isinstance(size, Counted) and first + number < dims:
                labels.uses.append(Use(size.source, thin(moved[0])[0], first + number))


def _cut(labels: Labels, name: str, args: tuple, kwargs: dict[str, object]) -> bool:
    """Record what splitting a tensor relies on; return whether that can be satisfied."""
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
    """Record what `x[index]` relies on; return whether that can be satisfied."""
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
                # A bool tensor may index several dimensions.
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
    """Record pieces of given sizes, which are a module's numbers or all equal."""
    if all(isinstance(size, Counted) for size in sizes):
        start = 0
        for size in sizes:
            labels.uses.append(Use(size.source, found.narrow(dim, start, size), dim))
            start += size
        return True
    equal = len(set(sizes)) == 1 and _equal_pieces(labels, found, dim, sizes[0])
    return equal or _fix_beside(labels, found, dim)


def _equal_pieces(labels: Labels, found: Tensor, dim: int, length: int) -> bool:
    """Record pieces of equal length, each of which must lose as many channels as the others."""
    if found.shape[dim] % length:
        return False
    pieces = thin(found)[0].unflatten(dim, (-1, int(length)))
    labels.cuts.append(Cut(pieces, (dim,)))
    return True


def _fix(labels: Labels, found: Tensor, dim: int) -> bool:
    """Record that one index of a dimension is taken, so that its size must stay."""
    if dim in varying(found):
        labels.cuts.append(Cut(thin(found)[0], (dim,)))
    return True


def _fix_beside(labels: Labels, found: Tensor, dim: int) -> bool:
    """Keep the size of a dimension if channels may be along another; return whether they may.

    For example the positions of embeddings, of which code takes any part.
    """
    return varying(found) != [dim] and _fix(labels, found, dim)
