"""A step of Distributed Lion: each worker votes for the sign of its own Lion update.

After Liu et al. 2024 (arXiv:2404.00438), with majority vote. With a worker's gradient g and its
momentum m, which nobody sends:

    vote = sign(beta1 m + (1 - beta1) g),   m = beta2 m + (1 - beta2) g
    theta = theta - lr (sign(sum of votes) + weight decay * theta)

A vote is one bit, and so is its outcome, but for an even number of workers: a tie is 0. Every
worker has one vote, whatever the number of its ranks.
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.state import OWN, RunContext
from prunex_mpi.core.sums import allocate_counts, bytes_handed_over, spread_, sum_numbers_
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("1 or 2 workers: votes", "workers", "Allgather", "1 bit each"),
    ("from 3 on: votes", "workers", "Alltoall", "1 bit each, a share for each worker"),
    ("from 3 on: outcomes", "workers", "Allgather", "1 bit each, 2 for an even number"),
)
MOMENTUM = f"{OWN}momentum"
UP = 1
# Weight of the momentum in a vote, and its decay.
BETA1, BETA2 = 0.9, 0.99


def bits_down(workers: int) -> int:
    """Return the bits of an outcome: 2 where there may be a tie."""
    return 1 if workers % 2 else 2


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate each worker's momentum."""
    return {MOMENTUM: torch.zeros_like(theta)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for votes and what comes of them."""
    return allocate_counts(wire, context.state.theta, UP, bits_down(wire.comm.size))


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the outcome of the vote: -1, 1, or 0 for a tie. Collective on `wire.comm`.

    A worker's weight changes no sign. The weight decay is the optimizer's, outside of the vote.
    """
    state, workers = context.state, wire.comm.size
    grad, momentum = state.grad, state.memory[MOMENTUM]
    update = torch.lerp(grad, momentum, BETA1, out=state.scratch)
    momentum.lerp_(grad, 1 - BETA2)
    cast_votes_(wire, space, update, steps_taken(context))
    votes = sum_numbers_(wire, space, UP)
    if space["to_all"]:
        grad.copy_(votes.view(-1)[: grad.numel()]).mul_(2).sub_(workers).sign_()
        return
    # More than half of the workers, or no less: 1 or 0, and their sum where there may be a tie.
    outcome = (votes > workers // 2).to(torch.uint8)
    if workers % 2 == 0:
        outcome.add_(votes >= workers // 2)
    outcomes = spread_(wire, space, outcome, bits_down(workers))
    grad.copy_(outcomes.view(-1)[: grad.numel()])
    grad.mul_(2 if workers % 2 else 1).sub_(1)


def cast_votes_(wire: Wire, space: dict[str, Any], update: Tensor, step: int) -> None:
    """Set the first of `numbers` to 1 where `update` is above 0, else to 0."""
    # One bit has no room for 0, which unused parameters have: workers take turns, so that votes
    # cancel, over the workers or over two steps.
    votes = space["numbers"].view(torch.bool).view(-1)[: update.numel()]
    above = torch.ge if (wire.comm.rank + step) % 2 else torch.gt
    above(update, 0, out=votes)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    how = f"a bit per element and its share of the outcomes, {settings.aggregation}"
    return bytes_handed_over(layout.numel, workers, UP, bits_down(workers)), how
