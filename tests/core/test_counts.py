"""Sums of small whole numbers over MPI, by either way, and the bits that they take."""

import pytest
import torch
from driving import assert_alike_on_all_ranks, wire_of
from nodes import WORLD

from prunex_mpi.base.units import ring_bytes
from prunex_mpi.core.sums import (
    allocate_counts,
    bytes_handed_over,
    goes_to_all,
    spread_,
    sum_numbers_,
)

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

NUMEL = 101


@pytest.mark.parametrize(("up", "down"), [(1, 1), (1, 2), (2, 4), (2, 8), (2, 16)])
def test_sums_reach_everyone(up: int, down: int, monkeypatch) -> None:
    """By shares as well, where sending everything to all would do."""
    every = [
        torch.randint(0, 1 << up, (NUMEL,), generator=torch.Generator().manual_seed(rank))
        for rank in range(WORLD.size)
    ]
    wanted = sum(every)
    fits = int(wanted.max()) < 1 << down
    for to_all in {goes_to_all(WORLD.size, up, down), False} if fits else {True}:
        monkeypatch.setattr("prunex_mpi.core.sums.goes_to_all", lambda *_, way=to_all: way)
        wire = wire_of(WORLD)
        space = allocate_counts(wire, torch.empty(NUMEL), up, down)
        space["numbers"].view(-1)[:NUMEL].copy_(every[WORLD.rank])
        sums = sum_numbers_(wire, space, up)
        if not to_all:
            if down == 16:
                sums = sums.to(torch.int16)
            sums = spread_(wire, space, sums, down)
        found = sums.reshape(-1)[:NUMEL].to(torch.int64)
        assert torch.equal(found, wanted)
        assert_alike_on_all_ranks(found)
        assert wire.traffic.payload == bytes_handed_over(NUMEL, WORLD.size, up, down)


def test_the_way_that_takes_fewer_bits() -> None:
    """Per number (W - 1) up against (W - 1)/W (up + down)."""
    for workers in range(2, 40):
        for up, down in ((1, 1), (1, 2), (2, 4), (2, 8)):
            to_all = (workers - 1) * up
            by_shares = (workers - 1) * (up + down) / workers
            assert goes_to_all(workers, up, down) == (to_all <= by_shares)
    assert [goes_to_all(w, 2, 4) for w in (1, 2, 3, 4)] == [True, True, True, False]


def test_bytes_by_hand() -> None:
    # 2 shares of 408 numbers of a bit; 4 of 208 numbers, of which one goes on in 2 bits.
    assert bytes_handed_over(801, 2, 1, 2) == 102
    assert bytes_handed_over(801, 4, 1, 2) == 104 + 52
    assert ring_bytes(4, 104, passes=1) + ring_bytes(4, 4 * 52, passes=1) == 78 + 156
