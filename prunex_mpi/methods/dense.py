"""A step of synchronous SGD: the mean gradient of all ranks, as it is.

With flat aggregation the mean is there when the backward pass is (`per_step`); with hierarchical
aggregation the leaders add up the means of their nodes.
"""

from typing import Any

from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import RunContext
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),)


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Return what a step hands to the next: nothing."""
    return {}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return what each step writes anew: nothing."""
    return {}


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    return layout.numel * size, settings.aggregation
