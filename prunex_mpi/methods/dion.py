"""A step of Dion (Ahn et al. 2025, arXiv:2504.05295): orthonormal updates of low rank.

The matrices M of hidden layers, which Muon would take, are the momentum: with the right factor Q of
the step before and the sum G of the gradients, by one power iteration (Alg. 1),

    B = M + G,   P = B Q, orthonormalised,   R = B^T P,   M = B - (1 - mu) P R^T
    Q = R, each column divided by its norm;   the update is P Q^T

P and R travel as in PowerSGD, since they are linear in B; each worker keeps its own part of M, of
which it takes its own part of P R^T. The optimizer (`core.optimizer.Muon`) steps along the update,
as far as along Muon's, and steps all else by AdamW.
"""

from prunex_mpi.base.errors import UserError
from prunex_mpi.methods.powersgd import RIGHT_FACTORS, PowerSgd, Split, sides
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class Dion(PowerSgd):
    """Send two factors of each hidden matrix's momentum; its gradient becomes the update."""

    def allocate(self) -> None:
        super().allocate()
        self.spent = 1 - self.settings.momentum

    @staticmethod
    def split_of(settings: Settings, layout: Layout) -> Split:
        """Return the hidden matrices with their ranks; raise UserError where there are none."""
        if not layout.hidden:
            raise UserError("dion finds no matrix of a hidden layer in the model")
        shorter = [min(sides(segment)) for segment in layout.hidden]
        ranks = tuple(max(1, int(settings.options.rank_ratio * side)) for side in shorter)
        whole = tuple(s for s in layout.segments if s not in layout.hidden)
        return Split(ranks, layout.hidden, whole)

    def scale_right_(self) -> None:
        """Divide each column by its norm; one of zeros stays."""
        for q in self.split.factors(self.state.memory[RIGHT_FACTORS], 1):
            q.div_(q.norm(dim=0).clamp_(min=1e-12))
