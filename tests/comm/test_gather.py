"""Gathering through buckets."""

import pytest
import torch
from nodes import WORLD

from prunex_mpi.comm import collectives
from prunex_mpi.comm.collectives import Transport, allgather_, allgatherv_, gather_counts

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("way", ["as it lies", "staged", "too far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 13, 64])
def test_every_rank_receives_what_every_rank_gave(count: int, dtype, way: str, monkeypatch) -> None:
    if way == "too far":
        monkeypatch.setattr(collectives, "FARTHEST", 12)
    room = 8 * 8 * WORLD.size
    staging = (torch.empty(room, dtype=torch.uint8), torch.empty(room, dtype=torch.uint8))
    # Pieces of 8 or 16 elements: 13 and 64 take several.
    transport = Transport(room, staging if way == "staged" else None)

    def given(rank: int) -> torch.Tensor:
        return (torch.arange(count) + 1000 * rank).to(dtype)

    mine = given(WORLD.rank)
    everyone = torch.full((WORLD.size, count), -1, dtype=dtype)
    allgather_(WORLD, mine, everyone, transport)
    assert torch.equal(everyone, torch.stack([given(r) for r in range(WORLD.size)]))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("most", [0, 1, 13])
def test_ranks_give_as_many_as_they_have(most: int, dtype, staged: bool) -> None:
    """The last rank has the most, and the first none where there is another."""

    def given(rank: int) -> torch.Tensor:
        return (torch.arange(most * (rank + 1) // WORLD.size) + 1000 * rank).to(dtype)

    wanted = torch.cat([given(rank) for rank in range(WORLD.size)])
    mine = given(WORLD.rank)
    counts = gather_counts(WORLD, mine.numel())
    assert counts == [given(rank).numel() for rank in range(WORLD.size)]
    room = 8 * max(1, wanted.numel())
    staging = (torch.empty(room, dtype=torch.uint8), torch.empty(room, dtype=torch.uint8))
    transport = Transport(room, staging if staged else None)
    everyone = torch.full((wanted.numel() + 3,), -1, dtype=dtype)
    allgatherv_(WORLD, mine, counts, everyone, transport)
    assert torch.equal(everyone[:-3], wanted)
    assert everyone[-3:].tolist() == [-1, -1, -1]
