"""The message in parts, each sent at a step of its own (`--fragments`): the link's peak is lower.

Of F parts the f-th leaves after local step f T/F of an outer iteration of T, so that each is
exchanged every T steps, as the whole is (Streaming DiLoCo, Douillard et al. 2025). To it alone
belongs what follows from an exchange: theta goes on from z, or from z_i where z arrives behind
local steps, the outer step, what rounding has left over, momentum that begins anew. BatchNorm
statistics go with the last part. Parts are runs of the compact message of equal size, whatever
layers they cut; of layers that have lost channels they are whole ones.

All of it goes at once, at its end, in an outer iteration whose z must be of one moment: the last,
and the one that freezes the masks. While there are duals there are no parts.
"""

from prunex_mpi.comm.wire import Wire, Wires
from prunex_mpi.core.alike import holds_alike
from prunex_mpi.core.exchange import exchange_, take_over_
from prunex_mpi.core.loop import Round
from prunex_mpi.core.schedule import Stage, local_steps, steps_behind
from prunex_mpi.core.state import RunContext, State, forget_momentum_, starts_from_z
from prunex_mpi.core.statistics import average_in_node_
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.values import AUTO


def goes_in_parts(context: RunContext, this: Round, stage: Stage) -> bool:
    """Return whether this outer iteration sends its message in parts."""
    at_once = this.last or stage.freeze or not context.state.consensus_sgd
    return context.settings.fragments > 1 and not at_once


def step_of_part(context: RunContext, number: int) -> int:
    """Return the local step of the outer iteration under way after which a part leaves."""
    return number * local_steps(context) // context.settings.fragments


def part_after_step(context: RunContext) -> int:
    """Return the number of the part that leaves now, between two local steps, 0 for none."""
    step, fragments = context.state.position.step, context.settings.fragments
    numbers = (n for n in range(1, fragments) if step_of_part(context, n) == step)
    return next(numbers, 0)


def arrival_step(context: RunContext) -> int:
    """Return after how many local steps what is under way is waited for."""
    number = context.state.position.part
    between = 0 < number < context.settings.fragments
    return steps_behind(context) + (step_of_part(context, number) if between else 0)


def send_part_(wires: Wires, context: RunContext, number: int, behind: bool) -> None:
    """Exchange part `number` of theta's means over the nodes, in the helper thread if `behind`.

    Collective on `node.comm`, then on `workers.comm` and `node.comm`.
    """
    state, settings = context.state, context.settings
    fragment = state.message.fragment(number, settings.fragments)
    place = fragment.place
    if fragment.last:
        average_in_node_(wires.node, state)
    _average_part_(wires.node, state, settings, place)
    exchange_(wires, state, settings.payload, fragment, context.behind if behind else None)
    if settings.inner_momentum == "reset":
        forget_momentum_(state, place)
    if not behind:
        take_over_(state, settings, fragment, state.position.iteration)
    state.theta[place].copy_((state.z_node if behind else state.z)[place])


def _average_part_(node: Wire, state: State, settings: Settings, place: slice) -> None:
    """Set a part of z_i to the mean of the node's theta. Collective on `node.comm`.

    Where gradients were averaged at each step, theta becomes the leader's where it differs.
    """
    mean = state.z_node[place].copy_(state.theta[place])
    if node.comm.size == 1:
        return
    if settings.node_sync == "outer":
        node.reduce_(mean)
        mean.div_(node.comm.size)
        return
    # From the beginning of a vector, as words of 64 bits ask for.
    first = state.scratch[: mean.numel()].copy_(mean)
    if not holds_alike(node, state, first, state.spare[: mean.numel()]):
        node.broadcast_(mean)


def merge_(state: State, settings: Settings, place: slice) -> None:
    """Let theta go on from z, which has arrived behind local steps: theta += z - z_i.

    Where theta does not start from z nothing is done.

    With a merging factor alpha (`diloco`) theta = alpha theta + (1 - alpha) z, as in Streaming
    DiLoCo.
    """
    if not starts_from_z(state, settings):
        return
    theta, z, z_node = (flat[place] for flat in (state.theta, state.z, state.z_node))
    alpha = settings.options.alpha if settings.method.outer_step else AUTO
    if alpha == AUTO:
        theta.add_(z).sub_(z_node)
    else:
        theta.lerp_(z, 1 - alpha)
