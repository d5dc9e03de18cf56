"""Take out of a masked network what no longer does anything, by the groups of its coupling.

A group of channels goes when nothing is lost without it, whichever mask made its zeros:

- nobody reads it: all columns of all weights that carry its id are zero, or
- it is constant zero: all rows of its weights are zero, so that it depends on no image, and what
  arrives of it at its readers, measured on images, is zero.

BatchNorm turns a zero filter into a constant, beta - gamma mu / sigma, which an activation may let
pass. With coupled groups, gamma and beta are part of the mask and forced to zero in training, so
the constant is zero as well; with other groups such a channel stays, and is reported.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.coupling import ChannelSet, Coupling
from prunex_mpi.errors import FAILURE, UserError
from prunex_mpi.standalone import BATCH_NORMS, CONVOLUTIONS, fill_, resize_

WEIGHT = ".weight"
STATISTICS = (".running_mean", ".running_var")
SHOWN = 2  # names per line of a report


@dataclass(frozen=True)
class Verdict:
    """Which groups go, bool [groups], and one line for each kind of zeros that stay, and why."""

    removed: np.ndarray
    stays: tuple[str, ...]


def judge(model: nn.Module, coupling: Coupling, images: Tensor) -> Verdict:
    """Decide by the weights of `model` and a batch of images [n, 3, H, W] which groups can go.

    At least one group of a set stays. The model is run in evaluation mode.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    written = {
        name: _carried(ids, ~_zero_slices(weights[name], 0), coupling.total)
        for name, ids in coupling.rows.items()
        if weights[name].dim() > 1
    }
    read = {
        name: _carried(ids, ~_zero_slices(weights[name], 1), coupling.total)
        for name, ids in coupling.columns.items()
    }
    active = _activity(model, coupling, images)
    nothing = np.zeros(coupling.total, dtype=bool)
    is_written, is_read, is_active = (
        np.logical_or.reduce([*found.values(), nothing]) for found in (written, read, active)
    )
    removed = ~is_read | (~is_written & ~is_active)
    lines = []
    for s in coupling.sets:
        part = slice(s.start, s.start + s.count)
        if removed[part].all():
            removed[s.start] = False
            lines.append(f"{_channels(s, 1)}: nothing is left of them, but one must stay")
            continue
        stays = ~removed[part]
        silent = stays & ~is_written[part]
        if silent.any():
            lines.append(
                f"{_channels(s, silent.sum())}: the filters are zero, but BatchNorm or a bias "
                f"passes a constant to {_names(active, part, silent)}"
            )
        partly = stays & is_written[part] & _some_idle(coupling.rows, written, part)
        if partly.any():
            lines.append(
                f"{_channels(s, partly.sum())}: the filters are zero in some but not all of "
                f"{_carriers(coupling.rows, written, s)}"
            )
        unread = stays & is_written[part] & _some_idle(coupling.columns, read, part)
        if unread.any():
            lines.append(
                f"{_channels(s, unread.sum())}: ignored by some but not all of "
                f"{_carriers(coupling.columns, read, s)}"
            )
    return Verdict(removed, (*lines, *_zeros_elsewhere(weights, coupling)))


def _zero_slices(weight: Tensor, dim: int) -> np.ndarray:
    """Return for each index of `dim` whether the slice is all zeros, bool [weight.shape[dim]]."""
    others = [d for d in range(weight.dim()) if d != dim % weight.dim()]
    return (weight.abs().amax(dim=others) == 0).cpu().numpy()


def _carried(ids: np.ndarray, marks: np.ndarray, total: int) -> np.ndarray:
    """Return which groups carry any mark, bool [total]; `ids` and `marks` are per slice."""
    found = np.zeros(total, dtype=bool)
    found[ids[marks & (ids >= 0)]] = True
    return found


@torch.no_grad()
def _activity(model: nn.Module, coupling: Coupling, images: Tensor) -> dict[str, np.ndarray]:
    """Return by the reader's name which groups arrive at it as anything but zero, bool [groups]."""
    found: dict[str, np.ndarray] = {}
    handles = []

    def watch(name: str, dim: int) -> None:
        def look(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            marks = ~_zero_slices(arguments[0], dim)
            # A module may be called more than once.
            before = found.get(name, np.zeros(coupling.total, dtype=bool))
            found[name] = before | _carried(coupling.columns[name], marks, coupling.total)

        module = model.get_submodule(name.removesuffix(WEIGHT))
        handles.append(module.register_forward_pre_hook(look))

    for name, ids in coupling.columns.items():
        module = _owner(model, name)
        attention = _attention_of(model, name)
        if attention is not None:
            # Its input is inside the attention: a head of zero filters gives its values' bias.
            marks = np.zeros(len(ids), dtype=bool)
            if attention.in_proj_bias is not None:
                marks = (attention.in_proj_bias.chunk(3)[2] != 0).cpu().numpy()
            found[name] = _carried(ids, marks, coupling.total)
        elif isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            watch(name, 1 if isinstance(module, CONVOLUTIONS) else -1)
        else:
            found[name] = _carried(ids, np.ones(len(ids), dtype=bool), coupling.total)
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training:
            module.training = mode
    return found


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _attention_of(model: nn.Module, name: str) -> nn.MultiheadAttention | None:
    """Return the attention that the parameter `name` is part of, if it is of one."""
    path = name.rpartition(".")[0]
    for candidate in (path, path.rpartition(".")[0]):
        module = model.get_submodule(candidate)
        if isinstance(module, nn.MultiheadAttention):
            return module
    return None


# --------------------------------------------------------------------------------------------------
# The smaller network
# --------------------------------------------------------------------------------------------------


def shrink(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy of `model` without the groups of `removed`, bool [groups].

    Raises UserError where a parameter belongs to a module that can't be made smaller.
    """
    smaller = copy.deepcopy(model)
    resize_(smaller, smaller_sizes(model, coupling, removed))
    fill_(smaller, smaller_tensors(model, coupling, removed))
    return smaller


def smaller_sizes(
    model: nn.Module, coupling: Coupling, removed: np.ndarray
) -> dict[str, dict[str, int]]:
    """Return what `standalone.resize_` takes: the sizes of every module that can have others.

    Raises UserError where a parameter that gets smaller belongs to none of these.
    """
    sizes: dict[str, dict[str, int]] = {}

    def left(known: Mapping[str, np.ndarray], name: str, size: int) -> int:
        return int(_kept(known[name], removed).sum()) if name in known else size

    for name, module in model.named_modules():
        weight = f"{name}{WEIGHT}" if name else "weight"
        if isinstance(module, nn.MultiheadAttention):
            rows = left(coupling.rows, f"{name}.in_proj_weight", 3 * module.embed_dim)
            sizes[name] = {"num_heads": rows // (3 * module.head_dim)}
        elif isinstance(module, BATCH_NORMS):
            sizes[name] = {"num_features": left(coupling.rows, weight, module.num_features)}
        elif isinstance(module, nn.Linear) and _attention_of(model, weight) is None:
            sizes[name] = {
                "in_features": left(coupling.columns, weight, module.in_features),
                "out_features": left(coupling.rows, weight, module.out_features),
            }
        elif isinstance(module, CONVOLUTIONS):
            outputs = left(coupling.rows, weight, module.out_channels)
            inputs, groups = left(coupling.columns, weight, module.in_channels), module.groups
            if groups > 1 and groups == module.in_channels:
                # Depthwise: with each input channel go all of its outputs.
                inputs = groups = outputs * module.in_channels // module.out_channels
            sizes[name] = {"in_channels": inputs, "out_channels": outputs, "groups": groups}
    for known in (coupling.rows, coupling.columns):
        for name, ids in known.items():
            owner = name.rpartition(".")[0]
            if (
                owner not in sizes
                and _attention_of(model, name) is None
                and not _kept(ids, removed).all()
            ):
                kind = type(_owner(model, name)).__name__
                raise UserError(f"{name}: a {kind} can't be made smaller", FAILURE)
    return sizes


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
        rows, columns = coupling.rows.get(name), coupling.columns.get(name)
        if key.endswith(STATISTICS):
            weight = key.rpartition(".")[0] + WEIGHT
            rows = coupling.rows.get(canonical.get(weight, weight))
        for dim, ids in ((0, rows), (1, columns)):
            if ids is not None:
                kept = torch.from_numpy(np.flatnonzero(_kept(ids, removed))).to(tensor.device)
                tensor = tensor.index_select(dim, kept)
        tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def _kept(ids: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """Return which slices stay, bool of the length of `ids`."""
    return (ids < 0) | ~removed[ids]


# --------------------------------------------------------------------------------------------------
# What is said
# --------------------------------------------------------------------------------------------------


def describe_removed(coupling: Coupling, removed: np.ndarray) -> list[dict[str, int | str]]:
    """Return for each set of channels its name, its groups, how many go, and channels per group."""
    return [
        {
            "set": s.name,
            "groups": s.count,
            "removed": int(removed[s.start : s.start + s.count].sum()),
            "unit": s.unit,
        }
        for s in coupling.sets
    ]


def _channels(s: ChannelSet, count: int) -> str:
    what = "channel" if s.unit == 1 else "head"
    return f"{count} {what}{'s' if count != 1 else ''} of {s.name.removesuffix(WEIGHT)}"


def _some_idle(
    ids: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], part: slice
) -> np.ndarray:
    """Return which groups of a set have slices in a weight of `found` that are all zero there."""
    idle = np.zeros(part.stop - part.start, dtype=bool)
    for name, marks in found.items():
        carried = _carried(ids[name], np.ones(len(ids[name]), dtype=bool), len(marks))
        idle |= (carried & ~marks)[part]
    return idle


def _carriers(ids: Mapping[str, np.ndarray], among: Iterable[str], s: ChannelSet) -> str:
    """Return the weights of `among` in which a set has slices."""
    return _join(
        name for name in among if ((ids[name] >= s.start) & (ids[name] < s.start + s.count)).any()
    )


def _names(found: Mapping[str, np.ndarray], part: slice, among: np.ndarray) -> str:
    return _join(name for name, marks in found.items() if (marks[part] & among).any())


def _join(names: Iterable[str]) -> str:
    plain = [name.removesuffix(WEIGHT) for name in names]
    shown, more = plain[:SHOWN], len(plain) - SHOWN
    last = f"{more} more" if more > 0 else shown.pop()
    return " and ".join([*([", ".join(shown)] if shown else []), last])


def zeros_that_stay(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for the zeros inside the weights of a smaller network, if there are any."""
    weights = [t for t in tensors.values() if t.dim() > 1]
    zeros, all_of_them = (sum(f(t) for t in weights) for f in (_count_zeros, Tensor.numel))
    if not zeros:
        return []
    return [
        f"{zeros:,} of {all_of_them:,} weights are zeros inside kept channels: dense kernels "
        "gain nothing by them"
    ]


def _count_zeros(tensor: Tensor) -> int:
    return int((tensor == 0).sum())


def _zeros_elsewhere(weights: Mapping[str, Tensor], coupling: Coupling) -> list[str]:
    """Return lines for zero filters that belong to no group."""
    lines = []
    for name, weight in weights.items():
        if weight.dim() < 2 or name not in coupling.positions:
            continue
        ids = coupling.rows.get(name, np.full(weight.shape[0], -1))
        count = int((_zero_slices(weight, 0) & (ids < 0)).sum())
        if count:
            reason = next((e for e in coupling.excluded if e.startswith(f"{name} [")), "")
            why = reason.partition(": ")[2] or "they meet what cannot be removed"
            plural = "s" if count > 1 else ""
            lines.append(f"{count} zero filter{plural} of {name.removesuffix(WEIGHT)}: {why}")
    return lines
