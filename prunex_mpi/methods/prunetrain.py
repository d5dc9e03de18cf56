"""PruneTrain: a network that becomes physically smaller while it is trained.

World rank 0 decides what is removed and the coefficient of the lasso, so that ranks that round
differently decide alike. The penalty's gradient, which all ranks have alike, is added to the mean.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.core.lasting import remove_
from prunex_mpi.core.memory import Declared, shared
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning import lasso
from prunex_mpi.settings.fields import Settings

COEFFICIENT = "lasso_coefficient"


class PruneTrain(Exchange):
    """Penalise channels as the network has them now, and take out those that are empty."""

    OPERATIONS = (
        ("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),
        ("coefficient of the lasso", "world", "Bcast, once", "one number"),
        ("what is removed", "world", "Bcast, when due", "a bit per group"),
    )
    everywhere = plain_mean = True

    def allocate(self) -> None:
        state = self.state
        coupling = state.groups.coupling.left(state.mask.bits)
        self.penalty = lasso.build_lasso(state.layout, coupling, state.theta.device)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate the coefficient of the penalty."""
        return {COEFFICIENT: shared(torch.zeros(1, dtype=torch.float64, device=theta.device))}

    def add_penalty_(self, loss: Tensor) -> None:
        """Add the (scaled) gradient of the penalty.

        The first step of a run fixes the coefficient by the `loss` of world rank 0's first batch.
        Collective on `world` in that step.
        """
        state, position = self.state, self.state.position
        coefficient = state.memory[COEFFICIENT]
        with position.clock.computing(state.theta.device):
            norms = lasso.group_norms(state.theta, self.penalty, state.scratch)
            if (position.iteration, position.step) == (1, 0):
                ratio = self.options.lasso_ratio
                coefficient.copy_(lasso.coefficient_for(ratio, loss.detach(), norms))
                self.comms.everyone.broadcast_(coefficient)
            scaled = state.scaler.scale(coefficient)
            lasso.write_subgradient_(state.theta, self.penalty, norms, scaled, state.scratch)
            state.grad.add_(state.scratch)

    def reshape_(self, done: int) -> bool:
        """Take out the groups that the lasso has emptied; return whether there were any.

        An averager of the old parameters is then of no use any more, either. Collective on `world`.
        """
        state, everyone = self.state, self.comms.everyone
        if done % self.options.reconfigure_every:
            return False
        removed = np.zeros(state.mask.bits.size, dtype=bool)
        if everyone.comm.rank == 0:
            how = state.groups, state.mask.bits, self.options.threshold
            removed = lasso.emptied(state.theta, self.penalty, *how)
        removed = everyone.broadcast_bits(removed, kind="mask")
        if not removed.any():
            return False
        remove_(state, self.context.problem.model, removed, self.settings)
        return True

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return layout.numel * size, f"{settings.aggregation}; less once channels have been removed"
