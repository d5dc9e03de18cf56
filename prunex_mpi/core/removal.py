"""A network that becomes physically smaller while it is trained.

What the mask lacks is taken out of the model and of every vector of the state: from then on steps
cost what the smaller network costs. Weights, BatchNorm statistics, the optimizer's memory, what has
not been sent yet, the average of z and the best z stay bit for bit in what is left, and so a run
goes on as it would with zeros in their place, up to how sums are rounded.

Groups and mask remain those of the whole network.
"""

from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.core.evaluation import BEST, BEST_MASK, BEST_STATS
from prunex_mpi.core.lasting import BUFFER, FIXED, MEMORY, OPTIMIZER, lasting
from prunex_mpi.core.memory import ITSELF, MESSAGE, PARAMETERS, STATISTICS
from prunex_mpi.core.state import RunContext, State, build_state
from prunex_mpi.models.layout import build_layout, trained_parameters
from prunex_mpi.models.standalone import Sizes, fill_, resize_
from prunex_mpi.pruning.shrink import cut, smaller_sizes, smaller_tensors
from prunex_mpi.settings.fields import Settings


def remove_dropped_(context: RunContext, averager: GradientAverager | None) -> None:
    """Take what frozen masks have dropped out of the network, once, if `--remove-dropped` is given.

    The averager, if there is one, listens to the smaller network then. Does not communicate.
    """
    state, settings = context.state, context.settings
    if not settings.remove_dropped or not state.frozen or state.removes:
        return
    mask, best, model = state.mask.bits, state.position.best, context.problem.model
    staying = _staying(state, model, mask)
    state.mask = replace(state.mask, bits=np.ones_like(mask))
    remove_(state, model, ~mask, settings)
    if f"{MEMORY}{BEST}" in staying:
        state.position.best = best
    table = lasting(state, model)
    for name, values in staying.items():
        table[name].tensor[: values.numel()].copy_(values)
    if averager is not None:
        averager.listen_to(model, state.layout, state.grad)


def remove_(state: State, model: nn.Module, removed: np.ndarray, settings: Settings) -> None:
    """Rebuild `model` and `state` without the groups of `removed`, bool [groups].

    z and z_i are theta then, and what else the state remembers begins anew.
    """
    coupling = state.groups.coupling.left(state.mask.bits)
    sizes = smaller_sizes(model, coupling, removed)
    tensors = smaller_tensors(model, coupling, removed)
    moments = {
        name: cut(moment, state.layout, coupling, removed)
        for name, moment in state.optimizer.moments.items()
    }
    resize_(model, sizes)
    fill_(model, tensors)
    _rebuild_(state, model, state.mask.bits & ~removed, sizes, settings, moments)


def resize_to_(state: State, model: nn.Module, mask: np.ndarray, settings: Settings) -> None:
    """Give `model` and `state` the sizes that `mask` leaves; the caller sets all values afterwards.

    The model may be larger or smaller before.
    """
    resize_(model, state.whole.sizes, grows=True)
    sizes = smaller_sizes(model, state.groups.coupling, ~mask)
    resize_(model, sizes)
    count = sum(p.numel() for p in trained_parameters(model).values())
    moments = {name: moment.new_zeros(count) for name, moment in state.optimizer.moments.items()}
    _rebuild_(state, model, mask, sizes, settings, moments)
    state.removes = settings.method.removes or not mask.all()


def _staying(state: State, model: nn.Module, mask: np.ndarray) -> dict[str, Tensor]:
    """Return what stays under `mask` of what neither model nor optimizer hold, by its name."""
    found, coupling = {}, state.groups.coupling
    other = ["theta"]
    # Of the best z no mask but its own says what of it stays.
    if BEST in state.memory and not torch.equal(state.memory[BEST_MASK], torch.from_numpy(mask)):
        other += [f"{MEMORY}{name}" for name in (BEST, BEST_STATS, BEST_MASK)]
    for name, entry in lasting(state, model).items():
        if name in other or name.startswith((OPTIMIZER, BUFFER, FIXED)):
            continue
        values = entry.tensor
        if entry.cut == PARAMETERS:
            values = cut(values, state.layout, coupling, ~mask)
        elif entry.cut == STATISTICS:
            values = values[state.message.stats_kept]
        elif entry.cut == MESSAGE:
            values = values[: state.message.plan.numel]
        found[name] = values.clone()
    return found


def _rebuild_(
    state: State,
    model: nn.Module,
    mask: np.ndarray,
    sizes: Sizes,
    settings: Settings,
    moments: dict[str, Tensor],
) -> None:
    """Fill `state` anew for a model of other sizes: from its weights, all else as at the start.

    The optimizer goes on, with `moments` that are as long as the model's parameters.
    """
    layout, optimizer = build_layout(model), state.optimizer
    new = build_state(model, layout, state.groups, settings, state.whole, optimizer)
    optimizer.follow_(model, layout, moments)
    sizes_of = {PARAMETERS: layout.numel, STATISTICS: new.stats.numel()}
    for name, entry in state.memory.items():
        if name not in new.memory:
            tensor = entry.tensor
            if entry.cut != ITSELF:
                tensor = tensor.new_zeros(sizes_of[entry.cut])
            new.memory.declare({name: entry._replace(tensor=tensor)})
    # The best z so far was of another size.
    state.position.best = []
    same = ("position", "scaler", "rho1", "rho2", "frozen", "consensus_sgd", "alone", "losses")
    for kept in same:
        setattr(new, kept, getattr(state, kept))
    new.mask, new.sizes, new.removes = replace(new.mask, bits=mask), sizes, True
    for field in fields(State):
        setattr(state, field.name, getattr(new, field.name))


def left_of(state: State) -> str:
    """Return what is left of a network that becomes smaller, to build it before it is filled."""
    return np.packbits(state.mask.bits).tobytes().hex() if state.removes else ""


def fit_network(left: str, context: RunContext) -> str:
    """Give a network that becomes smaller the sizes it had; return why that can't be, or ""."""
    state = context.state
    if not (state.removes or left):
        return ""
    if not left and not context.settings.method.removes:
        left = np.packbits(np.ones_like(state.mask.bits)).tobytes().hex()
    bits = np.frombuffer(bytes.fromhex(left), dtype=np.uint8)
    if bits.size != np.packbits(state.mask.bits).size:
        return "it does not say what was left of the network"
    mask = np.unpackbits(bits, count=state.mask.bits.size).astype(bool)
    as_it_is = np.array_equal(mask, state.mask.bits) if state.removes else mask.all()
    if not as_it_is:
        resize_to_(state, context.problem.model, mask, context.settings)
    return ""
