"""All tensors that one step hands to the next, by name; saved and put back as they are declared.

Checkpoints, what ranks keep in memory against the loss of a node, an own loop's state and removal
of channels are loops over the table of `lasting`; `core/memory.py` says what a declaration means.

By removal a network becomes physically smaller while it is trained. What the mask lacks is taken
out of the model and of every vector of the state: from then on steps cost what the smaller network
costs. Weights, BatchNorm statistics, the optimizer's memory, what has not been sent yet, the
average of z and the best z stay bit for bit in what is left, and so a run goes on as it would with
zeros in their place, up to how sums are rounded. Groups and mask remain those of the whole network.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.comm.agreement import broadcast_json, run_collectively_while
from prunex_mpi.comm.collectives import allreduce_, broadcast_tensor_
from prunex_mpi.comm.counted import worker_weight
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import BEST, BEST_MASK, BEST_STATS
from prunex_mpi.core.exchange import complete_
from prunex_mpi.core.memory import (
    ALL,
    FIRST,
    FROM_Z,
    ITSELF,
    MEAN,
    MESSAGE,
    NODE,
    PARAMETERS,
    RANK,
    STATISTICS,
    SUM,
    TOTAL,
    ZERO,
    Declared,
    Lasting,
)
from prunex_mpi.core.state import (
    RunContext,
    State,
    adopt_mask,
    begin_iteration,
    build_state,
    every_rank_sends,
    freeze,
    put_position,
)
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import build_layout, trained_parameters
from prunex_mpi.models.standalone import Sizes, fill_, resize_
from prunex_mpi.pruning.shrink import cut, smaller_sizes, smaller_tensors
from prunex_mpi.settings.fields import Settings

# How names of tensors begin that are the optimizer's, the memory's or the model's own.
OPTIMIZER, MEMORY, BUFFER, FIXED = "optimizer.", "memory.", "buffer.", "fixed."
MASK = "mask"

Tensors = dict[str, Tensor]
Numbers = dict[str, Any]
# Of several ranks what each has written.
Parts = Callable[[], Iterator[tuple[Tensors, Numbers]]]


def lasting(
    state: State, model: nn.Module, *, retired: bool | None = None, in_flight: bool | None = None
) -> Declared:
    """Return the table: of the state as it is, or as it would be with duals that are `retired`.

    The same of what is `in_flight` between the nodes. The mask is not in it, which says what the
    others are of.
    """
    retired = state.consensus_sgd if retired is None else retired
    in_flight = bool(state.position.in_flight) if in_flight is None else in_flight
    table = {
        "theta": Lasting(state.theta, RANK, FROM_Z, PARAMETERS),
        "z_node": Lasting(state.z_node, NODE, FROM_Z, PARAMETERS),
        "z": Lasting(state.z, ALL, FIRST, PARAMETERS),
        "rho1": Lasting(torch.from_numpy(state.rho1), ALL, FIRST),
        "rho2": Lasting(torch.from_numpy(state.rho2), ALL, FIRST),
    }
    if not retired:
        table["u"] = Lasting(state.u, RANK, ZERO, PARAMETERS)
        table["v"] = Lasting(state.v, NODE, ZERO, PARAMETERS)
    for name, tensor in state.optimizer.tensors().items():
        kind = PARAMETERS if name in state.optimizer.moments else ITSELF
        table[f"{OPTIMIZER}{name}"] = Lasting(tensor, RANK, MEAN, kind)
    if state.message.residual is not None:
        table["residual"] = Lasting(state.message.residual, RANK, SUM, MESSAGE)
    if in_flight:
        # Statistics that were offered with it.
        table["stats"] = Lasting(state.stats, RANK, FIRST, STATISTICS)
        table["message"] = Lasting(state.message.buffer, ALL, FIRST, MESSAGE)
    table |= {f"{MEMORY}{name}": entry for name, entry in state.memory.items()}
    # Of BatchNorm statistics elsewhere the mean over all data, see `put_elsewhere`.
    for name, buffer in model.named_buffers():
        table[f"{BUFFER}{name}"] = Lasting(buffer.detach(), RANK, FIRST)
    trained = trained_parameters(model)
    for name, parameter in model.named_parameters():
        if name not in trained:
            table[f"{FIXED}{name}"] = Lasting(parameter.detach(), ALL, FIRST)
    return table


# --------------------------------------------------------------------------------------------------
# What a rank writes
# --------------------------------------------------------------------------------------------------


def contents(topology: Topology, state: State, model: nn.Module) -> tuple[Tensors, Numbers]:
    """Return what this rank writes: its tensors on the CPU, copies of the model's own."""
    first = topology.world.rank == 0
    tensors = {}
    for name, entry in lasting(state, model).items():
        if entry.is_written(topology.is_leader, first):
            tensors[name] = entry.tensor.cpu()
            if name.startswith((BUFFER, FIXED)):
                # What is the model's own may share memory or lie in another order.
                tensors[name] = tensors[name].contiguous().clone()
    if first:
        tensors[MASK] = torch.from_numpy(np.packbits(state.mask.bits))
    return tensors, numbers_of(state)


def numbers_of(state: State) -> Numbers:
    """Return what goes through JSON: position, whether masks are frozen and duals retired."""
    return {
        "position": asdict(state.position),
        "stage": [state.frozen, state.consensus_sgd],
        "scaler": state.scaler.state_dict(),
    }


def common_contents(state: State, model: nn.Module, complete: bool) -> tuple[Tensors, Numbers]:
    """Return what `put_elsewhere` needs of a rank of which nothing else may be left, no copies.

    Where what was in flight between the nodes is not `complete`, z is what it was before, and what
    was offered then is lost: it is in the residual, which the helper thread writes.
    """
    table, numbers = lasting(state, model), numbers_of(state)
    tensors = {n: e.tensor for n, e in table.items() if e.elsewhere in (FIRST, MEAN, SUM)}
    tensors[MASK] = torch.from_numpy(np.packbits(state.mask.bits))
    if state.position.in_flight and not complete:
        numbers["position"]["in_flight"] = ""
        del tensors["message"]
        if "residual" in tensors:
            residual = tensors["residual"]
            tensors["residual"] = residual.new_zeros(1).expand(residual.shape)
    return tensors, numbers


# --------------------------------------------------------------------------------------------------
# What a rank puts back
# --------------------------------------------------------------------------------------------------


def put_exact(topology: Topology, tensors: Tensors, numbers: Numbers, context: RunContext) -> None:
    """Restore this rank on the same nodes. Collective on `world` and `node`."""
    state, model = context.state, context.problem.model
    put_position(state.position, numbers["position"])
    _put_mask(topology.world, tensors, numbers, state)
    for name, entry in lasting(state, model).items():
        if name in tensors:
            entry.tensor.copy_(tensors[name])
        comm = {RANK: None, NODE: topology.node, ALL: topology.world}[entry.owner]
        if comm is not None:
            broadcast_tensor_(comm, entry.tensor, context.transport)
    if state.consensus_sgd:
        state.u.zero_()
        state.v.zero_()
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(numbers["scaler"])


def put_elsewhere(topology: Topology, parts: Parts, context: RunContext) -> Numbers:
    """Restore what ranks on other nodes have in common; return the first rank's numbers.

    What those have written who are left is dealt out as `parts`, which each rank reads. The outer
    iteration under way begins anew. Collective on `world` and `node`.
    """
    world, settings, transport = topology.world, context.settings, context.transport
    state, model = context.state, context.problem.model
    table = lasting(state, model)
    summed = {n: e for n, e in table.items() if e.elsewhere in (MEAN, SUM)}
    # About 0, which float64 has the digits for.
    stats = torch.zeros_like(state.stats, dtype=torch.float64)
    each, zero = torch.empty_like(stats), torch.zeros_like(stats)
    for entry in summed.values():
        entry.tensor.zero_()
    given = np.zeros(1, dtype=np.int64)

    def add_up() -> tuple[Tensors, Numbers]:
        first: tuple[Tensors, Numbers] = ({}, {})
        for tensors, numbers in parts():
            given[0] += 1
            if world.rank == 0 and not first[0]:
                first = tensors, numbers
            for name, buffer in model.named_buffers():
                buffer.copy_(tensors[f"{BUFFER}{name}"])
            batchnorm.read_(state.bn_modules, each, zero)
            stats.add_(each)
            for name, entry in summed.items():
                entry.tensor.add_(tensors[name].to(entry.tensor.device))
        return first

    first, numbers = run_collectively_while(world, add_up, context.heartbeat)
    world.Allreduce(MPI.IN_PLACE, given)
    numbers = broadcast_json(world, numbers)
    allreduce_(world, stats, transport)
    put_position(state.position, numbers["position"])
    _put_mask(world, first, numbers, state)
    weight = worker_weight(topology, every_rank_sends(settings))
    totals = {f"{MEMORY}{e.of}": e.tensor for e in table.values() if e.elsewhere == TOTAL}
    for name, entry in summed.items():
        allreduce_(world, entry.tensor.view(-1), transport)
        if name in totals:
            totals[name].copy_(entry.tensor)
        if entry.elsewhere == MEAN:
            entry.tensor.div_(given[0])
        else:
            entry.tensor.mul_(weight)
    for name, entry in lasting(state, model).items():
        if entry.elsewhere in (FIRST, TOTAL):
            if entry.elsewhere == FIRST and name in first:
                entry.tensor.copy_(first[name])
            broadcast_tensor_(world, entry.tensor, transport)
    state.u.zero_()
    state.v.zero_()
    if state.position.in_flight:
        # The last that the old nodes have agreed on.
        complete_(state, settings)
        state.position.in_flight = ""
    state.theta.copy_(state.z)
    state.z_node.copy_(state.z)
    batchnorm.as_plain_(state.bn_modules, stats.div_(given[0]), zero)
    batchnorm.write_plain(state.bn_modules, stats)
    begin_iteration(state.position)
    state.position.part = 0
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(numbers["scaler"])
    return numbers


def _put_mask(world: MPI.Comm, tensors: Tensors, numbers: Numbers, state: State) -> None:
    """Adopt the mask of world rank 0, which holds it in `tensors`, and its stage.

    The caller sets the vectors afterwards. Collective on `world`.
    """
    bits = np.packbits(state.mask.bits)
    if world.rank == 0:
        bits[:] = tensors[MASK].numpy()
    world.Bcast(bits, root=0)
    mask = np.unpackbits(bits, count=state.mask.bits.size).astype(bool)
    frozen, retired = numbers["stage"]
    state.frozen, state.consensus_sgd = False, retired
    state.message.allocate_(state.layout.numel, state.stats.numel())
    adopt_mask(state, mask, residual_follows=False)
    # What is left over of messages lies with one leader then.
    state.message.agreed = False
    if frozen:
        freeze(state, retired)


# --------------------------------------------------------------------------------------------------
# Channels that leave the network
# --------------------------------------------------------------------------------------------------


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
