"""SparseLoCo (Sarfi et al. 2025): leaders exchange the largest of what local steps have changed.

With z of the last exchange, z_i the node's mean and w_i = P_i/N, the node's weight:

    e_i = 0.95 e_i + w_i (z - z_i),   e_i = e_i - q_i,   z = z - outer_lr sum_i q_i,

q_i being the largest values of e_i in each chunk, in 2 bits (`compress/chunks.py`). What has not
been sent stands in for DiLoCo's momentum. BatchNorm statistics travel along as differences to the
last ones that all know, in bfloat16.
"""

import torch
from torch import Tensor

from prunex_mpi.compress.chunks import (
    add_decoded_,
    build_chunks,
    encode_,
    kept_per_chunk,
    message_bytes,
    position_bytes,
)
from prunex_mpi.core.memory import Declared, summed
from prunex_mpi.core.state import KNOWN, State
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

NOT_SENT = "error_feedback"
ERROR_DECAY = 0.95  # the authors' beta
STATISTICS = torch.bfloat16


class SparseLoco(Exchange):
    """Send the largest changes of each chunk, as messages uint8 [nodes, bytes] of all leaders."""

    OPERATIONS = (
        (
            "changes of parameters",
            "leader",
            "Allgather",
            "the largest of each chunk, 2 bits and a position of 12, and BatchNorm statistics",
        ),
    )
    everywhere = True

    def allocate(self) -> None:
        state = self.state
        extra = state.stats.numel() * STATISTICS.itemsize
        self.chunks = build_chunks(state.layout, self.options.ratio, state.theta, extra)
        shape = self.link.ring, self.chunks.nbytes
        self.everyone = torch.zeros(shape, dtype=torch.uint8, device=state.theta.device)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet: the leader's, and zero on the other ranks."""
        return {NOT_SENT: summed(torch.zeros_like(theta))}

    def exchange_(self, flat: Tensor) -> None:
        """Move z, `flat`, and the statistics by what all leaders send; z_i must be the node's mean.

        Every rank decodes the same bytes in the same order, so all hold the same bits. Collective
        on the workers, then on the node.
        """
        state, chunks = self.state, self.chunks
        known, modules = state.memory[KNOWN], state.bn_modules
        total = batchnorm.of_reference(modules, known)
        if self.link.is_member:
            self.link.gather_(self.fill(), self.everyone)
        self.comms.node.broadcast_(self.everyone.view(-1))
        for message in self.everyone:
            add_decoded_(message, chunks, flat, -self.options.outer_lr)
            total.add_(message[chunks.extra : chunks.positions].view(STATISTICS))
        batchnorm.as_plain_(modules, total, known)
        batchnorm.write_plain(modules, total)
        state.stats.copy_(total)
        known.copy_(total)
        dense = state.layout.numel + state.stats.numel()
        state.position.traffic.dense += dense * state.theta.element_size()

    def fill(self) -> Tensor:
        """Return this node's message; what it leaves out stays to be sent."""
        state, chunks, weight = self.state, self.chunks, self.link.weight
        message = self.everyone.new_zeros(chunks.nbytes)
        left = state.memory[NOT_SENT].mul_(ERROR_DECAY)
        torch.sub(state.z, state.z_node, out=state.scratch)
        left.add_(state.scratch, alpha=weight)
        encode_(left, chunks, message)
        add_decoded_(message, chunks, left, -1.0)
        known = batchnorm.of_reference(state.bn_modules, state.memory[KNOWN])
        gap = torch.sub(state.stats, known).mul_(weight).to(STATISTICS)
        message[chunks.extra : chunks.positions].copy_(gap.view(torch.uint8))
        return message

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many bytes are positions: 12 bits each."""
        return rounds * position_bytes(state.layout, settings.options.ratio)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, statistics: int) -> tuple[int, str]:
        """Return the bytes that a leader hands over in an outer iteration, and what they are.

        They depend on the number of `statistics`, and not on that of workers.
        """
        extra = statistics * STATISTICS.itemsize
        count = kept_per_chunk(settings.options.ratio)
        how = f"{count:,} values of 4,096, 2 bits and a position each"
        return message_bytes(layout, settings.options.ratio, size, extra), how
