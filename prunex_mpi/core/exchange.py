"""What a leader offers to the other nodes, and what becomes of z by the sum of all offers.

As float32 it is the weighted z_i + v_i and the mean is its sum. In fewer bits what travels is the
*difference* d_i = z_i + v_i - z to the last z, which all ranks know, with error feedback: a leader
sends Q(w_i d_i + e_i), w_i = P_i/N, the owner of a share Q(sum + its e_i), and what either rounding
leaves over is the next e_i. So z changes by exactly what all ranks decode. With E = sum_i e_i,

    sum_i P_i v_i = N (E_k - E_{k-1})   after phase 5, in place of zero:

what the last rounding left over, less the one before. It does not add up over iterations. Groups
that are pruned take what was left over of them along. BatchNorm statistics travel as differences
to the last known ones as well, in bfloat16, without feedback: they are found anew every time. The
first known ones are a mean in float32 (`find_reference_`).

DiLoCo's step between nodes (Douillard et al. 2023) follows: SGD with Nesterov momentum on z.

With `--fragments` the message goes in parts, each at a step of its own: the link's peak is lower.
Of F parts the f-th leaves after local step f T/F of an outer iteration of T, so that each is
exchanged every T steps, as the whole is (Streaming DiLoCo, Douillard et al. 2025). To it alone
belongs what follows from an exchange: theta goes on from z, or from z_i where z arrives behind
local steps, the outer step, what rounding has left over, momentum that begins anew. BatchNorm
statistics go with the last part. Parts are runs of the compact message of equal size, whatever
layers they cut; of layers that have lost channels they are whole ones.

All of it goes at once, at its end, in an outer iteration whose z must be of one moment: the last,
and the one that freezes the masks. While there are duals there are no parts.
"""

from functools import partial

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import log
from prunex_mpi.comm.agreement import DIGEST_BYTES, digests_agree
from prunex_mpi.comm.async_exchange import AsyncExchange
from prunex_mpi.comm.counted import CountedComm, CountedComms
from prunex_mpi.core.evaluation import add_z_
from prunex_mpi.core.loop import Round
from prunex_mpi.core.memory import ALL, PARAMETERS, Declared, shared
from prunex_mpi.core.message import Fragment, message_bytes
from prunex_mpi.core.schedule import Stage, asynchronous_steps, local_steps
from prunex_mpi.core.state import (
    CODED,
    KNOWN,
    PLAIN,
    RunContext,
    State,
    agreeing,
    forget_momentum_,
    starts_from_z,
)
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import bits_digest
from prunex_mpi.pruning.masks import pack_, unpack_
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.values import AUTO


def exchange_(
    comms: CountedComms,
    state: State,
    payload: str,
    fragment: Fragment,
    helper: AsyncExchange | None = None,
) -> None:
    """Sum the nodes' contributions to z, of one fragment, into the buffer of the message.

    With a `helper` it goes on over its communicators while this rank trains, and z_i, v_i and z of
    the fragment must stay as they are until it has arrived. With one node everything travels as
    float32. Collective on `workers.comm` and `node.comm`.
    """
    leader, node, message = comms.workers, comms.node, state.message
    wire_dtype = payload if leader.ring > 1 else "fp32"
    message.make_codes_(wire_dtype, leader.peers, leader.transport, fragment)
    _compare_plans(leader, state)
    if leader.is_member:
        # Retired duals are zero.
        dual = None if state.consensus_sgd else state.v
        offer_ = _offer_values_ if message.codes is None else _offer_difference_
        offer_(leader, state, dual, fragment)
    counted = _count(leader, node, state, wire_dtype, fragment)
    state.position.part = fragment.number
    if helper is None:
        message.sum_(leader.comm, node.comm, leader.transport, leader.clock, fragment, counted)
        return
    state.position.in_flight = PLAIN if message.codes is None else CODED
    ways = helper.between, helper.node, helper.transport, helper.clock
    helper.begin(partial(message.sum_, *ways, fragment, counted))


def _compare_plans(leader: CountedComm, state: State) -> None:
    """Raise on every leader where their messages have other parameters. Collective, if new."""
    if state.message.agreed:
        return
    if leader.is_member:
        with agreeing(state, "Allreduce of a digest", DIGEST_BYTES):
            alike = digests_agree(leader.comm, state.message.plan.digest)
        if not alike:
            raise RuntimeError("the leaders' compact layouts differ; nothing was exchanged")
    state.message.agreed = True


def _offer_values_(
    leader: CountedComm, state: State, dual: Tensor | None, fragment: Fragment
) -> None:
    """Write the weighted z_i + v_i and statistics of this node into the message."""
    parameters, statistics = state.message.values(fragment)
    pack_(state.z_node, fragment.plan, parameters, dual, leader.weight)
    torch.index_select(state.stats, 0, fragment.stats_kept, out=statistics)
    statistics.mul_(leader.weight)


def _offer_difference_(
    leader: CountedComm, state: State, dual: Tensor | None, fragment: Fragment
) -> None:
    """Add the weighted difference to the residual; write that of the statistics."""
    message, numel, place = state.message, fragment.plan.numel, fragment.place
    parameters, statistics = message.blocks(fragment)
    torch.sub(state.z_node[place], state.z[place], out=state.scratch[place])
    pack_(state.scratch, fragment.plan, parameters, dual)
    residual = message.residual[fragment.span]
    residual.add_(parameters[:numel], alpha=leader.weight)
    offer = message.offer(fragment)
    if fragment.number:
        offer[:numel].copy_(residual)
    # int2 has no zero: what fills up the last block has something left over as well.
    offer[numel:].zero_()
    known = batchnorm.of_reference(state.bn_modules, state.memory[KNOWN])
    kept = fragment.stats_kept
    statistics.zero_()
    torch.index_select(torch.sub(state.stats, known), 0, kept, out=statistics[: kept.numel()])
    statistics.mul_(leader.weight)


def _count(
    leader: CountedComm, node: CountedComm, state: State, wire_dtype: str, fragment: Fragment
) -> dict[str, int]:
    """Count the bytes of a fragment between the nodes and in them; return them."""
    size = state.theta.element_size()
    numels = fragment.plan.numel, fragment.stats_kept.numel()
    if fragment.last:
        # Of the network as it was, whatever it has lost.
        state.position.traffic.dense += (state.whole.layout.numel + state.whole.stats) * size
    blocks = state.message.blocks(fragment) if wire_dtype != "fp32" else ()
    travelling = message_bytes(wire_dtype, *numels, size)
    summed = sum(block.nbytes for block in blocks)
    return leader.count(travelling, summed=summed) | node.count(travelling)


# --------------------------------------------------------------------------------------------------
# What becomes of z
# --------------------------------------------------------------------------------------------------


def complete_(state: State, settings: Settings, asynchronous: bool = False) -> Fragment:
    """Take over the fragment that is under way, with what follows from a new z; return it.

    The outer iteration in which it has left may be over.
    """
    fragment = state.message.fragment(state.position.part, settings.fragments)
    take_over_(state, settings, fragment, asynchronous=asynchronous)
    if fragment.last:
        add_z_(state, settings)
    return fragment


def take_over_(
    state: State,
    settings: Settings,
    fragment: Fragment,
    *,
    asynchronous: bool = False,
    freezes: bool = False,
) -> Tensor:
    """Make the mean that the message holds z, zero where the mask is; set the statistics.

    If `asynchronous` the model has gone on training since it has left: its statistics move by as
    much as those of the node. The mask `freezes` where it was chosen in this outer iteration.
    Returns what z was before, in the memory of `scratch`, where the whole message came and there is
    no outer step. Does not communicate.
    """
    message, place, in_flight = state.message, fragment.place, state.position.in_flight
    # After a checkpoint there are no codes yet.
    coded = in_flight == CODED if in_flight else message.codes is not None
    parameters, statistics = message.blocks(fragment) if coded else message.values(fragment)
    unpack_(parameters, fragment.plan, state.scratch)
    mean, last = state.scratch[place], state.z[place]
    if coded:
        mean.add_(last)
    # What is added to the last z leaves groups there that are pruned from now on. Flat consensus
    # sends all, and masks once it has chosen.
    stale = coded and (freezes or not state.frozen) if state.shrinks else state.frozen
    if stale and not fragment.number:
        state.mask.apply_(mean)
    if VELOCITY in state.memory:
        # The last fragment left with the outer iteration before, where it was in flight.
        k = state.position.iteration - bool(in_flight and fragment.last)
        nesterov_(settings, k, last, mean, state.memory[VELOCITY][place])
    if fragment.number:
        last.copy_(mean)
    else:
        state.z, state.scratch = state.scratch, state.z
    if fragment.last:
        _take_statistics_(state, fragment, statistics, coded, asynchronous)
    return state.scratch


def _take_statistics_(
    state: State, fragment: Fragment, statistics: Tensor, coded: bool, asynchronous: bool
) -> None:
    """Set the statistics of the model, those that are known, and `stats` to the mean that came."""
    modules, known, kept = state.bn_modules, state.memory[KNOWN], fragment.stats_kept
    values = statistics[: kept.numel()]
    if coded:
        values = values.add_(batchnorm.of_reference(modules, known)[kept])
    mean = state.stats.index_copy(0, kept, values)
    model = mean
    if asynchronous:
        moved = torch.empty_like(mean)
        batchnorm.read_(modules, moved, known)
        model = mean + moved.sub_(state.stats)
        batchnorm.as_plain_(modules, model, known)
    batchnorm.as_plain_(modules, mean, known)
    if state.alone:
        # Its own, without the rounding of differences.
        own = torch.empty_like(mean)
        batchnorm.read_plain_(modules, own)
        model = own
        mean = mean if asynchronous else own
    known.index_copy_(0, kept, mean[kept])
    # Removed channels are left as they have been reset.
    batchnorm.reset_(modules, state.stats)
    batchnorm.write_plain(modules, state.stats.index_copy(0, kept, model[kept]))
    state.stats.index_copy_(0, kept, mean[kept])


VELOCITY = "outer_momentum"


def outer_memory(theta: Tensor) -> Declared:
    """Allocate the velocity of `nesterov_`, in whose presence each exchange is such a step."""
    return {VELOCITY: shared(torch.zeros_like(theta), PARAMETERS)}


def nesterov_(settings: Settings, k: int, last: Tensor, mean: Tensor, velocity: Tensor) -> None:
    """Make the mean what the outer step `k` leads to; `last` is overwritten.

    b = momentum b + (last - mean), mean = last - lr (last - mean + momentum b). Written so that lr
    1 without momentum is the mean, bit for bit. The mask is kept: all vanish outside of it. The
    momentum rises to its value by `outer_warmup` equal steps.
    """
    lr, momentum = settings.options.outer_lr, settings.options.outer_momentum
    if k < settings.options.outer_warmup:
        momentum *= k / settings.options.outer_warmup
    step = last.sub_(mean)
    velocity.mul_(momentum).add_(step)
    mean.add_(step, alpha=1 - lr).add_(velocity, alpha=-lr * momentum)


# --------------------------------------------------------------------------------------------------
# In fragments
# --------------------------------------------------------------------------------------------------


def goes_in_fragments(context: RunContext, this: Round, stage: Stage) -> bool:
    """Return whether this outer iteration sends its message in parts."""
    at_once = this.last or stage.freeze or stage.choose or not context.state.consensus_sgd
    return context.settings.fragments > 1 and not at_once


def step_of_fragment(context: RunContext, number: int) -> int:
    """Return the local step of the outer iteration under way after which a part leaves."""
    return number * local_steps(context) // context.settings.fragments


def fragment_after_step(context: RunContext) -> int:
    """Return the number of the part that leaves now, between two local steps, 0 for none."""
    step, fragments = context.state.position.step, context.settings.fragments
    numbers = (n for n in range(1, fragments) if step_of_fragment(context, n) == step)
    return next(numbers, 0)


def completion_step(context: RunContext) -> int:
    """Return after how many local steps what is under way is waited for."""
    number = context.state.position.part
    between = 0 < number < context.settings.fragments
    return asynchronous_steps(context) + (step_of_fragment(context, number) if between else 0)


def send_fragment_(
    comms: CountedComms, context: RunContext, number: int, asynchronous: bool
) -> None:
    """Exchange part `number` of theta's means over the nodes, perhaps in the helper thread.

    Collective on `node.comm`, then on `workers.comm` and `node.comm`.
    """
    state, settings = context.state, context.settings
    fragment = state.message.fragment(number, settings.fragments)
    place = fragment.place
    if fragment.last:
        average_in_node_(comms.node, state)
    _average_part_(comms.node, state, settings, place)
    exchange_(comms, state, settings.payload, fragment, context.helper if asynchronous else None)
    if settings.inner_momentum == "reset":
        forget_momentum_(state, place)
    if not asynchronous:
        take_over_(state, settings, fragment)
    state.theta[place].copy_((state.z_node if asynchronous else state.z)[place])


def _average_part_(node: CountedComm, state: State, settings: Settings, place: slice) -> None:
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
    if not replicas_agree(node, state, first):
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


# --------------------------------------------------------------------------------------------------
# Whether ranks hold the same bits: MPI promises them of no sum, and devices differ as well. Ranks
# that step on the same gradients would part a little more with every step.
# --------------------------------------------------------------------------------------------------


def replicas_agree(link: CountedComm, state: State, flat: Tensor) -> bool:
    """Return whether `flat` has the same bits on all ranks. Collective on `link.comm`."""
    digest = bits_digest(flat)
    with agreeing(state, "Allreduce of a digest", DIGEST_BYTES):
        return digests_agree(link.comm, digest)


def adopt_first_replica_(link: CountedComm, state: State, flat: Tensor, where: str) -> bool:
    """Go on from the first rank's theta, u, optimizer and shared memory where `flat` differs.

    Returns whether it did, which a line says. Collective on `link.comm`.
    """
    if link.comm.size == 1 or replicas_agree(link, state, flat):
        return False
    theta, before = state.theta, state.theta.clone()
    alike = [entry.tensor for _, entry in state.memory.items() if entry.owner == ALL]
    for tensor in (theta, state.u, *state.optimizer.tensors().values(), *alike):
        # MPI has no buffers of bool.
        link.broadcast_(tensor.view(-1).view(torch.uint8), kind="control")
    gap = before.sub_(theta).abs_().max().view(1)
    link.reduce_(gap, MPI.MAX, kind="control")
    if link.comm.rank == 0:
        largest = float(torch.linalg.vector_norm(theta, torch.inf))
        log.warning(
            "weights differed between ranks %s, by up to %.1e (largest weight %.1e), after outer "
            "iteration %d: all go on from those of the first rank",
            where,
            float(gap),
            largest,
            state.position.iteration,
        )
    return True


# --------------------------------------------------------------------------------------------------
# The mean of all ranks' BatchNorm statistics, about a reference that they share
# --------------------------------------------------------------------------------------------------


def find_reference_(comms: CountedComms, state: State) -> None:
    """Have a first reference, the plain mean of all ranks, if there is none yet.

    In float32: what is far from its reference cannot be sent in fewer bits. Collective on `world`,
    or on `node` and `leader`.
    """
    if state.position.has_reference or not state.bn_modules:
        return
    known = state.memory[KNOWN]
    batchnorm.read_plain_(state.bn_modules, known)
    if not state.alone:
        comms.sum_(known, kind="setup")
        known.div_(comms.everyone.comm.size)
    state.position.has_reference = True


def average_in_node_(node: CountedComm, state: State) -> None:
    """Leave the node's mean statistics, about the reference, in `stats`. Collective on `node`."""
    batchnorm.read_(state.bn_modules, state.stats, state.memory[KNOWN])
    node.reduce_(state.stats)
    state.stats.div_(node.comm.size)


def average_statistics(comms: CountedComms, state: State) -> None:
    """Set the statistics of the model, and the reference, to the mean of all ranks.

    A rank that is `alone` keeps its own, bit for bit. Collective on `world`, or on `node` and
    `leader`.
    """
    find_reference_(comms, state)
    known, modules = state.memory[KNOWN], state.bn_modules
    if state.alone:
        batchnorm.read_plain_(modules, state.stats)
    else:
        batchnorm.read_(modules, state.stats, known)
        comms.sum_(state.stats)
        state.stats.div_(comms.everyone.comm.size)
        batchnorm.as_plain_(modules, state.stats, known)
        batchnorm.write_plain(modules, state.stats)
    known.copy_(state.stats)
