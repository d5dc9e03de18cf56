"""Remove coupled groups from a network: tensors, sizes of modules, numbers of their code."""

import copy
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.models import slim
from prunex_mpi.models.dummy_input import evaluating
from prunex_mpi.models.layout import Layout
from prunex_mpi.models.standalone import Sizes, fill_, resize_
from prunex_mpi.pruning.channel_trace import Following
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.labels import Mixed, Request, Site

WEIGHT = ".weight"
# Modules of torch, whose numbers are stated by name.
STATED = (*slim.CONVOLUTIONS, *slim.BATCH_NORMS, *slim.ATTENTIONS, nn.Linear, nn.Embedding)
STATED += (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, slim.SlimNorm)
STATISTICS = (".running_mean", ".running_var")


def shrink(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy of `model` without the groups of `removed`, bool [groups]."""
    return resized(model, coupling, removed, smaller_sizes(model, coupling, removed))


def resized(model: nn.Module, coupling: Coupling, removed: np.ndarray, sizes: Sizes) -> nn.Module:
    """Return a copy of `model` without the groups of `removed`, by the sizes of its modules."""
    smaller = copy.deepcopy(model)
    resize_(smaller, sizes)
    fill_(smaller, smaller_tensors(model, coupling, removed))
    return smaller


def smaller_sizes(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> Sizes:
    """Return the sizes of every module that has coupled groups, for `standalone.resize_`."""
    sizes = _sizes_of_tensors(model, coupling, removed)
    sites = {c.site for c in (*coupling.calls, *coupling.mixed) if getattr(c, "filled", True)}
    calls: dict[str, slim.Calls] = {}
    if sites and removed.any():
        calls, numbers = _find_calls(model, coupling, removed, sizes)
        for name, own in numbers.items():
            sizes.setdefault(name, {}).update(own)
    for name in {name for name, *_ in sites}:
        module = model.get_submodule(name)
        # Others may have been corrected before.
        if name in calls or isinstance(module, slim.CallsCorrected) or not removed.any():
            own = {} if removed.any() else getattr(module, "corrected_calls", {})
            sizes.setdefault(name, {})[slim.CALLS] = calls.get(name, own)
        if not removed.any():
            # Those of the whole network, to which a smaller one may grow again.
            sizes[name].update(_own_numbers(module))
    return sizes


def sizes_in_all(model: nn.Module, before: Sizes, coupling: Coupling, removed: np.ndarray) -> Sizes:
    """Return the sizes that turn the network of full size into `model` without `removed`.

    `before` are those that turned it into `model`, on which `coupling` was found.
    """
    sizes = smaller_sizes(model, coupling, removed)
    # A module is replaced before what is in it gets its sizes.
    names = [name for name, _ in model.named_modules() if name in before or name in sizes]
    return {name: {**before.get(name, {}), **sizes.get(name, {})} for name in names}


def _sizes_of_tensors(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> Sizes:
    """Return by module the shapes of its tensors, and what of torch's own they do not tell."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sizes: Sizes = {}
    inside: set[int] = set()

    def left(tensor: Tensor, slices: Sequence[tuple[int, np.ndarray]]) -> list[int]:
        shape = list(tensor.shape)
        for dim, ids in slices:
            shape[dim] = int(kept_slices(ids, removed).sum())
        return shape

    for name, module in model.named_modules():
        own, weight = {}, names.get(id(getattr(module, "weight", None)), "")
        if isinstance(module, slim.ATTENTIONS):
            inside |= {id(part) for part in module.modules()}
            if module.in_proj_weight is not None:
                slices = coupling.slices(names[id(module.in_proj_weight)])
                rows, width = left(module.in_proj_weight, slices)
                own = {"num_heads": rows // (3 * module.head_dim), "embed_dim": width}
        elif id(module) not in inside:
            for key, parameter in module.named_parameters(recurse=False):
                if slices := coupling.slices(names[id(parameter)]):
                    own[key] = left(parameter, slices)
        if weight in coupling.norms:
            own = {slim.NORM_FEATURES: own["weight"][0]}
        elif "weight" in own and isinstance(module, (*slim.CONVOLUTIONS, nn.GroupNorm)):
            # A group of a grouped convolution stays if any of its outputs does.
            key = "num_groups" if isinstance(module, nn.GroupNorm) else "groups"
            ids = coupling.rows.get(weight, np.full(len(module.weight), -1))
            kept = kept_slices(ids, removed).reshape(getattr(module, key), -1)
            own[key] = int(kept.any(axis=1).sum())
        if own:
            sizes[name] = own
    for name, entry in coupling.zeros.items():
        owner, _, key = name.rpartition(".")
        sizes.setdefault(owner, {})[key] = left(model.get_buffer(name), [entry])
    return sizes


class Fitting(Following):
    """Give torch calls the numbers that fit without `removed`; note in `found` which differ."""

    def __init__(
        self,
        model: nn.Module,
        coupling: Coupling,
        removed: np.ndarray,
        before: dict[str, slim.Calls],
    ) -> None:
        super().__init__(model)
        self.removed, self.before = removed, before
        self.wanted: dict[Site, list[Request | Mixed]] = {}
        filled = [call for call in coupling.mixed if call.filled]
        sites = {call.site for call in filled}
        for call in [*(c for c in coupling.calls if c.site not in sites), *filled]:
            self.wanted.setdefault(call.site, []).append(call)
        self.runs: dict[Site, list[object]] = {}
        self.found: dict[str, slim.Calls] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        site = self.site_of(sys._getframe(1))
        if site not in self.wanted:
            return func(*args, **kwargs)
        before = self.runs.setdefault(site, [])
        # A module that runs several times asks several times.
        call = self.wanted[site][min(len(before), len(self.wanted[site]) - 1)]
        leaves = slim.flatten((args, kwargs))
        if isinstance(call, Mixed):
            given = self.fill(call, leaves)
        elif call.pieces:
            given = self.cut(call, func, args, kwargs)
        else:
            given = self.correct(call, leaves)
        before.append(given)
        if given != before[0]:
            raise RuntimeError(f"{func.__name__} gets other channels each time")
        if given is None:
            return func(*args, **kwargs)
        name, line, number = site
        known = self.found.setdefault(name, {}).setdefault(line, [])
        known += [None] * (number + 1 - len(known))
        known[number] = given
        return slim.call_corrected(given, func, args, kwargs)

    def left(self, call: Request) -> list[float | None]:
        """Return what is wanted of each argument, None for anything."""
        return [
            w[0] * int(kept_slices(w[1], self.removed).sum()) if isinstance(w, tuple) else w
            for w in call.wanted
        ]

    def cut(self, call: Request, func, args: tuple, kwargs: dict) -> object:
        """Return the sizes of pieces, None where the call makes them so."""
        wanted, dim = self.left(call), kwargs.get("dim", args[2] if len(args) > 2 else 0)
        try:
            same = [piece.shape[dim] for piece in func(*args, **kwargs)] == wanted
        # Sizes that do not add up.
        except RuntimeError:
            same = False
        return None if same else {"sizes": wanted}

    def correct(self, call: Request, leaves: list[object]) -> object:
        """Return [asked, wanted] for each argument, None where all are as wanted."""
        pairs = [
            [asked, want] if want is not None and asked not in (want, -1, None) else None
            for asked, want in zip(leaves, self.left(call), strict=True)
        ]
        return pairs if any(pairs) else None

    def fill(self, call: Mixed, leaves: list[object]) -> object:
        """Return with which zeros, and with which numbers, a call mixes channels."""
        name, line, number = call.site
        known = self.before.get(name, {}).get(line, [])[number : number + 1]
        before = known[0] if known and isinstance(known[0], dict) else None
        size, places = len(call.labels), np.arange(len(call.labels))
        numbers = [
            wanted if wanted is not None and wanted != asked else None
            for wanted, asked in zip(call.numbers, leaves, strict=True)
        ]
        # A network that is smaller already keeps the places of the whole one.
        if before is not None:
            _, _, size, places = before["whole"]
            places, numbers = np.array(places), before["numbers"]
        kept = places[kept_slices(call.labels, self.removed)]
        if len(kept) == size:
            return None
        return {
            "whole": [call.place, call.dim, size, kept.tolist()],
            "back": call.back,
            "numbers": numbers,
        }


def _find_calls(
    model: nn.Module, coupling: Coupling, removed: np.ndarray, sizes: Sizes
) -> tuple[dict[str, slim.Calls], dict[str, dict[str, int]]]:
    """Return by module what to correct in the torch calls of its code without `removed`, or to set.

    Where a module's own numbers say the same (`self.num_heads`), these are to be set, since they
    cost no time. Smaller copies of the model run, on the CPU.
    """
    smaller, before = copy.deepcopy(model).cpu(), {}
    for name, module in smaller.named_modules():
        before[name] = getattr(module, "corrected_calls", {})
        slim.correct_calls_(module, {})
    resize_(smaller, sizes)
    fill_(smaller, smaller_tensors(model, coupling, removed))

    def run(own: Sizes) -> tuple[dict[str, slim.Calls], list[Tensor]]:
        """Return which calls had to be corrected, and outputs, none where it fails."""
        # Modules may remember what they have computed.
        tried, result = copy.deepcopy(smaller), None
        resize_(tried, own)
        fitting = Fitting(tried, coupling, removed, before)
        # What fails here fails again where it is reported.
        with suppress(Exception), evaluating(tried), fitting:
            result = tried(coupling.inputs.draw(1, next(tried.parameters()).dtype))
        return fitting.found, [x for x in slim.flatten(result) if isinstance(x, Tensor)]

    calls, wanted = run({})
    kinds: dict[type, dict[str, dict[str, int]]] = {}
    for name, found in calls.items():
        module = model.get_submodule(name)
        if numbers := _counting_numbers(module, found):
            kinds.setdefault(type(module), {})[name] = numbers
    chosen: dict[str, dict[str, int]] = {}
    for kind in kinds.values():
        while kind:
            found, result = run({**chosen, **kind})
            # For some they may say only a part of it, as where heads are not the width.
            if apart := found.keys() & kind.keys():
                kind = {name: kind[name] for name in kind if name not in apart}
                continue
            if wanted and len(result) == len(wanted) and all(map(torch.equal, result, wanted)):
                chosen |= kind
                calls = found
            break
    return calls, chosen


def _own_numbers(module: nn.Module) -> dict[str, int]:
    """Return the whole numbers that a module's own code keeps."""
    if isinstance(module, (*STATED, slim.CallsCorrected)):
        return {}
    every = vars(module).items()
    return {key: value for key, value in every if type(value) is int and key[0] != "_"}


def _counting_numbers(module: nn.Module, calls: slim.Calls) -> dict[str, int]:
    """Return what a module's own numbers may have to be, {} where they can't be all."""
    smaller: dict[int, set[int]] = {}
    for given in (given for line in calls.values() for given in line if given is not None):
        if not isinstance(given, list):
            return {}
        for asked, wanted in filter(None, given):
            if type(asked) is int and type(wanted) is int and wanted < asked:
                smaller.setdefault(asked, set()).add(wanted)
    own = _own_numbers(module).items()
    return {key: min(smaller[v]) for key, v in own if len(smaller.get(v, ())) == 1}


def smaller_tensors(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> dict[str, Tensor]:
    """Return the state dict of `model` without the groups of `removed`: copies, same dtype."""
    # Wrappers such as those of activation checkpointing have other names in the state dict.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state, tensors = model.state_dict(keep_vars=True), {}
    for key, tensor in state.items():
        weight = state.get(key.rpartition(".")[0] + WEIGHT) if key.endswith(STATISTICS) else tensor
        slices = coupling.slices(names.get(id(weight), key))
        left = slices_left(tensor, slices, removed)
        tensors[key] = left.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def slices_left(
    tensor: Tensor, slices: Sequence[tuple[int, np.ndarray]], removed: np.ndarray
) -> Tensor:
    """Return `tensor` without the slices of `removed` groups; `slices` are (dimension, ids)."""
    for dim, ids in slices:
        kept = torch.from_numpy(np.flatnonzero(kept_slices(ids, removed))).to(tensor.device)
        tensor = tensor.index_select(dim, kept)
    return tensor


def cut(flat: Tensor, layout: Layout, coupling: Coupling, removed: np.ndarray) -> Tensor:
    """Return the elements of the flat vector that stay without `removed`, in their order."""
    views = zip(layout.segments, layout.views(flat), strict=True)
    left = [slices_left(view, coupling.slices(s.name), removed) for s, view in views]
    return torch.cat([piece.reshape(-1) for piece in left])


def kept_slices(ids: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """Return which slices stay, bool [len(ids)]."""
    return (ids < 0) | ~removed[ids]
