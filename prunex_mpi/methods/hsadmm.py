"""The driver: H-SADMM, one outer iteration as five phases.

| phase                  | communicator     | MPI operation           | operand                   |
|------------------------|------------------|-------------------------|---------------------------|
| 1 local computation    | node (step sync) | Iallreduce SUM, T times | gradient, dense           |
| 2 intra-node consensus | node             | Allreduce SUM           | theta + u, dense          |
| 3 projection and masks | leader, node     | Reduce SUM, Bcast       | group energies, mask bits |
| 4 inter-node consensus | leader, node     | Allreduce BOR and SUM,  | mask bits, compact        |
|                        |                  | Bcast                   | z_i + v_i                 |
| 5 duals and residuals  | world            | Allreduce SUM, Bcast    | nine norms per layer      |

Names as in the paper: theta_ij, u_ij per rank; z_tilde (z~_i), z_node (z_i), v_i per node; z
everywhere. All are flat vectors over all parameters (`layout`). P_i ranks in node i, N in all.
With step sync phase 2 sends statistics alone; without duals phase 5 sends the loss alone. With a
payload of fewer bits phase 4 adds up codes, by Alltoallv and Allgather (`core/sums.py`).

Without duals this is local SGD, and so are the methods that train locally and exchange once per
outer iteration:

- `local-sgd`: theta starts each outer iteration from the mean over all ranks.
- `qsr`: the same, with an interval that grows as the learning rate falls (Gu et al. 2024).
- `diloco`: that mean is a step of SGD with Nesterov momentum (Douillard et al. 2023).
- `sparseloco`: a few values of what the local steps have changed travel (Sarfi et al. 2025).
- `one-shot`: at the end of one outer iteration the groups of largest magnitude are kept, as phase 3
  does, and what follows is training on the fixed support with the payload that has shrunk.

`prunex-flat` has phases 2 to 4 of its own (`flat_consensus.py`).
"""

import time
from collections.abc import Generator
from typing import Any

import numpy as np
from torch import Tensor

from prunex_mpi.comm.counted import CountedComm, CountedComms
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import now
from prunex_mpi.core import (
    admm,
    evaluation,
    exchange,
    loop,
    mask_choice,
    schedule,
)
from prunex_mpi.core.lasting import remove_dropped_
from prunex_mpi.core.state import RunContext, State, adopt_mask, comms_of, freeze
from prunex_mpi.methods.exchanges import exchange_of
from prunex_mpi.methods.flat_consensus import agree_on_z
from prunex_mpi.models.layout import squared_distances
from prunex_mpi.pruning import masks
from prunex_mpi.settings.fields import Settings


def outer_iterations(topology: Topology, context: RunContext) -> loop.Rounds:
    """Train from `position` on; yield each outer iteration's metrics (metrics.jsonl).

    Between them it yields wherever it needs the gradient of the next local step (`loop.Rounds`).
    Collective on `topology.world`: every rank must exhaust the generator, which ends early, between
    two local steps, where the ranks agree to stop. Of `seconds`, `intra` counts waiting for the
    node's gradients as well. Between two records the state is all there is to know. Raises Diverged
    on every rank.
    """
    state, settings, position = context.state, context.settings, context.state.position
    method = settings.method
    comms = comms_of(topology, state, context.transport)
    node = comms.node
    own = exchange_of(method)(comms, context) if method.own_exchange else None
    each_step = method.nodes and settings.node_sync == "step"
    with loop.averaging(node if each_step else None, context) as averager:
        for this in loop.rounds(context):
            measured = loop.measures_residuals(context, this)
            stage = schedule.find_stage(this.k, settings, state.frozen, position, measured)
            fragmented = exchange.goes_in_fragments(context, this, stage)
            with loop.phase(context, this, "local"):
                loss = yield from local_computation(
                    averager, context, comms if fragmented else None
                )
                if loss is None:
                    return
                evaluation.check_divergence(topology, context, loss)
            loop.split_local(context, this, waiting="intra")
            asynchronous = loop.is_asynchronous(context, this, stage)
            moved_node = moved = None
            with loop.phase(context, this, "intra"):
                exchange.find_reference_(comms, state)
                if method.nodes and not fragmented:
                    z_tilde = intra_node_consensus(node, state, settings)
            if method.flat:
                moved_node, moved = agree_on_z(comms, context, this, stage)
            elif fragmented:
                with loop.phase(context, this, "inter"):
                    exchange.send_fragment_(comms, context, settings.fragments, asynchronous)
            else:
                with loop.phase(context, this, "project"):
                    moved_node = project(comms.workers, node, state, settings, z_tilde, stage)
                    if stage.freeze:
                        freeze(state, settings.after_freeze == "local-sgd")
                with loop.phase(context, this, "inter"):
                    if own is not None:
                        own.exchange_(state.z)
                    else:
                        moved = inter_node_consensus(comms, context, stage, asynchronous)
            with loop.phase(context, this, "dual"):
                norms = None
                if not state.consensus_sgd:
                    norms = admm.update_duals(state, moved_node, moved)
                this.residuals.update(admm.own_residuals(norms, state))
                residuals, loss = admm.find_residuals(topology.world, state, settings, norms, loss)

            settles = residuals is not None and residuals.converged
            settles = settles and schedule.may_stop(stage, settings, state.frozen)
            # A union may hold more groups than allowed: vote once more before stopping.
            position.vote_next, converged = settles and stage.union, settles and not stage.union
            yield end_iteration(topology, context, this, stage, loss, residuals, converged)
            if converged:
                return


# --------------------------------------------------------------------------------------------------
# Phase 1: local computation
# --------------------------------------------------------------------------------------------------


def local_computation(
    averager: GradientAverager | None, context: RunContext, comms: CountedComms | None = None
) -> Generator[GradientAverager | None, Tensor, float | None]:
    """Take T steps on f_ij(theta) + rho1/2 |theta - z_i + u|^2 (Eq. 8); return the mean loss.

    No communication, unless `averager` averages each step's gradient inside the node (then
    collective on its communicator). Consensus SGD starts from z and has no proximal term. Where an
    exchange is under way the node goes on from its own z_i, and z arrives after some of the steps.
    With `comms` all parts of the message but the last are sent between the steps, see
    `core/exchange.py` (then collective on their communicators). Yields the averager where it needs
    the next gradient (`core/loop.py`). Returns None where the ranks agree
    to stop, before the step at which `position` then is.
    """
    state, settings, position = context.state, context.settings, context.state.position
    started = time.perf_counter()
    loop.begin_losses_(state)
    if position.step == 0:
        if loop.stops_here(context, started):
            return None
        remove_dropped_(context, averager)
        # A part of z is taken over as soon as it has been sent.
        if not position.part:
            loop.start_(context)
    in_theta = settings.weight_decay_in == "theta" or state.consensus_sgd
    state.optimizer.set_decay_(settings.weight_decay if in_theta else 0.0)
    anchor = None if state.consensus_sgd else admm.find_anchor(state)
    context.problem.model.train()
    count = schedule.local_steps(context)
    while position.step < count:
        if position.step and loop.stops_here(context, started):
            return None
        context.heartbeat.beat(position.step)
        if position.in_flight and position.step >= exchange.completion_step(context):
            complete_z(context)
            anchor = None if state.consensus_sgd else admm.find_anchor(state)
        loop.begin_step_(state)
        loss = yield averager
        loop.finish_average_(context, averager)
        state.scaler.unscale_(state.optimizer.optimizer)
        mask_choice.watch_(context)
        if state.frozen and settings.clip_grad:
            state.mask.apply_(state.grad)
        loop.clip_(context)
        if anchor is not None:
            admm.add_pull_(state, anchor)
        if state.frozen:
            state.mask.apply_(state.grad)
        loop.step_optimizer_(context)
        if state.frozen and settings.optimizer == "muon":
            # Of grouped convolutions a matrix that is made orthogonal is zero elsewhere.
            state.mask.apply_(state.theta)
        loop.add_loss_(context, loss)
        position.step += 1
        if comms is not None and (number := exchange.fragment_after_step(context)):
            if position.in_flight:
                complete_z(context)
            with position.clock.between_steps(state.theta.device):
                exchange.send_fragment_(
                    comms, context, number, asynchronous=context.helper is not None
                )
    if position.in_flight:
        complete_z(context)
    return float(state.losses[0] / state.losses[1])


# --------------------------------------------------------------------------------------------------
# Phase 2: intra-node consensus
# --------------------------------------------------------------------------------------------------


def intra_node_consensus(node: CountedComm, state: State, settings: Settings) -> Tensor:
    """Return the dense candidate of the node, z_tilde; leave its mean statistics in `stats`.

    z~_i = [rho1 mean_j(theta_ij + u_ij) + rho2 (z - v_i)] / (lambda + rho1 + rho2), Eq. 9; in
    consensus SGD the mean alone. Allreduce SUM of all parameters, dense, unless gradients were
    averaged at each step: then ranks hold the same bits, or the leader's theta and u become
    everyone's. In the memory of `scratch`. Collective on `node.comm`.
    """
    ranks = node.comm.size
    exchange.average_in_node_(node, state)
    decay = admm.decay_of_layers(settings, state.layout) * (settings.weight_decay_in == "z")
    if settings.node_sync == "step" or ranks == 1:
        z_tilde = admm.weigh_candidate(state, decay, 1)
        if exchange.adopt_first_replica_(node, state, z_tilde, "of a node"):
            admm.weigh_candidate(state, decay, 1)
        return z_tilde
    total = admm.sum_candidate(state)
    node.reduce_(total)
    return admm.weigh_candidate(state, decay, ranks, total)


# --------------------------------------------------------------------------------------------------
# Phase 3: projection and masks
# --------------------------------------------------------------------------------------------------


def project(
    leader: CountedComm,
    node: CountedComm,
    state: State,
    settings: Settings,
    z_tilde: Tensor,
    stage: schedule.Stage,
) -> np.ndarray | None:
    """Set z_i to the projection of z_tilde (Eq. 10), whose memory it takes over.

    By vote the leaders choose the shared support that keeps most of all nodes' energy, which is
    the exact projection of (z~_1 ... z~_M) on shared supports; else each leader projects for its
    node. Without a choice z_i = z~_i: before the first nothing is masked, and after the freeze z~_i
    is made of vectors that are. Returns |z_i^{k+1} - z_i^k|^2 per layer where it is measured.
    Collective on `leader.comm`, then on `node.comm`.
    """
    if stage.choose:
        bits = state.mask.bits
        weighed = mask_choice.scored(leader, node, state, settings, z_tilde)
        if leader.is_member and stage.vote:
            bits = mask_choice.agree_by_vote(leader, weighed, state, stage.strict, node.comm.size)
        elif leader.is_member:
            bits = mask_choice.project_locally(weighed, state, stage.strict)
        bits = node.broadcast_bits(bits)
        if stage.vote:
            adopt_mask(state, bits)
        else:
            # The node's own, until the leaders have agreed on what travels.
            state.mask = masks.make_mask(state.layout, state.groups, bits, z_tilde)
        state.mask.apply_(z_tilde)
    moved = squared_distances(state.z_node, z_tilde, state.layout) if stage.measured else None
    state.z_node, state.scratch = z_tilde, state.z_node
    return moved


# --------------------------------------------------------------------------------------------------
# Phase 4: inter-node consensus
# --------------------------------------------------------------------------------------------------


def inter_node_consensus(
    comms: CountedComms, context: RunContext, stage: schedule.Stage, asynchronous: bool
) -> np.ndarray | None:
    """Set z = sum_i P_i (z_i + v_i) / N on the mask, zero elsewhere (Eq. 11).

    Leaders agree on the mask (BOR of packed bits, unless it was voted), pack z_i + v_i and the
    BatchNorm statistics into one dense message, add it up in buckets, and broadcast the compact
    result inside their node. If `asynchronous` it goes on in the helper thread, and z is what it
    was until `complete_z`. Returns |z^{k+1} - z^k|^2 per layer where it is measured. Collective on
    the communicators of the workers and the node.
    """
    state, leader, node = context.state, comms.workers, comms.node
    if stage.union:
        bits = state.mask.bits
        if leader.is_member:
            bits = mask_choice.agree_by_or(leader, bits)
        adopt_mask(state, node.broadcast_bits(bits))
    whole, settings = state.message.fragment(), context.settings
    exchange.exchange_(
        comms, state, settings.payload, whole, context.helper if asynchronous else None
    )
    if asynchronous:
        return None
    last_z = exchange.take_over_(state, settings, whole, freezes=stage.freeze)
    return squared_distances(state.z, last_z, state.layout) if stage.measured else None


def complete_z(context: RunContext) -> None:
    """Wait for what phase 4, or a part of it, has begun: theta += z - z_i, v += z_i - z."""
    state, clock = context.state, context.state.position.clock
    started = now(state.theta.device)
    if context.helper is not None:
        context.helper.finish()
        clock.late += time.perf_counter() - started
    settings = context.settings
    fragment = exchange.complete_(state, settings, asynchronous=True)
    exchange.merge_(state, settings, fragment.place)
    if not state.consensus_sgd:
        state.v.add_(state.z_node).sub_(state.z)
    state.position.in_flight = ""
    clock.asynchronous += now(state.theta.device) - started


# --------------------------------------------------------------------------------------------------
# The end of an outer iteration
# --------------------------------------------------------------------------------------------------


def end_iteration(
    topology: Topology,
    context: RunContext,
    this: loop.Round,
    stage: schedule.Stage,
    loss: float,
    residuals: admm.Residuals | None,
    converged: bool,
) -> dict[str, Any]:
    """Note the drift, evaluate, update penalties; return the record. Collective on `world`."""
    state, settings = context.state, context.settings
    method = settings.method
    if method.consensus:
        drift = masks.mask_drift(state.mask.bits, this.mask)
        schedule.note_drift_(state.position, stage, settings, drift)
    # Once theta is trained on a support that stays, and longer than averages remember, they fit z.
    # Where nobody was trained with z, they are estimated when it is looked at.
    moves = stage.choose or not (state.frozen or method.prunes_once)
    estimate = evaluation.TEMPORARY if settings.bn == "recalibrate" and moves else ""
    if estimate and (stage.freeze or this.last or converged):
        estimate = evaluation.PERMANENT
    ended = {"residuals": residuals, "estimate": estimate, "converged": converged}
    record = loop.finish_round(topology, context, this, loss, **ended)
    if settings.penalty == "balance" and not state.consensus_sgd:
        admm.balance_penalties_(state, residuals)
    return record
