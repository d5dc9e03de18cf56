"""PowerSGD over MPI: exact where the gradient's rank allows it, the same on all ranks."""

import copy

import pytest
import torch
from driving import (
    COMMON,
    SHAPES,
    assert_alike_on_all_ranks,
    run_driver,
)
from nets import RandomStream
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.config.resolve import make

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

RANK = 5


class Singles:
    """One image at a time: a linear layer's gradient has rank 1 on each rank."""

    waited = 0.0

    def __init__(self) -> None:
        self.stream = RandomStream(WORLD.rank, torch.float64)

    def next(self):
        images, labels = self.stream.next()
        return images[:1], labels[:1]


def new_model() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Linear(108, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5)
    return nn.Sequential(nn.Flatten(), *layers).double()


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_gradients_of_no_higher_rank_arrive_whole(aggregation, ranks_per_node):
    """The rank of the sum is at most the number of ranks; P's other columns are noise."""
    assert WORLD.size < RANK
    model = new_model()
    found = {}
    with nodes_of(ranks_per_node) as topology:
        for method, rank in (("dense", {}), ("powersgd", {"powersgd_rank": RANK})):
            settings = make(method=method, aggregation=aggregation, **rank, **COMMON)
            runs = run_driver(topology, settings, copy.deepcopy(model), Singles())
            records, states = zip(*runs, strict=True)
            found[method] = states[-1].z
            assert_alike_on_all_ranks(states[-1].theta)
    assert (found["dense"] - found["powersgd"]).abs().max() < 1e-10
    assert states[-1].memory["residual"].abs().max() < 1e-10
    assert records[0]["bytes"]["payload"] < 0.6 * records[0]["bytes"]["dense"]
