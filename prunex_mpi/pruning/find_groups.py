"""Find the groups of a model: per convolution (`sparsity`), or coupled over layers (`coupling`)."""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.dummy_input import dummy_input, evaluating
from prunex_mpi.models.layout import Layout
from prunex_mpi.models.slim import CONVOLUTIONS
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.groups import Budget, CoupledLayer, Groups, PrunableLayer, Selection
from prunex_mpi.pruning.projection import cost, reduce_to

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
COUPLED_REACH = "--groups coupled, which prunes linear layers and heads of attention too"


@dataclass(frozen=True)
class OfAll:
    """That a keep ratio is of all the model's `what` (parameters | multiply-adds).

    Of each set a multiple of `round_to` channels is kept, at least a fraction `floor` of them.
    """

    what: str
    round_to: int = 1
    floor: float = 0.0


@dataclass(frozen=True)
class Ends:
    """The convolutions that read the image, and the layer that makes the classes, by weight."""

    stems: frozenset[str]
    head: str


def find_ends(model: nn.Module, image_size: int) -> Ends:
    """Run a blank image through `model`, on the CPU, and see where it begins and ends.

    The convolution that runs first may get the image in another form; others read the image if
    they get it as it is. The last layer with an output per class makes the classes.
    """
    image = dummy_input(model, image_size)
    ran: list[tuple[str, nn.Module, bool]] = []

    def listen(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(module: nn.Module, args: tuple) -> None:
            given = args[0] if args and isinstance(args[0], Tensor) else None
            ran.append((name, module, given is not None and given.data_ptr() == image.data_ptr()))

        return module.register_forward_pre_hook(note)

    handles = [
        listen(f"{name}.weight" if name else "weight", module)
        for name, module in model.named_modules()
        if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    try:
        with evaluating(model):
            classes = model(image).shape[-1]
    finally:
        for handle in handles:
            handle.remove()
    convs = [(name, reads) for name, module, reads in ran if isinstance(module, CONVOLUTIONS)]
    stems = {name for name, reads in convs if reads} | {name for name, _ in convs[:1]}
    heads = [name for name, module, _ in ran if module.weight.shape[0] == classes]
    return Ends(frozenset(stems), heads[-1] if heads else "")


def find_groups(
    model: nn.Module,
    layout: Layout,
    kinds: Sequence[str],
    keep_ratios: Sequence[float],
    layer_keep_ratios: Sequence[tuple[str, float]] = (),
    *,
    coupling: Coupling | None = None,
    of_all: OfAll | None = None,
    ends: Ends | None = None,
) -> Groups:
    """List the groups of `model` and say which slices cannot be pruned and why.

    `keep_ratios` holds one ratio per kind, or one for all; `layer_keep_ratios` are (fnmatch pattern
    on the parameter's name, ratio) pairs of which the last match wins. Coupled groups need the
    model's `coupling`; with `of_all` their ratio is not of each set's groups but one of the model.
    Without `ends` the model begins and ends with the layers that are its first and its last.
    Raises UserError when no group can be pruned, when a pattern matches no layer, or when a budget
    can't be met.
    """
    ratios = list(keep_ratios) * (len(kinds) if len(keep_ratios) == 1 else 1)
    index = {s.name: i for i, s in enumerate(layout.segments)}
    candidates, excluded = _find_layers(
        model, index, [k for k in kinds if k != "coupled"], ends or Ends(frozenset(), "")
    )
    names = [name for name, _, _ in candidates]
    layers = [layer for _, layer, _ in candidates]
    if coupling is not None:
        excluded += coupling.excluded
        for name in [*coupling.rows, *coupling.columns, *coupling.inner]:
            if name not in index:
                raise UserError(
                    f"coupled groups: {name} is not trained; choose another --model or other "
                    "--groups"
                )
            if name not in names:
                names.append(name)
                layers.append(_as_layer(index[name], model.get_parameter(name)))
    for pattern, _ in layer_keep_ratios:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(f"--layer-keep-ratio: no prunable layer matches {pattern!r}")
    if not layers:
        raise UserError(
            f"no layer of the model can be pruned by {'+'.join(kinds)} groups "
            f"({excluded[0]}): give {COUPLED_REACH}"
        )

    def keep_ratio(name: str, ratio: float) -> float:
        matching = [r for p, r in layer_keep_ratios if fnmatch.fnmatchcase(name, p)]
        return matching[-1] if matching else ratio

    gammas = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    gammas |= coupling.norms if coupling else set()
    by_kind: list[tuple[Selection, ...]] = []
    coupled: list[CoupledLayer] = []
    start = 0
    for kind, ratio in zip(kinds, ratios, strict=True):
        selections = []
        if kind == "coupled":
            for s in coupling.sets:
                keep = keep_ratio(s.name, ratio)
                selections.append(Selection(-1, kind, 1, s.count, start + s.start, keep, s.unit))
            for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
                if coupling.slices(name):
                    scored = name in coupling.positions or name in gammas
                    shape = layout.segments[layer.segment].shape
                    coupled.append(_couple(name, number, layer, shape, coupling, start, scored))
            start += coupling.total
        for number, (name, layer, usable) in enumerate(candidates):
            if kind not in usable:
                continue
            blocks, count = _extent(layer, kind)
            selections.append(
                Selection(number, kind, blocks, count, start, keep_ratio(name, ratio))
            )
            start += blocks * count
        if selections:
            by_kind.append(tuple(selections))
    groups = Groups(
        tuple(layers), tuple(by_kind), start, tuple(excluded), tuple(coupled), coupling=coupling
    )
    if of_all is None:
        return groups
    return _with_budget(groups, layout, coupling, ratios[0], of_all)


def out_of_reach(groups: Groups, numel: int) -> str:
    """Say that groups of convolutions leave most of the `numel` parameters alone; "" if not so."""
    kinds = [selections[0].kind for selections in groups.kinds]
    if not kinds or "coupled" in kinds or 2 * groups.prunable_numel >= numel:
        return ""
    found = f"{groups.prunable_numel:,} of the {numel:,} parameters"
    return (
        f"{'+'.join(kinds)} groups are of convolutions, which have {found} to prune: all others "
        f"stay, and are sent whole; give {COUPLED_REACH}"
    )


def _find_layers(
    model: nn.Module, index: dict[str, int], kinds: Sequence[str], ends: Ends
) -> tuple[list[tuple[str, PrunableLayer, list[str]]], list[str]]:
    """Return (name, layer, usable kinds) of the convolutions, and what cannot be pruned and why."""
    if not kinds:
        return [], []
    weighted = [
        (f"{name}.weight" if name else "weight", module)
        for name, module in model.named_modules()
        if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    convs = [(name, module) for name, module in weighted if isinstance(module, CONVOLUTIONS)]
    if not convs:
        raise UserError(
            f"the model has no convolution layer to prune by {'+'.join(kinds)} groups: give "
            f"{COUPLED_REACH}"
        )
    classifier = ends.head or weighted[-1][0]
    stems = ends.stems or {convs[0][0]}
    excluded = [
        f"{name}.weight: transposed convolutions are not pruned"
        for name, module in model.named_modules()
        if isinstance(module, TRANSPOSED)
    ]
    candidates: list[tuple[str, PrunableLayer, list[str]]] = []
    for name, conv in convs:
        if name not in index:
            why = _why_not_trained(conv.weight)
            excluded += [f"{name} [{kind}]: its weight is {why}" for kind in kinds]
            continue
        layer = _as_layer(index[name], conv.weight, conv.groups)
        usable = []
        for kind in kinds:
            reason = _why_not(layer, kind, name in stems, name == classifier)
            if reason:
                excluded.append(f"{name} [{kind}]: {reason}")
            else:
                usable.append(kind)
        if usable:
            candidates.append((name, layer, usable))
    return candidates, excluded


def _why_not_trained(weight: Tensor) -> str:
    """Say why the weight of a layer is none of the parameters that are trained."""
    if not isinstance(weight, nn.Parameter):
        return "computed from other parameters"
    # One that other layers have as well is pruned under the name of the first.
    return "another layer's" if weight.requires_grad else "not trained"


def _as_layer(segment: int, weight: Tensor, conv_groups: int = 1) -> PrunableLayer:
    return PrunableLayer(
        segment=segment,
        blocks=conv_groups,
        rows=weight.shape[0] // conv_groups,
        channels=weight.shape[1] if weight.dim() > 1 else 1,
        kernel=math.prod(weight.shape[2:]),
    )


def _couple(
    name: str,
    number: int,
    layer: PrunableLayer,
    shape: tuple[int, ...],
    coupling: Coupling,
    start: int,
    scored: bool,
) -> CoupledLayer:
    """Translate the groups of one parameter's slices to places in the mask."""
    rows = np.full(layer.blocks * layer.rows, -1)
    # What is known of one block of a convolution in groups is true of all.
    columns = np.full(shape[1:], -1)
    for dim, ids in coupling.slices(name):
        if dim == 0:
            rows = ids
        else:
            columns[:] = ids.reshape([-1 if d == dim else 1 for d in range(1, len(shape))])
    places = [np.where(ids < 0, -1, ids + start) for ids in (rows, columns.reshape(-1))]
    return CoupledLayer(number, *places, scored)


def _with_budget(
    groups: Groups,
    layout: Layout,
    coupling: Coupling,
    ratio: float,
    of_all: OfAll,
) -> Groups:
    """Limit what is kept of all parameters, or of all multiply-adds of weights, to `ratio`."""
    segments = layout.segments
    positions = np.array([coupling.positions.get(s.name, 0) for s in segments], dtype=np.float64)
    price = np.ones(len(segments)) if of_all.what == "parameters" else positions
    total = float(price @ [s.numel for s in segments])
    mine = [layer.segment for layer in groups.layers]
    fixed = total - float(price[mine] @ [layer.numel for layer in groups.layers])
    limited = replace(groups, budget=Budget(ratio * total, price[mine], fixed, of_all.floor))
    least = cost(reduce_to(np.zeros(groups.total), limited, groups.total, of_all.round_to), limited)
    if least > ratio * total:
        raise UserError(
            f"--keep-ratio {ratio:g} of the {of_all.what} can't be reached: with as few channels "
            f"in each set as can be, {least / total:.2g} are left; raise it"
            + (", or lower --keep-floor" if of_all.floor else "")
        )
    return limited


def _why_not(layer: PrunableLayer, kind: str, first: bool, classifier: bool) -> str:
    if kind == "filter":
        return "its outputs are the classes" if classifier else ""
    if first:
        return "its input channels are the image's"
    if _extent(layer, kind)[1] == 1:
        return "one input channel per convolution group (depthwise): nothing to choose from"
    return ""


def _extent(layer: PrunableLayer, kind: str) -> tuple[int, int]:
    if kind == "filter":
        return 1, layer.blocks * layer.rows
    return layer.blocks, layer.channels if kind == "channel" else layer.columns
