"""A step of synchronous SGD: the mean gradient of all ranks, as it is.

With flat aggregation the mean is there when the backward pass is (`per_step`); with hierarchical
aggregation the leaders add up the means of their nodes.
"""

from prunex_mpi.methods.exchange import Exchange


class Dense(Exchange):
    """Leave all to the driver."""

    OPERATIONS = (("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),)
    plain_mean = True
