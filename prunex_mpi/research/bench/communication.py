"""Time communication: collectives of the driver, and phase 4's exchange.

The cost model of `train --dry-run` is calibrated on the machines at hand and tried. Link and
kernels are measured apart: on vectors of a few sizes, and packing on three models. What they
predict of the whole exchange of phase 4 is then compared with that exchange.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import allreduce_, allreduce_then_bcast_, bcast_, between_nodes
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.message import exchange_message_, fill_message_, take_over_, way_of
from prunex_mpi.core.state import State, adopt_mask, freeze, wires_of
from prunex_mpi.core.sums import MOST_SUMMED, SUMMED
from prunex_mpi.research.bench.kernels import coding_steps, shared_steps
from prunex_mpi.research.bench.workbench import Bench, make_state
from prunex_mpi.run.cost import Exchange, Kernels, Link, bound_s, exchange_s, latency_s
from prunex_mpi.run.dry_run import exchange_of, nominal_mask, travelling_under
from prunex_mpi.settings.fields import PAYLOADS
from prunex_mpi.tools.timing import Action

SMALL_BYTES = 16 * MIB
# Of the cost model: bytes of messages between leaders, and of the float32 vectors that kernels work
# on.
MESSAGES = (2**12, 2**16, 2**20, 2**22, 2**24)
VECTORS = (2**23, 2**24, 2**25)
# The other models that packing is measured on, beside a large one.
SMALL = ("resnet8", "resnet20")


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


# --------------------------------------------------------------------------------------------------
# The cost model
# --------------------------------------------------------------------------------------------------


def cost_model(bench: Bench) -> list[Table]:
    """Return the tables of constants and of predictions, the same on every rank.

    Packing is measured on the model of the settings and two small ones; predicted is the exchange
    of `bench.models`. For two or more nodes. Collective on `world`, `node` and `leader`.
    """
    topology = bench.topology
    link = measure_link(bench)
    copy_gbs, kernels = measure_kernels(bench, link)
    piece_us = kernels["int8"].piece_us
    where = f"{topology.num_nodes} nodes of {'+'.join(map(str, topology.node_sizes))} ranks"
    constants = Table(
        f"Cost model, calibrated on {where}",
        ("payload", "step", "GB/s", "times copy"),
        tuple(
            (payload, step, rate, copy_gbs / rate)
            for payload, rates in kernels.items()
            for step, rate in vars(rates).items()
            if math.isfinite(rate) and step != "piece_us"
        ),
        (
            f"for train --dry-run: --link-gbit {link.gbit:.3g} --latency-us {link.latency_us:.3g} "
            f"--copy-gbs {copy_gbs:.3g}",
            f"least squares over a few sizes, all leaders at once, minimum of {bench.repeat}; pack "
            f"and unpack: after the freeze, on {', '.join(SMALL)} and {bench.settings.model}, and "
            f"{piece_us:.3g} us for each piece of a plan",
            "GB/s: of float32, of the model (pack, unpack) or of what travels of it; add of fp32 "
            "and int8sum: what Allreduce takes beyond link and latency",
        ),
    )
    return [constants, _predictions(bench, link, kernels)]


def measure_link(bench: Bench) -> Link:
    """Fit rate and latency to exchanges of records of several sizes. Collective on `world`."""
    leader, nodes = bench.topology.leader, bench.topology.num_nodes
    unit, columns, times = Link(1, 1), [], []
    for size in MESSAGES:
        exchange = Exchange(nodes, size, 0, 1, 0, 0, 0)
        columns.append((latency_s(unit, exchange), bound_s(unit, exchange)))
        times.append(bench.slowest(_exchange_of_bytes(leader, size)))
    latency_us, per_gbit = fit(columns, times)
    # Where latency explains everything, no link is infinite all the same.
    return Link(1 / (per_gbit or times[-1] / columns[-1][1]), latency_us)


def _exchange_of_bytes(leader: MPI.Comm, size: int) -> Callable[[], object]:
    """Return what exchanges records of `size` bytes in all, of which each leader owns a share."""
    if leader == MPI.COMM_NULL:
        return lambda: None
    share = size // leader.size
    records = np.zeros(share * leader.size, dtype=np.uint8)
    received = np.zeros_like(records)
    places = [share * rank for rank in range(leader.size)]
    others = [share * (rank != leader.rank) for rank in range(leader.size)]

    def run() -> None:
        parts = [[memory, (others, places), MPI.UINT8_T] for memory in (records, received)]
        leader.Alltoallv(*parts)
        leader.Allgather(MPI.IN_PLACE, [records, MPI.UINT8_T])

    return run


def measure_kernels(bench: Bench, link: Link) -> tuple[float, dict[str, Kernels]]:
    """Return the GB/s of copying, and the rates of all payloads that so many nodes can use.

    Collective on `world`.
    """
    nodes = bench.topology.num_nodes
    plain, coded = (_packing(bench, payload) for payload in ("fp32", "int8"))
    kernels = {}
    for payload in PAYLOADS:
        if payload == SUMMED and nodes > MOST_SUMMED:
            continue
        if payload == "fp32":
            coding = math.inf, _mpi_sum(bench, link, torch.float32), math.inf
        elif payload == SUMMED:
            encode, decode = (
                _rate(bench, partial(_coding, step, payload, nodes))
                for step in ("encode", "decode")
            )
            coding = encode, _mpi_sum(bench, link, torch.int8), decode
        else:
            coding = (
                _rate(bench, partial(_coding, step, payload, nodes))
                for step in ("encode", "add", "decode")
            )
        kernels[payload] = Kernels(*(plain if payload == "fp32" else coded), *coding)
    return _rate(bench, _copy), kernels


def _rate(bench: Bench, make: Callable[[Tensor], Action]) -> float:
    """Return the rate, in GB/s of float32, of what `make` returns for a vector, on all leaders."""
    times = []
    for size in VECTORS:
        run, prepare = make(torch.randn(size // 4, device=bench.device))
        times.append(bench.slowest(run if bench.topology.is_leader else lambda: None, prepare))
    return _gbs(np.array(VECTORS), np.array(times), np.zeros(len(times)))


def _copy(vector: Tensor) -> Action:
    target = torch.empty_like(vector)
    return Action(lambda: target.copy_(vector))


def _coding(step: str, payload: str, nodes: int, vector: Tensor) -> Action:
    """Return a step of a code, and what puts the vector that it works on back."""
    source = vector.clone()
    if payload == SUMMED:
        _, _, steps = shared_steps(vector, vector, 127 // nodes)
    else:
        _, _, steps = coding_steps(payload, vector, vector)

    def encode() -> None:
        for name in ("maxima", "encode"):
            if name in steps:
                steps[name]()

    encode()
    return Action(encode if step == "encode" else steps[step], lambda: vector.copy_(source))


def _mpi_sum(bench: Bench, link: Link, dtype: torch.dtype) -> float:
    """Return the rate of what an Allreduce takes beyond link and latency, in GB/s of float32."""
    topology = bench.topology
    transport = between_nodes(bench.transport, topology.num_nodes)
    times, known = [], []
    for size in VECTORS:
        flat = torch.zeros(size // 4, dtype=dtype, device=bench.device)
        reductions = -(-flat.nbytes // transport.bucket_bytes)
        exchange = Exchange(topology.num_nodes, flat.nbytes, reductions, 0, 0, 0, 0)
        known.append(bound_s(link, exchange) + latency_s(link, exchange))

        def run(flat: Tensor = flat) -> None:
            if topology.is_leader:
                allreduce_(topology.leader, flat, transport)

        times.append(bench.slowest(run))
    others = (topology.num_nodes - 1) / topology.num_nodes
    return _gbs(others * np.array(VECTORS), np.array(times), np.array(known))


def _packing(bench: Bench, payload: str) -> tuple[float, float, float]:
    """Return the rates of `fill_message_` and `take_over_`, and what a piece adds to both."""
    columns, times = [], []
    for name in (*SMALL, bench.settings.model):
        state = _prepare(bench, name)
        wires = wires_of(bench.topology, state, bench.transport)
        fill = partial(fill_message_, wires.workers, wires.node, state, payload)
        take = partial(_take_over, state)
        columns.append((4 * state.layout.numel / 1e9, len(state.plan.pieces)))
        times.append((bench.slowest(fill), bench.slowest(take, fill)))
    filling, taking = (fit(columns, seconds) for seconds in zip(*times, strict=True))
    return _inverse(filling[0]), _inverse(taking[0]), 1e6 * (filling[1] + taking[1])


def _take_over(state: State) -> None:
    take_over_(state, way_of(state))


def _prepare(bench: Bench, name: str) -> State:
    """Return the variables of a model after the freeze, at the keep ratio."""
    settings = with_overrides(bench.settings, model=name, payload="int8")
    state = make_state(settings, bench.device)
    adopt_mask(state, nominal_mask(state.groups, 1.0, settings.round_to))
    freeze(state, consensus_sgd=True)
    return state


def _predictions(bench: Bench, link: Link, kernels: dict[str, Kernels]) -> Table:
    """Measure phase 4's exchange of `models`, with every payload. Collective on `world`."""
    rows = []
    for name in bench.models:
        state = _prepare(bench, name)
        size, statistics = state.theta.element_size(), state.stats_kept.numel()
        what = travelling_under(state.plan, statistics, state.layout, size)
        for payload, rates in kernels.items():
            nodes = bench.topology.num_nodes
            pieces = between_nodes(bench.transport, nodes).bucket_bytes
            exchange = exchange_of(payload, what, nodes, pieces)
            predicted = exchange_s(link, rates, exchange)
            measured = bench.slowest(partial(_phase_4, bench, state, payload))
            mib = exchange.message_bytes / MIB
            rows.append((name, payload, mib, 1e3 * predicted, 1e3 * measured, predicted / measured))
    ratios = " ".join(f"{ratio:g}" for ratio in bench.settings.keep_ratio)
    return Table(
        f"Exchange of phase 4: {'+'.join(bench.settings.groups)} groups, keep {ratios}",
        ("model", "payload", "message MiB", "predicted ms", "measured ms", "ratio"),
        tuple(rows),
        ("the broadcast inside nodes is measured with it, but not predicted",),
    )


def _phase_4(bench: Bench, state: State, payload: str) -> None:
    """Do all of phase 4 but the agreement on the mask. Collective on `leader`, then on `node`."""
    topology, transport = bench.topology, bench.transport
    wires = wires_of(topology, state, transport)
    leader, node = wires.workers, wires.node
    fill_message_(leader, node, state, payload)
    exchange_message_(leader.comm, node.comm, state, leader.transport, leader.clock)
    _take_over(state)


def fit(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return factors, none below 0, whose sums of columns come closest to `times`, relatively."""
    matrix = np.array(columns) / np.array(times)[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, used], np.ones(len(times)), rcond=None)[0]
        factors = dict(zip(used, found, strict=True))
        used = [column for column in used if factors[column] > 0]
        if len(used) == len(factors) or not used:
            return [float(factors[c]) if c in used else 0.0 for c in range(matrix.shape[1])]


def _gbs(sizes: np.ndarray, times: np.ndarray, known: np.ndarray) -> float:
    """Return the GB/s that explain best, relatively, what `times` of `sizes` are beyond `known`."""
    weights, rest = sizes / times / 1e9, np.maximum(0.0, times - known) / times
    return _inverse(float(weights @ rest / (weights @ weights)))


def _inverse(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf
