"""Find the groups of channels that can be removed from a masked network without changing it.

A group is removable if, whichever mask made its zeros,

- no weight reads it: all columns of all weights with its id are zero, or
- all that makes it is zero: the rows of its weights, biases, gamma and beta, or
- it is constant zero: all rows of its weights are zero, so that it does not depend on the image,
  and its values at the layers that read it, measured on images, are zero.

BatchNorm turns a zero filter into a constant, beta - gamma mu / sigma, which an activation may
pass. With coupled groups, gamma and beta are masked as well; with other groups such a channel may
have to stay, and is reported.

Before training, copies without some channels are tried (`find_tried`).
"""

import copy
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.dummy_input import evaluating
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.slim import CONVOLUTIONS, doubled
from prunex_mpi.pruning.coupling import ChannelSet, Coupling, find_coupling
from prunex_mpi.pruning.shrink import (
    WEIGHT,
    kept_slices,
    resized,
    shrink,
    smaller_sizes,
)

LAYERS = (*CONVOLUTIONS, nn.Linear)
# Largest difference of outputs, relative to the largest output or 1, in float64 and below.
EXACT, TOLERANCE = 1e-9, 1e-3
NOISE = 0.1


@dataclass(frozen=True)
class Verdict:
    """Which groups are removed, bool [groups], and lines on the zeros that stay, with reasons."""

    removed: np.ndarray
    stays: tuple[str, ...]


def find_removable(model: nn.Module, coupling: Coupling, images: Tensor) -> Verdict:
    """Return which groups can be removed, by the weights of `model` and images [n, 3, H, W].

    At least one group of each set stays.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    makers, readers = coupling.sides(reads=False), coupling.sides(reads=True)
    made, taken = ({name: ids for name, (_, ids) in side.items()} for side in (makers, readers))
    written, read = (_used(weights, side, coupling.total) for side in (makers, readers))
    # Norms read all channels, and so do other calls.
    together = [coupling.rows[name] for name in coupling.norms]
    together += [call.labels for call in coupling.mixed]
    felt = np.isin(np.arange(coupling.total), np.concatenate([*together, [-1]]))
    active = _activity(model, taken, images, coupling.total)
    nothing = np.zeros(coupling.total, dtype=bool)
    is_written, is_read, is_active = (
        np.logical_or.reduce([*found.values(), nothing]) for found in (written, read, active)
    )
    is_made = nothing.copy()
    for name, weight in weights.items():
        for dim, ids in coupling.slices(name):
            if name not in readers or readers[name][0] != dim:
                is_made |= _carried(ids, ~_zero_slices(weight, dim), coupling.total)
    removed = ~(is_read | felt) | ~is_made | ~(is_written | is_active | felt)
    silent, unread = ~is_written, ~is_read
    reasons = (
        (silent, "the filters are zero, but BatchNorm or a bias passes a constant"),
        (~silent & _idle(made, written), "the filters are zero in some but not all of its layers"),
        (unread, "read by no weight, but by a norm of all channels"),
        (~silent & ~unread & _idle(taken, read), "ignored by some but not all layers"),
    )
    lines = []
    for s in coupling.sets:
        part = slice(s.start, s.start + s.count)
        if removed[part].all():
            removed[s.start] = False
            lines.append(f"{_channels(s, 1)}: all of the set could be removed, but one must stay")
            continue
        for found, reason in reasons:
            if count := np.count_nonzero(found[part] & ~removed[part]):
                lines.append(f"{_channels(s, count)}: {reason}")
    return Verdict(removed, tuple(lines))


def _used(
    weights: Mapping[str, Tensor], side: Mapping[str, tuple[int, np.ndarray]], total: int
) -> dict[str, np.ndarray]:
    """Return by weight which groups have a slice there that isn't zero, bool [groups]."""
    return {
        name: _carried(ids, ~_zero_slices(weights[name], dim), total)
        for name, (dim, ids) in side.items()
    }


def _zero_slices(tensor: Tensor, dim: int) -> np.ndarray:
    """Return which slices along `dim` are all zeros, bool [tensor.shape[dim]]."""
    slices = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    return ~slices.any(dim=1).cpu().numpy()


def _carried(ids: np.ndarray, marks: np.ndarray | bool, total: int) -> np.ndarray:
    """Return which groups have a marked slice, bool [total]; `ids` and `marks` are per slice."""
    found = np.zeros(total, dtype=bool)
    found[ids[marks & (ids >= 0)]] = True
    return found


def _activity(
    model: nn.Module, taken: Mapping[str, np.ndarray], images: Tensor, total: int
) -> dict[str, np.ndarray]:
    """Return by reader which groups are not zero where it reads them, bool [groups].

    `taken` are the groups of each reader's inputs. All are taken for active but where torch's own
    convolutions and linear layers read them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, np.ndarray] = {}

    def look(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # A grouped convolution has columns for the inputs of one group only.
        dim, ids = -1 if isinstance(module, nn.Linear) else 1, taken[name]
        marks = ~_zero_slices(args[0], dim).reshape(-1, len(ids)).all(axis=0) if args else True
        found[name] = found.get(name, False) | _carried(ids, marks, total)

    with ExitStack() as hooks, evaluating(model):
        for module in model.modules():
            if type(module) in LAYERS and (name := names.get(id(module.weight))) in taken:
                hooks.enter_context(module.register_forward_pre_hook(partial(look, name)))
        model(images)
    return {name: found.get(name, _carried(ids, True, total)) for name, ids in taken.items()}


# --------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------


def describe_removed(coupling: Coupling, removed: np.ndarray) -> list[dict[str, int | str]]:
    """Return for each set its name, number of groups, of removed ones, and channels per group."""
    gone = [int(removed[s.start : s.start + s.count].sum()) for s in coupling.sets]
    return [
        {"set": s.name, "groups": s.count, "removed": n, "unit": s.unit}
        for s, n in zip(coupling.sets, gone, strict=True)
    ]


def _channels(s: ChannelSet, count: int) -> str:
    what = "channel" if s.unit == 1 else f"group of {s.unit} channels"
    return f"{count} {what}{'s' if count != 1 else ''} of {s.name.removesuffix(WEIGHT)}"


def _idle(ids: Mapping[str, np.ndarray], used: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which groups are all zero in a weight that has their slices, bool [groups]."""
    found = [_carried(ids[name], True, len(marks)) & ~marks for name, marks in used.items()]
    return np.logical_or.reduce(found)


def zeros_that_stay(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line on the zeros inside the weights of a smaller network, if there are any."""
    weights = [t for t in tensors.values() if t.dim() > 1]
    all_of_them = sum(t.numel() for t in weights)
    zeros = all_of_them - sum(int(t.count_nonzero()) for t in weights)
    if not zeros:
        return []
    return [
        f"{zeros:,} of {all_of_them:,} weights are zeros inside kept channels: dense kernels "
        "gain nothing by them"
    ]


# --------------------------------------------------------------------------------------------------
# Whether a network works without them
# --------------------------------------------------------------------------------------------------


def find_tried(model: nn.Module, inputs: Inputs, layers: bool = False) -> Coupling:
    """Return what `find_coupling` does, and try whether `model` works without any of its groups.

    Raises UserError when no group can be removed, or some can't be missed.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            "coupled groups: what torch.jit has compiled can't be followed; give the model as it "
            "was before, or choose other --groups"
        )
    coupling = find_coupling(model, inputs, layers)
    for removed in (_some_of_each(coupling), _drawn_of_each(coupling)):
        if failure := attempt(model, coupling, removed, inputs):
            raise UserError(
                f"coupled groups: this model does not work without its channels ({failure}); "
                "choose another --model or other --groups"
            )
    return coupling


@torch.no_grad()
def attempt(
    model: nn.Module, coupling: Coupling, removed: np.ndarray, inputs: Inputs
) -> str | None:
    """Return why a network without the groups of `removed` fails or differs from one with zeros.

    None if it does not. Runs copies of `model` on the CPU, in float64, or in its own dtype if its
    code needs that.
    """
    masked = _masked_copy(model, coupling, removed)
    given = inputs.draw(1, next(masked.parameters()).dtype)
    try:
        sizes = smaller_sizes(masked, coupling, removed)
        # What raises does so in any dtype, and float64 takes several times as long.
        smaller = resized(masked, coupling, removed, sizes)
        found = smaller(given)
        double, given_double = doubled(masked), inputs.draw(1, torch.float64)
        # What a module remembers of a forward pass would be of the whole network.
        smaller = resized(double, coupling, removed, sizes)
        wanted = _in_double(double, given_double)
        if wanted is not None:
            found = smaller(given_double)
    # The model's own code may raise anything at other sizes.
    except Exception as error:
        return one_line(error)
    allowed = EXACT
    if wanted is None:
        wanted, allowed = masked(given), TOLERANCE
    apart = float((found - wanted).abs().max()) if found.shape == wanted.shape else math.inf
    if not apart <= allowed * max(1.0, float(wanted.abs().max())):
        return f"the outputs differ by {apart:.2g}"
    return None


@torch.no_grad()
def training_failure(model: nn.Module, coupling: Coupling, inputs: Inputs) -> str:
    """Return why a smaller network can't be trained though the whole one can, "" where it can.

    Code that runs in training only is not traced: it may read channels that nothing else reads.
    """
    # For one image BatchNorm may get a single value per channel, which it refuses.
    two = inputs.draw(2, next(model.parameters()).dtype)
    # The generators of other devices stay as they are.
    with torch.random.fork_rng(devices=[]):
        try:
            whole = copy.deepcopy(model)
            whole.train()
            whole(two)
        # Training will report it.
        except Exception:
            return ""
        for removed in (_some_of_each(coupling), _drawn_of_each(coupling)):
            try:
                smaller = shrink(model, coupling, removed)
                smaller.train()
                smaller(two)
            # The model's own code may raise anything at other sizes.
            except Exception as error:
                return one_line(error)
    return ""


def _some_of_each(coupling: Coupling) -> np.ndarray:
    """Remove a half, a third or two thirds of each set, so that sizes do not agree by chance."""
    removed = np.zeros(coupling.total, dtype=bool)
    for number, s in enumerate(coupling.sets):
        places = np.arange(s.count)
        gone = (places % 2 == 1, places % 3 == 1, places % 3 > 0)[number % 3]
        removed[s.start : s.start + s.count] = gone
    return removed


def _drawn_of_each(coupling: Coupling) -> np.ndarray:
    """Remove a random share of each set, as masks do."""
    removed = np.zeros(coupling.total, dtype=bool)
    rng = np.random.default_rng(0)
    for s in coupling.sets:
        count = rng.integers(1, s.count) if s.count > 1 else 0
        removed[s.start + rng.permutation(s.count)[:count]] = True
    return removed


def _masked_copy(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy in evaluation mode with the groups of `removed` at zero.

    Noise is added to vectors, and to weights that are zero: their initial values hide mistakes.
    """
    generator = torch.Generator().manual_seed(0)
    masked = copy.deepcopy(model)
    masked.eval()
    for name, parameter in masked.named_parameters():
        weight = parameter.dim() > 1 and name in coupling.positions
        if not (weight and parameter.any()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=NOISE / parameter[0].numel() ** 0.5 if weight else NOISE)
        for dim, ids in coupling.slices(name):
            gone = torch.from_numpy(np.flatnonzero(~kept_slices(ids, removed)))
            parameter.index_fill_(dim, gone, 0.0)
    return masked


def _in_double(model: nn.Module, given: Tensor) -> Tensor | None:
    """Return the outputs in float64, None where the model's own code needs another dtype."""
    try:
        outputs = model(given)
    # That code may raise anything.
    except Exception:
        return None
    return outputs if outputs.dtype == torch.float64 else None
