"""The driver: H-SADMM, one outer iteration as five phases.

| phase                  | communicator     | MPI operation           | operand                   |
|------------------------|------------------|-------------------------|---------------------------|
| 1 local computation    | node (step sync) | Iallreduce SUM, T times | gradient, dense           |
| 2 intra-node consensus | node             | Allreduce SUM           | theta + u, dense          |
| 3 projection and masks | leader, node     | Reduce SUM, Bcast       | group energies, mask bits |
| 4 inter-node consensus | leader, node     | Allreduce BOR and SUM,  | mask bits, compact        |
|                        |                  | Bcast                   | z_i + v_i                 |
| 5 duals and residuals  | world            | Allreduce SUM, Bcast    | nine norms per layer      |

Names as in the paper: theta_ij, u_ij per rank; z_node (z_i), v_i per node; z everywhere. All are
flat vectors over all parameters (`layout`). P_i ranks in node i, N in all.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import Transport, allreduce_, allreduce_then_bcast_
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.preemption import StopAgreement
from prunex_mpi.comm.topology import Topology, digests_agree
from prunex_mpi.core.evaluation import estimate_statistics, evaluate, refuse_divergence
from prunex_mpi.core.mask_agreement import (
    agree_by_or,
    agree_by_vote,
    broadcast_mask,
    project_locally,
)
from prunex_mpi.core.metrics import iteration_record, layer_records, timed
from prunex_mpi.core.residuals import NormSums, Residuals, compute_residuals
from prunex_mpi.core.schedule import settled, strictness
from prunex_mpi.core.state import (
    Problem,
    State,
    Traffic,
    adopt_mask,
    freeze,
    next_iteration,
    ring_bytes,
    update_penalties,
)
from prunex_mpi.core.steps import (
    add_loss_,
    clocked,
    forward_backward,
    loss_sums,
    open_averager,
    step_optimizer_,
)
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import fill_, scale_, squared_norms
from prunex_mpi.pruning.compaction import pack_, unpack_
from prunex_mpi.pruning.projection import (
    apply_factors_,
    build_factors,
    factor_views,
    mask_drift,
    mask_views_,
)
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
    """Run H-SADMM from `state.position` on; yield each outer iteration's metrics (metrics.jsonl).

    Collective on `topology.world`: every rank must exhaust the iterator, which ends early, between
    two local steps, where the ranks agree to `stop`. The record also carries `layers`, the rows of
    layers.jsonl, and `status`, which is "converged" on an early stop. Of `seconds`, `intra` counts
    waiting for the node's gradients as well. Between two records the state is all there is to know.
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
            strict = strictness(k, settings.warmup_iterations, settings.keep_ramp_iterations)
            due = position.freeze_next or k == settings.freeze_iteration
            freeze_now = due and not state.frozen
            # The delivered z must satisfy the constraint: its masks are voted even after a union.
            vote = settings.mask_agreement == "vote" or freeze_now or position.vote_next or last
            # Before the keep ratio falls, and after the freeze, there is no mask to agree on.
            choose = strict > 0 and not state.frozen
            union = choose and not vote
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
                moved_node = project(topology, state, settings, strict, choose, vote, traffic)
                if freeze_now:
                    freeze(state, settings.after_freeze == "local-sgd")
            with timed(heartbeat, seconds, "inter", state):
                moved = inter_node_consensus(topology, state, transport, union, traffic)
            with timed(heartbeat, seconds, "dual", state):
                residuals, loss = update_duals(topology, state, settings, moved_node, moved, loss)

            drift = mask_drift(state.mask, old_mask)
            settles = not state.consensus_sgd and bool(residuals.converged.all())
            # A union may hold more groups than allowed: vote once more before stopping.
            position.vote_next = strict == 1.0 and settles and union
            converged = strict == 1.0 and settles and not union
            if strict == 1.0:
                threshold, window = settings.freeze_drift, settings.freeze_window
                position.drifts = [*position.drifts, drift][-window:]
                position.freeze_next = settled(position.drifts, threshold, window)

            test_loss = test_accuracy = None
            with timed(heartbeat, seconds, "evaluate", state):
                due = last or converged or k % settings.evaluate_every == 0
                if due and problem.test is not None:
                    # On the support that theta was trained on, averaged statistics fit z.
                    if settings.bn == "recalibrate" and choose:
                        estimate_statistics(topology, state, problem, transport, traffic)
                    test_loss, test_accuracy = evaluate(topology, state, problem, traffic)
            seconds["total"] = time.perf_counter() - started + position.local_seconds
            record = {
                **iteration_record(k, state, seconds, traffic, residuals),
                "mask_drift": drift,
                "train_loss": loss,
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "layers": layer_records(k, state, residuals) if topology.world.rank == 0 else [],
                "status": "converged" if converged else "completed" if last else "running",
            }
            if not state.consensus_sgd:
                update_penalties(state, settings, residuals)
            next_iteration(position, loss)
            yield record
            if converged:
                return


# --------------------------------------------------------------------------------------------------
# Phase 1: local computation
# --------------------------------------------------------------------------------------------------


def local_computation(
    node: MPI.Comm,
    averager: GradientAverager | None,
    state: State,
    problem: Problem,
    settings: Settings,
    heartbeat: Heartbeat,
    stop: StopAgreement | None,
    traffic: Traffic,
) -> float | None:
    """Take T steps of SGD on f_ij(theta) + rho1/2 |theta - z_i + u|^2; return the mean loss.

    Eq. 8. No communication, unless `averager` averages each step's gradient inside the node (then
    collective on `node`). Consensus SGD starts from z and has no proximal term. Returns None where
    the ranks agree to stop: `state.position` then says which step comes next.
    """
    position = state.position
    if position.step == 0 and (settings.theta_start == "z" or state.consensus_sgd):
        state.theta.copy_(state.z)
    group = state.optimizer.param_groups[0]
    in_theta = settings.weight_decay_in == "theta" or state.consensus_sgd
    group["weight_decay"] = settings.weight_decay if in_theta else 0.0
    rho_by_weight = None
    if not state.consensus_sgd:
        # rho1 (theta - z_i + u) = rho1 theta - anchor. The anchor stands still during the phase,
        # and rho1 theta is a weight decay: the optimizer's one pass adds it.
        torch.sub(state.z_node, state.u, out=state.scratch)
        scale_(state.scratch, state.layout, state.rho1)
        if np.all(state.rho1 == state.rho1[0]):
            group["weight_decay"] += float(state.rho1[0])
        else:
            rho_by_weight = state.payload[: state.layout.numel]
            fill_(rho_by_weight, state.layout, state.rho1)
    masked = factor_views(state.grad, state.layout, state.groups, state.factors)
    losses = loss_sums(state)
    traffic.intra += position.intra_bytes
    started = time.perf_counter()
    problem.model.train()
    while position.step < problem.steps:
        if stop is not None and stop.reached():
            position.loss_sum, position.loss_count = losses.tolist()
            position.intra_bytes = traffic.intra
            position.local_seconds += time.perf_counter() - started
            return None
        heartbeat.beat(position.step)
        if averager is not None:
            averager.begin()
        loss = forward_backward(state, problem, settings)
        if averager is not None and node.size > 1:
            with clocked(state, "exchange_seconds"):
                averager.finish_()
            traffic.intra += state.grad.numel() * state.grad.element_size()
        state.scaler.unscale_(state.optimizer)
        if not state.consensus_sgd:
            state.grad.sub_(state.scratch)
            if rho_by_weight is not None:
                state.grad.addcmul_(state.theta, rho_by_weight)
        if state.frozen:
            mask_views_(masked, state.factors)
        step_optimizer_(state, problem, settings)
        add_loss_(losses, loss, settings)
        position.step += 1
    return float(losses[0] / losses[1])


# --------------------------------------------------------------------------------------------------
# Phase 2: intra-node consensus
# --------------------------------------------------------------------------------------------------


def intra_node_consensus(
    node: MPI.Comm, state: State, settings: Settings, transport: Transport, traffic: Traffic
) -> None:
    """Leave the dense candidate of the node in `scratch`, and its mean statistics in `stats`.

    z~_i = [rho1 mean_j(theta_ij + u_ij) + rho2 (z - v_i)] / (lambda + rho1 + rho2), Eq. 9 with the
    mean and the global z; in consensus SGD the mean alone. Allreduce SUM of all parameters, dense.
    Collective on `node`.
    """
    torch.add(state.theta, state.u, out=state.scratch)
    batchnorm.read_(state.bn_modules, state.stats)
    allreduce_(node, state.scratch, transport)
    allreduce_(node, state.stats, transport)
    if node.size > 1:
        elements = state.scratch.numel() + state.stats.numel()
        traffic.intra += elements * state.scratch.element_size()
    state.stats.div_(node.size)
    if state.consensus_sgd:
        state.scratch.div_(node.size)
        return
    decay = settings.weight_decay if settings.weight_decay_in == "z" else 0.0
    # Factored so that four passes serve any penalties: rho2/gamma [rho1/rho2 a + z - v].
    scale_(state.scratch, state.layout, state.rho1 / (state.rho2 * node.size))
    state.scratch.add_(state.z).sub_(state.v)
    scale_(state.scratch, state.layout, state.rho2 / (decay + state.rho1 + state.rho2))


# --------------------------------------------------------------------------------------------------
# Phase 3: projection and masks
# --------------------------------------------------------------------------------------------------


def project(
    topology: Topology,
    state: State,
    settings: Settings,
    strict: float,
    choose: bool,
    vote: bool,
    traffic: Traffic,
) -> np.ndarray:
    """Set z_i to the projection of the candidate; return |z_i^{k+1} - z_i^k|^2 per layer.

    With `vote` the leaders choose the shared support that keeps most of all nodes' energy, which is
    the exact projection of (z~_1 ... z~_M) on shared supports; else each leader projects for its
    node. Only leaders compute energies: one rank's decision is broadcast, so that no two ranks of a
    node can disagree on a near tie. Unless `choose`, z_i = z~_i * m. Collective on `leader`, then
    on `node`.
    """
    factors = state.factors
    if choose:
        mask = state.mask
        if topology.is_leader:
            # The payload's memory is free in this phase.
            squares = state.payload[: state.layout.numel]
            torch.mul(state.scratch, state.scratch, out=squares)
            if vote:
                mask = agree_by_vote(topology, squares, state, strict, settings.round_to, traffic)
            else:
                mask = project_locally(squares, state, strict, settings.round_to)
        mask = broadcast_mask(topology.node, mask, traffic)
        if vote:
            adopt_mask(state, mask)
            factors = state.factors
        else:
            factors = build_factors(mask, state.groups, state.theta.device, state.theta.dtype)
            state.mask = mask
    apply_factors_(state.scratch, state.layout, state.groups, factors)
    state.z_node.sub_(state.scratch)
    moved = squared_norms(state.z_node, state.layout)
    state.z_node, state.scratch = state.scratch, state.z_node
    return moved


# --------------------------------------------------------------------------------------------------
# Phase 4: inter-node consensus
# --------------------------------------------------------------------------------------------------


def inter_node_consensus(
    topology: Topology,
    state: State,
    transport: Transport,
    union: bool,
    traffic: Traffic,
) -> np.ndarray:
    """Set z = sum_i P_i (z_i + v_i) / N on the mask, zero elsewhere; return |z^{k+1} - z^k|^2.

    The only phase whose bytes cross nodes in bulk: leaders agree on the mask (BOR of packed bits,
    unless it was voted), pack z_i + v_i and the BatchNorm statistics into one dense message,
    Allreduce it in buckets, and broadcast the compact result inside their node, where every rank
    expands it. Collective on `leader`, then on `node`.
    """
    if union:
        mask = state.mask
        if topology.is_leader:
            mask = agree_by_or(topology.leader, mask, traffic)
        adopt_mask(state, broadcast_mask(topology.node, mask, traffic))
    message = state.message
    if topology.is_leader:
        if not state.plan_agreed and not digests_agree(topology.leader, state.plan.digest):
            raise RuntimeError("the leaders' compact layouts differ; nothing was exchanged")
        state.plan_agreed = True
        torch.add(state.z_node, state.v, out=state.scratch)
        pack_(state.scratch, state.plan, message)
        statistics = message[state.plan.numel :]
        torch.index_select(state.stats, 0, state.stats_kept, out=statistics)
        message.mul_(topology.node_weight)
    allreduce_then_bcast_(topology.leader, topology.node, message, transport)
    size = message.numel() * message.element_size()
    traffic.payload += size
    traffic.sent += ring_bytes(topology.num_nodes, size)
    traffic.dense += (state.layout.numel + state.stats.numel()) * message.element_size()
    if topology.node_size > 1:
        traffic.intra += size
    unpack_(message, state.plan, state.scratch)
    if not state.shrinks:
        apply_factors_(state.scratch, state.layout, state.groups, state.factors)
    if state.stats_kept.numel() < state.stats.numel():
        batchnorm.reset_(state.bn_modules, state.stats)
    state.stats.index_copy_(0, state.stats_kept, message[state.plan.numel :])
    batchnorm.write(state.bn_modules, state.stats)
    state.z.sub_(state.scratch)
    moved = squared_norms(state.z, state.layout)
    state.z, state.scratch = state.scratch, state.z
    return moved


# --------------------------------------------------------------------------------------------------
# Phase 5: duals, residuals, penalties
# --------------------------------------------------------------------------------------------------


def update_duals(
    topology: Topology,
    state: State,
    settings: Settings,
    moved_node: np.ndarray,
    moved: np.ndarray,
    loss: float,
) -> tuple[Residuals, float]:
    """u += theta - z_i and v += z_i - z; return the residuals and the mean loss over all ranks.

    One Allreduce of nine norms per layer. Its result is broadcast from rank 0, since MPI does not
    promise the same bits on every rank and the stopping test and the penalties are decided on it.
    Collective on `world`.
    """
    layout = state.layout
    torch.sub(state.theta, state.z_node, out=state.scratch)
    gap_theta = squared_norms(state.scratch, layout)
    if not state.consensus_sgd:
        state.u.add_(state.scratch)
    torch.sub(state.z_node, state.z, out=state.scratch)
    gap_node = squared_norms(state.scratch, layout)
    if not state.consensus_sgd:
        state.v.add_(state.scratch)
    norms = NormSums(
        theta_minus_z_node=gap_theta,
        z_node_step=moved_node,
        theta=squared_norms(state.theta, layout),
        z_node=squared_norms(state.z_node, layout),
        u=squared_norms(state.u, layout),
        z_node_minus_z=gap_node,
        z_step=moved,
        z=squared_norms(state.z, layout),
        v=squared_norms(state.v, layout),
    )
    buffer = np.append(np.concatenate(norms), loss)
    topology.world.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)
    topology.world.Bcast(buffer, root=0)
    sums = NormSums(*buffer[:-1].reshape(len(norms), -1))
    numels = np.array([s.numel for s in layout.segments], dtype=np.float64)
    residuals = compute_residuals(
        sums,
        numels,
        topology.world_size,
        state.rho1,
        state.rho2,
        settings.eps_abs,
        settings.eps_rel,
    )
    return residuals, float(buffer[-1]) / topology.world_size
