"""What attention does to the labels of channels: a head goes as a whole, out of q, k and v."""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.pruning.label_layers import read
from prunex_mpi.pruning.labels import Labels, pinned, thin, varying

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
    """Do what nn.MultiheadAttention does: heads go, and channels that its projections read."""
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
    """Do what scaled_dot_product_attention does to tensors [..., heads, places, channels]."""
    found = [labels.of(x)[0] for x in (query, key, value)]
    zero = labels.of(value)[1]
    head = None if options.get("enable_gqa") else _join_heads(labels, found, result)
    if head is None:
        # The product of queries and keys is scaled by how many channels they have.
        labels.pin([query, key], MIXES)
        _keep_columns(labels, result, value)
        return
    if attn_mask is not None and attn_mask.is_floating_point():
        own = labels.of(attn_mask)[0]
        if varying(own):
            labels.join(*thin(*torch.broadcast_tensors(head, own)))
    labels.label(result, head.expand(result.shape), zero)


def multiply_matrices(labels: Labels, result: Tensor, first: Tensor, second: Tensor) -> None:
    """Do what a product of matrices [..., n, k] and [..., k, m] does."""
    if first.dim() > 1 and second.dim() > 1:
        found, zeros = zip(*(labels.of(x) for x in (first, second)), strict=True)
        head = _join_heads(labels, list(found), result)
        if head is not None:
            labels.label(result, head.expand(result.shape), any(zeros))
            return
        if not varying(found[0]):
            _keep_columns(labels, result, second)
            return
    labels.pin([first, second], "a product of matrices mixes it with others")
    labels.label_pinned([result])


def _join_heads(labels: Labels, found: list[Tensor], result: Tensor) -> Tensor | None:
    """Make all of a head one group; return labels [..., heads, 1, 1], None without heads."""
    batch = result.shape[:-2]
    wide = [f.expand(*batch, *f.shape[-2:]) for f in found]
    dims = {d for f in wide for d in varying(f) if d < len(batch)}
    if not dims:
        return None
    heads = None
    for own, f in zip(found, wide, strict=True):
        # What is the same for all heads, as a mask of places, is none's.
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
    """Let the channels of a product be those of its second factor, where they are its columns."""
    found, zero = labels.of(second)
    if set(varying(found)) <= {second.dim() - 1}:
        labels.label(result, found.narrow(-2, 0, 1).expand(result.shape), zero)
        return
    labels.pin([second], MIXES)
    labels.label_pinned([result])


def soften(labels: Labels, result: Tensor, x: Tensor, dim: int | None = None, **rest) -> None:
    """Do what softmax does: channels stay what they are where it is not over them, but not zero."""
    found, _ = labels.of(x)
    if dim is None or dim % x.dim() in varying(found):
        labels.pin([x], "softmax mixes it with others")
        labels.label(result, pinned(result), zero=False)
        return
    labels.label(result, found, zero=False)
