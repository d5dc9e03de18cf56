"""A step of OmniReduce (Fei et al. 2021): blocks of the gradient travel or stay at home as a whole.

With Block Top-k, the default, each worker sends a share of its blocks, those of largest norm, and
keeps the others for later (error feedback). With --omnireduce-block-ratio 1 all blocks travel but
those that are zero on all workers: the sum is that of dense SGD, and nothing is saved unless whole
blocks of the gradient are zero, which on most networks none are.
"""

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.compress import sparse
from prunex_mpi.compress.quantise import pack_, unpack_
from prunex_mpi.core.memory import Declared, summed
from prunex_mpi.core.state import State
from prunex_mpi.core.sums import EqualParts
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class OmniReduce(Exchange):
    """Send whole blocks: those of largest norm, or all that are not zero."""

    OPERATIONS = (
        ("own blocks", "workers", "Allgather", "Block Top-k: elements"),
        ("their numbers", "workers", "Allgather", "Block Top-k: one int32 per block"),
        ("blocks that hold any", "workers", "Allreduce BOR", "all blocks: a bit per block (mask)"),
        ("blocks of the union", "workers", "Allreduce SUM", "all blocks: elements, no positions"),
    )

    def allocate(self) -> None:
        theta, self.size = self.state.theta, self.options.block_size
        if self.options.block_ratio < 1:
            count = sparse.share_of(
                sparse.block_count(theta.numel(), self.size), self.options.block_ratio
            )
            numbers = torch.empty(count, dtype=torch.int32, device=theta.device)
            self.sent = EqualParts(self.link, theta.new_empty(count, self.size), numbers)
            self.total = torch.empty_like(self.state.memory[RESIDUAL]).view(-1, self.size)
        else:
            self.bits = sparse.new_bits(theta.numel(), self.size, theta.device)
            self.packed = self.bits.new_empty(1, self.bits.numel() // 8, dtype=torch.uint8)
            self.blocks = torch.empty_like(theta)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet, in whole blocks; nothing where all travel."""
        if settings.options.block_ratio == 1:
            return {}
        blocks = sparse.block_count(layout.numel, settings.options.block_size)
        return {RESIDUAL: summed(theta.new_zeros(blocks * settings.options.block_size))}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of what the workers send."""
        if self.options.block_ratio < 1:
            self.send_top_(flat)
        else:
            self.send_nonzero_(flat)

    def send_top_(self, grad: Tensor) -> None:
        """Send the blocks of largest norm of residual + gradient; the others are the new residual.

        Of the whole gradient, as blocks are larger than many layers.
        """
        residual, sent = self.state.memory[RESIDUAL], self.sent
        residual[: grad.numel()].add_(grad)
        sparse.move_top_blocks_(residual.view(-1, self.size), sent.values, sent.positions)
        sent.sum_(self.total)
        grad.copy_(self.total.view(-1)[: grad.numel()])

    def send_nonzero_(self, grad: Tensor) -> None:
        """Set `grad` to the sum over the workers."""
        row = self.bits.view(torch.uint8).view(1, -1)
        sparse.find_nonzero_(grad, self.size, self.bits)
        pack_(row, 1, self.packed)
        self.link.reduce_(self.packed.view(-1), MPI.BOR, kind="mask")
        unpack_(self.packed, 1, row)
        chosen = self.bits.nonzero().squeeze(1)
        if chosen.numel() == sparse.block_count(grad.numel(), self.size):
            # They are together already.
            self.link.reduce_(grad)
            return
        message = sparse.take_blocks_(grad, self.size, chosen, self.blocks)
        self.link.reduce_(message)
        sparse.put_blocks_(grad, self.size, chosen, message)

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many bytes are numbers of blocks."""
        if settings.options.block_ratio == 1:
            return 0
        block = settings.options.block_size * state.theta.element_size()
        return sparse.position_bytes(payload, block)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        block, ratio = settings.options.block_size, settings.options.block_ratio
        blocks = sparse.block_count(layout.numel, block)
        if ratio == 1:
            how = f"at most, and {-(-blocks // 8):,} B of block bits, {settings.aggregation}"
            return layout.numel * size, how
        count = sparse.share_of(blocks, ratio)
        how = f"{count:,} of {blocks:,} blocks of {block}, {settings.aggregation}"
        return count * (block * size + sparse.POSITION_BYTES), how
