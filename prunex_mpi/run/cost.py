"""Estimate what the exchange of phase 4 takes: plain arithmetic on bytes, rates and latencies.

A node sends and receives 2 (M - 1)/M of its message, whatever the format: an Allreduce and the
exchange of records (Alltoallv, then Allgather) move the same. That over the link's rate is the
bound. To it the model adds what messages wait for one after the other, 2 (M - 1) of them for each
bucket of records (fewer where an MPI posts all of them at once) and 2 log2 M for each Allreduce, as
by Rabenseifner's algorithm; and what the processor does meanwhile. Nothing of this overlaps, but
for what `--overlap-steps` hides. The broadcast inside a node is left out.
"""

import math
from dataclasses import dataclass

from prunex_mpi.base.units import ring_bytes


@dataclass(frozen=True)
class Link:
    """The way between two nodes: 10^9 bits per second in each direction, microseconds a message."""

    gbit: float
    latency_us: float


@dataclass(frozen=True)
class Kernels:
    """What one leader does to memory, in 10^9 bytes of float32 per second.

    `pack` and `unpack` of the whole model: the difference and its packing before the exchange, what
    becomes of z after it; to which come `piece_us` microseconds for each piece of the packing plan.
    `encode`, `add` (of a part that has come, MPI's own sum in an Allreduce) and `decode` of the
    values that travel. Infinite where there is nothing to do.
    """

    pack: float
    unpack: float
    piece_us: float
    encode: float
    add: float
    decode: float


@dataclass(frozen=True)
class Exchange:
    """One exchange between `nodes`.

    Each hands over `message_bytes`, in `reductions` calls of Allreduce and `gatherings` (Alltoallv
    and Allgather); as float32 the values that travel are `values_bytes`, the model `model_bytes`,
    packed in `pieces` pieces.
    """

    nodes: int
    message_bytes: int
    reductions: int
    gatherings: int
    values_bytes: int
    model_bytes: int
    pieces: int


# How many times as long as copying the same bytes a step takes, and what a piece adds. Measured on
# two cores of an Intel Xeon with 2 MiB of second-level cache each, torch 2.15, by `bench model`:
# coding on vectors of 8 to 32 MiB, packing after the freeze with half of the coupled groups of
# resnet8, resnet20 and resnet18; the sums of fp32 by MPI's Reduce_local.
PACK_PLAIN, UNPACK_PLAIN = 1.7, 3.6
PACK, UNPACK = 5.7, 6.4
PIECE_US = 80.0
ENCODE_ADD_DECODE = {
    "fp32": (0.0, 1.0, 0.0),
    "fp16": (3.8, 1.9, 1.0),
    "bf16": (3.0, 2.4, 1.0),
    "int8": (5.0, 2.4, 2.4),
    "int8sum": (4.5, 0.7, 2.0),
    "int4": (5.2, 3.7, 3.6),
    "int2": (7.1, 4.0, 4.4),
}


def kernels_of(payload: str, copy_gbs: float) -> Kernels:
    """Return the rates of a payload on a processor that copies `copy_gbs` GB/s."""
    pack, unpack = (PACK_PLAIN, UNPACK_PLAIN) if payload == "fp32" else (PACK, UNPACK)
    coding = (copy_gbs / times if times else math.inf for times in ENCODE_ADD_DECODE[payload])
    return Kernels(copy_gbs / pack, copy_gbs / unpack, PIECE_US, *coding)


def sent_bytes(exchange: Exchange) -> int:
    """Return the bytes that leave a node, and as many come: what a wire counts."""
    return ring_bytes(exchange.nodes, exchange.message_bytes)


def wire_s(gbit: float, nbytes: float) -> float:
    """Return the seconds that bytes take on a link of so many 10^9 bits per second."""
    return nbytes / (gbit * 1e9 / 8)


def bound_s(link: Link, exchange: Exchange) -> float:
    """Return the seconds that the bytes of a node take on the link, and nothing else."""
    return wire_s(link.gbit, sent_bytes(exchange))


def latency_s(link: Link, exchange: Exchange) -> float:
    """Return the seconds that messages wait for one after the other."""
    in_turn = 2 * exchange.gatherings * (exchange.nodes - 1)
    in_turn += 2 * exchange.reductions * (exchange.nodes - 1).bit_length()
    return in_turn * link.latency_us / 1e6


def coding_s(kernels: Kernels, exchange: Exchange) -> float:
    """Return the seconds of encoding, adding up M - 1 parts of a share and decoding.

    With one node everything is plain.
    """
    others = (exchange.nodes - 1) / exchange.nodes
    if not others:
        return 0.0
    per_byte = 1 / kernels.encode + others / kernels.add + 1 / kernels.decode
    return exchange.values_bytes * per_byte / 1e9


def packing_s(kernels: Kernels, exchange: Exchange) -> float:
    """Return the seconds of what goes before the exchange and follows it, on every leader."""
    per_byte = 1 / kernels.pack + 1 / kernels.unpack
    return exchange.model_bytes * per_byte / 1e9 + exchange.pieces * kernels.piece_us / 1e6


def exchange_s(link: Link, kernels: Kernels, exchange: Exchange, hidden_s: float = 0.0) -> float:
    """Return the seconds of phase 4's exchange that training waits for.

    `hidden_s` is what local steps take behind which it runs; packing and unpacking do not.
    """
    between = latency_s(link, exchange) + bound_s(link, exchange) + coding_s(kernels, exchange)
    return packing_s(kernels, exchange) + max(0.0, between - hidden_s)


def share(communication_s: float, local_s: float) -> float:
    """Return the share of communication in an outer iteration with `local_s` of local steps."""
    return communication_s / (communication_s + local_s)
