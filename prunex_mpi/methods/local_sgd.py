"""The driver of the methods that average dense parameters once per outer iteration.

H-SADMM without duals: its phases 1, 2 and 4 are the local steps and the average, with the same
interval, the same `--node-sync` and the same messages (`hsadmm.py` names communicators, operations
and operands).

- `local-sgd`: theta starts each outer iteration from the mean over all ranks.
- `diloco`: that mean is a step of SGD with Nesterov momentum (Douillard et al. 2023).
- `one-shot`: at the end of one outer iteration the groups of largest magnitude are kept, as phase 3
  does, and what follows is training on the fixed support with the payload that has shrunk.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.preemption import StopAgreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import (
    estimate_statistics,
    evaluate,
    mean_over_ranks,
    refuse_divergence,
)
from prunex_mpi.core.metrics import iteration_record, layer_records, timed
from prunex_mpi.core.state import Problem, State, Traffic, freeze, next_iteration
from prunex_mpi.core.steps import open_averager
from prunex_mpi.methods.hsadmm import (
    inter_node_consensus,
    intra_node_consensus,
    local_computation,
    project,
)
from prunex_mpi.pruning.projection import mask_drift
from prunex_mpi.settings.fields import Settings


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

    As `hsadmm.outer_iterations`; `dual` counts diloco's outer step. Collective on `topology.world`.
    Raises Diverged on every rank.
    """
    node, position = topology.node, state.position
    with ExitStack() as exits:
        comm = node if settings.node_sync == "step" else None
        averager = open_averager(exits, comm, state, problem, transport)
        for k in range(position.iteration, settings.outer_iterations + 1):
            started = time.perf_counter()
            seconds: dict[str, float] = {}
            traffic = Traffic()
            last = k == settings.outer_iterations
            prune = settings.method == "one-shot" and k == settings.prune_iteration
            old_mask = state.mask

            heartbeat.iteration = k
            with timed(heartbeat, seconds, "local", state):
                loss = local_computation(
                    node, averager, state, problem, settings, heartbeat, stop, traffic
                )
                if loss is None:
                    return
                refuse_divergence(topology, state, loss)
            seconds["local"] += position.local_seconds - position.exchange_seconds
            with timed(heartbeat, seconds, "intra", state):
                intra_node_consensus(node, state, settings, transport, traffic)
            seconds["intra"] += position.exchange_seconds
            with timed(heartbeat, seconds, "project", state):
                project(topology, state, settings, 1.0, prune, True, traffic)
                if prune:
                    freeze(state, True)
            # The mean of theta is taken: its memory holds where the outer iteration started.
            state.theta.copy_(state.z)
            with timed(heartbeat, seconds, "inter", state):
                inter_node_consensus(topology, state, transport, False, traffic)
                loss = mean_over_ranks(topology.world, loss)
            with timed(heartbeat, seconds, "dual", state):
                if settings.method == "diloco":
                    outer_step_(state, settings.outer_lr, settings.outer_momentum)

            test_loss = test_accuracy = None
            with timed(heartbeat, seconds, "evaluate", state):
                if problem.test is not None and (last or k % settings.evaluate_every == 0):
                    if settings.bn == "recalibrate" and prune:
                        estimate_statistics(topology, state, problem, transport, traffic)
                    test_loss, test_accuracy = evaluate(topology, state, problem, traffic)
            seconds["total"] = time.perf_counter() - started + position.local_seconds
            record = {
                **iteration_record(k, state, seconds, traffic, None),
                "mask_drift": mask_drift(state.mask, old_mask),
                "train_loss": loss,
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "layers": layer_records(k, state, None) if topology.world.rank == 0 else [],
                "status": "completed" if last else "running",
            }
            next_iteration(position, loss)
            yield record


def outer_step_(state: State, lr: float, momentum: float) -> None:
    """Step from theta, the old z, along theta - z, z the mean of the ranks; leave the result in z.

    b = momentum b + (theta - z), z = theta - lr (theta - z + momentum b): DiLoCo's outer optimizer,
    SGD with Nesterov momentum. Written so that lr 1 without momentum is the mean, bit for bit. The
    mask is kept: theta, z and b vanish outside of it.
    """
    step = torch.sub(state.theta, state.z, out=state.scratch)
    velocity = state.memory["shared.outer_momentum"].mul_(momentum).add_(step)
    state.z.add_(step, alpha=1 - lr).add_(velocity, alpha=-lr * momentum)
