"""The driver of the methods that communicate at each step: dense SGD and compressed gradients.

| part of a step       | communicator        | MPI operation             | operand              |
|----------------------|---------------------|---------------------------|----------------------|
| gradient of the node | node (hierarchical) | Iallreduce SUM            | gradient, dense      |
| exchange             | workers             | the method's own          | what the method sends|
| result in the node   | node (hierarchical) | Bcast                     | gradient, dense      |

and, once per outer iteration, the BatchNorm statistics of all ranks and, where it is evaluated, a
digest of theta. The workers are all ranks or the leaders (`comm/counted.py`); the mean over all N
ranks is what every exchange aims at, and all ranks hold the same theta after every step. With a
method that `drifts` only those of a node do: z, which is evaluated and delivered, is the mean then,
and theta stays each node's. An outer iteration is T steps, as in H-SADMM, so that evaluations,
checkpoints and records come at the same places. What a method does is the class in its file
(`exchange.py`).
"""

import sys
import time
from collections.abc import Generator

from torch import Tensor

from prunex_mpi.comm.agreement import alike_bytes, mean_over_ranks
from prunex_mpi.comm.counted import CountedComms, reduce_between_nodes_
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core import loop
from prunex_mpi.core.admm import mean_loss
from prunex_mpi.core.evaluation import check_divergence
from prunex_mpi.core.exchange import adopt_first_replica_, average_statistics
from prunex_mpi.core.loop import Rounds, finish_round, is_due, phase, rounds, split_local
from prunex_mpi.core.state import RunContext, agreeing, comms_of
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.methods.exchanges import exchange_of
from prunex_mpi.models.layout import norm, squared_distances


def outer_iterations(topology: Topology, context: RunContext) -> Rounds:
    """Train from `position` on; yield as `hsadmm.outer_iterations`. Collective on `world`.

    Of `seconds`, `local` is the forward and backward pass and the step, `project` what the method
    computes, `inter` waiting for gradients and statistics. Raises Diverged on every rank.
    """
    state, settings, position = context.state, context.settings, context.state.position
    comms = comms_of(topology, state, context.transport, settings.aggregation == "flat")
    own = exchange_of(settings.method)
    exchange = own(comms, context)
    early = comms.workers if own.plain_mean else None
    with loop.averaging(early if comms.flat else comms.node, context) as averager:
        for this in rounds(context):
            with phase(context, this, "local"):
                loss = yield from train_steps(exchange, averager)
                if loss is None:
                    return
                check_divergence(topology, context, loss)
                drift = exchange.prune_(done=this.k)
            split_local(context, this, waiting="inter")
            with phase(context, this, "inter"):
                average_statistics(comms, state)
                if is_due(context, this) and not own.drifts:
                    adopt_first_replica_(comms.everyone, state, state.theta, "of the run")
                loss = mean_loss(topology.world, state, loss)
            distance = None
            if own.drifts:
                # No part of training: who evaluates or delivers needs it.
                with phase(context, this, "evaluate"):
                    distance = average_replicas_(comms, context)
            if settings.method.removes:
                with phase(context, this, "project"):
                    if exchange.reshape_(done=this.k):
                        exchange = own(comms, context)
                        if averager is not None:
                            averager.listen_to(context.problem.model, state.layout, state.grad)
            if distance is None:
                state.z.copy_(state.theta)
            state.z_node.copy_(state.theta)
            dense = context.problem.steps * state.whole.layout.numel + state.whole.stats
            position.traffic.dense += dense * state.theta.element_size()
            record = finish_round(topology, context, this, loss, drift=drift)
            yield record | {"replica_distance": distance}


# --------------------------------------------------------------------------------------------------
# The steps of one outer iteration
# --------------------------------------------------------------------------------------------------


def train_steps(
    exchange: Exchange, averager: GradientAverager | None
) -> Generator[GradientAverager | None, Tensor, float | None]:
    """Take T steps of SGD on the mean gradient of all ranks; return this rank's mean loss.

    Yields where it needs the next gradient (`core/loop.py`). Returns None where the ranks agree to
    stop: `position` then says which step comes next.
    Collective on `world`.
    """
    context, state, position = exchange.context, exchange.state, exchange.state.position
    # Lion's is decoupled: its momentum is on the workers, and the optimizer has none.
    state.optimizer.set_decay_(0.0 if exchange.own_decay else context.settings.weight_decay)
    loop.begin_losses_(state)
    started = time.perf_counter()
    exchange.prune_(done=position.iteration - 1)
    context.problem.model.train()
    while position.step < context.problem.steps:
        if loop.stops_here(context, started):
            return None
        context.heartbeat.beat(position.step)
        loop.begin_step_(state)
        loss = yield averager
        loop.finish_average_(context, averager)
        exchange.add_penalty_(loss)
        with position.clock.computing(state.theta.device):
            average_gradient_(exchange)
        state.scaler.unscale_(state.optimizer.optimizer)
        loop.clip_(context)
        loop.step_optimizer_(context)
        loop.add_loss_(context, loss)
        position.step += 1
    return float(state.losses[0] / state.losses[1])


def average_gradient_(exchange: Exchange) -> None:
    """Turn this worker's gradient in `grad` into the mean over all ranks, as the method has it.

    Collective on `workers` and, with hierarchical aggregation, on `node`.
    """
    comms, workers, grad = exchange.comms, exchange.link, exchange.state.grad
    if exchange.plain_mean:
        # Flat, it is the mean over all ranks already.
        if not comms.flat:
            grad.mul_(workers.weight)
            reduce_between_nodes_(workers, comms.node, grad)
        return
    if workers.is_member:
        if not exchange.drifts:
            grad.mul_(workers.weight)
        exchange.exchange_(grad)
    if not comms.flat:
        comms.node.broadcast_(grad)
    exchange.follow_()


def average_replicas_(comms: CountedComms, context: RunContext) -> float:
    """Set z to the mean of theta over all ranks; return how far apart the nodes are.

    That is the root of the mean over ranks of |theta - z|^2, divided by |z|. Collective on `node`
    and `leader`, then on `world`.
    """
    state = context.state
    state.z.copy_(state.theta).mul_(comms.workers.weight)
    reduce_between_nodes_(comms.workers, comms.node, state.z, kind="evaluate")
    squares = float(squared_distances(state.theta, state.z, state.layout).sum())
    with agreeing(state, "Allreduce and Bcast of a distance", alike_bytes(1)):
        squares = mean_over_ranks(comms.everyone.comm, squares)
    return squares**0.5 / max(float(norm(state.z)), sys.float_info.min)
