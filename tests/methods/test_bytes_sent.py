"""The bytes that exchanges count are those that MPI is handed, and those that are foretold."""

import numpy as np
import pytest
import torch
from counting import Counting
from driving import COMMON, exchange_over, make_context, wire_of
from nets import RandomStream, new_net
from nodes import WORLD

from mpi4py import MPI

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import declared
from prunex_mpi.methods.exchanges import exchange_of, metadata_bytes

pytestmark = pytest.mark.mpi

SIZE = WORLD.size
METHODS = {
    "dgc": {"dgc_ratio": 0.1, "dgc_warmup_epochs": 0},
    "omnireduce": {"omnireduce_block_size": 16, "omnireduce_block_ratio": 0.2},
    "adacgd": {},
}
# All others as they are by default; what a step of pactrain sends is told by those before it.
OTHERS = [
    m
    for m in declared.METHODS
    if m.per_step and not exchange_of(m).plain_mean and m.name != "pactrain"
]
METHODS |= {m.name: {} for m in OTHERS if m.name not in METHODS}
# Those of which the most that a step sends is foretold; adacgd's first step is dense.
AT_MOST = ("dgc", "adacgd", "parallax", "embrace")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_counted_is_what_is_sent(method):
    settings = make(method=method, **COMMON, **METHODS[method])
    model = new_net(torch.float32, method)
    context = make_context(settings, model, RandomStream(0, torch.float32))
    context.problem.train.steps_per_epoch = 2
    link = wire_of(Counting(WORLD))
    exchange = exchange_over(link, context)
    foretold, _ = exchange.payload(settings, context.state.layout, 4, SIZE)
    for step in range(3):
        context.state.position.step = step
        generator = torch.Generator().manual_seed(10 * step + WORLD.rank)
        context.state.grad.copy_(
            torch.randn(context.state.grad.numel(), generator=generator) / SIZE
        )
        before = link.traffic.payload
        exchange.exchange_(context.state.grad)
        handed_over = link.traffic.payload - before
        if method not in AT_MOST:
            assert handed_over == foretold
        elif step or method != "adacgd":
            assert handed_over <= foretold
    if SIZE == 1:
        # One rank sends nothing.
        return
    context.state.position.steps_done = 3
    counted = {"payload": link.traffic.payload, "mask": link.traffic.mask}
    assert metadata_bytes(settings, context.state, counted, rounds=0) == link.comm.positions
    # What a rank sends of elements that not all have as many of is counted as their mean.
    totals = np.array([link.comm.sent, link.traffic.sent])
    WORLD.Allreduce(MPI.IN_PLACE, totals)
    # Each count is rounded down.
    assert totals[1] <= totals[0] <= totals[1] + 3 * SIZE * 8
    assert totals[0] > 100
