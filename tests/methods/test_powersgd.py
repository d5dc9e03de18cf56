"""PowerSGD over MPI: exact where the gradient's rank allows it, the same on all ranks."""

import copy

import pytest
import torch
from driving import (
    COMMON,
    SHAPES,
    assert_alike_on_all_ranks,
    exchange_over,
    make_context,
    run_driver,
    wire_of,
)
from nets import RandomStream
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import RunContext

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


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES)
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
    assert states[-1].memory["own.residual"].abs().max() < 1e-10
    assert records[0]["bytes"]["payload"] < 0.6 * records[0]["bytes"]["dense"]


def three_by_three(rank: int) -> RunContext:
    """Return a worker's work on a matrix of 3 x 3 and three biases."""
    settings = make(method="powersgd", powersgd_rank=rank, **COMMON)
    model = nn.Sequential(nn.Linear(3, 3)).double()
    return make_context(settings, model, RandomStream(0, torch.float64))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Make columns orthonormal one after the other, as the authors' orthogonalize() does."""
    columns = []
    for column in matrix.T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def test_the_authors_reducer_takes_the_same_steps():
    """RankKReducer of epfml/powersgd, paper-code: what its memory lacks is everyone's mean.

    All is linear in the sum of the memories, so that what arrives is the same. The newer package
    and Algorithm 2 subtract a worker's own part, as here.
    """
    context = three_by_three(1)
    exchange, state = exchange_over(wire_of(WORLD), context), context.state
    generator = torch.Generator().manual_seed(4)
    query = state.memory["shared.right_factors"].view(3, 1).clone()
    memories = [torch.zeros(3, 3, dtype=torch.float64) for _ in range(WORLD.size)]
    for _ in range(4):
        gradients = torch.randn(WORLD.size, 12, generator=generator, dtype=torch.float64)
        state.grad.copy_(gradients[WORLD.rank] / WORLD.size)
        exchange.exchange_(state.grad)
        sent = [g[:9].view(3, 3) + m for g, m in zip(gradients, memories, strict=True)]
        left = orthogonalised(sum(m @ query for m in sent))
        query = sum(m.T @ left for m in sent) / WORLD.size
        out = left @ query.T
        memories = [m - out for m in sent]
        wanted = torch.cat([out.reshape(-1), gradients[:, 9:].mean(0)])
        torch.testing.assert_close(state.grad, wanted, rtol=1e-10, atol=1e-11)
    assert_alike_on_all_ranks(state.grad)
