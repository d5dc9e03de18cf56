"""ClickTrain: kernels, and patterns of 3x3 kernels, chosen once and pruned later.

Zhang et al. 2021 (arXiv:2011.10170), after the authors' code. With W the weights of a convolution
and G their gradient of one batch, here the mean of all ranks', the kernels of lowest

    sum (G W)^2

are to go, of each layer as many as the keep ratio leaves; of each 3x3 kernel the pattern with the
largest such sum is to stay. Until they are pruned the loss has a penalty on what is to go,

    coefficient * [ sum_k |W_k outside of its pattern| + sum_{k to go} |W_k| ]

where |.|^2 is the sum of squares + 1e-8. Then these weights, and what SGD remembers of them, are
zero, and gradients are packed without them. First layers are left alone, as in the authors' runs.
Of n kernels ⌈keep ratio n⌉ stay, as everywhere here, and not ⌊keep ratio n⌋.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import log
from prunex_mpi.core.evaluation import prunable_and_kept
from prunex_mpi.core.memory import Declared, shared
from prunex_mpi.core.state import State, adopt_mask, freeze
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.groups import gemm_views
from prunex_mpi.pruning.lasso import SMOOTHING
from prunex_mpi.pruning.masks import find_pruned, mask_drift, pack_, unpack_
from prunex_mpi.pruning.projection import group_squared_norms, select
from prunex_mpi.settings.fields import Settings

# The groups that are to stay, of which there are fewer than parameters; none before the choice.
CHOSEN = "chosen"


class ClickTrain(Exchange):
    """Choose kernels and patterns, penalise the others, prune them, and pack gradients."""

    OPERATIONS = (
        ("gradient", "workers", "Allreduce SUM", "dense; packed once pruned"),
        ("kernels and patterns, once", "world", "Bcast", "a bit per group"),
    )
    everywhere = True

    def allocate(self) -> None:
        self.penalised = penalised(self.state)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate room for the choice."""
        return {CHOSEN: shared(torch.zeros(layout.numel, dtype=torch.bool))}

    def add_penalty_(self, loss: Tensor) -> None:
        """Add the gradient of the penalty, between the choice and the pruning."""
        state, coefficient = self.state, self.options.lasso
        if state.frozen:
            return
        with state.position.clock.computing(state.theta.device):
            for penalised in self.penalised:
                flats = (state.theta, state.grad, penalised)
                views = (gemm_views(flat, state.layout, state.groups) for flat in flats)
                for layer, theta, grad, among in zip(state.groups.layers, *views, strict=True):
                    outside = (theta * among).view(-1, layer.kernel)
                    norms = (outside.square().sum(dim=1, keepdim=True) + SMOOTHING).sqrt_()
                    grad.view(-1, layer.kernel).addcdiv_(outside, norms, value=coefficient)

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of all workers', without what is pruned."""
        state = self.state
        if not state.frozen:
            self.link.reduce_(flat)
            return
        plan = state.message.plan
        message = state.message.buffer[: plan.numel]
        pack_(flat, plan, message)
        self.link.reduce_(message)
        unpack_(message, plan, flat)

    def follow_(self) -> None:
        """Choose by the gradient of all, in the step that does. Collective on `world` in it."""
        state, position, everyone = self.state, self.state.position, self.comms.everyone
        if (position.iteration, position.step) != (self.options.choose_iteration + 1, 0):
            return
        total = state.groups.total
        chosen = np.zeros(total, dtype=bool)
        if everyone.comm.rank == 0:
            products = torch.mul(state.theta, state.grad, out=state.scratch)
            for selections in state.groups.kinds:
                squared_norms = group_squared_norms(
                    products, state.layout, state.groups, selections
                ).numpy()
                place = slice(selections[0].start, selections[-1].stop)
                chosen[place] = select(squared_norms, selections, 1.0)
        chosen = everyone.broadcast_bits(chosen, kind="mask")
        state.memory[CHOSEN][:total].copy_(torch.from_numpy(chosen))
        self.penalised = penalised(state)

    def prune_(self, done: int) -> float:
        """Prune what is to go if `done` outer iterations are those of the option."""
        state = self.state
        if state.frozen or done != self.options.prune_iteration:
            return 0.0
        before = state.mask.bits
        adopt_mask(state, state.memory[CHOSEN][: state.groups.total].numpy().copy())
        freeze(state, consensus_sgd=True)
        prunable, kept = prunable_and_kept(state)
        log.info("pruned: %d of the %d weights of kernels are kept", kept, prunable)
        return mask_drift(state.mask.bits, before)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return layout.numel * size, f"{settings.aggregation}; less once kernels have been pruned"


def penalised(state: State) -> tuple[Tensor, ...]:
    """Return by kind what of flat vectors is to go, bool [parameters], once it is chosen."""
    chosen = state.memory[CHOSEN][: state.groups.total].numpy()
    found = []
    for selections in state.groups.kinds if chosen.any() else ():
        mask, part = np.ones_like(chosen), slice(selections[0].start, selections[-1].stop)
        mask[part] = chosen[part]
        found.append(find_pruned(mask, state.layout, state.groups, state.theta.device))
    return tuple(pruned for pruned in found if pruned is not None)
