"""Collectives on tensors against numpy: any size, dtype and node shape, staged or not."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from driving import assert_alike_on_all_ranks, wire_of
from nodes import NODE_SHAPES, WORLD, nodes_of, numbers, total

from mpi4py import MPI

from prunex_mpi.comm import collectives
from prunex_mpi.comm.agreement import gather_counts
from prunex_mpi.comm.collectives import (
    LEAST_SHARE_BYTES,
    MPI_TYPES,
    Transport,
    allgather_,
    allgatherv_,
    allreduce_,
    allreduce_halves_,
    allreduce_then_bcast_,
    alltoall_,
    alltoallv_,
    bcast_,
    between_nodes,
    buckets,
    build_transport,
    mpi_buffer,
    reduce_,
    staged,
    staged_parts,
)
from prunex_mpi.comm.traffic import Traffic

CPU = torch.device("cpu")
TINY = 104  # bytes, what 1e-4 MiB come to: 26 float32, 13 float64, 104 uint8
DTYPES = tuple(MPI_TYPES)
KINDS = ("direct", "staged", "staged together")
SIZES = (0, 1, 13, 26, 27, 104, 1000)


class NoCommunication:
    """A communicator of two ranks that must not be used."""

    size, rank = 2, 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: pytest.fail(f"MPI was entered: {name}")


def transport(kind: str, size: int = TINY) -> Transport:
    """Return the transport of the CPU, or one that stages as it is done for a GPU.

    One bucket at a time, or two and a half: whole buckets alone are staged.
    """
    if kind == "direct":
        return build_transport(CPU, size / 2**20, "host")
    room = size if kind == "staged" else size * 5 // 2
    return Transport(size, (torch.empty(room).byte(), torch.empty(room).byte()))


def test_buckets_of_the_transport():
    assert build_transport(CPU, 32.0, "host") == Transport(32 * 2**20)
    assert build_transport(CPU, 1e-4, "host").bucket_bytes == TINY
    assert build_transport(CPU, 1e-9, "host").bucket_bytes == 8
    flat = torch.arange(30.0)
    pieces = list(buckets(flat, Transport(TINY)))
    assert [p.numel() for p in pieces] == [26, 4]
    assert pieces[1].data_ptr() == flat[26:].data_ptr()
    assert [p.numel() for p in buckets(flat.double()[:3], Transport(8))] == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mpi_works_on_the_tensors_own_memory(dtype):
    tensor = torch.zeros(9, dtype=dtype)[2:7]
    memory, kind = mpi_buffer(tensor)
    assert np.shares_memory(memory, tensor.numpy())
    assert memory.nbytes == 5 * kind.Get_size()
    assert kind.Get_size() == tensor.element_size()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("kind", KINDS)
def test_unsafe_dtypes_are_refused_before_mpi_is_entered(dtype, kind):
    tensor = torch.ones(40, dtype=dtype)
    calls = [
        lambda comm: mpi_buffer(tensor),
        lambda comm: allreduce_(comm, tensor, transport(kind)),
        lambda comm: bcast_(comm, tensor, transport(kind)),
        lambda comm: reduce_(comm, tensor, transport(kind)),
        lambda comm: allreduce_then_bcast_(comm, comm, tensor, transport(kind)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=str(dtype)):
            call(NoCommunication())


def test_scattered_tensors_are_refused_before_mpi_is_entered():
    tensor = torch.ones(80)[::2]
    for call in (allreduce_, bcast_, reduce_):
        with pytest.raises(ValueError, match="contiguous"):
            call(NoCommunication(), tensor, transport("direct"))
    with pytest.raises(ValueError, match="contiguous"):
        mpi_buffer(torch.ones(4, 6).T)


def test_one_rank_alone_communicates_nothing():
    class Alone(NoCommunication):
        size = 1

    tensor = torch.arange(40.0)
    for kind in KINDS:
        allreduce_(Alone(), tensor, transport(kind))
        bcast_(Alone(), tensor, transport(kind))
        reduce_(Alone(), tensor, transport(kind))
        allreduce_then_bcast_(Alone(), Alone(), tensor, transport(kind))
    assert torch.equal(tensor, torch.arange(40.0))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_sums_every_element_and_nothing_else(dtype, kind):
    how = transport(kind)
    for size in SIZES:
        # Neighbours in the same memory must stay what they are.
        memory = torch.full((size + 2,), 77, dtype=dtype)
        flat = memory[1:-1]
        flat.copy_(numbers(WORLD.rank, size, dtype))
        allreduce_(WORLD, flat, how)
        assert torch.equal(flat, total(size, dtype))
        assert memory[0] == memory[-1] == 77


@pytest.fixture
def three() -> Iterator[MPI.Comm]:
    """The first three ranks, where there are as many, and what is left of four."""
    comm = WORLD.Split(WORLD.rank // 3, key=WORLD.rank)
    yield comm
    comm.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_large_sums_of_three_ranks_are_right(dtype, kind, three):
    first = WORLD.rank // 3 * 3
    large = LEAST_SHARE_BYTES * three.size
    how = transport(kind, 2 * large)
    # The last bucket is a little smaller than what goes by shares, as large, in uneven shares.
    for nbytes in (large - 8, large, 3 * large + 20, 3 * large + 4 * (three.size - 1)):
        flat = numbers(WORLD.rank, nbytes // dtype.itemsize, dtype)
        wanted = total(flat.numel(), dtype, range(first, first + three.size))
        again = flat.clone()
        allreduce_(three, flat, how)
        assert torch.equal(flat, wanted)
        ranks = range(first, first + three.size)
        largest = torch.stack([numbers(r, flat.numel(), dtype) for r in ranks]).amax(0)
        flat = numbers(WORLD.rank, flat.numel(), dtype)
        allreduce_(three, flat, how, MPI.MAX)
        assert torch.equal(flat, largest)
        allreduce_then_bcast_(three, MPI.COMM_SELF, again, how)
        assert torch.equal(again, wanted)


@pytest.mark.mpi(min_size=3)
def test_large_sums_of_three_ranks_have_the_same_bits(three):
    values = torch.rand(2 * LEAST_SHARE_BYTES, generator=torch.Generator().manual_seed(WORLD.rank))
    allreduce_(three, values, Transport(2**20))
    everyone = torch.empty(three.size, values.numel())
    three.Allgather(values.numpy(), everyone.numpy())
    assert torch.equal(everyone, values.expand_as(everyone))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_adds_up_on_the_first_alone(dtype, kind):
    how = transport(kind)
    for size in SIZES:
        flat = numbers(WORLD.rank, size, dtype)
        reduce_(WORLD, flat, how)
        wanted = numbers(WORLD.rank, size, dtype) if WORLD.rank else total(size, dtype)
        assert torch.equal(flat, wanted)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bcast_copies_the_first(dtype, kind):
    how = transport(kind)
    for size in SIZES:
        flat = numbers(WORLD.rank, size, dtype)
        bcast_(WORLD, flat, how)
        assert torch.equal(flat, numbers(0, size, dtype))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_leaders_sum_reaches_every_rank_of_every_node(ranks_per_node, kind):
    leaders = range(0, WORLD.size, min(ranks_per_node, WORLD.size))
    how = transport(kind)
    with nodes_of(ranks_per_node) as topology:
        for dtype in (torch.float32, torch.float64):
            for size in SIZES:
                flat = numbers(WORLD.rank - topology.node.rank, size, dtype)
                if not topology.is_leader:
                    flat.fill_(torch.nan)
                allreduce_then_bcast_(topology.leader, topology.node, flat, how)
                assert torch.equal(flat, total(size, dtype, leaders))


def test_pieces_are_staged_together_and_cut_as_if_they_were_not():
    flat = torch.arange(26.0)
    way = transport("staged together", 40)
    stretches = []
    for operand in staged(flat, way):
        stretches.append([piece.tolist() for piece in buckets(operand, way)])
        operand += 1
    assert [len(pieces) for pieces in stretches] == [2, 1]
    assert list(chain(*stretches)) == [p.tolist() for p in torch.arange(26.0).split(10)]
    assert flat.equal(torch.arange(26.0) + 1)


def test_the_next_part_is_copied_while_one_is_reduced():
    """And the stream waits for its values before, but not the caller."""
    way, begun = transport("staged", 40), []
    flat = torch.arange(25.0)
    parts = [flat[:8], flat[8:20], flat[20:]]
    ready = [partial(begun.append, number) for number in range(3)]
    found = []
    for operand, last in staged_parts(parts, ready, way):
        ahead = next(t for t in way.staging if t.data_ptr() != operand.data_ptr())
        found.append((operand.tolist(), list(begun), last))
        if not last:
            place = sum(len(values) for values, *_ in found)
            assert ahead[:4].view(torch.float32) == flat[place]
        operand.add_(100)
    assert [begun for _, begun, _ in found] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [last for *_, last in found] == [False, False, False, True]
    # Stretches are those of each part alone: so MPI adds up as if they came one by one.
    assert [len(values) for values, *_ in found] == [8, 10, 2, 5]
    assert torch.equal(flat, torch.arange(25.0) + 100)
    begun.clear()
    for _ in staged_parts(parts, ready, transport("direct", 40)):
        found.append(len(begun))
    assert found[-3:] == [1, 2, 3]


def test_what_is_staged_is_copied_where_it_is_wanted():
    way = transport("staged", 40)
    flat = torch.arange(26.0)
    for operand in staged(flat, way, fetch=False):
        operand.fill_(7)
    assert flat.equal(torch.full((26,), 7.0))
    for operand in staged(flat, way, back=False):
        assert operand.eq(7).all()
        operand.fill_(8)
    assert flat.equal(torch.full((26,), 7.0))


def test_pieces_between_nodes_grow_with_them():
    whole = build_transport(torch.device("cpu"), 1.0, "host")
    assert between_nodes(whole, 3) is whole
    pieces = build_transport(torch.device("cpu"), 1.0, "host", 60)
    assert pieces.bucket_bytes == 2**20
    assert between_nodes(pieces, 2).bucket_bytes == 2 * 60 * 1024
    assert between_nodes(pieces, 64).bucket_bytes == 2**20
    assert between_nodes(pieces, 2).staging is pieces.staging


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["as it lies", "staged", "too far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 13, 64])
def test_every_rank_receives_what_every_rank_gave(count, dtype, way, monkeypatch):
    if way == "too far":
        monkeypatch.setattr(collectives, "FARTHEST", 12)
    # Pieces of 8 or 16 elements: 13 and 64 take several.
    how = transport("staged" if way == "staged" else "direct", 8 * 8 * WORLD.size)

    def given(rank: int) -> torch.Tensor:
        return (torch.arange(count) + 1000 * rank).to(dtype)

    mine = given(WORLD.rank)
    everyone = torch.full((WORLD.size, count), -1, dtype=dtype)
    allgather_(WORLD, mine, everyone, how)
    assert torch.equal(everyone, torch.stack([given(r) for r in range(WORLD.size)]))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("most", [0, 1, 13])
def test_ranks_give_as_many_as_they_have(most, dtype, kind):
    """The last rank has the most, and the first none where there is another."""

    def given(rank: int) -> torch.Tensor:
        return (torch.arange(most * (rank + 1) // WORLD.size) + 1000 * rank).to(dtype)

    wanted = torch.cat([given(rank) for rank in range(WORLD.size)])
    mine = given(WORLD.rank)
    counts = gather_counts(WORLD, mine.numel())
    assert counts == [given(rank).numel() for rank in range(WORLD.size)]
    how = transport(kind, 8 * max(1, wanted.numel()))
    everyone = torch.full((wanted.numel() + 3,), -1, dtype=dtype)
    allgatherv_(WORLD, mine, counts, everyone, how)
    assert torch.equal(everyone[:-3], wanted)
    assert everyone[-3:].tolist() == [-1, -1, -1]


SMALL = 96  # bytes: less than what is sent, so that it is cut


def whole_numbers(rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (WORLD.size, width), generator=generator)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("width", [0, 1, 23, 200])
def test_rows_go_to_the_ranks_of_their_number(width, kind):
    mine = whole_numbers(WORLD.rank, width).to(torch.uint8)
    received = torch.full_like(mine, 255)
    alltoall_(WORLD, mine, received, transport(kind, SMALL))
    wanted = [whole_numbers(rank, width)[WORLD.rank] for rank in range(WORLD.size)]
    assert torch.equal(received.long(), torch.stack(wanted))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("width", [0, 1, 5])
def test_any_number_of_elements_goes_to_each_rank(width, kind):
    def given(source: int, to: int) -> torch.Tensor:
        """Return what one rank has for another: a different number for each pair."""
        return torch.arange(width * (source + 2 * to)) + 100 * source + 10 * to

    ranks = range(WORLD.size)
    leaving, arriving = (
        [given(*pair) for pair in pairs]
        for pairs in (
            [(WORLD.rank, rank) for rank in ranks],
            [(rank, WORLD.rank) for rank in ranks],
        )
    )
    received = torch.full((sum(map(len, arriving)),), -1)
    counts = [len(part) for part in leaving], [len(part) for part in arriving]
    how = transport(kind, SMALL)
    alltoallv_(WORLD, torch.cat(leaving), counts[0], received, counts[1], how)
    assert torch.equal(received, torch.cat(arriving))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 23, 200])
def test_halves_are_added_in_float32_and_rounded_once(count, dtype, kind):
    everyone = [(whole_numbers(rank, count)[0] / 7).to(dtype) for rank in range(WORLD.size)]
    flat = everyone[WORLD.rank].clone()
    allreduce_halves_(WORLD, flat, transport(kind, SMALL))
    total = torch.zeros(flat.shape)
    for addend in everyone:
        total += addend
    assert torch.equal(flat, total.to(dtype))
    assert_alike_on_all_ranks(flat.float())


@pytest.mark.mpi
@pytest.mark.parametrize("far", [False, True])
def test_rows_that_reach_too_far_go_through_buckets(far, monkeypatch):
    if far:
        monkeypatch.setattr(collectives, "FARTHEST", 22)
    test_rows_go_to_the_ranks_of_their_number(200, "direct")
    reach = collectives.staged_if_far(transport("direct", SMALL), torch.empty(1, 23))
    assert (reach.staging is not None) == far


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("distance", range(1, WORLD.size))
def test_what_is_shifted_comes_from_as_far_behind(distance, kind):
    """Many buckets, each rank to one ahead and from one behind."""
    mine = torch.arange(100, dtype=torch.float64) + 1000 * WORLD.rank
    received = torch.empty_like(mine)
    to, source = ((WORLD.rank + step) % WORLD.size for step in (distance, -distance))
    link = wire_of(WORLD, transport(kind, SMALL))
    link.sendrecv_(mine, to, received, source)
    assert torch.equal(received, torch.arange(100, dtype=torch.float64) + 1000 * source)
    assert link.traffic == Traffic(payload=800, sent=800)
