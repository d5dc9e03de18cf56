"""SparseLoCo (Sarfi et al. 2025): leaders exchange the largest of what local steps have changed.

With z of the last exchange, z_i the node's mean and w_i = P_i/N, the node's weight:

    e_i = 0.95 e_i + w_i (z - z_i),   e_i = e_i - q_i,   z = z - outer_lr sum_i q_i,

q_i being the largest values of e_i in each chunk, in 2 bits (`compress/chunks.py`). What has not
been sent stands in for DiLoCo's momentum. BatchNorm statistics travel along as differences to the
last ones that all know, in bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wires
from prunex_mpi.compress.chunks import (
    Chunks,
    add_decoded_,
    build_chunks,
    encode_,
    kept_per_chunk,
    message_bytes,
    position_bytes,
)
from prunex_mpi.core.state import KNOWN, OWN, RunContext, State
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    (
        "changes of parameters",
        "leader",
        "Allgather",
        "the largest of each chunk, 2 bits and a position of 12, and BatchNorm statistics",
    ),
)
NOT_SENT = f"{OWN}error_feedback"
ERROR_DECAY = 0.95  # the authors' beta
STATISTICS = torch.bfloat16


@dataclass(frozen=True)
class Space:
    """What each exchange writes anew: messages of all leaders, uint8 [nodes, bytes]."""

    chunks: Chunks
    everyone: Tensor


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what has not been sent yet: the leader's, and zero on the other ranks."""
    return {NOT_SENT: torch.zeros_like(theta)}


def allocate(nodes: int, context: RunContext) -> Space:
    """Plan messages between so many nodes and allocate them."""
    state = context.state
    extra = state.stats.numel() * STATISTICS.itemsize
    chunks = build_chunks(state.layout, context.settings.options.ratio, state.theta, extra)
    everyone = torch.zeros(nodes, chunks.nbytes, dtype=torch.uint8, device=state.theta.device)
    return Space(chunks, everyone)


def exchange_(wires: Wires, space: Space, context: RunContext) -> None:
    """Move z, and the statistics, by what all leaders send; z_i must be the node's mean.

    Every rank decodes the same bytes in the same order, so all hold the same bits. Collective on
    `workers.comm`, where it speaks, then on `node.comm`.
    """
    state, settings = context.state, context.settings
    chunks, everyone = space.chunks, space.everyone
    known, modules = state.memory[KNOWN], state.bn_modules
    total = batchnorm.of_reference(modules, known)
    if wires.workers.is_member:
        wires.workers.gather_(_fill(wires.workers.weight, space, context), everyone)
    wires.node.broadcast_(everyone.view(-1))
    for message in everyone:
        add_decoded_(message, chunks, state.z, -settings.options.outer_lr)
        total.add_(message[chunks.extra : chunks.positions].view(STATISTICS))
    batchnorm.as_plain_(modules, total, known)
    batchnorm.write_plain(modules, total)
    state.stats.copy_(total)
    known.copy_(total)
    dense = state.layout.numel + state.stats.numel()
    state.position.traffic.dense += dense * state.theta.element_size()


def _fill(weight: float, space: Space, context: RunContext) -> Tensor:
    """Return this node's message; what it leaves out stays to be sent."""
    state, chunks = context.state, space.chunks
    message = space.everyone.new_zeros(chunks.nbytes)
    left = state.memory[NOT_SENT].mul_(ERROR_DECAY)
    torch.sub(state.z, state.z_node, out=state.scratch)
    left.add_(state.scratch, alpha=weight)
    encode_(left, chunks, message)
    add_decoded_(message, chunks, left, -1.0)
    known = batchnorm.of_reference(state.bn_modules, state.memory[KNOWN])
    gap = torch.sub(state.stats, known).mul_(weight).to(STATISTICS)
    message[chunks.extra : chunks.positions].copy_(gap.view(torch.uint8))
    return message


def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
    """Return how many of a run's `payload` bytes are positions: 12 bits each."""
    return rounds * position_bytes(state.layout, settings.options.ratio)


def payload(settings: Settings, layout: Layout, size: int, statistics: int) -> tuple[int, str]:
    """Return the bytes that a leader hands over in an outer iteration, and what they are."""
    extra = statistics * STATISTICS.itemsize
    count = kept_per_chunk(settings.options.ratio)
    how = f"{count:,} values of 4,096, 2 bits and a position each"
    return message_bytes(layout, settings.options.ratio, size, extra), how
