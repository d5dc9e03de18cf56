"""Try coupled groups: a network without some of them must compute the same as with zeros."""

import copy
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.slim import self_attention_parts
from prunex_mpi.pruning.coupling import PLAIN, Coupling, find_coupling
from prunex_mpi.pruning.places import NO_PINS, Call, Failing, Pins, Places, following
from prunex_mpi.pruning.shrink import kept_slices, shrink
from prunex_mpi.pruning.trace import is_own

# Of the largest output, or of 1, for sums in another order: in float64, and in a dtype of less.
EXACT, TOLERANCE = 1e-9, 1e-3
NOISE = 0.1


@dataclass(frozen=True)
class Failure:
    """Why a smaller network is not the same.

    If code failed, in which module it was, if not torch's own, and in which call of torch's.
    """

    reason: str
    module: str | None = None
    call: Call | None = None


@dataclass(frozen=True)
class Rules:
    """In which modules plain rules hold, and which are attention to be replaced when smaller.

    What calls of `pins` touch stays.
    """

    plain: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()
    pins: Pins = NO_PINS

    def text(self) -> str:
        """Return the rules as text, for `rules_of`."""
        every = self.plain, self.swapped, self.pins.arguments, self.pins.all_before
        return json.dumps([sorted(names) for names in every])


def rules_of(text: str) -> Rules:
    """Return the rules whose text is `text`."""
    plain, swapped, *calls = json.loads(text)
    pins = Pins(*(frozenset(map(tuple, every)) for every in calls))
    return Rules(frozenset(plain), frozenset(swapped), pins)


def find_coupling_by(model: nn.Module, image_size: int, rules: Rules) -> Coupling:
    """Find the coupled groups of `model` by `rules`, untried."""
    return replace(find_coupling(model, image_size, rules.plain, rules.pins), swapped=rules.swapped)


def find_rules(model: nn.Module, image_size: int, rules: Rules = Rules()) -> Rules:
    """Return the rules by which the code of `model` can do without its coupled groups: `rules` ...

    ... or narrower ones: where the code of a module works at its full size alone, attention is
    replaced by ours, and in other modules of its kind plain rules hold. Before they hold in all of
    the model what the call gets that fails stays; when they do, all that was made before it.
    Raises UserError when no group can be removed, and where that is not enough either.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            "coupled groups: what torch.jit has compiled can't be followed; give the model as it "
            "was before, or choose other --groups"
        )
    while True:
        coupling = find_coupling_by(model, image_size, rules)
        attempts = (
            attempt(model, coupling, removed, image_size)
            for removed in (_some_of_each(coupling), _drawn_of_each(coupling))
        )
        failure = next((failure for failure in attempts if failure is not None), None)
        if failure is None:
            return rules
        whole = rules.plain >= PLAIN
        alike = _alike(model, failure.module)
        attention = frozenset(n for n in alike if self_attention_parts(model.get_submodule(n)))
        if attention - rules.swapped - rules.plain and not whole:
            rules = replace(rules, swapped=rules.swapped | attention)
            continue
        # Those of its kind, then what they are in, at last the whole model.
        name = failure.module
        while name and alike <= rules.plain:
            name = name.rpartition(".")[0]
            alike = _alike(model, name)
        plain = rules.plain | (alike or PLAIN)
        calls, pins = _calls_alike(model, failure.call), rules.pins
        if plain >= PLAIN and calls - pins.arguments:
            rules = replace(rules, pins=replace(pins, arguments=pins.arguments | calls))
        elif not whole:
            rules = replace(rules, plain=plain, swapped=rules.swapped - alike)
        elif calls - pins.all_before:
            rules = replace(rules, pins=replace(pins, all_before=pins.all_before | calls))
        else:
            raise UserError(
                f"coupled groups: this model does not work without its channels ({failure.reason});"
                " choose another --model or other --groups"
            )


def _calls_alike(model: nn.Module, call: Call | None) -> frozenset[Call]:
    """Return the call and the same one of modules of the same class; none for None."""
    if call is None:
        return frozenset()
    module, number = call
    return frozenset((name, number) for name in {module} | _alike(model, module))


def _alike(model: nn.Module, name: str | None) -> frozenset[str]:
    """Return the modules of the same class as the module `name`; none where torch wrote it."""
    kind = type(model.get_submodule(name)) if name is not None else None
    if kind is None or kind.__module__.startswith("torch."):
        return frozenset()
    return frozenset(n for n, module in model.named_modules() if type(module) is kind)


@torch.no_grad()
def attempt(
    model: nn.Module, coupling: Coupling, removed: np.ndarray, image_size: int
) -> Failure | None:
    """Compare a network with the groups of `removed` at zero and the one without; None if equal.

    Copies of `model`, on the CPU, in float64, or in its own dtype where it does not run in that.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, image_size, image_size, generator=generator, dtype=torch.float64)
    masked, allowed = _masked_copy(model, coupling, removed).double(), EXACT
    wanted = _in_double(masked, image)
    if wanted is None:
        masked, allowed = _masked_copy(model, coupling, removed), TOLERANCE
        image = image.to(next(masked.parameters()).dtype)
        wanted = masked(image)
    places = Places()
    failing = Failing(places)
    try:
        smaller = shrink(masked, coupling, removed)
        with following(smaller, places), failing:
            found = smaller(image)
    # Whatever the model's own code meets at other sizes.
    except Exception as error:
        own = [name for name in places.inside if is_own(model.get_submodule(name))]
        return Failure(one_line(error), own[-1] if own else None, failing.call)
    apart = float((found - wanted).abs().max()) if found.shape == wanted.shape else math.inf
    if not apart <= allowed * max(1.0, float(wanted.abs().max())):
        return Failure(f"the outputs differ by {apart:.2g}")
    return None


@torch.no_grad()
def training_failure(model: nn.Module, coupling: Coupling, image_size: int) -> str:
    """Return why a smaller network can't be trained where the whole one can, "" where it can.

    What a model does in training alone is not followed: it may read channels that nothing else
    reads. Copies of `model` run on the CPU, whose generator is left as it was.
    """
    parameter, generator = next(model.parameters()), torch.Generator().manual_seed(0)
    # Of a single image BatchNorm may have a single value per channel.
    images = torch.rand(2, 3, image_size, image_size, generator=generator).to(parameter.dtype)
    # The generators of other devices stay as they are.
    with torch.random.fork_rng(devices=[]):
        try:
            copy.deepcopy(model).train()(images)
        # It will say so itself.
        except Exception:
            return ""
        for removed in (_some_of_each(coupling), _drawn_of_each(coupling)):
            try:
                shrink(model, coupling, removed).train()(images)
            # Whatever the model's own code meets at other sizes.
            except Exception as error:
                return one_line(error)
    return ""


def _some_of_each(coupling: Coupling) -> np.ndarray:
    """Remove a half, a third or two thirds of each set: no two sizes stay alike by chance."""
    removed = np.zeros(coupling.total, dtype=bool)
    for number, s in enumerate(coupling.sets):
        places = np.arange(s.count)
        gone = (places % 2 == 1, places % 3 == 1, places % 3 > 0)[number % 3]
        removed[s.start : s.start + s.count] = gone
    return removed


def _drawn_of_each(coupling: Coupling) -> np.ndarray:
    """Remove a share of each set that is its own, as masks do: some sizes are odd ones."""
    removed = np.zeros(coupling.total, dtype=bool)
    rng = np.random.default_rng(0)
    for s in coupling.sets:
        count = rng.integers(1, s.count) if s.count > 1 else 0
        removed[s.start + rng.permutation(s.count)[:count]] = True
    return removed


def _masked_copy(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy in evaluation mode with the groups of `removed` at zero.

    With noise on all but weights, and on weights of zeros: what begins as zeros and ones, or small,
    hides a mistake.
    """
    generator = torch.Generator().manual_seed(0)
    masked = copy.deepcopy(model).eval()
    for name, parameter in masked.named_parameters():
        weight = parameter.dim() > 1 and name in coupling.positions
        if not (weight and parameter.any()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=NOISE / parameter[0].numel() ** 0.5 if weight else NOISE)
        for dim, ids in coupling.slices(name):
            gone = torch.from_numpy(np.flatnonzero(~kept_slices(ids, removed)))
            parameter.index_fill_(dim, gone, 0.0)
    return masked


def _in_double(model: nn.Module, image: Tensor) -> Tensor | None:
    """Return the outputs in float64, None where the model's own code does not compute in it."""
    try:
        outputs = model(image)
    # Whatever that code meets.
    except Exception:
        return None
    return outputs if outputs.dtype == torch.float64 else None
