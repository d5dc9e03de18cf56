"""What convolutions, linear layers, norms, sums and pooling do to the labels of channels."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.pruning.labels import PINNED, VOID, Cut, Labels, thin, varying

COMPUTED_WEIGHT = "a computed weight"
COMPUTED = f"{COMPUTED_WEIGHT} is no parameter; leave weight_norm and its like away"


def read(labels: Labels, tensor: Tensor, dim: int, reader: str) -> np.ndarray:
    """Return the labels along `dim`, one group over positions; pin what is not zero if removed."""
    found, zero = labels.of(tensor)
    along = _along(found, dim)
    if not zero:
        labels.pin([tensor], f"{reader} reads what isn't zero without it")
    if bool((along != along[:, :1]).any()):
        if labels.plain:
            labels.pin([tensor], f"{reader} reads it together with others")
            return np.full(tensor.shape[dim], PINNED)
        # What stands for a channel is any of its labels that is one.
        first = along.amax(dim=1, keepdim=True)
        labels.join(first.expand(along.shape), along)
        return labels.roots(first)[:, 0].numpy()
    return along[:, 0].numpy()


def _along(found: Tensor, dim: int) -> Tensor:
    """Return labels as [size of dim, other places], of places that all have the same one alone."""
    moved = found.movedim(dim, 0)
    few = thin(moved)[0]
    return few.expand(len(moved), *few.shape[1:]).reshape(len(moved), -1)


def convolve(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: object,
    **options: object,
) -> None:
    """Let the labels of `x` be the weight's columns, and give its rows labels of their own."""
    name = labels.names.get(id(weight), COMPUTED_WEIGHT)
    # Behind stride, padding and dilation.
    groups = rest[3] if len(rest) > 3 else options.get("groups", 1)
    # A batch of one; without a batch dimension nothing is known.
    columns = read(labels, x, 1, name) if x.dim() == weight.dim() else None
    multiple = weight.shape[0] // groups
    if columns is None or name not in labels.shapes:
        labels.pin([x], COMPUTED if name == COMPUTED_WEIGHT else f"{name} is no parameter")
        rows = np.full(weight.shape[0], PINNED)
    elif groups == 1:
        rows = labels.fresh(weight.shape[0])
        labels.note(labels.columns, weight, columns)
    elif weight.shape[1] == 1:
        # Depthwise: an output channel is its input channel.
        rows = np.repeat(columns, multiple)
    elif labels.plain:
        labels.pin([x], f"{name} is a grouped convolution, whose groups must stay alike")
        rows = labels.fresh(weight.shape[0])
        labels.pin_labels(rows.tolist(), "a grouped convolution's groups must stay alike")
    else:
        rows = _convolve_in_groups(labels, weight, columns, groups)
    labels.note(labels.rows, weight, rows)
    _note_bias(labels, bias, rows)
    if name in labels.shapes:
        labels.count(name, result[0, 0].numel())
    shape = (1, -1, *[1] * (result.dim() - 2))
    labels.label(result, torch.from_numpy(rows).view(shape).expand(result.shape))


def _convolve_in_groups(
    labels: Labels, weight: Tensor, columns: np.ndarray, groups: int
) -> np.ndarray:
    """Return the rows' labels of a convolution whose groups of channels must stay alike.

    Whole groups go, inputs and outputs, or, where there are fewer groups than inputs of each, the
    same inputs and the same outputs of each.
    """
    inputs, rows = columns.reshape(groups, -1), labels.fresh(weight.shape[0]).reshape(groups, -1)
    if (inputs == VOID).any():
        labels.pin_labels(columns.tolist(), "a grouped convolution reads zeros beside it")
    if groups >= weight.shape[1]:
        labels.join(inputs[:, :1].repeat(inputs.shape[1], 1), inputs)
        labels.join(inputs[:, :1].repeat(rows.shape[1], 1), rows)
    else:
        labels.join(inputs[:1].repeat(groups, 0), inputs)
        labels.join(rows[:1].repeat(groups, 0), rows)
        labels.note(labels.columns, weight, inputs[0])
    return rows.reshape(-1)


def multiply(
    labels: Labels, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    """Do to a linear layer what `convolve` does to a convolution; `x` has its channels last."""
    name = labels.names.get(id(weight))
    columns = read(labels, x, -1, name or COMPUTED_WEIGHT)
    rows = labels.fresh(weight.shape[0])
    if name is None:
        labels.pin([x], COMPUTED)
        labels.pin_labels(rows.tolist(), COMPUTED)
    else:
        labels.note(labels.columns, weight, columns)
        labels.note(labels.rows, weight, rows)
        labels.count(name, result[..., 0].numel())
    _note_bias(labels, bias, rows)
    labels.label(result, torch.from_numpy(rows).expand(result.shape))


def _note_bias(labels: Labels, bias: Tensor | None, rows: np.ndarray) -> None:
    if labels.note(labels.rows, bias, rows):
        return
    found, zero = labels.of(bias)
    if zero:
        labels.join(found.numpy(), rows)
    else:
        labels.pin_labels(rows.tolist(), "its bias is no parameter")


def normalise_batch(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: object,
    **options: object,
) -> None:
    """Tie BatchNorm's gamma and beta to the channels of `x`."""
    found, _ = labels.of(x)
    along = _along(found, 1)
    whole = not bool((along != along[:, :1]).any())
    if weight is None or bias is None or not whole:
        reason = "a BatchNorm without gamma and beta passes a constant; give it affine=True"
        labels.pin([x], reason if whole else "a BatchNorm mixes it with others")
        labels.label_pinned([result])
        return
    known = [labels.note(labels.rows, p, along[:, 0].numpy()) for p in (weight, bias)]
    if not all(known):
        labels.pin([x], "its gamma or beta is no parameter")
    labels.label(result, found)


def normalise_groups(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    """Let GroupNorm's groups of channels go as a whole, where there are not fewer than in each."""
    found, _ = labels.of(x)
    known = all(id(p) in labels.names for p in (weight, bias))
    few = groups < max(2, x.shape[1] // groups)
    if not known or few or set(varying(found)) - {1}:
        remedy = "; take as many groups as each has channels, or more" if few and known else ""
        labels.pin([x], f"group_norm mixes it with others{remedy}")
        labels.label_pinned([result])
        return
    blocks = found.unflatten(1, (groups, -1))
    labels.join_along(blocks, 2)
    found = labels.roots(found)
    for parameter in (weight, bias):
        labels.note(labels.rows, parameter, _along(found, 1)[:, 0].numpy())
    labels.label(result, found)


def normalise_each(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: object,
    **options: object,
) -> None:
    """Tie InstanceNorm's gamma and beta to the channels of `x`; without, zero stays zero."""
    if running_mean is None and weight is None:
        labels.label(result, *labels.of(x))
    elif running_mean is None:
        normalise_batch(labels, result, x, None, None, weight, bias)
    else:
        labels.pin([x], "an InstanceNorm with statistics passes a constant; take it without")
        labels.label_pinned([result])


def bend(labels: Labels, result: Tensor, x: Tensor, weight: Tensor) -> None:
    """Tie PReLU's slopes, one for each channel or one for all, to the channels of `x`."""
    found, zero = labels.of(x)
    if weight.numel() > 1:
        if set(varying(found)) - {1} or id(weight) not in labels.names:
            labels.pin([x], "prelu mixes it with others")
        labels.note(labels.rows, weight, _along(found, 1)[:, 0].numpy())
    labels.label(result, found, zero)


def normalise_layer(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    normalized_shape: object,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    """Tie LayerNorm's gamma and beta to the channels of `x`, which are last.

    Zeros go on to count in its mean and variance. Where it is every head's, as of queries, whole
    heads are one group and gamma and beta are all of theirs.
    """
    found, zero = labels.of(x)
    few = varying(found)
    last = x.dim() - 1
    if len(few) > 1 and last in few:
        labels.join_along(found, last)
    if last not in few or len(few) > 1:
        labels.label(result, labels.roots(found), zero=False)
        return
    along = _along(found, last)[:, 0].numpy()
    name = labels.names.get(id(weight), "")
    known = [name in labels.norms, bias is None or id(bias) in labels.names]
    if not (all(known) and zero):
        labels.pin([x], "layer_norm mixes it with others")
    labels.note(labels.rows, weight, along)
    labels.note(labels.rows, bias, along)
    labels.label(result, found)


def normalise_length(
    labels: Labels,
    result: Tensor,
    module: str,
    x: Tensor,
    p: float = 2.0,
    dim: int = 1,
    *rest: object,
    **options: object,
) -> None:
    """Let channels that are divided by the length of all of them stay what they are.

    Zeros add nothing to it. All others do, whoever reads them: that is noted for `module`.
    """
    found, zero = labels.of(x)
    own = thin(found)[0]
    labels.lengths.append((module, own, dim % x.dim()))
    if len(varying(own)) > 1:
        labels.cuts.append(Cut(own))
    labels.label(result, found, zero)


def meet(labels: Labels, result: Tensor, product: bool, *operands: object) -> None:
    """Join what an addition or a product brings together element by element."""
    found, zeros = [], []
    for operand in operands[:2]:
        if isinstance(operand, Tensor) and operand.dim():
            own, zero = labels.of(operand)
            zeros.append(zero)
            found.append(own)
        elif not product and float(operand) != 0:
            # A constant that is added leaves no zero.
            zeros.append(False)
    if not found:
        # Single numbers, such as a counter, have no channels.
        labels.label_pinned([result])
        return
    if len(found) == 2 and not labels.plain:
        found = _of_channels(labels, found)
    labelled = thin(*(own.expand(result.shape) for own in found))
    if len(labelled) == 2:
        labels.join(labelled[0].numpy(), labelled[1].numpy())
    joined = labelled[0]
    for other in labelled[1:]:
        # Where one operand is constant zero, the sum is the other; a product stays zero.
        joined = (
            torch.minimum(joined, other) if product else torch.where(joined == VOID, other, joined)
        )
        joined = torch.where(other == PINNED, PINNED, joined)
    labels.label(result, joined.expand(result.shape), any(zeros) if product else all(zeros))


def _of_channels(labels: Labels, found: list[Tensor]) -> list[Tensor]:
    """Return those of two operands' labels that have channels: one number is for all channels."""
    for one, other in (found, found[::-1]):
        single = not varying(one)
        dims = other.dim()
        shape = [1] * (dims - one.dim()) + list(one.shape[max(0, one.dim() - dims) :])
        if single and varying(other) and all(shape[d] == 1 for d in varying(other)):
            labels.pin_labels(thin(one)[0].unique().tolist(), "it is one for all channels")
            return [other]
    return found


def pool(labels: Labels, result: Tensor, x: Tensor) -> None:
    """Let a channel that is pooled over positions stay what it is."""
    found, zero = labels.of(x)
    # Batch and channel come first.
    kept = 2
    flat = thin(found)[0].flatten(kept) if found.dim() > kept else found
    if found.dim() != result.dim() or bool((flat != flat[..., :1]).any()):
        labels.pin([x], "pooling mixes it with others")
        labels.label_pinned([result])
        return
    corner = found[(..., *[slice(0, 1)] * (found.dim() - 2))]
    labels.label(result, corner.expand(result.shape), zero)


def reduce(
    labels: Labels, result: object, func: Callable, args: tuple, kwargs: dict[str, object]
) -> None:
    """Let a sum over positions be its channel's."""
    found, zero = labels.of(args[0])
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if dims is not None and isinstance(result, Tensor):
        low, high = found.amin(dims, keepdim=keep), found.amax(dims, keepdim=keep)
        if bool((low == high).all()):
            labels.label(result, low, zero)
            return
    labels.pin([args[0]], f"{func.__name__} mixes it with others")
    labels.label_pinned([result])


def pad(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
) -> None:
    """Let zeros around the positions of a channel belong to it; zero channels are void."""
    found, zero = labels.of(x)
    if mode != "constant" or value:
        labels.pin([x], "padding that isn't zero; pad with zeros")
        labels.label_pinned([result])
        return
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim, size = x.dim() - 1 - number, x.shape[-1 - number]
        places = torch.arange(-before, size + after)
        moved = found.index_select(dim, places.clamp(0, size - 1))
        along = varying(found)
        # Channels are where labels differ, or where there is no telling in the second dimension.
        if dim in along or (dim < 2 and (labels.plain or not along)):
            shape = [-1 if d == dim else 1 for d in range(x.dim())]
            inside = ((places >= 0) & (places < size)).view(shape)
            moved = torch.where(inside, moved, VOID)
        found = moved
    labels.label(result, found, zero)
