"""Time the collectives of the driver, as its transport hands tensors to MPI, and mask agreement."""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import (
    Transport,
    allreduce_,
    allreduce_then_bcast_,
    bcast_,
    buckets,
)
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.mask_agreement import (
    agree_by_or,
    agree_by_vote,
    project_locally,
)
from prunex_mpi.core.position import begin_iteration
from prunex_mpi.core.state import State, wires_of
from prunex_mpi.research.bench.gloo import DDP_BUCKET_BYTES, gloo_group
from prunex_mpi.research.bench.kernels import make_state
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import synchronize

SMALL_BYTES = 16 * MIB


def collectives(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    repeat: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Return the tables of collectives and of mask agreement, the same on every rank.

    Collective on `world`, `node` and `leader`: every rank walks the same list in the same order.
    Whether an entry is left out depends only on the node sizes, which all ranks know.
    """
    state = make_state(settings, device)
    tables = [_transfers(topology, state, transport, repeat, heartbeat)]
    tables.append(_mask_agreement(topology, state, settings, transport, repeat, heartbeat))
    if device.type == "cpu":
        tables.append(_rival(topology, state, transport, repeat, heartbeat))
    return tables


def slowest_of_ranks(
    world: MPI.Comm,
    run: Callable[[], object],
    repeat: int,
    device: torch.device,
    heartbeat: Heartbeat,
    prepare: Callable[[], object] = lambda: None,
) -> float:
    """Return the shortest of `repeat` times until the last rank has finished `run`, in seconds.

    All ranks start together, after each has done `prepare`; one turn before is not counted.
    Collective on `world`.
    """
    times = np.empty(repeat + 1)
    for turn in range(repeat + 1):
        heartbeat.go_on()
        prepare()
        synchronize(device)
        world.Barrier()
        start = time.perf_counter()
        run()
        synchronize(device)
        times[turn] = time.perf_counter() - start
    world.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    return float(times[1:].min())


def _transfers(
    topology: Topology, state: State, transport: Transport, repeat: int, heartbeat: Heartbeat
) -> Table:
    world, node, leader = topology.world, topology.node, topology.leader
    device = state.theta.device
    element_size = state.theta.element_size()
    one_host = _all_ranks_share_a_host(topology)
    layout = f"{topology.num_nodes} nodes of {'+'.join(map(str, topology.node_sizes))} ranks"
    many_nodes, big_nodes = topology.num_nodes > 1, max(topology.node_sizes) > 1

    def on_leaders(run: Callable[[], object]) -> Callable[[], object]:
        return run if leader != MPI.COMM_NULL else lambda: None

    rows = []
    for count in (SMALL_BYTES // element_size, state.layout.numel):
        flat = torch.empty(count, dtype=state.theta.dtype, device=device).zero_()
        other = torch.empty_like(flat).zero_()
        candidates = [
            ("Allreduce", "world", True, lambda f=flat: allreduce_(world, f, transport)),
            ("Allreduce", "node", big_nodes, lambda f=flat: allreduce_(node, f, transport)),
            (
                "Allreduce",
                "leader",
                many_nodes,
                on_leaders(lambda f=flat: allreduce_(leader, f, transport)),
            ),
            (
                "Allreduce, Bcast",
                "leader, node",
                many_nodes and big_nodes,
                lambda f=flat: allreduce_then_bcast_(leader, node, f, transport),
            ),
            ("Bcast", "world", True, lambda f=flat: bcast_(world, f, transport)),
            ("Bcast", "node", big_nodes, lambda f=flat: bcast_(node, f, transport)),
            (
                "Bcast",
                "leader",
                many_nodes,
                on_leaders(lambda f=flat: bcast_(leader, f, transport)),
            ),
        ]
        size = count * element_size

        def copy(f: Tensor = flat, o: Tensor = other) -> None:
            o.copy_(f)

        # Ranks that copy at once share the memory's bandwidth: leaders alone have more of it each.
        bounds = {"all": slowest_of_ranks(world, copy, repeat, device, heartbeat)}
        bounds["leader"] = slowest_of_ranks(world, on_leaders(copy), repeat, device, heartbeat)
        for who, bound in bounds.items():
            rows.append((f"copy ({who})", "none", size / MIB, 1e3 * bound, size / bound / 1e6, 1.0))
        for name, where, wanted, run in candidates:
            if not wanted:
                continue
            seconds = slowest_of_ranks(world, run, repeat, device, heartbeat)
            bound = bounds.get(where, bounds["all"]) if one_host or where == "node" else None
            rows.append(
                (
                    name,
                    where,
                    size / MIB,
                    1e3 * seconds,
                    size / seconds / 1e6,
                    seconds / bound if bound else None,
                )
            )
    buffers = "staged in host memory" if transport.staging is not None else "handed to MPI as is"
    return Table(
        f"Collectives: {layout}, float32 SUM, buckets of {transport.bucket_bytes / MIB:g} MiB, "
        f"tensors {buffers}",
        ("operation", "communicator", "MiB", "ms", "MB/s", "times copy"),
        tuple(rows),
        (
            f"until the last rank has finished, minimum of {repeat}; MB/s: operand over time",
            "times copy: against the same ranks copying the operand in their own memory at once; "
            "- between machines",
        ),
    )


def _mask_agreement(
    topology: Topology,
    state: State,
    settings: Settings,
    transport: Transport,
    repeat: int,
    heartbeat: Heartbeat,
) -> Table:
    candidate = state.theta
    mask = np.zeros(state.groups.total, dtype=bool)
    mask[:: 2 + topology.node_index] = True
    traffic = state.position.traffic
    wires = wires_of(topology, state, transport)
    leader, node = wires.workers, wires.node

    def vote() -> None:
        begin_iteration(state.position)
        chosen = mask
        if leader.speaks:
            ranks = node.comm.size
            chosen = agree_by_vote(leader, candidate, state, 1.0, settings.round_to, ranks)
        node.broadcast_bits(chosen)

    def union() -> None:
        begin_iteration(state.position)
        chosen = agree_by_or(leader, mask) if leader.speaks else mask
        node.broadcast_bits(chosen)

    def alone() -> None:
        if topology.is_leader:
            project_locally(candidate, state, 1.0, settings.round_to)

    rows = []
    for name, run in (
        ("or: Allreduce BOR of bits, Bcast", union),
        ("vote: energies, Reduce SUM, selection, Bcast", vote),
        ("energies and selection alone, for comparison", alone),
    ):
        begin_iteration(state.position)
        seconds = slowest_of_ranks(topology.world, run, repeat, state.theta.device, heartbeat)
        # Rank 0 is a leader: what it counted is what one leader hands to MPI.
        rows.append((name, 1e3 * seconds, traffic.mask, traffic.intra))
    return Table(
        f"Mask agreement: {settings.model}, {state.groups.total:,} groups",
        ("operation", "ms", "bytes between nodes", "bytes inside a node"),
        tuple(rows),
        (f"minimum of {repeat}; operands of one leader in each call",),
    )


def _rival(
    topology: Topology, state: State, transport: Transport, repeat: int, heartbeat: Heartbeat
) -> Table:
    """Compare a dense synchronisation with what DistributedDataParallel does over gloo."""
    world = topology.world
    flat = torch.zeros_like(state.theta)

    def ours() -> None:
        allreduce_then_bcast_(topology.leader, topology.node, flat, transport)

    def gloo() -> None:
        of_ddp = buckets(flat, Transport(DDP_BUCKET_BYTES))
        works = [dist.all_reduce(bucket, async_op=True) for bucket in of_ddp]
        for work in works:
            work.wait()

    how = repeat, flat.device, heartbeat
    seconds = {"leaders, then nodes, over MPI": slowest_of_ranks(world, ours, *how)}
    with gloo_group(world):
        seconds["all ranks, over gloo, as DDP does"] = slowest_of_ranks(world, gloo, *how)
    size = flat.numel() * flat.element_size()
    return Table(
        f"One dense synchronisation: {size / MIB:.1f} MiB",
        ("how", "ms", "MB/s"),
        tuple((how, 1e3 * s, size / s / 1e6) for how, s in seconds.items()),
        (f"minimum of {repeat}; DDP's buckets are of {DDP_BUCKET_BYTES // MIB} MiB",),
    )


def _all_ranks_share_a_host(topology: Topology) -> bool:
    smallest = np.array([topology.host_size], dtype=np.int64)
    topology.world.Allreduce(MPI.IN_PLACE, smallest, op=MPI.MIN)
    return int(smallest[0]) == topology.world_size
