"""What decides which groups are kept, where it is not their magnitude alone: the gradients.

With W a weight of the candidate and G_t its gradient at local step t of the outer iteration (of the
last epoch, for methods that choose once), what is added up over a group in place of W^2 is

- `fisher`: sum_t (G_t W)^2, the diagonal of the Fisher information (Theis et al. 2018; Molchanov et
  al. 2019, equation 8)
- `taylor`: (sum_t G_t W)^2, the first order of what the mean loss would change by
- `gates`, of coupled groups alone: one sum_t (sum G_t W)^2 for the whole group, the inner sum being
  over the weights that read the channel (`pruning/gates.py`): the Fisher information of a factor on
  it. W is that of theta. Where layers share one budget, a group counts by what it costs of it

The gradients are those of the local steps: they cost one more pass over the parameters. Each node
weighs its candidate by gradients of its own; where its ranks have not averaged them at each step it
takes the mean of their sums. All are in the unit of the loss, or its square, in every layer, and so
a budget of the whole model can choose among all of them.
"""

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import EACH, State, Work
from prunex_mpi.pruning.gates import gate_gradients
from prunex_mpi.settings.fields import Settings

# The sum of gradients, or of squares: of each weight, or of each gate.
SENSITIVITY = f"{EACH}sensitivity"


def memory_of_scores(settings: Settings, state: State) -> dict[str, Tensor]:
    """Allocate what gradients are added up in, where the score looks at them."""
    if not settings.method.prunes_groups or settings.score == "magnitude":
        return {}
    size = state.groups.total if settings.score == "gates" else state.layout.numel
    return {SENSITIVITY: state.theta.new_zeros(size)}


def watch_(work: Work) -> None:
    """Add up the unscaled gradient in `grad`, in outer iterations that end with a choice.

    Where there is one choice in all, in those of the epoch before it.
    """
    state, settings, position = work.state, work.settings, work.state.position
    if SENSITIVITY not in state.memory or state.frozen:
        return
    k, first, last = position.iteration, settings.warmup_iterations + 1, position.iteration
    begins = position.step == 0
    if settings.method.prunes_once:
        last = settings.options.prune_iteration
        first = max(1, last + 1 - -(-work.problem.train.steps_per_epoch // work.problem.steps))
        begins = begins and k == first
    if not first <= k <= last:
        return
    total = state.memory[SENSITIVITY]
    if begins:
        total.zero_()
    match settings.score:
        case "fisher":
            total.addcmul_(state.grad, state.grad)
        case "gates":
            by_gate = gate_gradients(state.grad, state.theta, state.layout, state.groups)
            total.add_(by_gate.square_())
        case _:
            total.add_(state.grad)


def scored(leader: Wire, node: Wire, state: State, settings: Settings, candidate: Tensor) -> Tensor:
    """Return the vector whose squares are the scores of what `candidate` holds, or the scores.

    That is the candidate itself, or lies in the memory of `grad`; of `gates` the scores of the
    groups themselves. Those who do not speak get the candidate. Of gradients that the node has not
    averaged at each step the sums are averaged first: then collective on `node.comm`.
    """
    if SENSITIVITY not in state.memory:
        return candidate
    total = state.memory[SENSITIVITY]
    if settings.node_sync == "outer":
        node.reduce_(total)
        total.div_(node.comm.size)
    if not leader.speaks:
        return candidate
    if settings.score == "gates":
        return total
    if settings.score == "fisher":
        return torch.sqrt(total, out=state.grad).mul_(candidate)
    return torch.mul(total, candidate, out=state.grad)
