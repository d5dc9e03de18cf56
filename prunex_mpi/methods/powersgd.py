"""A step of PowerSGD: sums over the workers of two thin factors per gradient matrix.

| what            | communicator | MPI operation         | operand                              |
|-----------------|--------------|-----------------------|--------------------------------------|
| whole tensors   | workers      | Allreduce SUM         | 1-D tensors and small matrices       |
| left factors P  | workers      | Reduce SUM, Bcast     | rank elements per row of a matrix    |
| right factors Q | workers      | Allreduce SUM         | rank elements per column of a matrix |

The first worker alone makes P orthonormal, between the Reduce and the Bcast: where P's columns
depend on each other nearly, rounding decides what comes out, and all must go on with the same.
Together the two move what an Allreduce does, and are counted as one.
"""

from torch import Tensor

from prunex_mpi.comm.collectives import Transport, allreduce_, bcast_, reduce_
from prunex_mpi.comm.workers import Workers
from prunex_mpi.compress.low_rank import (
    move_whole_,
    multiply_,
    orthonormalise_,
    project_left_,
    project_right_,
    put_whole_,
    split_layout,
)
from prunex_mpi.core.state import State, Traffic
from prunex_mpi.core.steps import clocked, count_allreduce
from prunex_mpi.settings.fields import Settings


def allocate_powersgd(state: State, settings: Settings) -> dict[str, Tensor]:
    """Return memory for the left factors and for the tensors that travel whole."""
    split = split_layout(state.layout, settings.powersgd_rank)
    return {
        "left_factors": state.theta.new_empty(split.left_numel),
        "whole": state.theta.new_empty(split.whole_numel),
    }


def exchange_powersgd_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Set `state.grad` to the low-rank part of the sum of residual + gradient over the workers.

    A worker's new residual is its own part without the projection on the common left factors.
    Collective on `workers.comm`.
    """
    comm, grad, residual = workers.comm, state.grad, state.memory["own.residual"]
    left, whole = space["left_factors"], space["whole"]
    right = state.memory["shared.right_factors"]
    split = split_layout(state.layout, settings.powersgd_rank)
    with clocked(state, "method_seconds"):
        residual.add_(grad)
        move_whole_(residual, split, whole)
        project_left_(residual, right, split, left)
    with clocked(state, "exchange_seconds"):
        allreduce_(comm, whole, transport)
        reduce_(comm, left, transport)
    if comm.rank == 0:
        with clocked(state, "method_seconds"):
            orthonormalise_(left, split)
    with clocked(state, "exchange_seconds"):
        bcast_(comm, left, transport)
    with clocked(state, "method_seconds"):
        project_right_(residual, left, split, right)
    with clocked(state, "exchange_seconds"):
        allreduce_(comm, right, transport)
    with clocked(state, "method_seconds"):
        multiply_(grad, left, right, split)
        put_whole_(grad, split, whole)
    for operand in (whole, left, right):
        count_allreduce(traffic, workers, operand.nbytes)
