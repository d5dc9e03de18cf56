"""Rules for labels: attention, of which a head goes as a whole, and products of matrices.

As `label_layers`, each function labels the result of one torch function.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.pruning.label_layers import multiply_by, read
from prunex_mpi.pruning.labels import Labels, distinct, first_along, thin, varying

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
