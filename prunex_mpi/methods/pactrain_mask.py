"""PacTrain's mask: which weights are pruned, decided once and alike on all ranks.

Weights and momentum are set to zero once, gradients at each step (`pactrain.py`): so
pruned weights stay zero. The paper's g ⊙ [w ≠ 0] is g ⊙ mask here, since a kept weight that happens
to be zero may move.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import run_collectively, run_collectively_while
from prunex_mpi.comm.wire import Wire, Wires
from prunex_mpi.core.losses import softened
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.methods.declared import GRASP_BELOW
from prunex_mpi.methods.pactrain_samples import batches_to_score
from prunex_mpi.methods.pactrain_support import set_support_
from prunex_mpi.models.dummy_input import keeping
from prunex_mpi.models.layout import matrices
from prunex_mpi.pruning.unstructured import (
    Batches,
    add_gradients_,
    add_hessian_products_,
    prune_by_gradient_flow,
    prune_by_magnitude,
)
from prunex_mpi.settings.fields import Settings

# What logits are divided by for the score grasp (Wang et al. 2020).
GRASP_TEMPERATURE = 200.0


def score_of(settings: Settings) -> str:
    """Return what decides which weights go, magnitude or grasp."""
    if settings.options.score != "auto":
        return settings.options.score
    return "magnitude" if settings.keep_ratio[0] >= GRASP_BELOW else "grasp"


def prune_when_due_(wires: Wires, context: RunContext, done: int) -> float:
    """Prune if `done` outer iterations are those of the option; return the mask's drift.

    The mask is decided on world rank 0. Seconds and bytes count as set-up. Collective on `world`.
    """
    state, settings = context.state, context.settings
    if state.frozen or done != settings.options.prune_iteration:
        return 0.0
    with state.position.clock.setting_up(state.theta.device):
        pruned = choose_pruned(wires, context)
        mask = wires.everyone.broadcast_bits(pruned.cpu().numpy(), kind="setup")
        pruned.copy_(torch.from_numpy(mask))
        adopt_pruned_(state, pruned)
    total = sum(segment.numel for segment in matrices(state.layout))
    kept = total - int(mask.sum())
    text = "pruned by %s: %d of %d weights are kept, biases and BatchNorm apart"
    log.info(text, score_of(settings), kept, total)
    return (total - kept) / max(1, kept)


def choose_pruned(wires: Wires, context: RunContext) -> Tensor:
    """Return which weights go, bool [layout.numel]; only what world rank 0 returns counts.

    Collective on `world`. Raises UserError on every rank.
    """
    state, settings = context.state, context.settings
    everyone, layout, (ratio,) = wires.everyone, state.layout, settings.keep_ratio
    if not matrices(layout):
        raise UserError("the model has no weight of two or more dimensions to prune")
    if score_of(settings) == "magnitude":
        return prune_by_magnitude(state.theta, layout, ratio)
    product = hessian_gradient_product(everyone, context)
    prune = partial(prune_by_gradient_flow, state.theta, product, layout, ratio)
    return run_collectively(everyone.comm, prune)


def hessian_gradient_product(everyone: Wire, context: RunContext) -> Tensor:
    """Return H g over the weights, both summed over the batches of all ranks.

    Of the loss at logits divided by `GRASP_TEMPERATURE`. As in the authors' code g and H are
    those of the weights that may be pruned alone. Collective on `world`. Raises UserError alike.
    """
    state, problem = context.state, context.problem
    if problem.train_shard is None:
        raise UserError(
            "score grasp looks at samples and their loss, which one's own loop keeps to itself; "
            "give pactrain_score='magnitude'"
        )
    layout, model, temperature = state.layout, problem.model, GRASP_TEMPERATURE
    batches = batches_to_score(everyone, context)

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return problem.loss(softened(outputs, temperature), labels)

    slope, product = torch.zeros_like(state.theta), torch.zeros_like(state.theta)
    model.train()
    passes = (
        (slope, partial(add_gradients_, slope, layout, model, loss)),
        (product, partial(add_hessian_products_, product, slope, layout, model, loss)),
    )

    # The passes must leave no trace in the statistics of BatchNorm.
    with keeping(model.buffers()):
        for flat, add in passes:
            counted = beating_through(batches, context.heartbeat)
            run_collectively_while(everyone.comm, partial(add, counted), context.heartbeat)
            everyone.reduce_(flat, kind="setup")
            for segment in layout.segments:
                if len(segment.shape) < 2:
                    flat[segment.place].zero_()
    return product


def beating_through(batches: Batches, heartbeat: Heartbeat) -> Batches:
    """Yield each batch, and count it as progress."""
    for batch in batches:
        heartbeat.go_on()
        yield batch


def adopt_pruned_(state: State, pruned: Tensor) -> None:
    """Make `pruned` the mask in force: weights and momentum vanish on it.

    So do those of z, which other nodes go on from where a run leaves in this outer iteration.
    """
    for flat in (state.theta, state.z, *state.optimizer.moments.values()):
        flat.masked_fill_(pruned, 0.0)
    set_support_(state.memory, pruned, state.theta, state.layout)
    state.frozen = True
