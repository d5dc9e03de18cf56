"""What freezing and mixed precision leave in the variables of a rank; bytes of agreement."""

from dataclasses import replace

import pytest
import torch
from counting import Counting
from nodes import nodes_of
from small_runs import small_run
from torch import nn

from prunex_mpi.comm.agreement import alike_bytes
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import State, adopt_mask, build_state, freeze, weights
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.projection import select
from prunex_mpi.run.supervision import outer_iterations


def make_state(**changes: object) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten())
    layout = build_layout(model)
    groups = find_groups(model, layout, ["channel"], [0.5])
    return build_state(model, layout, groups, make(**changes))


def adopt_half(state: State) -> None:
    squared_norms = torch.arange(state.groups.total, dtype=torch.float32).numpy()
    adopt_mask(state, select(squared_norms, state.groups.kinds[0], 1.0))


def test_a_skipped_first_step_leaves_no_momentum():
    """The fused step returns early on overflow and must not leave uninitialised memory behind."""
    state = make_state(amp="fp16")
    before = state.theta.clone()
    state.scaler.scale(torch.zeros(()))
    state.grad.fill_(float("inf"))
    state.scaler.unscale_(state.optimizer.optimizer)
    state.scaler.step(state.optimizer.optimizer)
    state.scaler.update()
    assert torch.equal(state.theta, before)
    assert torch.all(state.optimizer.first_moment == 0)


@pytest.mark.parametrize("consensus_sgd", [True, False])
def test_freezing_masks_what_lives_on(consensus_sgd):
    state = make_state()
    momentum = state.optimizer.first_moment
    for flat in (state.theta, momentum, state.u, state.v):
        flat.fill_(1.0)
    adopt_half(state)
    freeze(state, consensus_sgd)
    pruned = state.layout.numel - state.message.plan.numel
    assert pruned == 8
    for flat in (state.theta, momentum):
        assert int((flat == 0).sum()) == pruned
    for dual in (state.u, state.v):
        assert int((dual == 0).sum()) == (dual.numel() if consensus_sgd else pruned)
    message = state.message
    whole = message.fragment()
    sizes = [part.numel() for part in message.values(whole)]
    assert sizes == [message.plan.numel, state.stats.numel()]
    # In whole blocks; without duals nothing else will travel any more.
    room, there = sum(part.numel() for part in message.blocks(whole)), message.buffer.numel()
    assert there == room if consensus_sgd else there >= room


def test_weights_are_lent_and_returned():
    state = make_state()
    before = state.theta.clone()
    with pytest.raises(RuntimeError), weights(state, torch.zeros_like(before)):
        assert torch.all(state.theta == 0)
        raise RuntimeError
    assert torch.equal(state.theta, before)


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", ["recipe", "int4", "local sgd", "sparseloco"])
def test_losses_norms_and_digests_are_counted_apart(scenario):
    with nodes_of(1) as topology, small_run(topology, scenario) as context:
        world, leader = Counting(topology.world), Counting(topology.leader)
        counted = replace(topology, world=world, leader=leader)
        records = list(outer_iterations(counted, replace(context, stop=None)))
    told = [record["bytes"] for record in records]
    evaluated = sum(record["test_loss"] is not None for record in records)
    # Three float64: loss, those that are right, all.
    assert sum(each["evaluate"] for each in told) == evaluated * alike_bytes(3) > 0
    control = sum(each["control"] for each in told)
    assert control + evaluated * alike_bytes(3) == world.operands + leader.digests > 0
