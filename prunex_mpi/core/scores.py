"""What decides which groups are kept, where it is not their magnitude alone: the gradients.

With W a weight of the candidate and G_t its gradient at local step t of the outer iteration, what
is added up over a group in place of W^2 is

- `fisher`: sum_t (G_t W)^2, the diagonal of the Fisher information (Theis et al. 2018; Molchanov et
  al. 2019, equation 8)
- `taylor`: (sum_t G_t W)^2, the first order of what the mean loss would change by

The gradients are those of the local steps: they cost one more pass over the parameters. Each node
weighs its candidate by gradients of its own, which its ranks add up where they have not averaged
them at each step. Both are in the unit of the loss, or its square, in
every layer, and so a budget of the whole model can choose among all of them.
"""

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import OWN, State, Work
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.methods import PRUNING_ONCE

# The sum of this outer iteration's gradients, or of their squares.
SENSITIVITY = f"{OWN}sensitivity"


def memory_of_scores(settings: Settings, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what gradients are added up in, where the score looks at them."""
    return {} if settings.score == "magnitude" else {SENSITIVITY: torch.zeros_like(theta)}


def watch_(work: Work) -> None:
    """Add up the unscaled gradient in `grad`, in outer iterations that end with a choice."""
    state, settings, position = work.state, work.settings, work.state.position
    if SENSITIVITY not in state.memory or state.frozen:
        return
    k = position.iteration
    once = settings.method in PRUNING_ONCE
    if k != settings.prune_iteration if once else k <= settings.warmup_iterations:
        return
    total = state.memory[SENSITIVITY]
    if position.step == 0:
        total.zero_()
    if settings.score == "fisher":
        total.addcmul_(state.grad, state.grad)
    else:
        total.add_(state.grad)


def scored(node: Wire, state: State, settings: Settings, candidate: Tensor) -> Tensor:
    """Return the vector whose squares are the scores of what `candidate` holds.

    That is the candidate itself, or lies in the memory of `grad`. Gradients that the node has not
    averaged at each step are added up first: then collective on `node.comm`.
    """
    if SENSITIVITY not in state.memory:
        return candidate
    total = state.memory[SENSITIVITY]
    if settings.node_sync == "outer":
        node.reduce_(total)
    if settings.score == "fisher":
        return torch.sqrt(total, out=state.grad).mul_(candidate)
    return torch.mul(total, candidate, out=state.grad)
