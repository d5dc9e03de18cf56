"""Cut groups of channels out of a network: its tensors and the sizes of its modules."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.models.layout import Layout
from prunex_mpi.models.slim import (
    ATTENTION_HEADS,
    ATTENTIONS,
    BATCH_NORMS,
    CONVOLUTIONS,
    WINDOWS,
    SlimAttention,
    SlimLayerNorm,
    SlimSelfAttention,
    self_attention_parts,
)
from prunex_mpi.models.standalone import Sizes, fill_, resize_
from prunex_mpi.pruning.coupling import Coupling

WEIGHT = ".weight"
STATISTICS = (".running_mean", ".running_var")


def shrink(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy of `model` without the groups of `removed`, bool [groups]."""
    smaller = copy.deepcopy(model)
    resize_(smaller, smaller_sizes(model, coupling, removed))
    fill_(smaller, smaller_tensors(model, coupling, removed))
    return smaller


def smaller_sizes(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> Sizes:
    """Return what `standalone.resize_` takes: the sizes of every module that can have others."""
    sizes: Sizes = {}

    def left(known: Mapping[str, np.ndarray], name: str, size: int) -> int:
        return int(kept_slices(known[name], removed).sum()) if name in known else size

    for name, module in model.named_modules():
        weight = f"{name}{WEIGHT}" if name else "weight"
        if isinstance(module, ATTENTIONS):
            inner = module.num_heads * module.head_dim
            rows = left(coupling.rows, f"{name}.in_proj_weight", 3 * inner)
            width = left(coupling.columns, f"{name}.in_proj_weight", module.embed_dim)
            sizes[name] = {"num_heads": rows // (3 * module.head_dim), "embed_dim": width}
        elif type(module) in WINDOWS:
            inner, width = module.proj.in_features, module.qkv.in_features
            heads = left(coupling.columns, f"{name}.proj.weight", inner) * module.num_heads // inner
            width = left(coupling.columns, f"{name}.qkv.weight", width)
            sizes[name] = {"num_heads": heads, "embed_dim": width}
        elif name in coupling.swapped or isinstance(module, SlimSelfAttention):
            parts = self_attention_parts(module)
            weight = f"{name}.{parts.last}{WEIGHT}"
            left_of = left(coupling.columns, weight, parts.heads * parts.head_dim)
            sizes[name] = {ATTENTION_HEADS: left_of // parts.head_dim}
        elif isinstance(module, BATCH_NORMS):
            sizes[name] = {"num_features": left(coupling.rows, weight, module.num_features)}
        elif isinstance(module, nn.GroupNorm) and weight in coupling.rows:
            kept = kept_slices(coupling.rows[weight], removed).reshape(module.num_groups, -1)
            sizes[name] = {
                "num_groups": int(kept.any(axis=1).sum()),
                "num_channels": int(kept.sum()),
            }
        elif weight in coupling.norms or isinstance(module, SlimLayerNorm):
            sizes[name] = {"num_features": left(coupling.rows, weight, module.weight.numel())}
        elif isinstance(module, nn.Linear) and attention_of(model, weight) is None:
            sizes[name] = {
                "in_features": left(coupling.columns, weight, module.in_features),
                "out_features": left(coupling.rows, weight, module.out_features),
            }
        elif isinstance(module, CONVOLUTIONS):
            kept = np.ones(module.out_channels, dtype=bool)
            if weight in coupling.rows:
                kept = kept_slices(coupling.rows[weight], removed)
            # Of a convolution in groups those stay of which any output does.
            groups = int(kept.reshape(module.groups, -1).any(axis=1).sum())
            inputs = module.in_channels // module.groups
            sizes[name] = {
                "in_channels": groups * left(coupling.columns, weight, inputs),
                "out_channels": int(kept.sum()),
                "groups": groups,
            }
    _add_own_sizes(model, coupling, removed, sizes)
    return sizes


def sizes_in_all(model: nn.Module, before: Sizes, coupling: Coupling, removed: np.ndarray) -> Sizes:
    """Return the sizes that make the whole network what `model` is without `removed`.

    `before` made the whole one `model`, by which `coupling` was found: that says nothing of modules
    that can't become smaller a second time.
    """
    sizes = smaller_sizes(model, coupling, removed)
    # A module is replaced before what is in it gets its sizes.
    names = [name for name, _ in model.named_modules() if name in before or name in sizes]
    return {name: {**before.get(name, {}), **sizes.get(name, {})} for name in names}


def _add_own_sizes(
    model: nn.Module,
    coupling: Coupling,
    removed: np.ndarray,
    sizes: Sizes,
) -> None:
    """Add to `sizes` the parameters and the numbers that modules of another kind have."""
    known = sizes.keys() - {n for n, m in model.named_modules() if type(m) in WINDOWS}
    known |= coupling.swapped
    for name in dict.fromkeys((*coupling.rows, *coupling.columns, *coupling.inner)):
        owner, _, attribute = name.rpartition(".")
        if owner not in known and attention_of(model, name) is None:
            shape = list(model.get_parameter(name).shape)
            for dim, ids in coupling.slices(name):
                shape[dim] = int(kept_slices(ids, removed).sum())
            sizes.setdefault(owner, {})[attribute] = shape
    for (owner, attribute), ids in coupling.numbers.items():
        if owner not in known and attribute not in sizes.get(owner, {}):
            sizes.setdefault(owner, {})[attribute] = int(kept_slices(ids, removed).sum())


def smaller_tensors(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> dict[str, Tensor]:
    """Return the state dict of `model` without the groups of `removed`: copies, same dtype."""
    first: dict[int, str] = {}
    canonical = {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    tensors = {}
    for key, tensor in model.state_dict().items():
        name = canonical.get(key, key)
        slices = coupling.slices(name)
        if key.endswith(STATISTICS):
            weight = key.rpartition(".")[0] + WEIGHT
            slices = coupling.slices(canonical.get(weight, weight))
        left = slices_left(tensor, slices, removed)
        tensors[key] = left.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def slices_left(
    tensor: Tensor, slices: Sequence[tuple[int, np.ndarray]], removed: np.ndarray
) -> Tensor:
    """Return `tensor` without its slices of the groups of `removed`: (dimension, ids) of each."""
    for dim, ids in slices:
        kept = torch.from_numpy(np.flatnonzero(kept_slices(ids, removed))).to(tensor.device)
        tensor = tensor.index_select(dim, kept)
    return tensor


def cut(flat: Tensor, layout: Layout, coupling: Coupling, removed: np.ndarray) -> Tensor:
    """Return the elements of `flat` that stay without the groups of `removed`, in their order."""
    pieces = []
    for segment, view in zip(layout.segments, layout.views(flat), strict=True):
        pieces.append(slices_left(view, coupling.slices(segment.name), removed).reshape(-1))
    return torch.cat(pieces)


def kept_slices(ids: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """Return which slices stay, bool of the length of `ids`."""
    return (ids < 0) | ~removed[ids]


def attention_of(model: nn.Module, name: str) -> nn.MultiheadAttention | SlimAttention | None:
    """Return the attention that the parameter `name` is part of, if it is of one."""
    path = name.rpartition(".")[0]
    for candidate in (path, path.rpartition(".")[0]):
        module = model.get_submodule(candidate)
        if isinstance(module, ATTENTIONS):
            return module
    return None
