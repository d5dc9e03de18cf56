"""What becomes, in theta, of groups that z has dropped while the masks may still change.

By `--dropped`:

- `cut`: theta starts each local phase from z, where they are zero. Neither what feeds a channel of
  a coupled group nor what reads it gets a gradient then, so it moves again only by what momentum
  and duals hold of it, which are masked from the freeze on. A few come back by that.
- `keep`: theta goes on from where it was in them, so that they come back where their score says
  so: masks regrow while theta stays dense (CHEX, Hou et al. 2022).
- `shrink`: the same, less in equal parts until the masks freeze, when nothing is left of a group
  that stayed out (as in HESSO, Chen et al. 2024).

Such groups are each node's own, and so they travel only once z has them again. Their u is zero: it
would add up what z does not want to have. Their v stays what it was, and residuals count them.
"""

from torch import Tensor

from prunex_mpi.core.state import State
from prunex_mpi.pruning.masks import apply_factors_
from prunex_mpi.settings.fields import Settings


def start_from_(state: State, settings: Settings, source: Tensor) -> None:
    """Let theta start the local steps from `source`, which is on the mask. Uses `scratch`."""
    if settings.dropped == "cut" or state.frozen:
        state.theta.copy_(source)
        return
    kept = state.scratch.copy_(state.theta)
    apply_factors_(kept, state.layout, state.groups, state.factors)
    state.theta.sub_(kept)
    if settings.dropped == "shrink":
        left = settings.freeze_iteration - state.position.iteration
        state.theta.mul_(left / (left + 1))
    state.theta.add_(source)


def forget_duals_(state: State, settings: Settings) -> None:
    """Set u to zero in groups that z has dropped, as long as theta has them."""
    if settings.dropped != "cut" and not state.frozen:
        apply_factors_(state.u, state.layout, state.groups, state.factors)
