"""A step of GossipGraD (Daily et al. 2018): a node meets one other at each step, never all.

The leaders of M nodes stand in a shuffled circle. At step t, counted in a period of ceil(log2 M)
steps, the one at place r sends the mean gradient of its node to place r + 2^t and receives that of
place r - 2^t; its node takes its step along the mean of the two (pytorch/torchdistx,
gossip_grad.py, dissemination), whatever their numbers of ranks. Each period has the next of M
shuffles. A gradient goes no further than to one other node, for one message a step, and nodes drift
apart: theta and momentum are each node's own, and what is evaluated and delivered, z, is the mean
over all ranks.
"""

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class Gossip(Exchange):
    """Average a node's gradient with that of one other."""

    OPERATIONS = (
        ("gradient of the node", "leader", "Sendrecv", "dense"),
        ("z, the mean", "leader", "Allreduce SUM", "dense, once per outer iteration, to evaluate"),
    )
    drifts = True

    def allocate(self) -> None:
        self.received = torch.empty_like(self.state.theta)
        self.circles = make_circles(self.settings.seed, self.link.comm.size)

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to its mean with another node's."""
        if self.link.comm.size == 1:
            return
        to, source = neighbours(self.circles, self.link.comm.rank, steps_taken(self.context))
        self.link.sendrecv_(flat, to, self.received, source)
        flat.add_(self.received).mul_(0.5)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        return layout.numel * size if workers > 1 else 0, "to one other node"


def make_circles(seed: int, nodes: int) -> list[list[int]]:
    """Return as many shuffles of the nodes as there are nodes."""
    generator = np.random.default_rng([seed, nodes])
    return [generator.permutation(nodes).tolist() for _ in range(nodes)]


def neighbours(circles: list[list[int]], node: int, step: int) -> tuple[int, int]:
    """Return the node that `node` sends to, and the one that it receives from, at a step."""
    nodes = len(circles)
    period = (nodes - 1).bit_length()
    circle = circles[step // period % nodes]
    place, distance = circle.index(node), 1 << step % period
    return circle[(place + distance) % nodes], circle[(place - distance) % nodes]
