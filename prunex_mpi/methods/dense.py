"""A step of synchronous SGD: the mean gradient of all ranks, as it is.

With flat aggregation the mean is there when the backward pass is (`per_step`); with hierarchical
aggregation the leaders add up the means of their nodes.
"""

from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    return layout.numel * size, settings.aggregation
