"""The message between nodes: what a leader offers, how it travels, what becomes of z by it.

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
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.agreement import DIGEST_BYTES, digests_agree
from prunex_mpi.comm.collectives import Transport, allreduce_then_bcast_
from prunex_mpi.comm.traffic import NOTHING, Clock
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.evaluation import add_z_
from prunex_mpi.core.state import CODED, KNOWN, PLAIN, REST, SHARED, Part, State, agreeing
from prunex_mpi.core.sums import allocate_coded, coded_bytes, first_blocks, sum_coded_, whole_blocks
from prunex_mpi.models import batchnorm
from prunex_mpi.pruning.compaction import pack_, unpack_
from prunex_mpi.pruning.masks import apply_factors_
from prunex_mpi.settings.fields import Settings

STATISTICS = "bf16"


def fill_message_(
    leader: Wire, node: Wire, state: State, payload: str, part: Part | None = None
) -> dict[str, int]:
    """Write what this node contributes, on its leader; count it, and return what was counted.

    The whole message, or one `part`, of which z_i, v_i and z must stay as they are until it is
    taken over. With one node everything is plain. Where the mask has changed, collective on
    `leader.comm`.
    """
    part = part or state.whole_message
    coded = payload != "fp32" and leader.ring > 1
    _make_room_(state, payload if coded else "", leader, part)
    # Retired duals are zero.
    dual = None if state.consensus_sgd else state.v
    if not state.plan_agreed:
        if leader.is_member:
            with agreeing(state, "Allreduce of a digest", DIGEST_BYTES):
                alike = digests_agree(leader.comm, state.plan.digest)
            if not alike:
                raise RuntimeError("the leaders' compact layouts differ; nothing was exchanged")
        state.plan_agreed = True
    kept = part.stats_kept
    if leader.is_member:
        if coded:
            _offer_difference_(leader, state, dual, part)
        else:
            message = state.message(part)
            pack_(state.z_node, part.plan, message, dual, leader.weight)
            statistics = message[part.plan.numel :]
            torch.index_select(state.stats, 0, kept, out=statistics)
            statistics.mul_(leader.weight)
    size = state.payload.element_size()
    numels = part.plan.numel, kept.numel()
    travelling = message_bytes(payload if coded else "fp32", *numels, size)
    if not part.number or part.number == len(state.parts[1]):
        # Of the network as it was, whatever its parts have lost.
        state.position.traffic.dense += (state.whole.layout.numel + state.whole.stats) * size
    summed = sum(block.nbytes for block in state.blocks(part)) if coded else 0
    return leader.count(travelling, summed=summed) | node.count(travelling)


def message_bytes(payload: str, parameters: int, statistics: int, size: int) -> int:
    """Return the bytes of a message of so many values, whose dtype has `size` bytes."""
    if payload == "fp32":
        return (parameters + statistics) * size
    return coded_bytes(payload, parameters, size) + coded_bytes(STATISTICS, statistics, size)


def _make_room_(state: State, payload: str, leader: Wire, part: Part) -> None:
    """Allocate what a message of fewer bits needs; nothing where the last one was as long."""
    if not payload:
        state.coded = None
        return
    lengths = [block.numel() for block in state.blocks(part)]
    # Parts differ by a few blocks: what is enough for the longest is enough.
    known = [c.numel for c in state.coded] if state.coded else []
    enough = [n >= m for n, m in zip(known, lengths, strict=False)]
    if known != lengths and not (part.number and known and all(enough)):
        if part.number and known:
            lengths = list(map(max, known, lengths))
        ways = zip((payload, STATISTICS), lengths, strict=True)
        state.coded = tuple(
            allocate_coded(way, state.payload.new_empty(n), leader.peers, leader.transport)
            for way, n in ways
        )
    if part.number and (state.waiting is None or state.waiting.numel() < lengths[0]):
        state.waiting = state.theta.new_empty(lengths[0])


def _offer_difference_(leader: Wire, state: State, dual: Tensor | None, part: Part) -> None:
    """Add the weighted difference to what is left over; write that of the statistics."""
    message, statistics = state.blocks(part)
    rest, kept, place = state.memory[REST], part.stats_kept, part.place
    numel = part.plan.numel
    torch.sub(state.z_node[place], state.z[place], out=state.scratch[place])
    pack_(state.scratch, part.plan, message, dual)
    rest[part.span].add_(message[:numel], alpha=leader.weight)
    values = _waiting(state, part)
    if part.number:
        values[:numel].copy_(rest[part.span])
    # int2 has no zero: what fills up the last block has something left over as well.
    values[numel:].zero_()
    gap = torch.sub(state.stats, batchnorm.of_reference(state.bn_modules, state.memory[KNOWN]))
    statistics.zero_()
    torch.index_select(gap, 0, kept, out=statistics[: kept.numel()])
    statistics.mul_(leader.weight)


def _waiting(state: State, part: Part) -> Tensor:
    """Return what is left over of a message, in whole blocks; of parts it is a copy."""
    blocks = whole_blocks(part.plan.numel)
    return state.waiting[:blocks] if part.number else state.memory[REST][:blocks]


def exchange_message_(
    between: MPI.Comm,
    node: MPI.Comm,
    state: State,
    transport: Transport,
    clock: Clock,
    counted: Mapping[str, int] = NOTHING,
    part: Part | None = None,
) -> None:
    """Add up the messages of the nodes, or a `part` of them; hand the sum to all ranks of each.

    Touches nothing of the state but the message, what is left over of it, and its codes; `clock` is
    this thread's, `counted` what `fill_message_` has returned, for the trace. Collective on
    `between`, the leaders, where it is not MPI.COMM_NULL, then on `node`.
    """
    part = part or state.whole_message
    if state.coded is None:
        message = state.message(part)
        buckets = -(-message.nbytes // transport.bucket_bytes)
        counted = {**counted, "buckets": buckets}
        with clock.exchanging(message.device, "Allreduce and Bcast", counted):
            spent = allreduce_then_bcast_(between, node, message, transport)
        clock.broadcast += spent
        return
    message, statistics = state.blocks(part)
    parameters_coded, statistics_coded = map(first_blocks, state.coded, (message, statistics))
    values = _waiting(state, part)
    ways = transport, clock
    with clock.named("sum of codes", counted):
        sum_coded_(between, node, parameters_coded, values, message, *ways)
        sum_coded_(between, node, statistics_coded, statistics, statistics, *ways)
    if part.number and between != MPI.COMM_NULL:
        state.memory[REST][part.span].copy_(values[: part.plan.numel])


def way_of(state: State) -> str:
    """Return as what the message of the state travels."""
    return PLAIN if state.coded is None else CODED


def take_over_(state: State, way: str, behind: bool = False, freezes: bool = False) -> None:
    """Make the mean that has come PLAIN or CODED z, zero where the mask is; set the statistics.

    What z was before is then `last_z`. With `behind` the model has gone on training since: its
    statistics move by as much as those of the node. The mask `freezes` where it was chosen in this
    outer iteration. Does not communicate.
    """
    coded, whole = way == CODED, state.whole_message
    message, statistics = _arrived(state, whole, coded)
    unpack_(message, state.plan, state.scratch)
    if coded:
        state.scratch.add_(state.z)
    if not state.shrinks or (coded and (freezes or not state.frozen)):
        # z may hold groups that are pruned from now on.
        apply_factors_(state.scratch, state.layout, state.groups, state.factors)
    _take_statistics_(state, whole, statistics, coded, behind)
    state.z, state.scratch = state.scratch, state.z


def _arrived(state: State, part: Part, coded: bool) -> tuple[Tensor, Tensor]:
    """Return the parameters and the statistics that have come, of the former at least these."""
    if coded:
        return state.blocks(part)
    message = state.message(part)
    return message[: part.plan.numel], message[part.plan.numel :]


def _take_statistics_(
    state: State, part: Part, statistics: Tensor, coded: bool, behind: bool
) -> None:
    """Set the statistics of the model, those that are known, and `stats` to the mean that came."""
    modules, known, kept = state.bn_modules, state.memory[KNOWN], part.stats_kept
    values = statistics[: kept.numel()]
    if coded:
        values = values.add_(batchnorm.of_reference(modules, known)[kept])
    mean = state.stats.index_copy(0, kept, values)
    model = mean
    if behind:
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
        mean = mean if behind else own
    known.index_copy_(0, kept, mean[kept])
    # Removed channels are left as they have been reset.
    batchnorm.reset_(modules, state.stats)
    batchnorm.write_plain(modules, state.stats.index_copy(0, kept, model[kept]))
    state.stats.index_copy_(0, kept, mean[kept])


VELOCITY = f"{SHARED}outer_momentum"


def outer_memory(theta: Tensor) -> dict[str, Tensor]:
    """Allocate the velocity of `outer_step_`."""
    return {VELOCITY: torch.zeros_like(theta)}


def outer_step_(state: State, settings: Settings, k: int) -> None:
    """Step from `last_z` towards z, the mean of the ranks, where the method has a velocity.

    z is of what left in outer iteration `k`.
    """
    if VELOCITY in state.memory:
        _nesterov_(settings, k, state.last_z, state.z, state.memory[VELOCITY])


def _nesterov_(settings: Settings, k: int, last: Tensor, mean: Tensor, velocity: Tensor) -> None:
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


def sent_in(iteration: int, number: int, settings: Settings) -> int:
    """Return in which outer iteration part `number` left that is under way in `iteration`."""
    return iteration - 1 if number in (0, settings.fragments) else iteration


def arrive_(
    state: State, settings: Settings, way: str, k: int, number: int, behind: bool = False
) -> slice:
    """Take over the whole message, or part `number` of it, with what follows from a new z.

    It has left in outer iteration `k`, which may be over. Returns its place in flat vectors.
    """
    if number:
        part = state.parts_of_message(settings.fragments)[number - 1]
        take_part_(state, settings, way, part, k, behind)
    else:
        part = state.whole_message
        take_over_(state, way, behind=behind)
        outer_step_(state, settings, k)
    if number in (0, settings.fragments):
        add_z_(state, settings)
    return part.place


def take_part_(
    state: State, settings: Settings, way: str, part: Part, k: int, behind: bool = False
) -> None:
    """Do for a part of z what `take_over_` and `outer_step_` do for all; masks do not change."""
    coded, place = way == CODED, part.place
    message, statistics = _arrived(state, part, coded)
    unpack_(message, part.plan, state.scratch)
    last, mean = state.z[place], state.scratch[place]
    if coded:
        mean.add_(last)
    if VELOCITY in state.memory:
        _nesterov_(settings, k, last, mean, state.memory[VELOCITY][place])
    last.copy_(mean)
    if part.number == settings.fragments:
        _take_statistics_(state, part, statistics, coded, behind)
