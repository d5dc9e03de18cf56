"""Find the rules by which channels can be removed from a model's own code, by trying."""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.slim import doubled
from prunex_mpi.pruning.channel_trace import NO_RULES, Call, Failing, Places, Rules, following
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.shrink import kept_slices, resized, shrink, smaller_sizes

# Largest difference of outputs, relative to the largest output or 1, in float64 and below.
EXACT, TOLERANCE = 1e-9, 1e-3
NOISE = 0.1


@dataclass(frozen=True)
class Failure:
    """Why a smaller network fails or differs, and the torch call that raised."""

    reason: str
    call: Call | None = None


def find_rules(model: nn.Module, inputs: Inputs, rules: Rules = NO_RULES) -> Rules:
    """Return the widest rules, from `rules` down, by which `model` works without any group.

    Where its code fails at a smaller size, the arguments of the failing call stay, in all modules
    of the same class; then all channels made before it. Raises UserError when no group can be
    removed, or some can't be missed.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            "coupled groups: what torch.jit has compiled can't be followed; give the model as it "
            "was before, or choose other --groups"
        )
    while True:
        coupling = find_coupling(model, inputs, rules)
        attempts = (
            attempt(model, coupling, removed, inputs)
            for removed in (_some_of_each(coupling), _drawn_of_each(coupling))
        )
        failure = next((failure for failure in attempts if failure is not None), None)
        if failure is None:
            return rules
        calls = _calls_alike(model, failure.call)
        if calls - rules.arguments:
            rules = replace(rules, arguments=rules.arguments | calls)
        elif calls - rules.all_before:
            rules = replace(rules, all_before=rules.all_before | calls)
        else:
            raise UserError(
                f"coupled groups: this model does not work without its channels ({failure.reason});"
                " choose another --model or other --groups"
            )


def _calls_alike(model: nn.Module, call: Call | None) -> frozenset[Call]:
    """Return the call and its counterparts in modules of a user's same class; none for None."""
    if call is None:
        return frozenset()
    (name, number), kind = call, type(model.get_submodule(call[0]))
    alike = [n for n, module in model.named_modules() if type(module) is kind]
    own = kind.__module__.startswith("torch.")
    return frozenset((n, number) for n in ([name] if own else alike))


@torch.no_grad()
def attempt(
    model: nn.Module, coupling: Coupling, removed: np.ndarray, inputs: Inputs
) -> Failure | None:
    """Compare a network with the groups of `removed` at zero and one without them; None if equal.

    Runs copies of `model` on the CPU, in float64, or in its own dtype if its code needs that.
    """
    masked = _masked_copy(model, coupling, removed)
    given = inputs.draw(1, next(masked.parameters()).dtype)
    places = Places()
    failing = Failing(places)
    try:
        sizes = smaller_sizes(masked, coupling, removed)
        # What raises does so in any dtype, and float64 takes several times as long.
        smaller = resized(masked, coupling, removed, sizes)
        with following(smaller, places), failing:
            found = smaller(given)
        double, given_double = doubled(masked), inputs.draw(1, torch.float64)
        # What a module remembers of a forward pass would be of the whole network.
        smaller = resized(double, coupling, removed, sizes)
        wanted = _in_double(double, given_double)
        if wanted is not None:
            with following(smaller, places), failing:
                found = smaller(given_double)
    # The model's own code may raise anything at other sizes.
    except Exception as error:
        return Failure(one_line(error), failing.call)
    allowed = EXACT
    if wanted is None:
        wanted, allowed = masked(given), TOLERANCE
    apart = float((found - wanted).abs().max()) if found.shape == wanted.shape else math.inf
    if not apart <= allowed * max(1.0, float(wanted.abs().max())):
        return Failure(f"the outputs differ by {apart:.2g}")
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
