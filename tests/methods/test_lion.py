"""Distributed Lion against its paper: votes by hand, ties, and Lion itself on one worker."""

import pytest
import torch
from driving import COMMON, exchange_over, make_context, wire_of
from nets import RandomStream, new_net
from nodes import WORLD

from mpi4py import MPI

from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import RunContext
from prunex_mpi.methods import lion

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]


def work_of(**changes: object) -> RunContext:
    settings = make(method="lion", **{**COMMON, **changes})
    return make_context(settings, new_net(), RandomStream(0, torch.float64))


@pytest.mark.parametrize("workers", range(1, WORLD.size + 1))
def test_votes_by_hand(workers, monkeypatch):
    """Gradients and momenta of halves; beta1 1/2 and beta2 3/4 are exact."""
    comm = WORLD.Split(0 if WORLD.rank < workers else MPI.UNDEFINED, key=WORLD.rank)
    if comm == MPI.COMM_NULL:
        return
    monkeypatch.setattr(lion, "BETA1", 0.5)
    monkeypatch.setattr(lion, "BETA2", 0.75)
    context = work_of()
    exchange = exchange_over(wire_of(comm), context)
    grad, momentum = context.state.grad, context.state.memory[lion.MOMENTUM]
    momentum.zero_()
    grad.zero_()
    # All for, the first against all others, the momentum against the gradient, half of them.
    momentum[2] = -4.0
    half = WORLD.rank < workers / 2
    grad[:4] = torch.tensor([2.0, -2.0 if WORLD.rank == 0 else 2.0, 2.0, 2.0 if half else -2.0])
    exchange.exchange_(grad)
    second = {1: -1, 2: 0, 3: 1, 4: 1}[workers]
    fourth = 1 if workers % 2 else 0
    assert grad[:4].tolist() == [1, second, -1, fourth]
    assert momentum[:3].tolist() == [0.5, -0.5 if WORLD.rank == 0 else 0.5, -2.5]
    assert set(grad.tolist()) <= {-1, 0, 1}
    comm.Free()


def test_parameters_without_a_gradient_go_nowhere_in_two_steps():
    context, total = work_of(), 0
    exchange = exchange_over(wire_of(WORLD), context)
    for step in range(2):
        context.state.position.step = step
        context.state.grad.zero_()
        exchange.exchange_(context.state.grad)
        total = total + context.state.grad
    assert not total.any()
