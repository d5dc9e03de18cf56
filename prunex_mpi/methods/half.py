"""A step of SGD on a gradient that travels as float16 or bfloat16.

What PyTorch's DDP hooks fp16_compress and bf16_compress do: rounded, divided by the number of
workers, added up. Here it is divided before it is rounded, which is the same for powers of two but
for numbers that become too small. MPI adds up neither type, so workers add up shares in float32 and
round their sums once (`comm/collectives.py`). Nothing is remembered of what rounding takes away.
"""

import torch
from torch import Tensor

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.core.loop import ask_to_stop_
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class Bf16(Exchange):
    """Round gradients, and their sums, to 16 bits."""

    OPERATIONS = (
        ("gradient, 16 bits", "workers", "Alltoall", "a share for each worker"),
        ("sums, 16 bits", "workers", "Allgather", "each worker's share"),
    )
    dtype = torch.bfloat16

    def allocate(self) -> None:
        self.rounded = torch.empty_like(self.state.theta, dtype=self.dtype)

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the rounded sum of rounded gradients."""
        self.link.reduce_halves_(self.rounded.copy_(flat))
        self.look_at_(self.rounded)
        flat.copy_(self.rounded)

    def look_at_(self, total: Tensor) -> None:
        """Note as a failure what has gone wrong in the sum; bfloat16 has the range of float32."""

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return layout.numel * Bf16.dtype.itemsize, f"16 bits, {settings.aggregation}"


class Fp16(Bf16):
    """The same in float16, which has a largest number."""

    dtype = torch.float16

    def look_at_(self, total: Tensor) -> None:
        """Note as a failure that finite gradients have become infinite in float16.

        A loss scaler leaves such a step out instead.
        """
        state, failures = self.state, self.context.failures
        if state.scaler.is_enabled() or failures:
            return
        if bool(torch.isinf(total).any()) and bool(torch.isfinite(state.grad).all()):
            most = torch.finfo(torch.float16).max
            text = f"gradients are beyond {most:g}, the largest that float16 holds"
            advice = "give --method bf16, which has the range of float32, or a smaller rate"
            failures.append(UserError(f"{text}: {advice}", FAILURE))
            ask_to_stop_(self.context)
