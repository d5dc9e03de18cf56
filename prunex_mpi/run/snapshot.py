"""What a checkpoint holds of one rank, whether it fits a run, and how it is put back.

Of rank r it holds theta, u, momentum, the model's buffers, its place in the data and its random
generators; of node leaders also z_i and v_i, of world rank 0 also z, mask and penalties, and what
has been exchanged but is no part of z yet. On the same nodes a restored run goes on bit for bit (on
the CPU). Parameters that are not trained are of rank 0. On other nodes it goes on from what the
ranks have in common: z with all that has been exchanged, mask, penalties, the means of momentum and
of BatchNorm statistics; theta and z_i start from z, the duals from 0, so that sum_i P_i v_i = 0,
the data are shuffled anew from the first step of the outer iteration, and of a method's memory the
`own.` tensors, parts of a sum over ranks, are added up and dealt out by the new ranks' weights, and
of `each.` tensors there is the mean.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import one_line
from prunex_mpi.comm.agreement import broadcast_json, run_collectively_while
from prunex_mpi.comm.collectives import Transport, allreduce_, bcast_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.wire import worker_weight
from prunex_mpi.core.admm import update_rho2
from prunex_mpi.core.broadcast import broadcast_tensor_
from prunex_mpi.core.message import arrive_, sent_in
from prunex_mpi.core.schedule import recount_steps_, steps_with
from prunex_mpi.core.state import (
    EACH,
    OWN,
    REST,
    SUM_OF,
    Position,
    Problem,
    RunContext,
    State,
    begin_iteration,
    every_rank_sends,
    put_mask_back,
    put_position,
)
from prunex_mpi.data.batches import BatchStream
from prunex_mpi.data.text import WindowStream
from prunex_mpi.models import batchnorm
from prunex_mpi.models.draws import seed_all
from prunex_mpi.models.layout import trained_parameters

BUFFER, FIXED = "buffer.", "fixed."
OF_THE_MODEL = (BUFFER, FIXED)

Tensors = dict[str, Tensor]
Numbers = dict[str, Any]
# What this rank reads, part by part; calls what it is given as reading goes on.
Parts = Callable[[Callable[[], None]], Iterator[tuple[Tensors, Numbers]]]


# --------------------------------------------------------------------------------------------------
# What a rank writes
# --------------------------------------------------------------------------------------------------


def contents(topology: Topology, state: State, problem: Problem) -> tuple[Tensors, Numbers]:
    """Return all that this rank has to write, on the CPU; copies of what is the model's own."""
    stream = problem.train
    tensors = {"theta": state.theta, "order": stream.order}
    tensors |= buffers_of(problem)
    tensors |= {"generator.data": stream.generator.get_state()}
    tensors |= {"generator.torch": torch.get_rng_state()}
    if state.theta.device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(state.theta.device)
    tensors |= state.optimizer.tensors()
    if not state.consensus_sgd:
        tensors["u"] = state.u
        if topology.is_leader:
            tensors["v"] = state.v
    if topology.is_leader:
        tensors["z_node"] = state.z_node
    first = topology.world.rank == 0
    if state.position.under_way:
        tensors["stats"] = state.stats
        if first:
            tensors["message"] = state.payload
    tensors |= {key: state.memory[key] for key in _memory_keys(state, first)}
    if first:
        tensors |= _agreed(state, problem)
    numbers = _numbers(state, stream, state.position)
    # What is the model's own may share memory or lie in another order.
    return {
        k: t.detach().cpu().contiguous().clone() if k.startswith(OF_THE_MODEL) else t.cpu()
        for k, t in tensors.items()
    }, numbers


def common_contents(state: State, problem: Problem, complete: bool) -> tuple[Tensors, Numbers]:
    """Return what `put_common` needs of a rank of which nothing else may be left, no copies.

    Where what was under way between the nodes is not `complete`, z is what it was before, and what
    was offered then is lost: it is in what is left over, which the helper thread writes.
    """
    tensors = buffers_of(problem) | state.optimizer.tensors()
    tensors |= state.memory | _agreed(state, problem)
    tensors["order"] = problem.train.order
    numbers = _numbers(state, problem.train, state.position)
    if state.position.under_way and complete:
        tensors["message"] = state.payload
    elif state.position.under_way:
        numbers["position"]["under_way"] = ""
        if REST in tensors:
            rest = state.memory[REST]
            tensors[REST] = rest.new_zeros(1).expand(rest.shape)
    return tensors, numbers


def buffers_of(problem: Problem) -> Tensors:
    """Return the model's buffers, no copies, by the names that a checkpoint gives them."""
    return {f"{BUFFER}{name}": buffer for name, buffer in problem.model.named_buffers()}


def _agreed(state: State, problem: Problem) -> Tensors:
    """Return z, mask, penalties and the parameters that are not trained, which all ranks share."""
    tensors = {"z": state.z, "mask": torch.from_numpy(np.packbits(state.mask))}
    tensors["rho1"], tensors["rho2"] = map(torch.from_numpy, (state.rho1, state.rho2))
    return tensors | _fixed(problem)


def _fixed(problem: Problem) -> Tensors:
    """Return the parameters that are not trained, by the names that a checkpoint gives them."""
    trained, every = trained_parameters(problem.model), problem.model.named_parameters()
    return {f"{FIXED}{name}": p.detach() for name, p in every if name not in trained}


def _numbers(state: State, stream: BatchStream | WindowStream, position: Position) -> Numbers:
    """Return what goes through JSON."""
    name, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "position": asdict(position),
        "stage": [state.frozen, state.consensus_sgd],
        "data": [stream.epoch, stream.position],
        "scaler": state.scaler.state_dict(),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }


def _memory_keys(state: State, first: bool) -> list[str]:
    """Return the names in `state.memory` that a rank, the `first` of all or another, writes."""
    return [key for key in state.memory if first or key.startswith((OWN, EACH))]


def _shared_keys(state: State) -> list[str]:
    """Return the names in `state.memory` of what all ranks hold alike."""
    return [key for key in state.memory if not key.startswith((OWN, EACH))]


def model_digest(state: State) -> str:
    """Return what changes when parameters, buffers or groups have other names, shapes or order.

    Of the network as it was before anything was taken out of it.
    """
    whole = state.whole
    return hashlib.sha256(
        repr((whole.layout, state.groups, list(whole.buffers))).encode()
    ).hexdigest()


def misfit(
    tensors: Tensors,
    numbers: Any,
    state: State,
    problem: Problem,
    *,
    leader: bool,
    first: bool,
    same_nodes: bool,
) -> str:
    """Return what of one rank's file does not fit this run, or "".

    The rank was a `leader`, or the `first` of all; its place in the data counts on the
    `same_nodes`.
    """
    template = _numbers(state, problem.train, Position())
    # The spare Gaussian of the generator is a number or None.
    template["python"][2] = None
    place = numbers["position"] if _alike(template, numbers) else None
    if place is None or place["iteration"] < 1 or place["step"] < 0:
        return "its numbers are not what this version writes"
    epoch, at = numbers["data"]
    # Ranks of fewer nodes had more steps in an epoch.
    most = problem.train.steps_per_epoch if same_nodes else at
    if epoch < 0 or not 0 <= at <= most or place["steps_done"] < 0:
        return f"epoch {epoch}, step {at} is no place in this rank's data"
    order = problem.train.order
    wanted = _expected(state, problem, leader, first, retired=numbers["stage"][1])
    if place["under_way"]:
        wanted["stats"] = (tuple(state.stats.shape), state.stats.dtype)
        if first and ("message" not in tensors or tensors["message"].dtype != state.theta.dtype):
            return "what was under way between the nodes is missing"
    if same_nodes:
        like = {"order": order, "generator.data": problem.train.generator.get_state()}
        like["generator.torch"] = torch.get_rng_state()
        wanted |= {key: (tuple(t.shape), t.dtype) for key, t in like.items()}
    for key, kind in wanted.items():
        found = (tuple(tensors[key].shape), tensors[key].dtype) if key in tensors else None
        if found != kind:
            return f"{key} is {found}, the model asks for {kind}"
    if same_nodes and not torch.equal(tensors["order"].sort()[0], order.sort()[0]):
        return "its order is not one of this rank's images"
    return _odd_generators(tensors, numbers) if same_nodes else ""


def _alike(template: Any, value: Any) -> bool:
    """Return whether `value`, read from JSON, has the form of `template`, all the way down.

    That is keys, lengths and types; None in `template` stands for anything, an empty list for one
    of any length.
    """
    if template is None:
        return True
    if isinstance(template, dict):
        return (
            isinstance(value, dict)
            and template.keys() == value.keys()
            and all(_alike(template[key], value[key]) for key in template)
        )
    if isinstance(template, list):
        return isinstance(value, list) and (
            not template or (len(template) == len(value) and all(map(_alike, template, value)))
        )
    return type(value) is type(template) or (isinstance(template, float) and type(value) is int)


def _odd_generators(tensors: Tensors, numbers: Numbers) -> str:
    """Return which of the random generators has a state that none can have, "" for none."""
    version, words, gauss = numbers["python"]
    name, keys, *rest = numbers["numpy"]
    try:
        random.Random().setstate((version, tuple(words), gauss))
        np.random.RandomState().set_state((name, np.array(keys, dtype=np.uint32), *rest))
        for key in ("generator.data", "generator.torch"):
            if key in tensors:
                torch.Generator().set_state(tensors[key])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return f"the state of a random generator is impossible ({one_line(error)})"
    return ""


def _expected(
    state: State, problem: Problem, leader: bool, first: bool, *, retired: bool
) -> dict[str, tuple]:
    """Return shape and dtype of what a rank's file must hold; with `retired` duals none of them."""
    keys = ["theta"]
    keys += [] if retired else ["u"]
    if leader:
        keys += ["z_node"] if retired else ["z_node", "v"]
    if first:
        keys.append("z")
    wanted = dict.fromkeys(keys, (tuple(state.theta.shape), state.theta.dtype))
    for name, moment in state.optimizer.tensors().items():
        wanted[name] = (tuple(moment.shape), moment.dtype)
    for key, buffer in buffers_of(problem).items():
        wanted[key] = (tuple(buffer.shape), buffer.dtype)
    for key in _memory_keys(state, first):
        wanted[key] = (tuple(state.memory[key].shape), state.memory[key].dtype)
    if first:
        wanted["mask"] = ((-(-state.groups.total // 8),), torch.uint8)
        wanted["rho1"] = wanted["rho2"] = (state.rho1.shape, torch.float64)
        wanted |= {key: (tuple(t.shape), t.dtype) for key, t in _fixed(problem).items()}
    return wanted


# --------------------------------------------------------------------------------------------------
# What a rank puts back
# --------------------------------------------------------------------------------------------------


def put_all(topology: Topology, tensors: Tensors, numbers: Numbers, context: RunContext) -> None:
    """Restore this rank exactly. Collective on `world` and `node`."""
    state, problem, transport = context.state, context.problem, context.transport
    frozen, retired = numbers["stage"]
    _put_shared(topology, tensors, frozen, retired, state, transport)
    _put_fixed(topology, tensors, problem, transport)
    state.theta.copy_(tensors["theta"])
    for key, flat in (("u", state.u), ("v", state.v), ("z_node", state.z_node)):
        if key in tensors:
            flat.copy_(tensors[key])
    if retired:
        state.u.zero_()
        state.v.zero_()
    else:
        bcast_(topology.node, state.v, transport)
    bcast_(topology.node, state.z_node, transport)
    for name, moment in state.optimizer.tensors().items():
        moment.copy_(tensors[name])
    for key, buffer in buffers_of(problem).items():
        buffer.copy_(tensors[key])
    for key in _memory_keys(state, topology.world.rank == 0):
        state.memory[key].copy_(tensors[key])
    _bcast_shared_memory(topology, state, transport)
    if numbers["position"]["under_way"]:
        state.stats.copy_(tensors["stats"])
        _put_message(topology, tensors, state, transport)
    put_position(state.position, numbers["position"])
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(numbers["scaler"])
    stream = problem.train
    stream.epoch, stream.position = numbers["data"]
    stream.order = tensors["order"]
    stream.generator.set_state(tensors["generator.data"])
    torch.set_rng_state(tensors["generator.torch"])
    if state.theta.device.type == "cuda" and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"], state.theta.device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def put_common(topology: Topology, parts: Parts, ranks: int, context: RunContext) -> bool:
    """Restore what ranks on other nodes have in common; return whether outer iterations are lost.

    Those of nodes that were apart since z was agreed on. There were as many `ranks` before, of
    which `parts` are there. Collective on `world` and `node`.
    """
    world, settings, transport = topology.world, context.settings, context.transport
    state, problem = context.state, context.problem
    means = state.optimizer.tensors()
    means |= {key: tensor for key, tensor in state.memory.items() if key.startswith(EACH)}
    # About 0, which float64 has the digits for.
    stats = torch.zeros_like(state.stats, dtype=torch.float64)
    each, zero = torch.empty_like(stats), torch.zeros_like(stats)
    for mean in means.values():
        mean.zero_()
    own = [key for key in state.memory if key.startswith(OWN)]
    for key in own:
        state.memory[key].zero_()
    given = np.zeros(1, dtype=np.int64)

    def add_up(going: Callable[[], None]) -> tuple[Tensors, Numbers]:
        first: tuple[Tensors, Numbers] = ({}, {})
        for tensors, numbers in parts(going):
            given[0] += 1
            if world.rank == 0 and not first[0]:
                first = tensors, numbers
            for key, buffer in buffers_of(problem).items():
                buffer.copy_(tensors[key])
            batchnorm.read_(state.bn_modules, each, zero)
            stats.add_(each)
            for name, mean in means.items():
                mean.add_(tensors[name].to(mean.device))
            for key in own:
                state.memory[key].add_(tensors[key].to(state.theta.device))
        return first

    first = run_collectively_while(world, add_up, context.heartbeat.go_on)
    world.Allreduce(MPI.IN_PLACE, given)
    for mean in means.values():
        allreduce_(world, mean.view(-1), transport)
        mean.div_(given[0])
    allreduce_(world, stats, transport)
    order = len(first[0]["order"]) if first[0] else 0
    common = broadcast_json(world, {**first[1], "order": order})
    frozen, retired = common["stage"]
    _put_shared(topology, first[0], frozen, retired, state, transport)
    _put_fixed(topology, first[0], problem, transport)
    state.u.zero_()
    state.v.zero_()
    sums = {}
    for key in own:
        allreduce_(world, state.memory[key].view(-1), transport)
        whole = f"{SUM_OF}{key.removeprefix(OWN)}s"
        if given[0] < ranks and whole in state.memory:
            sums[whole] = state.memory[key].clone()
        state.memory[key].mul_(worker_weight(topology, every_rank_sends(settings)))
    if world.rank == 0:
        for key in _shared_keys(state):
            state.memory[key].copy_(first[0][key])
    _bcast_shared_memory(topology, state, transport)
    for key, left in sums.items():
        state.memory[key].copy_(left)
    place = common["position"]
    if place["under_way"]:
        # The last that the old nodes have agreed on.
        _put_message(topology, first[0], state, transport)
        k = sent_in(place["iteration"], place["part"], settings)
        arrive_(state, settings, place["under_way"], k, place["part"])
        if not state.consensus_sgd:
            update_rho2(state, settings)
        place["under_way"] = ""
    place["part"] = 0
    lost = place["apart"]
    place["apart"] = False
    state.theta.copy_(state.z)
    state.z_node.copy_(state.z)
    if world.rank == 0:
        for key, buffer in buffers_of(problem).items():
            buffer.copy_(first[0][key])
    for buffer in problem.model.buffers():
        broadcast_tensor_(world, buffer.detach(), transport)
    batchnorm.as_plain_(state.bn_modules, stats.div_(given[0]), zero)
    batchnorm.write_plain(state.bn_modules, stats)
    put_position(state.position, place)
    samples = problem.train.samples_among(ranks, common["order"])
    before = steps_with(settings, samples)
    recount_steps_(state.position, settings, before, problem.steps)
    begin_iteration(state.position)
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(common["scaler"])
    problem.train.reshuffle([settings.seed, world.rank, state.position.iteration])
    seed_all((settings.seed + state.position.iteration) * world.size + world.rank)
    return lost


def _put_fixed(
    topology: Topology, tensors: Tensors, problem: Problem, transport: Transport
) -> None:
    """Give every rank the parameters that are not trained of world rank 0, which holds them."""
    for key, values in _fixed(problem).items():
        if topology.world.rank == 0:
            values.copy_(tensors[key])
        broadcast_tensor_(topology.world, values, transport)


def _bcast_shared_memory(topology: Topology, state: State, transport: Transport) -> None:
    for key in _shared_keys(state):
        bcast_(topology.world, state.memory[key].view(-1).view(torch.uint8), transport)


def _put_message(topology: Topology, tensors: Tensors, state: State, transport: Transport) -> None:
    """Give every rank what was under way between the nodes, which world rank 0 holds."""
    if topology.world.rank == 0:
        state.payload.copy_(tensors["message"])
    bcast_(topology.world, state.payload, transport)


def _put_shared(
    topology: Topology,
    tensors: Tensors,
    frozen: bool,
    retired: bool,
    state: State,
    transport: Transport,
) -> None:
    """Give every rank z, mask and penalties of world rank 0, which holds them in `tensors`."""
    world = topology.world
    bits = np.packbits(state.mask)
    if world.rank == 0:
        bits[:] = tensors["mask"].numpy()
        state.rho1[:], state.rho2[:] = tensors["rho1"].numpy(), tensors["rho2"].numpy()
        state.z.copy_(tensors["z"])
    for array in (bits, state.rho1, state.rho2):
        world.Bcast(array, root=0)
    put_mask_back(state, np.unpackbits(bits, count=state.mask.size).astype(bool), frozen, retired)
    bcast_(world, state.z, transport)
