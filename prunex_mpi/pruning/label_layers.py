"""Rules for labels: convolutions, linear layers, norms, additions, products, pooling, attention.

Each function labels the result of one torch function, and joins or pins groups of its arguments.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.pruning.labels import PINNED, VOID, Cut, Labels, first_along, mixes, thin, varying

COMPUTED_WEIGHT = "a computed weight"
COMPUTED = f"{COMPUTED_WEIGHT} is no parameter; leave weight_norm and its like away"


def read(labels: Labels, tensor: Tensor, dim: int, reader: str) -> np.ndarray:
    """Return the labels along `dim` of what the weight `reader` reads, [size of dim].

    All positions of a channel become one group; what is not zero without its group is pinned.
    """
    found, zero = labels.of(tensor)
    along = _along(found, dim)
    if not zero:
        labels.pin([tensor], f"{reader} reads what isn't zero without it")
    if bool((along != along[:, :1]).any()):
        if labels.plain or len(along) == 1:
            how = "all of them as one channel" if len(along) == 1 else "it together with others"
            labels.pin([tensor], f"{reader} reads {how}")
            return np.full(tensor.shape[dim], PINNED)
        # Any label of a channel that is not VOID or PINNED may represent it.
        first = along.amax(dim=1, keepdim=True)
        labels.join(first.expand(along.shape), along)
        return labels.roots(first)[:, 0].numpy()
    return along[:, 0].numpy()


def _along(found: Tensor, dim: int) -> Tensor:
    """Return labels as [size of dim, other positions], without dimensions that are expanded."""
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
    """Read the labels of `x` as the weight's columns and give its rows new ones.

    `rest` begins with stride, padding, dilation and groups.
    """
    name = labels.names.get(id(weight), COMPUTED_WEIGHT)
    groups = rest[3] if len(rest) > 3 else options.get("groups", 1)
    # Without a batch dimension nothing is known.
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
    """Return the rows' labels of a grouped convolution, whose groups must stay of equal size.

    Whole groups are removable, inputs and outputs; where there are fewer groups than inputs of
    each, the same inputs and the same outputs of every group are.
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
    """Label a linear layer as `convolve` does a convolution; `x` has its channels last."""
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


def multiply_transposed(
    labels: Labels, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    """Label x @ weight + bias, where the parameter `weight` is [inputs, outputs]."""
    name = labels.names[id(weight)]
    inputs, outputs = read(labels, x, -1, name), labels.fresh(weight.shape[1])
    labels.transposed.add(name)
    labels.note(labels.rows, weight, inputs)
    labels.note(labels.columns, weight, outputs)
    labels.count(name, result[..., 0].numel())
    _note_bias(labels, bias, outputs)
    labels.label(result, torch.from_numpy(outputs).expand(result.shape))


def add_product(
    labels: Labels, result: Tensor, bias: Tensor, x: Tensor, weight: Tensor, **options: object
) -> None:
    """Label addmm, which some linear layers are made of."""
    if id(weight) in labels.names and bias.dim() == 1:
        multiply_transposed(labels, result, x, weight, bias)
    else:
        labels.keep([bias, x, weight], [result], "addmm mixes it with others")


def embed(
    labels: Labels,
    result: Tensor,
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *rest: object,
    **options: object,
) -> None:
    """Give the channels of an embedding, the columns of its weight, new labels."""
    name = labels.names.get(id(weight))
    if name is None or max_norm is not None:
        labels.label_pinned([result])
        return
    columns = labels.fresh(weight.shape[1])
    labels.embeddings.add(name)
    labels.note(labels.columns, weight, columns)
    # Looking up takes no multiplication.
    labels.count(name, 0)
    labels.label(result, torch.from_numpy(columns).expand(result.shape))


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
        labels.keep([x], [result], reason if whole else "a BatchNorm mixes it with others")
        return
    known = [labels.note(labels.rows, p, first_along(found, 1)) for p in (weight, bias)]
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
    """Join each group of GroupNorm, unless there are fewer groups than channels per group."""
    found, _ = labels.of(x)
    known = all(id(p) in labels.names for p in (weight, bias))
    few = groups < max(2, x.shape[1] // groups)
    if not known or few or set(varying(found)) - {1}:
        hint = "; take as many groups as each has channels, or more" if few and known else ""
        labels.keep([x], [result], f"group_norm mixes it with others{hint}")
        return
    blocks = found.unflatten(1, (groups, -1))
    labels.join_along(blocks, 2)
    found = labels.roots(found)
    for parameter in (weight, bias):
        labels.note(labels.rows, parameter, first_along(found, 1))
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
    """Tie InstanceNorm's gamma and beta to the channels of `x`; without them zero stays zero."""
    if running_mean is None and weight is None:
        labels.label(result, *labels.of(x))
    elif running_mean is None:
        normalise_batch(labels, result, x, None, None, weight, bias)
    else:
        reason = "an InstanceNorm with statistics passes a constant; take it without"
        labels.keep([x], [result], reason)


def bend(labels: Labels, result: Tensor, x: Tensor, weight: Tensor) -> None:
    """Tie PReLU's slopes, unless it is one for all, to the channels of `x`."""
    found, zero = labels.of(x)
    if weight.numel() > 1:
        if set(varying(found)) - {1} or id(weight) not in labels.names:
            labels.pin([x], "prelu mixes it with others")
        labels.note(labels.rows, weight, first_along(found, 1))
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

    Zeros go on to count in its mean and variance. Where heads share one, as in a norm of queries,
    each head becomes one group, and gamma and beta stay.
    """
    found, zero = labels.of(x)
    few = varying(found)
    last = x.dim() - 1
    if len(few) > 1 and last in few:
        labels.join_along(found, last)
    if last not in few or len(few) > 1:
        labels.label(result, labels.roots(found), zero=False)
        return
    along = first_along(found, last)
    name = labels.names.get(id(weight), "")
    known = [name in labels.norms, bias is None or id(bias) in labels.names]
    if not (all(known) and zero):
        labels.pin([x], "layer_norm mixes it with others")
    labels.note(labels.rows, weight, along)
    labels.note(labels.rows, bias, along)
    labels.label(result, found)


def normalise_squares(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    normalized_shape: object,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> None:
    """Label RMSNorm as `normalise_layer` does LayerNorm; zeros stay zero."""
    found, zero = labels.of(x)
    few, last = varying(found), x.dim() - 1
    if len(few) > 1 and last in few:
        labels.join_along(found, last)
    if last in few and len(few) == 1:
        if labels.names.get(id(weight), "") not in labels.norms or not zero:
            labels.pin([x], mixes("rms_norm", plain=labels.plain))
        labels.note(labels.rows, weight, first_along(found, last))
    labels.label(result, labels.roots(found), zero)


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
    """Pass on the labels of F.normalize's input, and record that `module` reads all channels.

    Zeros add nothing to the length; any other channel does.
    """
    found, zero = labels.of(x)
    own = thin(found)[0]
    labels.lengths.append((module, own, dim % x.dim()))
    if len(varying(own)) > 1:
        labels.cuts.append(Cut(own))
    labels.label(result, found, zero)


def meet(labels: Labels, result: Tensor, product: bool, *operands: object) -> None:
    """Join the groups that an addition or a product combines element by element."""
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
        # Scalars, such as a counter, have no channels.
        labels.label_pinned([result])
        return
    if len(found) == 2 and not labels.plain:
        scaled = _keep_fixed(labels, found) if product else None
        if scaled is not None:
            labels.label(result, scaled.expand(result.shape), any(zeros))
            return
        shared = _find_shared(labels, found, operands)
        if shared is not None:
            one = found.pop(shared)
            labels.pin_labels(thin(one)[0].unique().tolist(), "it is the same for all channels")
            # It stays where a channel is removed.
            zeros[shared] = False
    labelled = thin(*(own.expand(result.shape) for own in found))
    if len(labelled) == 2:
        labels.join(labelled[0].numpy(), labelled[1].numpy())
    joined = labelled[0]
    for other in labelled[1:]:
        # Where one operand is constant zero, a sum is the other operand and a product is zero.
        joined = (
            torch.minimum(joined, other) if product else torch.where(joined == VOID, other, joined)
        )
        joined = torch.where(other == PINNED, PINNED, joined)
    labels.label(result, joined.expand(result.shape), any(zeros) if product else all(zeros))


def _keep_fixed(labels: Labels, found: list[Tensor]) -> Tensor | None:
    """Return the labels of a product with what stays, such as the angles of rotary positions.

    Where that is the same along some dimension of channels, as along heads, all channels along the
    other dimensions, whose sizes it has, become one group. None where there is no such dimension.
    """
    for one, other in (found, found[::-1]):
        shape = _shape_beside(one, other)
        along = varying(other)
        whole = [d for d in along if shape[d] != 1]
        if whole and len(whole) < len(along) and bool((thin(one)[0] == PINNED).all()):
            for dim in whole:
                labels.join_along(other, dim)
            return labels.roots(other)
    return None


def _shape_beside(one: Tensor, other: Tensor) -> list[int]:
    """Return the shape of `one` in the dimensions of `other`."""
    dims = other.dim()
    return [1] * (dims - one.dim()) + list(one.shape[max(0, one.dim() - dims) :])


def _find_shared(labels: Labels, found: list[Tensor], operands: tuple[object, ...]) -> int | None:
    """Return which of two operands is broadcast along the other's channels, parameters first."""
    for i in sorted((0, 1), key=lambda i: id(operands[i]) not in labels.names):
        one, other = found[i], found[1 - i]
        shape, along = _shape_beside(one, other), varying(other)
        if along and all(shape[d] == 1 for d in along):
            return i
    return None


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
    """Pass on the labels of a sum, mean or maximum over dimensions in which they are equal."""
    found, zero = labels.of(args[0])
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if dims is not None and isinstance(result, Tensor):
        low, high = found.amin(dims, keepdim=keep), found.amax(dims, keepdim=keep)
        if bool((low == high).all()):
            labels.label(result, low, zero)
            return
    labels.keep([args[0]], [result], f"{func.__name__} mixes it with others")


def pad(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
) -> None:
    """Give zeros around the positions of a channel its label, and VOID to added channels."""
    found, zero = labels.of(x)
    if mode != "constant" or value:
        labels.keep([x], [result], "padding that isn't zero; pad with zeros")
        return
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim, size = x.dim() - 1 - number, x.shape[-1 - number]
        places = torch.arange(-before, size + after)
        moved = found.index_select(dim, places.clamp(0, size - 1))
        along = varying(found)
        # The channel dimension is where labels vary, or the second where they don't.
        if dim in along or (dim < 2 and (labels.plain or not along)):
            shape = [-1 if d == dim else 1 for d in range(x.dim())]
            inside = ((places >= 0) & (places < size)).view(shape)
            moved = torch.where(inside, moved, VOID)
        found = moved
    labels.label(result, found, zero)


# --------------------------------------------------------------------------------------------------
# Attention: a head goes as a whole, out of queries, keys and values
# --------------------------------------------------------------------------------------------------

MIXES = "attention mixes it with others"


def attend_module(
    labels: Labels,
    result: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    *args: object,
    **options: object,
) -> None:
    """Label nn.MultiheadAttention: each head is a group, and so is each channel it reads."""
    weight, bias, bias_k, bias_v, zero_attn, _, out_weight, out_bias = args[:8]
    labels.label_pinned([result])
    plain = weight is not None and bias_k is None and bias_v is None and not zero_attn
    if labels.plain or not plain:
        labels.pin([query, key, value], "self-attention keeps its width")
    if not (plain and id(weight) in labels.names and id(out_weight) in labels.names):
        return
    size = embed_dim // heads
    by_head = labels.fresh(heads)
    by_row = np.tile(np.repeat(by_head, size), 3)
    labels.note(labels.rows, weight, by_row)
    labels.note(labels.rows, bias, by_row)
    labels.note(labels.columns, out_weight, np.repeat(by_head, size))
    rows = labels.fresh(out_weight.shape[0])
    labels.note(labels.rows, out_weight, rows)
    labels.note(labels.rows, out_bias, rows)
    names = [labels.names[id(p)] for p in (weight, out_weight)]
    for name in names:
        labels.count(name, query.numel() // query.shape[-1])
    mask = options.get("attn_mask")
    if mask is not None and mask.dim() > 2:
        labels.pin_labels(by_head.tolist(), "a mask of each head counts them")
    if labels.plain:
        labels.pin_labels(rows.tolist(), "self-attention keeps its width")
        return
    for x in dict.fromkeys((query, key, value)):
        labels.note(labels.columns, weight, read(labels, x, -1, names[0]))
    output = result[0]
    labels.label(output, torch.from_numpy(rows).expand(output.shape))


def attend(
    labels: Labels,
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: object,
    **options: object,
) -> None:
    """Label scaled_dot_product_attention of tensors [..., heads, positions, channels]."""
    found = [labels.of(x)[0] for x in (query, key, value)]
    zero = labels.of(value)[1]
    if options.get("enable_gqa"):
        # So many heads of queries have the same keys and values.
        sharing = query.shape[-3] // key.shape[-3]
        found[1:] = [f.repeat_interleave(sharing, dim=-3) for f in found[1:]]
    head = _join_heads(labels, found, result)
    if head is None:
        # Without heads, the scale of the product depends on the number of channels.
        labels.pin([query, key], MIXES)
        _keep_columns(labels, result, value)
        return
    if attn_mask is not None and attn_mask.is_floating_point():
        own = labels.of(attn_mask)[0]
        if varying(own):
            labels.join(*thin(*torch.broadcast_tensors(head, own)))
    labels.label(result, head.expand(result.shape), zero)


def multiply_matrices(labels: Labels, result: Tensor, first: Tensor, second: Tensor) -> None:
    """Label a product of matrices [..., n, k] and [..., k, m]."""
    if id(second) in labels.names and second.dim() == 2:
        multiply_transposed(labels, result, first, second)
        return
    if first.dim() > 1 and second.dim() > 1:
        found, zeros = zip(*(labels.of(x) for x in (first, second)), strict=True)
        head = _join_heads(labels, list(found), result)
        if head is not None:
            labels.label(result, head.expand(result.shape), any(zeros))
            return
        if not varying(found[0]):
            _keep_columns(labels, result, second)
            return
    labels.keep([first, second], [result], "a product of matrices mixes it with others")


def _join_heads(labels: Labels, found: list[Tensor], result: Tensor) -> Tensor | None:
    """Join all channels of each head; return labels [..., heads, 1, 1], None without heads."""
    batch = result.shape[:-2]
    wide = [f.expand(*batch, *f.shape[-2:]) for f in found]
    dims = {d for f in wide for d in varying(f) if d < len(batch)}
    if not dims:
        return None
    heads = None
    for own, f in zip(found, wide, strict=True):
        # An operand that all heads share, such as a mask of positions, belongs to none.
        sizes = [1] * (f.dim() - own.dim()) + list(own.shape)
        if not varying(own) and all(sizes[d] == 1 for d in dims):
            continue
        first = f[..., :1, :1]
        labels.join(*thin(first.expand(f.shape), f))
        if heads is not None:
            labels.join(*thin(heads, first))
        heads = first
    return labels.roots(heads)


def _keep_columns(labels: Labels, result: Tensor, second: Tensor) -> None:
    """Pass on the labels of a product's second factor where they vary along its columns only."""
    found, zero = labels.of(second)
    if set(varying(found)) <= {second.dim() - 1}:
        labels.label(result, found.narrow(-2, 0, 1).expand(result.shape), zero)
        return
    labels.keep([second], [result], MIXES)


def soften(labels: Labels, result: Tensor, x: Tensor, dim: int | None = None, **rest) -> None:
    """Pass on the labels of a softmax that is not over channels; zeros do not stay zero."""
    found, _ = labels.of(x)
    if dim is None or dim % x.dim() in varying(found):
        labels.keep([x], [result], "softmax mixes it with others")
        return
    labels.label(result, found, zero=False)
