"""Which groups a model has, and the choice of the mask: scores, and agreement over the leaders.

The score `gates`, by which coupled groups are kept as the loss depends on a factor on their channel
(`prunex_mpi/README.md`, "Scores"), is summed over the local steps, at the cost of one more pass
over the parameters. Each node scores by its own gradients; where its ranks do not average them at
each step it takes the mean of the ranks' sums.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, log
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.core.memory import MEAN, RANK, Declared, Lasting
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.models.dummy_input import find_ends
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.groups import INSTEAD, Groups, Selection, find_groups, out_of_reach
from prunex_mpi.pruning.masks import find_pruned
from prunex_mpi.pruning.projection import gate_gradients, group_squared_norms, select, with_budget
from prunex_mpi.pruning.removable import find_tried, training_failure
from prunex_mpi.settings.fields import Settings

# --------------------------------------------------------------------------------------------------
# Groups
# --------------------------------------------------------------------------------------------------


def try_removal(settings: Settings, model: nn.Module, inputs: Inputs) -> Coupling | None:
    """Try whether `model` works without its coupled groups, on the CPU; return them, None if none.

    Raises UserError where it does not, or could not be trained without them.
    """
    removing = settings.method.removes
    if not removing and (not settings.method.prunes_groups or "coupled" not in settings.groups):
        return None
    coupling = find_tried(model, inputs, layers=removing)
    if settings.remove_dropped or removing:
        reason = training_failure(model, coupling, inputs)
        what, instead = "remove-dropped", "leave remove-dropped away"
        if removing:
            what, instead = f"method {settings.method.name}", "choose another method"
        if reason:
            raise UserError(
                f"{what}: a smaller network could not be trained, since the model reads channels "
                f"in training alone ({reason}); {instead}"
            )
    return coupling


def try_groups(settings: Settings, model: nn.Module, layout: Layout, inputs: Inputs) -> Groups:
    """Find the groups of `model`, as `make_groups`, once it has been seen to work without them.

    Raises UserError as `try_removal`.
    """
    coupling = try_removal(settings, model, inputs)
    return make_groups(settings, model, layout, inputs, coupling)


def make_groups(
    settings: Settings,
    model: nn.Module,
    layout: Layout,
    inputs: Inputs,
    coupling: Coupling | None = None,
) -> Groups:
    """Find the groups of `model`, which is on the CPU; none for methods that do not prune them.

    `coupling` is what `try_removal` has returned, where it was asked on this rank (`try_groups`).
    """
    removes = settings.method.removes
    kinds = ("coupled",) if removes else settings.method.own_groups or settings.groups
    if not (removes or settings.method.keeps_by_layer):
        return Groups((), (), 0, ())
    if coupling is None and "coupled" in kinds:
        coupling = find_coupling(model, inputs, layers=removes)
    if removes:
        return find_groups(model, layout, kinds, (1.0,), coupling=coupling)
    found = find_groups(
        model,
        layout,
        kinds,
        settings.keep_ratio,
        coupling=coupling,
        ends=None if kinds == ("coupled",) else find_ends(model, inputs),
        instead="choose another --method" if settings.method.own_groups else INSTEAD,
    )
    if settings.keep_by != "groups":
        found = with_budget(found, layout, settings.keep_by, settings.keep_floor)
    return replace(found, by_gate=settings.score == "gates")


def log_unpruned(settings: Settings, groups: Groups, numel: int) -> None:
    """Log which channels of a model of `numel` parameters are not pruned, and why."""
    for excluded in groups.excluded:
        log.info("not pruned: %s", excluded)
    line = out_of_reach(groups, numel)
    if line and settings.method.prunes_groups:
        log.warning("%s", line)


# --------------------------------------------------------------------------------------------------
# The choice
# --------------------------------------------------------------------------------------------------


def project_locally(flat: Tensor, state: State, strict: float) -> np.ndarray:
    """Return the support of the projection of `flat`, of `scored`; kinds one after the other."""
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        squared_norms = _squared_norms_left(flat, state, selections, mask).numpy()
        chosen = select(squared_norms, selections, strict, state.groups)
        mask[selections[0].start : selections[-1].stop] = chosen
    return mask


def agree_by_vote(
    leader: CountedComm, flat: Tensor, state: State, strict: float, node_size: int
) -> np.ndarray:
    """Return the shared mask that keeps the most of sum_i P_i |z~_i,g|^2, alike on every leader.

    Per kind of group: Reduce SUM of one float per group to the first leader, which decides alone
    and broadcasts packed bits. `flat` is as in `project_locally`, `node_size` is P_i. Collective on
    `leader.comm`.
    """
    mask = np.ones(state.groups.total, dtype=bool)
    for selections in state.groups.kinds:
        squared_norms = _squared_norms_left(flat, state, selections, mask)
        squared_norms *= node_size
        leader.reduce_to_first_(squared_norms, kind="mask")
        chosen = np.zeros(squared_norms.shape, dtype=bool)
        if leader.comm.rank == 0:
            chosen = select(squared_norms.numpy(), selections, strict, state.groups)
        chosen = leader.broadcast_bits(chosen, "mask")
        mask[selections[0].start : selections[-1].stop] = chosen
    return mask


def agree_by_or(leader: CountedComm, mask: np.ndarray) -> np.ndarray:
    """Return the union of the leaders' masks (Eq. 14), as bits. Collective on `leader.comm`."""
    bits = torch.from_numpy(np.packbits(mask))
    leader.reduce_(bits, MPI.BOR, kind="mask")
    return np.unpackbits(bits.numpy(), count=mask.size).astype(bool)


def _squared_norms_left(
    flat: Tensor, state: State, selections: tuple[Selection, ...], mask: np.ndarray
) -> Tensor:
    if state.groups.by_gate:
        return flat.to("cpu", copy=True)
    # Groups of a further kind are chosen among what the kinds before it left.
    first = selections is state.groups.kinds[0]
    pruned = None if first else find_pruned(mask, state.layout, state.groups, flat.device)
    return group_squared_norms(flat, state.layout, state.groups, selections, pruned)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


# The sum of squared gate gradients, one per group.
SENSITIVITY = "sensitivity"


def memory_of_scores(settings: Settings, state: State) -> Declared:
    """Allocate what gradients are added up in, where the score looks at them."""
    if not settings.method.prunes_groups or settings.score == "magnitude":
        return {}
    return {SENSITIVITY: Lasting(state.theta.new_zeros(state.groups.total), RANK, MEAN)}


def watch_(context: RunContext) -> None:
    """Add the squared gate gradients of the unscaled `grad`, in outer iterations that choose masks.

    Methods that prune once sum over the epoch before they do.
    """
    state, settings, position = context.state, context.settings, context.state.position
    if SENSITIVITY not in state.memory or state.frozen:
        return
    k, first, last = position.iteration, settings.warmup_iterations + 1, position.iteration
    begins = position.step == 0
    if settings.method.prunes_once:
        last = settings.options.prune_iteration
        first = max(
            1, last + 1 - -(-context.problem.train.steps_per_epoch // context.problem.steps)
        )
        begins = begins and k == first
    if not first <= k <= last:
        return
    total = state.memory[SENSITIVITY]
    if begins:
        total.zero_()
    by_gate = gate_gradients(state.grad, state.theta, state.layout, state.groups)
    total.add_(by_gate.square_())


def scored(
    leader: CountedComm, node: CountedComm, state: State, settings: Settings, candidate: Tensor
) -> Tensor:
    """Return what groups are scored by: `candidate`, or on leaders the scores of `gates`, [groups].

    With `--node-sync outer` the ranks' sums are averaged first: then collective on `node.comm`.
    """
    if SENSITIVITY not in state.memory:
        return candidate
    total = state.memory[SENSITIVITY]
    if settings.node_sync == "outer":
        node.reduce_(total)
        total.div_(node.comm.size)
    return total if leader.is_member else candidate
