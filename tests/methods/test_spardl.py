"""SparDL over MPI: the authors' schedule and residual with any number of workers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counting import Counting
from driving import COMMON, exchange_over, make_context, wire_of
from nets import RandomStream
from nodes import WORLD
from reference_rivals import spardl as oracle
from reference_rivals import spardl_rounds
from torch import nn

from mpi4py import MPI

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import spardl
from prunex_mpi.methods.exchange import RESIDUAL

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]


def gradient_of(rank: int, step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("workers", range(1, WORLD.size + 1))
# One element in the last block, or none at all; everything travels.
@pytest.mark.parametrize(("count", "ratio"), [(61, 0.1), (57, 0.4), (9, 0.2), (30, 1.0)])
def test_any_number_of_workers_does_what_the_authors_do(workers, count, ratio):
    settings = make(method="spardl", spardl_ratio=ratio, **COMMON)
    comm = WORLD.Split(0 if WORLD.rank < workers else MPI.UNDEFINED, key=WORLD.rank)
    if comm == MPI.COMM_NULL:
        return
    row = nn.Linear(count, 1, bias=False, dtype=torch.float64)
    context = make_context(settings, row, RandomStream(0, torch.float64))
    link = wire_of(Counting(comm))
    exchange, grad, memory = exchange_over(link, context), context.state.grad, {}
    residual = context.state.memory[RESIDUAL]
    for step in range(4):
        given = [gradient_of(rank, step, count) for rank in range(workers)]
        before = np.array([residual.sum(), 0.0])
        wanted = oracle([{"row": g} for g in given], memory, SimpleNamespace(**vars(settings)))
        grad.copy_(given[comm.rank])
        exchange.exchange_(grad)
        torch.testing.assert_close(grad, wanted["row"], rtol=1e-12, atol=1e-12)
        mine = torch.tensor(memory["residuals"][comm.rank], dtype=torch.float64)
        torch.testing.assert_close(residual, mine, rtol=1e-12, atol=1e-12)
        # What was there before is what has arrived and what is kept.
        kept = torch.empty_like(residual)
        comm.Allreduce(residual.numpy(), kept.numpy())
        sums = np.empty_like(before)
        comm.Allreduce(before, sums)
        torch.testing.assert_close(
            float(sums[0] + sum(given).sum()), float((grad + kept).sum()), rtol=1e-11, atol=1e-11
        )
        if ratio == 1:
            torch.testing.assert_close(grad, sum(given), rtol=1e-12, atol=1e-12)
            assert not residual.any()
    # Bounded whatever the ratio: twice the vector with its positions, never more for more workers.
    size, share = spardl.sizes_of(settings, count, workers)
    assert link.traffic.payload == 4 * workers * share * 12 <= 4 * 12 * (count + workers - 1 + size)
    assert link.traffic.sent == link.comm.sent == 4 * 2 * (workers - 1) * share * 12
    comm.Free()


@pytest.mark.parametrize("workers", range(1, 18))
def test_every_other_block_is_sent_once_in_rounds_that_double(workers):
    mine = spardl.rounds(workers, rank=3)
    assert [(r.start - 3, len(r)) for r in mine] == spardl_rounds(workers)
    assert len(mine) == int(np.ceil(np.log2(workers)))
    assert sorted(b % workers for r in mine for b in r) == sorted(
        b % workers for b in range(4, 3 + workers)
    )
