"""A step of Distributed Lion: each worker votes for the sign of its own Lion update.

After Liu et al. 2024 (arXiv:2404.00438), with majority vote. With a worker's gradient g and its
momentum m, which nobody sends:

    vote = sign(beta1 m + (1 - beta1) g),   m = beta2 m + (1 - beta2) g
    theta = theta - lr (sign(sum of votes) + weight decay * theta)

A vote is one bit, and so is its outcome, but for an even number of workers: a tie is 0. Every
worker has one vote, whatever the number of its ranks.
"""

import torch
from torch import Tensor

from prunex_mpi.core.memory import Declared, summed
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.sums import Counts, bytes_handed_over
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

MOMENTUM = "worker_momentum"
UP = 1
# Weight of the momentum in a vote, and its decay.
BETA1, BETA2 = 0.9, 0.99


class Lion(Exchange):
    """Vote for signs; a worker's weight changes none. The optimizer decays the weights."""

    OPERATIONS = (
        ("1 or 2 workers: votes", "workers", "Allgather", "1 bit each"),
        ("from 3 on: votes", "workers", "Alltoall", "1 bit each, a share for each worker"),
        ("from 3 on: outcomes", "workers", "Allgather", "1 bit each, 2 for an even number"),
    )

    def allocate(self) -> None:
        self.votes = Counts(self.link, self.state.theta, UP, bits_down(self.link.comm.size))

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate each worker's momentum."""
        return {MOMENTUM: summed(torch.zeros_like(theta))}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the outcome of the vote: -1, 1, or 0 for a tie."""
        momentum, workers = self.state.memory[MOMENTUM], self.link.comm.size
        update = torch.lerp(flat, momentum, BETA1, out=self.state.scratch)
        momentum.lerp_(flat, 1 - BETA2)
        self.cast_(update)
        votes = self.votes.sum_()
        # More than half of the workers, or no less: 1 or 0, and their sum where there may be a tie.
        outcome = (votes > workers // 2).to(torch.uint8)
        if workers % 2 == 0:
            outcome.add_(votes >= workers // 2)
        if not self.votes.to_all:
            outcome = self.votes.spread_(outcome)
        flat.copy_(outcome.view(-1)[: flat.numel()]).mul_(2 if workers % 2 else 1).sub_(1)

    def cast_(self, update: Tensor) -> None:
        """Vote 1 where `update` is above 0, else 0."""
        # One bit has no room for 0, which unused parameters have: workers take turns, so that votes
        # cancel, over the workers or over two steps.
        votes = self.votes.numbers.view(torch.bool).view(-1)[: update.numel()]
        above = torch.ge if (self.link.comm.rank + steps_taken(self.context)) % 2 else torch.gt
        above(update, 0, out=votes)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        how = f"a bit per element and its share of the outcomes, {settings.aggregation}"
        return bytes_handed_over(layout.numel, workers, UP, bits_down(workers)), how


def bits_down(workers: int) -> int:
    """Return the bits of an outcome: 2 where there may be a tie."""
    return 1 if workers % 2 else 2
