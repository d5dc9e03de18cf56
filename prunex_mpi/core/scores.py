"""Score `gates`: coupled groups are kept by how the loss depends on a factor on their channel.

With W a weight of theta and G_t its gradient at local step t of the outer iteration (for methods
that prune once: of the last epoch), the score of a group is sum_t (sum G_t W)^2, the inner sum over
the weights that read the channel (`pruning/projection.py`): the Fisher information of a factor on
the channel (Theis et al. 2018; Molchanov et al. 2019). Where layers share one budget, it is divided
by the group's cost. All scores are in the unit of the squared loss, so a budget of the whole model
can compare them between layers.

The gradients are those of the local steps, at the cost of one more pass over the parameters. Each
node scores by its own gradients; where its ranks do not average them at each step it takes the mean
of the ranks' sums.
"""

from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.state import EACH, RunContext, State
from prunex_mpi.pruning.projection import gate_gradients
from prunex_mpi.settings.fields import Settings

# The sum of squared gate gradients, one per group.
SENSITIVITY = f"{EACH}sensitivity"


def memory_of_scores(settings: Settings, state: State) -> dict[str, Tensor]:
    """Allocate what gradients are added up in, where the score looks at them."""
    if not settings.method.prunes_groups or settings.score == "magnitude":
        return {}
    return {SENSITIVITY: state.theta.new_zeros(state.groups.total)}


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


def scored(leader: Wire, node: Wire, state: State, settings: Settings, candidate: Tensor) -> Tensor:
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
