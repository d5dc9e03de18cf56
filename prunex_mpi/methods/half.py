"""A step of SGD on a gradient that travels as float16 or bfloat16.

What PyTorch's DDP hooks fp16_compress and bf16_compress do: rounded, divided by the number of
workers, added up. Here it is divided before it is rounded, which is the same for powers of two but
for numbers that become too small. MPI adds up neither type, so workers add up shares in float32 and
round their sums once (`comm/collectives.py`). Nothing is remembered of what rounding takes away.
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import RunContext
from prunex_mpi.core.steps import ask_to_stop_
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("gradient, 16 bits", "workers", "Alltoall", "a share for each worker"),
    ("sums, 16 bits", "workers", "Allgather", "each worker's share"),
)
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for the gradient in 16 bits."""
    theta = context.state.theta
    return {"rounded": torch.empty_like(theta, dtype=TYPES[context.settings.method.name])}


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the rounded sum of rounded gradients. Collective on `wire.comm`."""
    rounded = space["rounded"].copy_(context.state.grad)
    wire.reduce_halves_(rounded)
    note_overflow_(rounded, context)
    context.state.grad.copy_(rounded)


def note_overflow_(total: Tensor, context: RunContext) -> None:
    """Note as a failure that finite gradients have become infinite in float16, in their `total`.

    A loss scaler leaves such a step out instead.
    """
    state = context.state
    if total.dtype != torch.float16 or state.scaler.is_enabled() or context.failures:
        return
    if bool(torch.isinf(total).any()) and bool(torch.isfinite(state.grad).all()):
        most = torch.finfo(torch.float16).max
        text = f"gradients are beyond {most:g}, the largest that float16 holds"
        advice = "give --method bf16, which has the range of float32, or lower --lr"
        context.failures.append(UserError(f"{text}: {advice}", FAILURE))
        ask_to_stop_(context)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    return layout.numel * TYPES[settings.method.name].itemsize, f"16 bits, {settings.aggregation}"
