"""The driver of the methods that communicate at each step: dense SGD and compressed gradients.

| part of a step       | communicator        | MPI operation             | operand              |
|----------------------|---------------------|---------------------------|----------------------|
| gradient of the node | node (hierarchical) | Iallreduce SUM            | gradient, dense      |
| exchange             | workers             | the method's own          | what the method sends|
| result in the node   | node (hierarchical) | Bcast                     | gradient, dense      |

and, once per outer iteration, the BatchNorm statistics of all ranks. The workers are all ranks or
the node leaders (`exchange.py`); the mean over all N ranks is what every exchange aims at, and all
ranks hold the same theta after every step. An outer iteration is T steps, as in H-SADMM, so that
evaluations, checkpoints and records come at the same places.

A method is one case in each of three places: its memory (`memory.build_memory`), memory that no
step hands to the next (`allocate`), and its exchange (`exchange_`).
`prunetrain` is dense SGD whose gradient starts from that of a penalty, on a network that becomes
smaller between outer iterations (`reconfiguration.py`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import Transport, allreduce_then_bcast_, bcast_
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.preemption import StopAgreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.workers import Workers, find_workers, sum_over_ranks_
from prunex_mpi.core.evaluation import evaluate, mean_over_ranks, refuse_divergence
from prunex_mpi.core.metrics import iteration_record, layer_records, timed
from prunex_mpi.core.state import Problem, State, Traffic, next_iteration
from prunex_mpi.core.steps import (
    add_loss_,
    clocked,
    count_allreduce,
    count_sum_over_ranks,
    forward,
    forward_backward,
    loss_sums,
    open_averager,
    step_optimizer_,
)
from prunex_mpi.methods.dgc import allocate_dgc, exchange_dgc_
from prunex_mpi.methods.omnireduce import allocate_omnireduce, exchange_omnireduce_
from prunex_mpi.methods.pactrain import (
    allocate_pactrain,
    exchange_pactrain_,
    follow_pactrain_,
)
from prunex_mpi.methods.pactrain_mask import prune_when_due_
from prunex_mpi.methods.powersgd import allocate_powersgd, exchange_powersgd_
from prunex_mpi.methods.prunetrain import find_lasso, reconfigure_, start_gradient_
from prunex_mpi.methods.topk import allocate_topk, exchange_topk_
from prunex_mpi.models import batchnorm
from prunex_mpi.pruning.lasso import Lasso
from prunex_mpi.pruning.projection import mask_drift
from prunex_mpi.settings.fields import Settings

# Methods whose step takes the mean gradient as it is.
PLAIN_MEAN = ("dense", "prunetrain")


def outer_iterations(
    topology: Topology,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    heartbeat: Heartbeat,
    stop: StopAgreement | None = None,
) -> Iterator[dict[str, Any]]:
    """Train from `state.position` on; yield each outer iteration's metrics (metrics.jsonl).

    As `hsadmm.outer_iterations`. Of `seconds`, `local` is the forward and backward pass and the
    step, `project` what the method computes, `inter` waiting for gradients and statistics.
    Collective on `topology.world`. Raises Diverged on every rank.
    """
    position = state.position
    workers = find_workers(topology, settings.aggregation)
    space = allocate(workers, state, settings, transport)
    lasso = find_lasso(state) if settings.method == "prunetrain" else None
    with ExitStack() as exits:
        comm = comm_during_backward(topology, settings)
        averager = open_averager(exits, comm, state, problem, transport)
        for k in range(position.iteration, settings.outer_iterations + 1):
            started = time.perf_counter()
            before_s = position.local_seconds
            seconds: dict[str, float] = {}
            traffic = Traffic()
            last = k == settings.outer_iterations
            old_mask = state.mask
            heartbeat.iteration = k
            with timed(heartbeat, seconds, "local", state):
                loss = train_steps(
                    topology,
                    workers,
                    averager,
                    space,
                    lasso,
                    state,
                    problem,
                    settings,
                    transport,
                    heartbeat,
                    stop,
                    traffic,
                )
                if loss is None:
                    return
                refuse_divergence(topology, state, loss)
                drift = 0.0
                if settings.method == "pactrain":
                    drift = prune_when_due_(
                        topology, workers, state, problem, settings, transport, traffic, k
                    )
            seconds["local"] += before_s - position.method_seconds - position.exchange_seconds
            seconds["project"] = position.method_seconds
            with timed(heartbeat, seconds, "inter", state):
                average_statistics(topology, workers, state, settings, transport, traffic)
                loss = mean_over_ranks(topology.world, loss)
            seconds["inter"] += position.exchange_seconds
            if lasso is not None and k % settings.reconfigure_every == 0:
                with timed(heartbeat, seconds, "project", state):
                    if reconfigure_(topology, workers, lasso, state, problem, settings, traffic):
                        exits.close()
                        averager = open_averager(exits, comm, state, problem, transport)
                        lasso = find_lasso(state)
                seconds["project"] += position.method_seconds
                drift = mask_drift(state.mask, old_mask)
            state.z.copy_(state.theta)
            state.z_node.copy_(state.theta)
            gradients = problem.steps * state.whole.layout.numel
            traffic.dense += (gradients + state.whole.stats) * state.theta.element_size()

            test_loss = test_accuracy = None
            with timed(heartbeat, seconds, "evaluate", state):
                if problem.test is not None and (last or k % settings.evaluate_every == 0):
                    test_loss, test_accuracy = evaluate(topology, state, problem, traffic)
            seconds |= {"intra": 0.0, "dual": 0.0}
            seconds["total"] = time.perf_counter() - started + before_s
            record = {
                **iteration_record(k, state, seconds, traffic, None),
                "mask_drift": drift,
                "train_loss": loss,
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "layers": layer_records(k, state, None) if topology.world.rank == 0 else [],
                "status": "completed" if last else "running",
            }
            next_iteration(position, loss)
            yield record


# --------------------------------------------------------------------------------------------------
# The steps of one outer iteration
# --------------------------------------------------------------------------------------------------


def comm_during_backward(topology: Topology, settings: Settings) -> MPI.Comm | None:
    """Return over whom gradients are averaged while the backward pass still runs, if over anyone.

    The node's mean, or everyone's at once.
    """
    if settings.aggregation == "hierarchical":
        return topology.node
    return topology.world if settings.method in PLAIN_MEAN else None


def train_steps(
    topology: Topology,
    workers: Workers,
    averager: GradientAverager | None,
    space: dict[str, Tensor],
    lasso: Lasso | None,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    heartbeat: Heartbeat,
    stop: StopAgreement | None,
    traffic: Traffic,
) -> float | None:
    """Take T steps of SGD on the mean gradient of all ranks; return this rank's mean loss.

    Returns None where the ranks agree to stop: `state.position` then says which step comes next.
    Collective on `world`.
    """
    position = state.position
    # DGC adds it to the gradients, since it is they that the momentum accumulates.
    decay = 0.0 if settings.method == "dgc" else settings.weight_decay
    state.optimizer.param_groups[0]["weight_decay"] = decay
    losses = loss_sums(state)
    traffic.payload += position.payload_bytes
    traffic.sent += position.sent_bytes
    traffic.mask += position.mask_bytes
    traffic.intra += position.intra_bytes
    started = time.perf_counter()
    if settings.method == "pactrain":
        done = position.iteration - 1
        prune_when_due_(topology, workers, state, problem, settings, transport, traffic, done)
    problem.model.train()
    while position.step < problem.steps:
        if stop is not None and stop.reached():
            position.loss_sum, position.loss_count = losses.tolist()
            position.payload_bytes, position.sent_bytes = traffic.payload, traffic.sent
            position.mask_bytes, position.intra_bytes = traffic.mask, traffic.intra
            position.local_seconds += time.perf_counter() - started
            return None
        heartbeat.beat(position.step)
        if averager is not None:
            averager.begin()
        if lasso is None:
            loss = forward_backward(state, problem, settings)
        else:
            loss = forward(state, problem, settings)
            with clocked(state, "method_seconds"):
                start_gradient_(topology, workers, lasso, loss, state, settings, transport, traffic)
            state.scaler.scale(loss).backward()
            loss = loss.detach()
        average_gradient_(
            topology, workers, averager, space, state, problem, settings, transport, traffic
        )
        state.scaler.unscale_(state.optimizer)
        step_optimizer_(state, problem, settings)
        add_loss_(losses, loss, settings)
        position.step += 1
    return float(losses[0] / losses[1])


def average_gradient_(
    topology: Topology,
    workers: Workers,
    averager: GradientAverager | None,
    space: dict[str, Tensor],
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Turn this rank's gradient in `state.grad` into the mean over all ranks, as the method has it.

    Collective on `workers.comm` and, with hierarchical aggregation, on `node`.
    """
    node, grad = topology.node, state.grad
    inside = grad.numel() * grad.element_size() if node.size > 1 else 0
    if settings.aggregation == "flat":
        inside = 0
    if averager is not None:
        with clocked(state, "exchange_seconds"):
            averager.finish_()
        traffic.intra += inside
    if settings.method in PLAIN_MEAN:
        with clocked(state, "exchange_seconds"):
            exchange_dense_(topology, workers, state, settings, transport, traffic)
        traffic.intra += inside
        return
    if workers.speaks:
        grad.mul_(workers.weight)
        exchange_(workers, space, state, problem, settings, transport, traffic)
    if settings.aggregation == "hierarchical":
        with clocked(state, "exchange_seconds"):
            bcast_(node, grad, transport)
        traffic.intra += inside
    if settings.method == "pactrain":
        follow_pactrain_(topology, workers, space, state, settings, traffic)


def average_statistics(
    topology: Topology,
    workers: Workers,
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Average the BatchNorm statistics over all ranks, by second moments.

    Collective on `world`, or on `node` and `leader`.
    """
    batchnorm.read_(state.bn_modules, state.stats)
    size = state.stats.numel() * state.stats.element_size()
    sum_over_ranks_(topology, settings.aggregation, state.stats, transport)
    count_sum_over_ranks(traffic, topology, workers, settings.aggregation, size)
    state.stats.div_(topology.world_size)
    batchnorm.write(state.bn_modules, state.stats)


# --------------------------------------------------------------------------------------------------
# The methods
# --------------------------------------------------------------------------------------------------


def allocate(
    workers: Workers, state: State, settings: Settings, transport: Transport
) -> dict[str, Tensor]:
    """Return the memory that the method writes anew in each step, by names of its own."""
    match settings.method:
        case "topk" if workers.speaks:
            return allocate_topk(workers, state, settings)
        case "pactrain":
            return allocate_pactrain(workers, state, settings)
        case "dgc" if workers.speaks:
            return allocate_dgc(workers, state, settings, transport)
        case "powersgd" if workers.speaks:
            return allocate_powersgd(state, settings)
        case "omnireduce" if workers.speaks:
            return allocate_omnireduce(state, settings)
        case _:
            return {}


def exchange_(
    workers: Workers,
    space: dict[str, Tensor],
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Replace this worker's weighted gradient in `state.grad` by the sum over all workers.

    What the method leaves out of the sum stays in `state.memory`, and every worker receives the
    same bits. Collective on `workers.comm`; followers must not call it.
    """
    match settings.method:
        case "topk":
            exchange_topk_(workers, space, state, settings, transport, traffic)
        case "pactrain":
            exchange_pactrain_(workers, space, state, settings, transport, traffic)
        case "dgc":
            exchange_dgc_(workers, space, state, problem, settings, transport, traffic)
        case "powersgd":
            exchange_powersgd_(workers, space, state, settings, transport, traffic)
        case "omnireduce":
            exchange_omnireduce_(workers, space, state, settings, transport, traffic)
        case other:
            raise ValueError(f"{other} exchanges nothing at each step")


def exchange_dense_(
    topology: Topology,
    workers: Workers,
    state: State,
    settings: Settings,
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Finish synchronous SGD's mean: over the nodes, where their own mean is in `state.grad`.

    Flat, the mean over all ranks is there already. Collective on `leader`, then on `node`.
    """
    grad = state.grad
    if settings.aggregation == "hierarchical":
        grad.mul_(workers.weight)
        allreduce_then_bcast_(topology.leader, topology.node, grad, transport)
    count_allreduce(traffic, workers, grad.numel() * grad.element_size())
