"""Rules for labels: reshaping, slicing, splitting, concatenating, pooling and padding.

Labels move as the data do. What the code relies on is recorded: tensors must stay rectangular when
channels are gone, and numbers in calls must count what is left.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunex_mpi.models.slim import flatten
from prunex_mpi.pruning.labels import (
    CUTTING,
    RESHAPING,
    VOID,
    Labels,
    Size,
    counts,
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
    # `cat` passes over an empty vector, with which a cache of keys begins.
    operands = [t for t in tensors_in(given) if t.is_floating_point() and t.shape != (0,)]
    if not operands:
        labels.label_pinned([result])
        return
    zero = all(labels.of(t)[1] for t in operands)
    if not zero:
        zero = _keep_apart(labels, name, operands)
    if name in JOINING:
        _align(labels, [labels.of(t)[0] for t in operands], args, kwargs, name == "stack")
    outputs = list(tensors_in([result]))
    moved = _moved(labels, outputs, func, args, kwargs)
    if name not in CUTTING:
        _request_sizes(labels, name, args, moved)
    elif not _cut(labels, name, args, kwargs):
        labels.pin(operands, counts(name))
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

    Where the labels of one do not vary along it, it holds positions, such as tokens: then all
    positions of the others have the same channels.
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


def _request_sizes(labels: Labels, name: str, args: tuple, moved: list[Tensor]) -> None:
    """Record that a reshaped tensor is rectangular, and which arguments are its sizes."""
    for found in moved:
        labels.keep_rectangular(found)
    if name not in RESHAPING or len(moved) != 1:
        return
    few, (given, named) = thin(moved[0])[0], labels.given
    leaves = flatten((given, named))
    # Sizes are all whole numbers but the dimension that `unflatten` begins with.
    places = [p for p, leaf in enumerate(leaves) if type(leaf) is int]
    first = 0
    if name == "unflatten":
        dim = named.get("dim", args[1] if len(args) > 1 else 0)
        first = dim % args[0].dim()
        places.remove(next(p for p in places if leaves[p] == dim))
    wanted: list[Size | None] = [None] * len(leaves)
    for dim, place in enumerate(places, first):
        # -1 is found by torch, and 1 is no channels.
        if leaves[place] > 1:
            wanted[place] = Size(few, dim, leaves[place])
    labels.request(wanted)


def _cut(labels: Labels, name: str, args: tuple, kwargs: dict[str, object]) -> bool:
    """Record what splitting a tensor relies on; return whether that can be satisfied."""
    found = labels.of(args[0])[0]
    if name == "__getitem__":
        return _index(labels, found, args[1])
    if name in ("unbind", "select"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return _fix(labels, found, dim % found.dim())
    if name == "narrow":
        dim, start, length = args[1:] if len(args) == 4 else (0, None, None)
        if not isinstance(start, int) or kwargs:
            return not varying(found)
        if (dim := dim % found.dim()) in varying(found):
            piece = Size(found, dim, length, start, start + length)
            labels.pieces.append(piece)
            labels.request([None, None, Size(found, dim, start, 0, start), piece])
            labels.keep_rectangular(found)
        return True
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % found.dim()
    if dim not in varying(found):
        return True
    # Labels are cut as the data were.
    how = {key: value for key, value in kwargs.items() if key != "dim"}
    cut = getattr(torch, name)(torch.arange(found.shape[dim]), *args[1:2], **how)
    ends = [0, *itertools.accumulate(map(len, cut))]
    sizes = [Size(found, dim, b - a, a, b) for a, b in itertools.pairwise(ends)]
    labels.pieces += sizes
    labels.request(sizes, pieces=True)
    labels.keep_rectangular(found)
    return True


def _index(labels: Labels, found: Tensor, index: object) -> bool:
    """Record what `x[index]` relies on; return whether that can be satisfied."""
    items = index if isinstance(index, tuple) else (index,)
    count = sum(item is not None and item is not Ellipsis for item in items)
    sound, dim = True, 0
    # Of the tensor itself.
    wanted: list[Size | None] = [None]
    for item in items:
        numbers: list[Size | None] = [None] * len(flatten(item))
        if item is Ellipsis:
            dim = found.dim() - (count - dim)
        elif item is not None:
            if isinstance(item, slice):
                sound &= _slice(labels, found, dim, item, numbers)
            elif isinstance(item, int):
                sound &= _fix(labels, found, dim)
            else:
                # A bool tensor may index several dimensions.
                sound &= isinstance(item, Tensor) and item.dtype == torch.int64
                sound &= _fix_beside(labels, found, dim)
            dim += 1
        wanted += numbers
    labels.request(wanted)
    return sound


def _slice(
    labels: Labels, found: Tensor, dim: int, item: slice, numbers: list[Size | None]
) -> bool:
    """Record in `numbers` what the ends of a slice count."""
    size = found.shape[dim]
    start, stop, step = item.indices(size)
    if dim not in varying(found) or (start, stop, step) == (0, size, 1):
        return True
    # For example the positions of embeddings, of which code takes any part.
    if step != 1 or stop <= start or varying(found) != [dim]:
        return _fix_beside(labels, found, dim)
    labels.pieces.append(Size(found, dim, stop - start, start, stop))
    for place, (end, count) in enumerate(((item.start, start), (item.stop, stop))):
        if end is not None and end < 0:
            numbers[place] = Size(found, dim, count - size, count)
        elif end is not None and 0 < count < size:
            numbers[place] = Size(found, dim, count, 0, count)
    return True


def _fix(labels: Labels, found: Tensor, dim: int) -> bool:
    """Record that one index of a dimension is taken, so that its size must stay."""
    if dim in varying(found):
        labels.keep_rectangular(found, (dim,))
    return True


def _fix_beside(labels: Labels, found: Tensor, dim: int) -> bool:
    """Keep the size of a dimension if channels may be along another; return whether they may."""
    return varying(found) != [dim] and _fix(labels, found, dim)


def pool(labels: Labels, result: Tensor, x: Tensor) -> None:
    """Pass on the labels of what is pooled over positions."""
    found, zero = labels.of(x)
    # Batch and channel come first.
    flat = thin(found)[0].flatten(2) if found.dim() > 2 else found
    if found.dim() != result.dim() or bool((flat != flat[..., :1]).any()):
        labels.keep([x], [result], "pooling mixes it with others")
        return
    corner = found[(..., *[slice(0, 1)] * (found.dim() - 2))]
    labels.label(result, corner.expand(result.shape), zero)


def reduce(
    labels: Labels, result: object, func: Callable, args: tuple, kwargs: dict[str, object]
) -> None:
    """Pass on the labels of a sum, mean or maximum over dimensions in which they become equal."""
    x, name = args[0], func.__name__
    # The places of the dimensions and of keepdim.
    first, last = {"norm": (2, 3), "vector_norm": (2, 3), "var": (1, 3), "std": (1, 3)}.get(
        name, (1, 2)
    )
    dims = kwargs.get("dim", args[first] if len(args) > first else None)
    keep = kwargs.get("keepdim", args[last] if len(args) > last else False)
    found, zero = labels.of(x)
    if dims is None or not isinstance(result, Tensor):
        labels.keep([x], [result], f"{name} mixes it with others")
        return
    over = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    along = set(varying(found))
    if len(along & over) == 1 and along <= over:
        (dim,) = along
        # Zeros change neither a sum nor a length.
        if labels.mix(x, dim, filled=name not in ("sum", "norm", "vector_norm")):
            labels.label_pinned([result])
            return
    else:
        for dim in along & over:
            labels.join_along(found, dim)
        found = labels.roots(found)
        if not over & set(varying(found)):
            labels.label(result, found.amin(tuple(over), keepdim=keep), zero)
            return
    labels.keep([x], [result], f"{name} mixes it with others")


def pad(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
) -> None:
    """Give what is around the positions of a channel its label, and VOID to added channels."""
    found, zero = labels.of(x)
    if value:
        labels.keep([x], [result], "padding that isn't zero; pad with zeros")
        return
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim, size = x.dim() - 1 - number, x.shape[-1 - number]
        places = torch.arange(-before, size + after)
        moved = found.index_select(dim, places.clamp(0, size - 1))
        along = varying(found)
        if mode != "constant" and dim in along and (before, after) != (0, 0):
            labels.keep([x], [result], f"padding by {mode} mixes it with others")
            return
        # The channel dimension is where labels vary, or the second where they don't.
        if mode == "constant" and (dim in along or (dim < 2 and not along)):
            shape = [-1 if d == dim else 1 for d in range(x.dim())]
            inside = ((places >= 0) & (places < size)).view(shape)
            moved = torch.where(inside, moved, VOID)
        found = moved
    labels.label(result, found, zero)
