"""Shares of vectors over MPI: dealt out, and added up in types that MPI doesn't know."""

import pytest
import torch
from driving import assert_alike_on_all_ranks, wire_of
from nodes import WORLD

from prunex_mpi.base.units import ring_bytes
from prunex_mpi.comm import collectives
from prunex_mpi.comm.collectives import Transport, build_transport, deal_, sum_halves_
from prunex_mpi.comm.traffic import Traffic

pytestmark = pytest.mark.mpi

CPU = torch.device("cpu")
TINY = 96  # bytes: less than what is sent, so that it is cut


def transports() -> list[Transport]:
    """Return the CPU's, and one that stages as it is done for a GPU."""
    memory = torch.empty(TINY, dtype=torch.uint8), torch.empty(TINY, dtype=torch.uint8)
    return [build_transport(CPU, TINY / 2**20, "host"), Transport(TINY, memory)]


def numbers(rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (WORLD.size, width), generator=generator)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("width", [0, 1, 23, 200])
def test_rows_go_to_the_ranks_of_their_number(width: int, staged: bool) -> None:
    mine = numbers(WORLD.rank, width).to(torch.uint8)
    received = torch.full_like(mine, 255)
    deal_(WORLD, mine, received, transports()[staged])
    wanted = [numbers(rank, width)[WORLD.rank] for rank in range(WORLD.size)]
    assert torch.equal(received.long(), torch.stack(wanted))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 23, 200])
def test_halves_are_added_in_float32_and_rounded_once(count: int, dtype, staged: bool) -> None:
    everyone = [(numbers(rank, count)[0] / 7).to(dtype) for rank in range(WORLD.size)]
    flat = everyone[WORLD.rank].clone()
    sum_halves_(WORLD, flat, transports()[staged])
    total = torch.zeros(flat.shape)
    for addend in everyone:
        total += addend
    assert torch.equal(flat, total.to(dtype))
    assert_alike_on_all_ranks(flat.float())


@pytest.mark.parametrize("far", [False, True])
def test_rows_that_reach_too_far_go_through_buckets(far: bool, monkeypatch) -> None:
    if far:
        monkeypatch.setattr(collectives, "FARTHEST", 22)
    test_rows_go_to_the_ranks_of_their_number(200, False)
    reach = collectives.within_reach(transports()[0], torch.empty(1, 23))
    assert (reach.staging is not None) == far


def test_a_sum_of_halves_counts_as_a_reduction_and_a_deal_as_one_pass() -> None:
    wire = wire_of(WORLD)
    wire.reduce_halves_(torch.ones(10, dtype=torch.float16))
    assert wire.traffic == Traffic(payload=20, sent=ring_bytes(WORLD.size, 20))
    wire.deal_(torch.ones(WORLD.size, 3), torch.ones(WORLD.size, 3))
    each = 12 * WORLD.size
    assert wire.traffic.payload == 20 + each
    assert wire.traffic.sent == ring_bytes(WORLD.size, 20) + ring_bytes(WORLD.size, each, passes=1)
