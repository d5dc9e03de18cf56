"""Time the collectives of the driver."""

from collections.abc import Callable
from functools import partial

import torch

from mpi4py import MPI

from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import allreduce_, allreduce_then_bcast_, bcast_
from prunex_mpi.research.bench.workbench import Bench, make_state

SMALL_BYTES = 16 * MIB


def collectives(bench: Bench) -> Table:
    """Return the table of collectives, the same on every rank.

    Collective on `world`, `node` and `leader`: every rank walks the same list in the same order.
    Whether an entry is left out depends only on the node sizes, which all ranks know.
    """
    state = make_state(bench.settings, bench.device)
    topology, transport, device = bench.topology, bench.transport, bench.device
    world, node, leader = topology.world, topology.node, topology.leader
    element_size = state.theta.element_size()
    one_host = topology.host_size == topology.world_size
    layout = f"{topology.num_nodes} nodes of {'+'.join(map(str, topology.node_sizes))} ranks"
    comms = {"world": world}
    if max(topology.node_sizes) > 1:
        comms["node"] = node
    if topology.num_nodes > 1:
        comms["leader"] = leader

    def slowest(comm: MPI.Comm, run: Callable[..., object], *args: object) -> float:
        member = comm != MPI.COMM_NULL
        return bench.slowest(partial(run, *args) if member else lambda: None)

    rows = []
    for count in (SMALL_BYTES // element_size, state.layout.numel):
        flat = torch.empty(count, dtype=state.theta.dtype, device=device).zero_()
        other = torch.empty_like(flat).zero_()
        size = count * element_size
        # Ranks that copy at once share the memory's bandwidth: leaders alone have more of it each.
        copies = {
            who: slowest(comm, other.copy_, flat)
            for who, comm in (("all", world), ("leader", leader))
        }
        for who, seconds in copies.items():
            rows.append((f"copy ({who})", "none", size, seconds, 1.0))
        found = [
            (name, where, slowest(comm, call, comm, flat, transport))
            for name, call in (("Allreduce", allreduce_), ("Bcast", bcast_))
            for where, comm in comms.items()
        ]
        if len(comms) == 3:
            both = slowest(world, allreduce_then_bcast_, leader, node, flat, transport)
            found.append(("Allreduce, Bcast", "leader, node", both))
        for name, where, seconds in found:
            copy = copies.get(where, copies["all"]) if one_host or where == "node" else None
            rows.append((name, where, size, seconds, seconds / copy if copy else None))
    buffers = "staged in host memory" if transport.staging is not None else "handed to MPI as is"
    return Table(
        f"Collectives: {layout}, float32 SUM, buckets of {transport.bucket_bytes / MIB:g} MiB, "
        f"tensors {buffers}",
        ("operation", "communicator", "MiB", "ms", "MB/s", "times copy"),
        tuple(
            (name, where, size / MIB, 1e3 * seconds, size / seconds / 1e6, times)
            for name, where, size, seconds, times in rows
        ),
        (
            f"until the last rank has finished, minimum of {bench.repeat}; MB/s: operand over time",
            "times copy: against the same ranks copying the operand in their own memory at once; "
            "- between machines",
        ),
    )
