"""A step of OmniReduce (Fei et al. 2021): blocks of the gradient travel or stay at home as a whole.

With Block Top-k, the default, each worker sends a share of its blocks, those of largest norm, and
keeps the others for later (error feedback). With --omnireduce-block-ratio 1 all blocks travel but
those that are zero on all workers: the sum is that of dense SGD, and nothing is saved unless whole
blocks of the gradient are zero, which on most networks none are.
"""

import torch
from torch import Tensor

from prunex_mpi.compress import sparse
from prunex_mpi.core.mask_choice import agree_by_or
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
        theta = self.state.theta
        count, chosen = sizes_of(self.settings, theta.numel())
        # The gradient in whole blocks, filled up with zeros.
        self.blocks = theta.new_zeros(count, self.options.block_size)
        self.message = torch.empty_like(self.blocks[:chosen])
        if self.options.block_ratio < 1:
            numbers = torch.empty(chosen, dtype=torch.int32, device=theta.device)
            self.sent = EqualParts(self.link, self.message, numbers)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet, in whole blocks; nothing where all travel."""
        if settings.options.block_ratio == 1:
            return {}
        blocks, _ = sizes_of(settings, layout.numel)
        return {RESIDUAL: summed(theta.new_zeros(blocks * settings.options.block_size))}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of what the workers send."""
        if self.options.block_ratio < 1:
            self.send_top_(flat)
        else:
            self.send_nonzero_(flat)

    def send_top_(self, grad: Tensor) -> None:
        """Send the blocks of largest norm of residual + gradient; the others are the new residual.

        Of the whole gradient, as blocks are larger than many layers (Block Top-k).
        """
        residual, sent = self.state.memory[RESIDUAL], self.sent
        residual[: grad.numel()].add_(grad)
        blocks = residual.view(self.blocks.shape)
        norms = torch.linalg.vector_norm(blocks, dim=1)
        chosen = torch.topk(norms, len(sent.values), sorted=False).indices.sort().values
        sparse.move_(blocks, chosen, sent.values, sent.positions)
        sent.sum_(self.blocks)
        grad.copy_(self.blocks.view(-1)[: grad.numel()])

    def send_nonzero_(self, grad: Tensor) -> None:
        """Set `grad` to the sum over the workers."""
        blocks, flat = self.blocks, self.blocks.view(-1)[: grad.numel()]
        flat.copy_(grad)
        # NaN is something.
        holding = agree_by_or(self.link, torch.any(blocks, 1).cpu().numpy())
        if holding.all():
            # They are together already.
            self.link.reduce_(grad)
            return
        chosen = torch.from_numpy(holding.nonzero()[0]).to(grad.device)
        message = torch.index_select(blocks, 0, chosen, out=self.message[: len(chosen)])
        # The last block may be shorter, and travels as short as it is.
        filler = blocks.numel() - grad.numel() if holding[-1] else 0
        self.link.reduce_(message.view(-1)[: message.numel() - filler])
        blocks.index_copy_(0, chosen, message)
        grad.copy_(flat)

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
        blocks, count = sizes_of(settings, layout.numel)
        if ratio == 1:
            how = f"at most, and {-(-blocks // 8):,} B of block bits, {settings.aggregation}"
            return layout.numel * size, how
        how = f"{count:,} of {blocks:,} blocks of {block}, {settings.aggregation}"
        return count * (block * size + sparse.POSITION_BYTES), how


def sizes_of(settings: Settings, numel: int) -> tuple[int, int]:
    """Return in how many blocks so many elements are, and how many of them a worker sends."""
    blocks = -(-numel // settings.options.block_size)
    return blocks, sparse.share_of(blocks, settings.options.block_ratio)
