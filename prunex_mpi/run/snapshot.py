"""What a checkpoint holds of one rank, whether it fits a run, and how it is put back.

The tensors that training hands on are those of `core/lasting.py`. The program adds each rank's
place in its data and its random generators; on other nodes the data are shuffled anew from the
first step of the outer iteration.
"""

import hashlib
import random

import numpy as np
import torch

from prunex_mpi.comm.topology import Topology
from prunex_mpi.core import lasting
from prunex_mpi.core.lasting import MASK, Numbers, Parts, Tensors
from prunex_mpi.core.schedule import steps_with
from prunex_mpi.core.state import Problem, RunContext, State
from prunex_mpi.data.batches import BatchStream
from prunex_mpi.data.text import WindowStream
from prunex_mpi.models.dummy_input import seed_all

GENERATORS = ("generator.data", "generator.torch")


def contents(topology: Topology, state: State, problem: Problem) -> tuple[Tensors, Numbers]:
    """Return all that this rank has to write, on the CPU; copies of what is the model's own."""
    tensors, numbers = lasting.contents(topology, state, problem.model)
    tensors |= _generators(problem.train)
    if state.theta.device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(state.theta.device)
    return tensors, numbers | _draws(problem.train)


def common_contents(state: State, problem: Problem, complete: bool) -> tuple[Tensors, Numbers]:
    """Return what `put_common` needs of a rank of which nothing else may be left, no copies.

    What was in flight between the nodes may not be `complete`.
    """
    tensors, numbers = lasting.common_contents(state, problem.model, complete)
    return tensors | {"order": problem.train.order}, numbers | _draws(problem.train)


def _generators(stream: BatchStream | WindowStream) -> Tensors:
    """Return order and generators of a rank's data, and torch's generator."""
    states = (stream.generator.get_state(), torch.get_rng_state())
    return {"order": stream.order, **dict(zip(GENERATORS, states, strict=True))}


def _draws(stream: BatchStream | WindowStream) -> Numbers:
    """Return a rank's place in the data, and the generators that go through JSON."""
    name, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "data": [stream.epoch, stream.position],
        "samples": len(stream.order),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }


def model_digest(state: State) -> str:
    """Return what changes when parameters, buffers or groups have other names, shapes or order.

    Of the network as it was before anything was taken out of it.
    """
    whole = state.whole
    return hashlib.sha256(
        repr((whole.layout, state.groups, list(whole.buffers))).encode()
    ).hexdigest()


# --------------------------------------------------------------------------------------------------
# Whether it fits
# --------------------------------------------------------------------------------------------------


def misfit(
    tensors: Tensors,
    numbers: Numbers,
    state: State,
    problem: Problem,
    *,
    leader: bool,
    first: bool,
    same_nodes: bool,
) -> str:
    """Return what of one rank's file does not fit this run's network or data, or "".

    The rank was a `leader`, or the `first` of all; its data are the same on the `same_nodes`.
    Checksums, format and configuration are as they were written.
    """
    in_flight = bool(numbers["position"]["in_flight"])
    stage = {"retired": numbers["stage"][1], "in_flight": in_flight}
    table = lasting.lasting(state, problem.model, **stage)
    wanted = {n: e.tensor for n, e in table.items() if e.is_written(leader, first)}
    if wanted.pop("message", None) is not None and (
        "message" not in tensors or tensors["message"].dtype != state.theta.dtype
    ):
        return "what was in flight between the nodes is missing"
    if first:
        wanted[MASK] = torch.from_numpy(np.packbits(state.mask.bits))
    wanted |= _generators(problem.train) if same_nodes else {}
    for key, tensor in wanted.items():
        kind = tuple(tensor.shape), tensor.dtype
        found = (tuple(tensors[key].shape), tensors[key].dtype) if key in tensors else None
        if found != kind:
            return f"{key} is {found}, the model asks for {kind}"
    if not same_nodes:
        return ""
    if not torch.equal(tensors["order"].sort()[0], problem.train.order.sort()[0]):
        return "its order is not one of this rank's images"
    return ""


# --------------------------------------------------------------------------------------------------
# What a rank puts back
# --------------------------------------------------------------------------------------------------


def put_all(topology: Topology, tensors: Tensors, numbers: Numbers, context: RunContext) -> None:
    """Restore this rank exactly. Collective on `world` and `node`."""
    stream, device = context.problem.train, context.state.theta.device
    lasting.put_exact(topology, tensors, numbers, context)
    stream.epoch, stream.position = numbers["data"]
    stream.order = tensors["order"]
    stream.generator.set_state(tensors["generator.data"])
    torch.set_rng_state(tensors["generator.torch"])
    if device.type == "cuda" and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"], device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def put_common(topology: Topology, parts: Parts, ranks: int, context: RunContext) -> None:
    """Restore what ranks on other nodes have in common.

    There were as many `ranks` before, of which `parts` are there. Collective on `world` and `node`.
    """
    world, settings, problem = topology.world, context.settings, context.problem
    position = context.state.position
    numbers = lasting.put_elsewhere(topology, parts, context)
    samples = problem.train.samples_among(ranks, numbers["samples"])
    # The same share of the run, whose outer iterations may have other steps on other nodes.
    done = position.steps_done * problem.steps
    position.steps_done = round(done / steps_with(settings, samples))
    problem.train.reshuffle([settings.seed, world.rank, position.iteration])
    seed_all((settings.seed + position.iteration) * world.size + world.rank)
