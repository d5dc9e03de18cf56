"""The variables of a run on one rank, and the operations that touch several of them."""

from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.async_exchange import AsyncExchange
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.counted import CountedComms, make_comms
from prunex_mpi.comm.preemption import StopAgreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import Clock, Traffic
from prunex_mpi.core.memory import STATISTICS, Memory, shared
from prunex_mpi.core.message import Message
from prunex_mpi.core.optimizer import OptimizerMemory, build_optimizer
from prunex_mpi.core.task import EVALUATION_BATCH, IMAGES, Loss, Reader, Stream, Task, Teacher
from prunex_mpi.models import batchnorm
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.layout import Layout, flatten_
from prunex_mpi.models.standalone import Sizes
from prunex_mpi.pruning.groups import Groups
from prunex_mpi.pruning.masks import Mask, build_plan, make_mask
from prunex_mpi.pruning.shrink import smaller_sizes
from prunex_mpi.settings.fields import Settings

# As what a message travels between nodes.
PLAIN, CODED = "plain", "coded"


@dataclass
class Position:
    """Where a run stands: all that the driver remembers from one local step to the next.

    `step` counts the local steps that outer iteration `iteration` has behind it, `steps_done` those
    of the outer iterations before; losses, bytes and seconds so far are this rank's own.
    `in_flight` says as what (PLAIN or CODED) travels what z does not hold yet, "" for nothing.
    `part` is the number, from 1, of the part that was exchanged last, 0 for the whole message.
    `converged_of` is the length, in outer iterations, of a run that has converged before it, else
    0. `fresh_statistics`: BatchNorm's began with this run; `has_reference`: all ranks share those
    about which they are averaged.
    """

    iteration: int = 1
    step: int = 0
    steps_done: int = 0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    clock: Clock = field(default_factory=Clock)
    drifts: list[float] = field(default_factory=list)
    freeze_next: bool = False
    vote_next: bool = False
    in_flight: str = ""
    part: int = 0
    first_loss: float | None = None
    # Of the best z so far by held-out images, as `evaluation.Evaluation` has it.
    best: list[float] = field(default_factory=list)
    converged_of: int = 0
    fresh_statistics: bool = False
    has_reference: bool = False
    # Local steps of the outer iteration under way, where these follow from a rate.
    interval: int = 0


def next_iteration(position: Position, loss: float) -> None:
    """Move on to the first step of the next outer iteration; `loss` is this one's mean."""
    if position.first_loss is None:
        position.first_loss = loss
    position.iteration += 1
    position.steps_done += position.step
    begin_iteration(position)


def begin_iteration(position: Position) -> None:
    """Forget what belongs to the steps of an outer iteration."""
    position.step, position.loss_sum, position.loss_count = 0, 0.0, 0.0
    # In place: counted communicators hold on to these objects.
    for part in (position.traffic, position.clock):
        for one in fields(part):
            setattr(part, one.name, type(getattr(part, one.name))())


def put_position(position: Position, values: dict[str, Any]) -> None:
    """Set a position in place: the driver and its communicators hold on to its parts."""
    for name, value in values.items():
        if isinstance(value, dict) and not isinstance(getattr(position, name), dict):
            put_position(getattr(position, name), value)
        else:
            setattr(position, name, value)


@dataclass(frozen=True)
class Original:
    """What shares and savings are relative to.

    `stats` is the number of BatchNorm statistics, `buffers` holds names and shapes, `sizes` what
    makes a smaller network whole again, where anything may be taken out of it.
    """

    layout: Layout
    stats: int
    buffers: tuple[tuple[str, torch.Size], ...]
    sizes: Sizes


def describe_whole(
    model: nn.Module, layout: Layout, groups: Groups, settings: Settings
) -> Original:
    """Describe `model`, of which nothing has been taken out."""
    sizes: Sizes = {}
    if settings.method.removes or settings.remove_dropped:
        sizes = smaller_sizes(model, groups.coupling, np.zeros(groups.total, dtype=bool))
    buffers = tuple((name, b.shape) for name, b in model.named_buffers())
    return Original(layout, batchnorm.numel(batchnorm.find(model)), buffers, sizes)


# The BatchNorm means and variances that all ranks know, those of the last exchange, about which
# they are averaged.
KNOWN = "known_statistics"
# Of methods that prune single weights and not groups: which are pruned, bool [numel].
PRUNED = "pruned"


@dataclass(frozen=True)
class Problem:
    """What is trained: this rank's f_ij and its share of the test set.

    `forward` is `model`, compiled or not; `steps` are the local steps of phase 1.
    `batches(shard, batch_size=...)` yields (images, labels) in order, without augmentation. Without
    `test` nothing is evaluated; where data are held out of the training set, it holds those, and
    the test set is `kept_back`. `mean` and `std`, float32 [3] on the CPU, normalise images of
    values in 0..1. No loss below `guess_loss`, that of guessing, is a divergence. `reader` decodes
    images that are files; all ranks have one or none. `digest` tells other data sets apart. `rate`
    returns the learning rate where its schedule is somebody's own. BatchNorm's statistics are
    estimated on `calibration_batches`, 0 for a few of an epoch. At most `at_once` samples are
    evaluated at a time.
    """

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    loss: Loss
    train: Stream
    train_shard: Sized | None
    test: Sized | None
    batches: Callable[..., Iterator[tuple[Tensor, Tensor]]]
    steps: int
    mean: Tensor
    std: Tensor
    guess_loss: float = 0.0
    kept_back: Sized | None = None
    reader: Reader | None = None
    teacher: Teacher | None = None
    digest: str = ""
    task: Task = IMAGES
    rate: Callable[[], float] | None = None
    calibration_batches: int = 0
    at_once: int = EVALUATION_BATCH
    inputs: Inputs | None = None


@dataclass
class State:
    """Flat vectors of `layout` on one device, host arrays per layer, and the mask in force.

    theta, grad, u, v, z_node, z and `scratch` hold `layout.numel` elements. `scratch` is
    workspace: what a function leaves in it, it returns (the anchor of phase 1, z_tilde, the z
    before an exchange). `stats` holds BatchNorm statistics; `stats_groups` is the place in the mask
    of each, -1 for those that always travel. `message` owns what travels between nodes, `memory`
    what methods, scores and evaluation remember. `consensus_sgd`: there are no duals, since the
    method has none, or they are retired: the masks are frozen, and the message holds what is kept
    alone. With `shrinks` off everything travels, whatever the mask. `sound`: the BatchNorm
    statistics before a step in float16, which may overflow. `losses`: sum and count of this outer
    iteration's losses. A rank that is `alone` is the only one. With `removes`, what the mask lacks
    has been taken out of the network: `groups` and `mask` are still those of the `whole` one, all
    else is of the smaller one, which has the `sizes`.
    """

    layout: Layout
    groups: Groups
    bn_modules: list[_BatchNorm]
    theta: Tensor
    grad: Tensor
    optimizer: OptimizerMemory
    scaler: torch.amp.GradScaler
    u: Tensor
    v: Tensor
    z_node: Tensor
    z: Tensor
    scratch: Tensor
    stats: Tensor
    stats_groups: np.ndarray
    rho1: np.ndarray
    rho2: np.ndarray
    mask: Mask
    message: Message
    memory: Memory
    whole: Original
    shrinks: bool = True
    removes: bool = False
    sizes: Sizes = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    frozen: bool = False
    consensus_sgd: bool = False
    sound: Tensor | None = None
    losses: Tensor | None = None
    alone: bool = False


@dataclass(frozen=True)
class RunContext:
    """What a rank works on and with; the communicators are handed down beside it.

    What it could not do in local steps is in `failures`; all ranks raise the first after phase 1.
    """

    state: State
    problem: Problem
    settings: Settings
    transport: Transport
    heartbeat: Heartbeat
    stop: StopAgreement | None = None
    helper: AsyncExchange | None = None
    failures: list[UserError] = field(default_factory=list)


def comms_of(
    topology: Topology, state: State, transport: Transport, flat: bool = False
) -> CountedComms:
    """Make this rank's communicators, which count into the position of `state` (`make_comms`)."""
    return make_comms(topology, flat, transport, state.position.traffic, state.position.clock)


def agreeing(
    state: State, name: str, nbytes: int, kind: str = "control"
) -> AbstractContextManager[None]:
    """Count the block as a message of `nbytes` by which ranks agree, and as waiting for it."""
    traffic, clock = state.position.traffic, state.position.clock
    setattr(traffic, kind, getattr(traffic, kind) + nbytes)
    return clock.exchanging(state.theta.device, name, {kind: nbytes}, part="agreed")


def build_state(
    model: nn.Module,
    layout: Layout,
    groups: Groups,
    settings: Settings,
    whole: Original | None = None,
    optimizer: OptimizerMemory | None = None,
) -> State:
    """Allocate the variables; without `whole` nothing has been taken out of the model.

    Without an `optimizer` it is that of the settings.
    """
    theta, grad = flatten_(model, layout)
    if optimizer is None:
        built = build_optimizer(settings, model, layout)
        optimizer = OptimizerMemory(built, model, layout)
    bn_modules = batchnorm.find(model)
    stats = theta.new_empty(batchnorm.numel(bn_modules))
    batchnorm.read_plain_(bn_modules, stats)
    mask = make_mask(layout, groups, np.ones(groups.total, dtype=bool), theta)
    layers = len(layout.segments)
    plan = build_plan(layout, mask)
    everything = torch.arange(stats.numel(), device=theta.device)
    quantised = settings.method.averages and settings.payload != "fp32"
    return State(
        layout=layout,
        groups=groups,
        bn_modules=bn_modules,
        theta=theta,
        grad=grad,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(theta.device.type, enabled=settings.amp == "fp16"),
        u=torch.zeros_like(theta),
        v=torch.zeros_like(theta),
        z_node=theta.clone(),
        z=theta.clone(),
        scratch=torch.empty_like(theta),
        stats=stats,
        stats_groups=find_stats_groups(model, bn_modules, layout, groups),
        rho1=np.full(layers, settings.rho1),
        rho2=np.full(layers, settings.rho2),
        mask=mask,
        message=Message(theta, plan, everything, quantised),
        memory=Memory({KNOWN: shared(stats.clone(), STATISTICS)}),
        whole=whole or describe_whole(model, layout, groups, settings),
        position=Position(fresh_statistics=batchnorm.are_fresh(bn_modules)),
        shrinks=settings.method.nodes,
        removes=settings.method.removes,
        consensus_sgd=not getattr(settings.options, "duals", settings.method.consensus),
        sound=torch.empty_like(stats) if settings.amp == "fp16" else None,
    )


def every_rank_sends(settings: Settings) -> bool:
    """Return whether all ranks speak between nodes at each step, not the leaders of the nodes."""
    return settings.method.per_step and settings.aggregation == "flat"


def find_stats_groups(
    model: nn.Module, bn_modules: list[_BatchNorm], layout: Layout, groups: Groups
) -> np.ndarray:
    """Return the place in the mask of each BatchNorm statistic: that of its channel's gamma."""
    names = {id(p): name for name, p in model.named_parameters()}
    by_name = {layout.segments[groups.layers[c.layer].segment].name: c.rows for c in groups.coupled}
    places = [np.empty(0, dtype=np.int64)]
    for module in bn_modules:
        never = np.full(module.num_features, -1)
        rows = by_name.get(names.get(id(module.weight), ""), never)
        # A mean and a second moment per channel.
        places += [rows, rows]
    return np.concatenate(places)


def kept_stats(mask: np.ndarray, stats_groups: np.ndarray) -> np.ndarray:
    """Return the places of the BatchNorm statistics that travel under `mask`."""
    # The last entry stands for what belongs to no group.
    return np.flatnonzero(np.append(mask, True)[stats_groups])


def adopt_mask(state: State, bits: np.ndarray, residual_follows: bool = True) -> None:
    """Make the mask of `bits`, bool [groups], the one in force, and its kept slices what travels.

    With `residual_follows` the message's residual is carried over to its new order.
    """
    if state.removes:
        # Nothing of what is left is masked.
        state.mask = replace(state.mask, bits=bits)
        return
    state.mask = make_mask(state.layout, state.groups, bits, state.theta)
    travels = state.mask if state.shrinks else Mask(np.ones_like(bits), None)
    kept = torch.from_numpy(kept_stats(travels.bits, state.stats_groups)).to(state.stats.device)
    state.message.follow_(build_plan(state.layout, travels), kept, residual_follows)


def freeze(state: State, consensus_sgd: bool) -> None:
    """Fix the mask in force: from now on theta, duals and momentum live on it.

    With `consensus_sgd` the duals are retired (u = v = 0) and the payload shrinks to what travels;
    without, they are masked, which keeps sum_i P_i v_i = 0.
    """
    state.frozen = True
    state.consensus_sgd = consensus_sgd
    for flat in (state.theta, *state.optimizer.moments.values(), state.u, state.v):
        state.mask.apply_(flat)
    if consensus_sgd:
        state.u.zero_()
        state.v.zero_()
        state.message.allocate_(state.message.plan.numel, state.message.stats_kept.numel())


def forget_momentum_(state: State, place: slice = slice(None)) -> None:
    """Let the optimizer begin without momentum, of AdamW without first moment, in one `place`."""
    momentum = state.optimizer.first_moment
    if momentum is not None:
        momentum[place].zero_()


def starts_from_z(state: State, settings: Settings) -> bool:
    """Return whether theta starts the local steps from z, not from where it was."""
    return state.consensus_sgd or settings.theta_start == "z"


@contextmanager
def weights(state: State, values: Tensor) -> Iterator[None]:
    """Run the model with `values` as its parameters; theta is restored afterwards."""
    state.scratch.copy_(state.theta)
    state.theta.copy_(values)
    try:
        yield
    finally:
        state.theta.copy_(state.scratch)


@contextmanager
def in_place_of_z(
    state: State, values: Tensor, statistics: Tensor, bits: np.ndarray | None = None
) -> Iterator[None]:
    """Have `values` as z, and `statistics` as BatchNorm means and variances, for the block.

    And the mask of `bits`, bool [groups], unless it is that of the last z.
    """
    last, mask, kept = state.z, state.mask, torch.empty_like(state.stats)
    batchnorm.read_plain_(state.bn_modules, kept)
    state.z, state.mask = values, mask if bits is None else replace(mask, bits=bits)
    batchnorm.write_plain(state.bn_modules, statistics)
    try:
        yield
    finally:
        state.z, state.mask = last, mask
        batchnorm.write_plain(state.bn_modules, kept)
