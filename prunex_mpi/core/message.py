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

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.agreement import DIGEST_BYTES, digests_agree
from prunex_mpi.comm.collectives import Transport, allreduce_then_bcast_
from prunex_mpi.comm.traffic import NOTHING, Clock
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.evaluation import add_z_
from prunex_mpi.core.state import CODED, KNOWN, PLAIN, REST, SHARED, State, agreeing
from prunex_mpi.core.sums import allocate_coded, coded_bytes, sum_coded_
from prunex_mpi.models import batchnorm
from prunex_mpi.pruning.compaction import pack_, unpack_
from prunex_mpi.pruning.masks import apply_factors_
from prunex_mpi.settings.fields import Settings

STATISTICS = "bf16"


def fill_message_(lane: Wire, node: Wire, lanes: int, state: State, payload: str) -> dict[str, int]:
    """Write what this node contributes, on all its leaders; count it, and return what was counted.

    z_i, v_i and z must stay as they are until `take_over_`. With one node there is nobody to save
    bytes for: everything is plain. Where the mask has changed, collective on `lane.comm`, then on
    `node.comm`.
    """
    coded = payload != "fp32" and lane.ring > 1
    _make_room_(state, payload if coded else "", lane)
    # Retired duals are zero.
    dual = None if state.consensus_sgd else state.v
    if not state.plan_agreed:
        if lane.is_member:
            with agreeing(state, "Allreduce of a digest", DIGEST_BYTES):
                alike = digests_agree(lane.comm, state.plan.digest)
            if not alike:
                raise RuntimeError("the leaders' compact layouts differ; nothing was exchanged")
        if coded and lanes > 1:
            _share_rest_(lane, node, state)
        state.plan_agreed = True
    if lane.is_member:
        if coded:
            _offer_difference_(lane, state, dual)
        else:
            pack_(state.z_node, state.plan, state.message, dual, lane.weight)
            statistics = state.message[state.plan.numel :]
            torch.index_select(state.stats, 0, state.stats_kept, out=statistics)
            statistics.mul_(lane.weight)
    size = state.message.element_size()
    # A plan's sizes are NumPy's, which JSON does not know.
    numels = int(state.plan.numel), state.stats_kept.numel()
    travelling = message_bytes(payload if coded else "fp32", *numels, size)
    dense = state.whole.layout.numel + state.whole.stats
    state.position.traffic.dense += dense * size
    return lane.count(travelling) | node.count(travelling)


def message_bytes(payload: str, parameters: int, statistics: int, size: int) -> int:
    """Return the bytes of one leader's message, as they are counted where there are several nodes.

    So many `parameters` and BatchNorm `statistics` travel, whose dtype has `size` bytes.
    """
    if payload == "fp32":
        return (parameters + statistics) * size
    return coded_bytes(payload, parameters, size) + coded_bytes(STATISTICS, statistics, size)


def _make_room_(state: State, payload: str, lane: Wire) -> None:
    """Allocate what a message of fewer bits needs; nothing where the last one was as long."""
    if not payload:
        state.coded = None
        return
    blocks = tuple(part.numel() for part in state.blocks)
    if state.coded is None or blocks != tuple(c.numel for c in state.coded):
        ways = zip((payload, STATISTICS), state.blocks, strict=True)
        state.coded = tuple(
            allocate_coded(way, part, lane.ring, lane.transport) for way, part in ways
        )


def _share_rest_(lane: Wire, node: Wire, state: State) -> None:
    """Have all that is left over of the node's messages on each leader, and on nobody else.

    Under a new mask each leader's part is another one. Collective on `node.comm`.
    """
    rest = state.memory[REST]
    node.reduce_(rest)
    if not lane.is_member:
        rest.zero_()


def _offer_difference_(lane: Wire, state: State, dual: Tensor | None) -> None:
    """Add the weighted difference to what is left over; write that of the statistics."""
    message, statistics = state.blocks
    rest, kept = state.memory[REST], state.stats_kept
    numel = state.plan.numel
    torch.sub(state.z_node, state.z, out=state.scratch)
    pack_(state.scratch, state.plan, message, dual)
    rest[:numel].add_(message[:numel], alpha=lane.weight)
    # int2 has no zero: what fills up the last block has something left over as well.
    rest[numel : message.numel()].zero_()
    gap = torch.sub(state.stats, batchnorm.of_reference(state.bn_modules, state.memory[KNOWN]))
    statistics.zero_()
    torch.index_select(gap, 0, kept, out=statistics[: kept.numel()])
    statistics.mul_(lane.weight)


def exchange_message_(
    between: MPI.Comm,
    node: MPI.Comm,
    lanes: int,
    state: State,
    transport: Transport,
    clock: Clock,
    counted: Mapping[str, int] = NOTHING,
) -> None:
    """Add up the messages of the nodes and hand the sum to every rank of each.

    Touches nothing of the state but the message, what is left over of it, and its codes; `clock` is
    this thread's, `counted` what `fill_message_` has returned, for the trace. Collective on
    `between`, a lane, where it is not MPI.COMM_NULL, then on `node`.
    """
    if state.coded is None:
        buckets = -(-state.message.nbytes // transport.bucket_bytes)
        counted = {**counted, "buckets": buckets}
        with clock.exchanging(state.message.device, "Allreduce and Bcast", counted):
            spent = allreduce_then_bcast_(between, node, state.message, transport, lanes)
        clock.broadcast += spent
        return
    message, statistics = state.blocks
    parameters_coded, statistics_coded = state.coded
    rest = state.memory[REST][: message.numel()]
    ways, started = (transport, clock, lanes), time.perf_counter()
    sum_coded_(between, node, parameters_coded, rest, message, *ways)
    sum_coded_(between, node, statistics_coded, statistics, statistics, *ways)
    clock.note("exchange", "sum of codes", started, counted)


def way_of(state: State) -> str:
    """Return as what the message of the state travels."""
    return PLAIN if state.coded is None else CODED


def take_over_(state: State, way: str, behind: bool = False, freezes: bool = False) -> None:
    """Make the mean that has come z, expanded, zero where the mask is; set the statistics.

    It has come PLAIN or CODED. What z was before is then `last_z`. With `behind` the model has
    gone on training since: its statistics move by as much as those of the node by which it began.
    The mask `freezes` where it was chosen in this outer iteration. Does not communicate.
    """
    coded = way == CODED
    message, statistics = state.blocks if coded else _plain_parts(state)
    unpack_(message, state.plan, state.scratch)
    if coded:
        state.scratch.add_(state.z)
    if not state.shrinks or (coded and (freezes or not state.frozen)):
        # z may hold groups that are pruned from now on.
        apply_factors_(state.scratch, state.layout, state.groups, state.factors)
    _take_over_statistics_(state, statistics, coded, behind)
    state.z, state.scratch = state.scratch, state.z


def _take_over_statistics_(state: State, total: Tensor, coded: bool, behind: bool) -> None:
    """Set the statistics of the model, those that are known, and `stats` to the mean that came."""
    modules, known, kept = state.bn_modules, state.memory[KNOWN], state.stats_kept
    values = total[: kept.numel()]
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


def _plain_parts(state: State) -> tuple[Tensor, Tensor]:
    numel = state.plan.numel
    return state.message[:numel], state.message[numel:]


VELOCITY = f"{SHARED}outer_momentum"


def outer_memory(theta: Tensor) -> dict[str, Tensor]:
    """Allocate the velocity of `outer_step_`."""
    return {VELOCITY: torch.zeros_like(theta)}


def outer_step_(state: State, settings: Settings) -> None:
    """Step from `last_z` towards z, the mean of the ranks.

    b = momentum b + (old_z - z), z = old_z - lr (old_z - z + momentum b). Written so that lr 1
    without momentum is the mean, bit for bit. The mask is kept: old_z, z and b vanish outside of
    it. Does nothing where the method has no velocity.
    """
    if VELOCITY not in state.memory:
        return
    lr, momentum = settings.options.outer_lr, settings.options.outer_momentum
    step = state.last_z.sub_(state.z)
    velocity = state.memory[VELOCITY].mul_(momentum).add_(step)
    state.z.add_(step, alpha=1 - lr).add_(velocity, alpha=-lr * momentum)


def arrive_(state: State, settings: Settings, way: str, behind: bool = False) -> None:
    """Make z what was exchanged for it while training may have gone on `behind` it.

    As `take_over_`, with what follows from a new z.
    """
    take_over_(state, way, behind=behind)
    outer_step_(state, settings)
    add_z_(state, settings)
