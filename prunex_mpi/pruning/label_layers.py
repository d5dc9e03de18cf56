"""Rules for labels: convolutions, linear layers, norms, attention, products of matrices.

Each function labels the result of one torch function, and joins or pins groups of its arguments.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.models.slim import flatten
from prunex_mpi.pruning.labels import (
    PINNED,
    VOID,
    Labels,
    Mixed,
    Standardised,
    distinct,
    first_along,
    mixes,
    thin,
    turned,
    varying,
)

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
        if len(along) == 1:
            labels.pin([tensor], f"{reader} reads all of them as one channel")
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
    """Read the labels of `x` as the weight's columns and give its rows new ones."""
    if _convolve_channels(labels, result, x, weight):
        return
    made = labels.standardised.get(id(weight))
    weight = weight if made is None or made.mixed is None else made.weight
    name = labels.names.get(id(weight), COMPUTED_WEIGHT)
    # Behind stride, padding and dilation.
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
    else:
        rows = _convolve_in_groups(labels, weight, columns, groups)
    labels.note(labels.rows, weight, rows)
    _note_bias(labels, bias, rows)
    if made is not None:
        _note_standardised(labels, made, name, rows)
    if name in labels.shapes:
        labels.count(name, result[0, 0].numel())
    shape = (1, -1, *[1] * (result.dim() - 2))
    labels.label(result, torch.from_numpy(rows).view(shape).expand(result.shape))


def reshape_weight(labels: Labels, result: Tensor, x: Tensor) -> bool:
    """Follow a weight [outputs, ...] to [1, outputs, fan-in] and back; return whether it is one."""
    made = labels.standardised.get(id(x))
    if made is not None and result.shape == made.weight.shape:
        labels.standardised[id(result)] = replace(made, tensor=result)
    elif id(x) in labels.names and x.dim() > 2 and result.shape == (1, len(x), x[0].numel()):
        labels.standardised[id(result)] = Standardised(result, x)
    else:
        return False
    labels.label_pinned([result])
    return True


def _note_standardised(labels: Labels, made: Standardised, name: str, rows: np.ndarray) -> None:
    """Tie the gain of a standardised weight to its rows, and let it be filled up for its fan-in."""
    if made.gain is not None:
        found, zero = labels.of(made.gain)
        if zero:
            labels.join(found.numpy(), rows)
        else:
            labels.pin_labels(rows.tolist(), "its gain is no parameter")
    if made.mixed is not None and (columns := labels.columns.get(name)) is not None:
        fan_in = np.repeat(columns, made.weight[0, 0].numel())
        labels.mixed.append(replace(made.mixed, labels=torch.from_numpy(fan_in).view(1, 1, -1)))


def _convolve_channels(labels: Labels, result: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Label a convolution along channels, as over their means; return whether it is one."""
    found = labels.of(x)[0]
    along = varying(found)
    if len(along) != 1 or not 1 < along[0] == result.dim() - 1:
        return False
    if result.shape[-1] != x.shape[-1] or not labels.mix(x, -1, back=along[0]):
        return False
    _keep_layer(labels, weight, "it is applied along channels")
    # Each gets something from its neighbours.
    labels.label(result, found.narrow(1, 0, 1).expand(result.shape), zero=False)
    return True


def _keep_layer(labels: Labels, weight: Tensor, reason: str) -> None:
    """Keep the outputs of a layer that makes no channels."""
    rows = labels.fresh(weight.shape[0])
    labels.pin_labels(rows.tolist(), reason)
    labels.note(labels.rows, weight, rows)


def _convolve_in_groups(
    labels: Labels, weight: Tensor, columns: np.ndarray, groups: int
) -> np.ndarray:
    """Return the rows' labels of a grouped convolution: whole groups are removable.

    Where there are fewer groups than inputs of each, the same inputs and outputs of all are.
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
    found, zero = labels.of(x)
    along = varying(found)
    if name and along and x.dim() - 1 not in along:
        # Over positions, each channel by itself.
        _keep_layer(labels, weight, "it is applied along positions")
        labels.count(name, result[..., 0].numel())
        labels.label(result, found.narrow(-1, 0, 1).expand(result.shape), zero and bias is None)
        return
    columns = read(labels, x, -1, name or COMPUTED_WEIGHT)
    rows = labels.fresh(weight.shape[0])
    if name is None:
        labels.pin([x], COMPUTED)
        labels.pin_labels(rows.tolist(), COMPUTED)
    else:
        labels.note(labels.columns, weight, columns)
        labels.note(labels.rows, weight, rows)
        labels.count(name, result[..., 0].numel())
    _label_outputs(labels, result, bias, rows)


def _label_outputs(labels: Labels, result: Tensor, bias: Tensor | None, made: np.ndarray) -> None:
    _note_bias(labels, bias, made)
    labels.label(result, torch.from_numpy(made).expand(result.shape))


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
    _label_outputs(labels, result, bias, outputs)


def add_product(
    labels: Labels, result: Tensor, bias: Tensor, x: Tensor, weight: Tensor, **options: object
) -> None:
    """Label addmm, which some linear layers are made of."""
    if bias.dim() != 1 or not multiply_by(labels, result, x, weight, bias):
        labels.keep([bias, x, weight], [result], "addmm mixes it with others")


def multiply_by(
    labels: Labels, result: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None
) -> bool:
    """Label x @ matrix + bias where that is a linear layer; return whether it is one."""
    if id(matrix) in labels.names and matrix.dim() == 2:
        multiply_transposed(labels, result, x, matrix, bias)
    elif (weight := turned(labels.weights, matrix)) is not None:
        multiply(labels, result, x, weight, bias)
    else:
        return False
    return True


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
    _label_outputs(labels, result, None, columns)


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
    """Tie BatchNorm's gamma and beta to the channels of `x`, which may be a weight's outputs."""
    made = labels.standardised.get(id(x))
    if made is not None and mean is None and var is None and bias is None and labels.site[1]:
        numbers = (None,) * len(flatten(labels.given))
        mixed = Mixed(labels.site, 0, None, 2, True, 2, numbers)
        labels.standardised[id(result)] = replace(made, tensor=result, gain=weight, mixed=mixed)
        labels.label_pinned([result])
        return
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
    found, zero = labels.of(x)
    known = all(id(p) in labels.names for p in (weight, bias))
    if groups == 1 and varying(found) == [1] and labels.names.get(id(weight)) in labels.norms:
        # As LayerNorm over channels and positions.
        if not zero or not (bias is None or known):
            labels.pin([x], "group_norm mixes it with others")
    else:
        few = groups < max(2, x.shape[1] // groups)
        if not known or few or set(varying(found)) - {1}:
            hint = "; take as many groups as each has channels, or more" if few and known else ""
            labels.keep([x], [result], f"group_norm mixes it with others{hint}")
            return
        labels.join_along(found.unflatten(1, (groups, -1)), 2)
        found = labels.roots(found)
    for parameter in (weight, bias):
        labels.note(labels.rows, parameter, first_along(found, 1))
    labels.label(result, found)


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
    bias: Tensor | float | None = None,
    eps: float = 1e-5,
) -> None:
    """Tie LayerNorm's or RMSNorm's gamma and beta to the channels of `x`, which are last.

    Zeros go on to count in its mean and variance. Where heads share one, as in a norm of queries,
    each head becomes one group, and gamma and beta stay.
    """
    found, zero = labels.of(x)
    along, last = varying(found), x.dim() - 1
    centred = labels.operation == "layer_norm"
    # RMSNorm has its epsilon there.
    bias = bias if centred else None
    if along == [last]:
        known = bias is None or id(bias) in labels.names
        if labels.names.get(id(weight), "") not in labels.norms or not (known and zero):
            labels.pin([x], mixes(labels.operation))
        for parameter in (weight, bias):
            labels.note(labels.rows, parameter, first_along(found, last))
    elif last in along:
        labels.join_along(found, last)
    labels.label(result, found, zero=along == [last] if centred else zero)


def normalise_length(
    labels: Labels,
    result: Tensor,
    x: Tensor,
    p: float = 2.0,
    dim: int = 1,
    *rest: object,
    **options: object,
) -> None:
    """Pass on the labels of F.normalize's input; zeros add nothing to the length, others do."""
    found, zero = labels.of(x)
    if dim % x.dim() in varying(found) and not labels.mix(x, dim, filled=False):
        labels.keep([x], [result], "normalize mixes it with others")
        return
    labels.label(result, found, zero)


# --------------------------------------------------------------------------------------------------
# Attention, of which a head goes as a whole, and products of matrices
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
    known = id(weight) in labels.names and id(out_weight) in labels.names
    if not (plain and known):
        labels.pin([query, key, value], "self-attention keeps its width")
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
    head, apart = _join_heads(labels, found, result)
    if head is None:
        # Without heads, the scale of the product depends on the number of channels.
        labels.pin([query, key], MIXES)
        _keep_columns(labels, result, value)
        return
    if attn_mask is not None and attn_mask.is_floating_point():
        own = labels.of(attn_mask)[0]
        if varying(own):
            labels.join(*thin(*torch.broadcast_tensors(head, own)))
    labels.label(result, head.expand(result.shape), zero and apart[2])


def multiply_matrices(labels: Labels, result: Tensor, first: Tensor, second: Tensor) -> None:
    """Label a product of matrices [..., n, k] and [..., k, m]."""
    if multiply_by(labels, result, first, second):
        return
    if first.dim() > 1 and second.dim() > 1:
        found, zeros = zip(*(labels.of(x) for x in (first, second)), strict=True)
        head, apart = _join_heads(labels, list(found), result)
        if head is not None:
            # What all heads share is not zero where one is gone.
            zero = any(z and own for z, own in zip(zeros, apart, strict=True))
            labels.label(result, head.expand(result.shape), zero)
            return
        ways = [varying(f) for f in found]
        if not ways[0]:
            _keep_columns(labels, result, second)
            return
        if ways[0] == [first.dim() - 2] and not ways[1]:
            labels.pin([second], "all channels are multiplied by it")
            labels.label(result, found[0].narrow(-1, 0, 1).expand(result.shape), zeros[0])
            return
        if (
            ways == [[first.dim() - 1], [second.dim() - 2]]
            # A sum over channels, to which those of zero add nothing.
            and all([labels.mix(first, -1, filled=False), labels.mix(second, -2, filled=False)])
        ):
            inner = [first_along(f, d[0]) for f, d in zip(found, ways, strict=True)]
            labels.join(*inner)
            labels.label_pinned([result])
            return
    labels.keep([first, second], [result], "a product of matrices mixes it with others")


def _join_heads(
    labels: Labels, found: list[Tensor], result: Tensor
) -> tuple[Tensor | None, list[bool]]:
    """Join all channels of each head, and keep those that all heads share.

    Return labels [..., heads, 1, 1], None without heads, and which operands have some of their own.
    """
    batch = result.shape[:-2]
    wide = [f.expand(*batch, *f.shape[-2:]) for f in found]
    dims = {d for f in wide for d in varying(f) if d < len(batch)}
    heads, apart = None, []
    for own, f in zip(found, wide, strict=True):
        sizes = [1] * (f.dim() - own.dim()) + list(own.shape)
        apart.append(bool(dims) and any(sizes[d] != 1 for d in dims))
        if not apart[-1]:
            continue
        first = f[..., :1, :1]
        labels.join(*thin(first.expand(f.shape), f))
        if heads is not None:
            labels.join(*thin(heads, first))
        heads = first
    if heads is None:
        return None, apart
    # For example a table of relative places.
    for own, mine in zip(found, apart, strict=True):
        if not mine:
            labels.pin_labels(distinct([own]), "all heads share it")
    return labels.roots(heads), apart


def _keep_columns(labels: Labels, result: Tensor, second: Tensor) -> None:
    """Pass on the labels of a product's second factor where they vary along its columns only."""
    found, zero = labels.of(second)
    if set(varying(found)) <= {second.dim() - 1}:
        labels.label(result, found.narrow(-2, 0, 1).expand(result.shape), zero)
        return
    labels.keep([second], [result], MIXES)


def soften(labels: Labels, result: Tensor, x: Tensor, dim: int | None = None, **rest) -> None:
    """Pass on the labels of a softmax; zeros do not stay zero."""
    found, _ = labels.of(x)
    along = varying(found)
    if dim is None or (along == [dim % x.dim()] and not labels.mix(x, dim, back=dim % x.dim())):
        labels.keep([x], [result], "softmax mixes it with others")
        return
    if len(along) > 1:
        labels.join_along(found, dim % x.dim())
    labels.label(result, labels.roots(found), zero=False)
