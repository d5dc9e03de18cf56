"""Run a driver on a small network, and compare what comes of it with an oracle."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import RandomStream
from nodes import WORLD
from places import BUFFERS, DEVICE, Moved

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.comm.counted import CountedComm, CountedComms, make_comms
from prunex_mpi.comm.traffic import Clock, Traffic
from prunex_mpi.config.resolve import make
from prunex_mpi.core.mask_choice import make_groups
from prunex_mpi.core.state import Problem, RunContext, build_state
from prunex_mpi.data.batches import Shard
from prunex_mpi.methods.exchanges import exchange_of, memory_of
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.masks import layer_masks
from prunex_mpi.run.supervision import outer_iterations

CPU = torch.device("cpu")
SMALL_BUCKETS = build_transport(DEVICE, 2**-10, BUFFERS)
STEPS = 3
STEPS_PER_EPOCH = 2
COMMON = {"outer_iterations": 2, "lr": 0.05, "lr_schedule": "constant", "warmup_ratio": 0.0}
# Aggregation and ranks per node; with 4 ranks: 2 + 2, 3 + 1.
SHAPES = (("flat", 2), ("hierarchical", 2), ("hierarchical", 3))


def run_driver(topology, settings, model, stream, steps=STEPS, loss=F.cross_entropy):
    """Yield (record, state) after each outer iteration of the driver of the method."""
    stream.steps_per_epoch = STEPS_PER_EPOCH
    with exchanging_asynchronously(topology, settings.overlap_steps != 0, SMALL_BUCKETS) as helper:
        context = replace(make_context(settings, model, stream, steps, loss), helper=helper)
        for record in outer_iterations(topology, context):
            yield record, context.state


def simulated(simulate, model, settings, ranks_per_node=None):
    """Return the history of an oracle: all ranks in one process, so rank 0 runs it for all.

    Without `ranks_per_node` the oracle knows of no nodes. Collective on COMM_WORLD.
    """
    history = None
    if WORLD.rank == 0:
        streams = [RandomStream(rank, torch.float64) for rank in range(WORLD.size)]
        nodes = []
        if ranks_per_node is not None:
            nodes = [node_sizes_of(WORLD.size, min(ranks_per_node, WORLD.size))]
        wanted = SimpleNamespace(**settings)
        history = simulate(copy.deepcopy(model), streams, *nodes, F.cross_entropy, wanted)
    return WORLD.bcast(history, root=0)


def make_context(settings, model, stream, steps=STEPS, loss=F.cross_entropy, side=6):
    """Return what a rank works on with `model`, whose images have `side` pixels; nothing is tested.

    Buckets of 1 KiB: every message is cut.
    """
    layout = build_layout(model)
    groups = make_groups(settings, model, layout, Images(side))
    state = build_state(model.to(DEVICE), layout, groups, settings)
    state.alone = WORLD.size == 1
    if DEVICE.type != "cpu":
        stream = Moved(stream)
    state.memory.declare(memory_of(settings, state))
    nothing = Shard(torch.empty(0), torch.empty(0))
    # Without code in C++, which takes its time: what is seen is whether it follows the model.
    forward = torch.compile(model, backend="aot_eager") if settings.compile else model
    feed = stream, nothing, None, iter, steps
    problem = Problem(model, forward, loss, *feed, *torch.zeros(2, 3))
    return RunContext(state, problem, settings, SMALL_BUCKETS, Heartbeat())


def comms_of(topology, flat=False):
    """Return the wires of a rank, with counts of their own."""
    return make_comms(topology, flat, SMALL_BUCKETS, Traffic(), Clock())


def wire_of(comm, transport=SMALL_BUCKETS, kind="payload"):
    """Return a wire over `comm`, with counts of its own."""
    return CountedComm(comm, 1 / comm.size, comm.size, transport, Traffic(), Clock(), kind)


def exchange_over(link, context):
    """Return the exchange of a method whose workers, all nodes of their own, speak over `link`."""
    return exchange_of(context.settings.method)(CountedComms(link, link, link, flat=True), context)


def exchange_alone(model, dtype=torch.float64, **changes):
    """Return the exchange of a method whose only worker is this rank, without training."""
    stream = RandomStream(0, dtype)
    stream.steps_per_epoch = STEPS_PER_EPOCH
    context = make_context(make(**COMMON, **changes), model.to(dtype), stream)
    return exchange_over(wire_of(MPI.COMM_SELF), context)


def element_masks(state):
    """Return {parameter name: bool tensor of its shape} of the mask in force."""
    result = {}
    for layer, (rows, columns, weights) in zip(
        state.groups.layers, layer_masks(state.mask.bits, state.groups), strict=True
    ):
        segment = state.layout.segments[layer.segment]
        full = rows.reshape(layer.blocks, layer.rows, 1) & columns[:, None, :]
        full = full if weights is None else weights
        result[segment.name] = torch.from_numpy(full.reshape(segment.shape))
    return result


def by_name(flat, state):
    """Return {parameter name: tensor on the CPU}, there of the memory of `flat`."""
    names = [s.name for s in state.layout.segments]
    return dict(zip(names, state.layout.views(flat.cpu()), strict=True))


def difference(mine, reference):
    """Return the relative 2-norm difference of two {name: tensor}, over all tensors."""
    gap = sum(float(((mine[n] - reference[n]).double() ** 2).sum()) for n in reference)
    size = sum(float((reference[n].double() ** 2).sum()) for n in reference)
    return gap**0.5 / max(size**0.5, 1e-12)


def assert_like_oracle(record, state, expected):
    """Compare an outer iteration of a method that keeps all ranks alike with its oracle."""
    for flat in (state.theta, state.z, state.z_node):
        assert difference(by_name(flat, state), expected.z) < 1e-11
        assert_alike_on_all_ranks(flat)
    assert record["train_loss"] == pytest.approx(expected.loss, rel=1e-11)
    assert_statistics(state, expected.statistics)


def assert_statistics(state, expected, rtol=1e-11, atol=1e-12):
    """Compare the running averages of each BatchNorm with its pair in `expected`."""
    near = {"rtol": rtol, "atol": atol}
    for module, (mean, variance) in zip(state.bn_modules, expected, strict=True):
        torch.testing.assert_close(module.running_mean.cpu(), mean, **near)
        torch.testing.assert_close(module.running_var.cpu(), variance, **near)


def node_sizes_of(size, ranks_per_node):
    sizes = [ranks_per_node] * (size // ranks_per_node)
    return sizes + ([size % ranks_per_node] if size % ranks_per_node else [])


def assert_alike_on_all_ranks(tensor):
    """Fail on every rank, so that none waits, where a tensor differs from that of rank 0."""
    mine = tensor.cpu().numpy()
    reference = mine.copy()
    WORLD.Bcast(reference, root=0)
    assert WORLD.allreduce(np.array_equal(reference, mine), MPI.LAND)
