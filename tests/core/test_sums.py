"""Sums in fewer bits over the leaders, against the same in NumPy and by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counting import Counting
from driving import assert_alike_on_all_ranks, wire_of
from nodes import NODE_SHAPES, WORLD, nodes_of
from pretended import GPU, pretended_gpu
from reference_payload import RECORD, coded_sum

from mpi4py import MPI

from prunex_mpi.base.units import ring_bytes
from prunex_mpi.comm.collectives import Transport, build_transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.traffic import Clock
from prunex_mpi.compress.quantise import PAYLOADS
from prunex_mpi.core.sums import (
    BLOCK,
    Counts,
    allocate_coded,
    bytes_handed_over,
    coded_bytes,
    first_blocks,
    goes_to_all,
    sum_coded_,
)

CODES = ("fp16", "bf16", "int8", "int4", "int2")
# Blocks: none, fewer than leaders, not a multiple of them, several buckets.
SIZES = (0, 1, 3, 7, 29)
# Of at most a few blocks each.
BUCKET_BYTES = 1024


def contribution(leader: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(leader)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    # Blocks of very different sizes, one of zeros.
    values.view(-1, BLOCK).mul_(10.0 ** (torch.arange(numel // BLOCK) % 7 - 3).unsqueeze(1))
    values[BLOCK : 2 * BLOCK] = 0
    return values.to(dtype)


@contextmanager
def several_nodes() -> Iterator[Topology]:
    with nodes_of(1) as topology:
        if topology.num_nodes == 1:
            pytest.skip("a node alone sends nothing")
        yield topology


def sum_up(
    topology: Topology, payload: str, blocks: int, dtype: torch.dtype, bucket_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and what is left over on this rank."""
    transport = Transport(bucket_bytes)
    values = contribution(topology.node_index, blocks * BLOCK, dtype)
    if not topology.is_leader:
        values.fill_(torch.nan)
    out = torch.full_like(values, torch.nan)
    coded = allocate_coded(payload, values, topology.num_nodes, transport)
    assert coded_bytes(payload, values.numel()) == blocks * RECORD[payload]
    sum_coded_(topology.leader, topology.node, coded, values, out, transport, Clock())
    return out, values


@pytest.mark.mpi
@pytest.mark.parametrize("payload", CODES)
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_sums_are_those_of_one_process(ranks_per_node, payload):
    with nodes_of(ranks_per_node) as topology:
        if topology.num_nodes == 1:
            pytest.skip("a node alone sends nothing")
        for blocks, dtype in [*((blocks, torch.float64) for blocks in SIZES), (29, torch.float32)]:
            check_sum(topology, payload, blocks, dtype)


def check_sum(topology: Topology, payload: str, blocks: int, dtype: torch.dtype) -> None:
    out, left = sum_up(topology, payload, blocks, dtype, BUCKET_BYTES)
    assert_alike_on_all_ranks(out)
    if not blocks:
        return
    parts = [contribution(i, out.numel(), torch.float64) for i in range(topology.num_nodes)]
    exact = np.sum([part.numpy() for part in parts], axis=0)
    # Nothing is lost: what came and what is left over are what there was.
    leads = topology.is_leader
    mine = left.double().numpy() if leads else np.zeros(out.numel())
    total = np.empty_like(mine)
    WORLD.Allreduce(mine, total)
    scale = np.abs(exact).reshape(-1, BLOCK).max(axis=1, keepdims=True) + 1e-30
    gap = (out.double().numpy() + total - exact).reshape(-1, BLOCK) / scale
    assert np.abs(gap).max() < 64 * torch.finfo(dtype).eps, blocks
    if dtype == torch.float64:
        expected, rests = coded_sum(parts, payload, BUCKET_BYTES)
        torch.testing.assert_close(out, expected.double(), rtol=1e-12, atol=1e-12)
        # The leader holds what is left over.
        if leads:
            rest = rests[topology.node_index].numpy()
            np.testing.assert_allclose(left.numpy(), rest, rtol=1e-9, atol=1e-12)
        else:
            assert left.isnan().all()


@pytest.mark.mpi
@pytest.mark.parametrize("payload", CODES)
def test_buckets_decide_only_who_adds_up(payload):
    with several_nodes() as topology:
        small, _ = sum_up(topology, payload, 29, torch.float32, 512)
        large, _ = sum_up(topology, payload, 29, torch.float32, 2**20)
        exact = sum(contribution(i, small.numel(), torch.float64) for i in range(WORLD.size))
        size = float(exact.view(-1, BLOCK).norm(dim=1).sum())
        gaps = [float((x - exact).view(-1, BLOCK).norm(dim=1).sum()) / size for x in (small, large)]
        assert max(gaps) < {"int2": 0.7, "int4": 0.25}.get(payload, 0.02)


@pytest.mark.mpi
@pytest.mark.parametrize("payload", CODES)
def test_buckets_coded_together_are_the_same_bits(payload):
    """As on a GPU, where the codes of all whole buckets are made at once."""
    with several_nodes() as topology:
        transport, longest = Transport(BUCKET_BYTES), contribution(0, 61 * BLOCK, torch.float32)
        room = allocate_coded(payload, longest, topology.num_nodes, transport)
        received = room.records.new_empty(room.records.shape)
        for blocks, together in ((1, 9), (29, 9), (61, 3), (61, 99)):
            found = []
            for coded in (room, replace(room, together=together, received=received)):
                values = contribution(topology.node_index, blocks * BLOCK, torch.float32)
                out = torch.full_like(values, torch.nan)
                ways = topology.leader, topology.node, first_blocks(coded, values)
                sum_coded_(*ways, values, out, transport, Clock())
                found.append((out, values))
            for apart, joined in zip(*found, strict=True):
                assert torch.equal(apart, joined)


@pytest.mark.mpi
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_gpu_is_waited_for_as_often_for_a_long_message(payload):
    with several_nodes() as topology:
        found = []
        for blocks in (40, 80):
            with pretended_gpu() as waits:
                ways = replace(build_transport(GPU, 1, "host"), bucket_bytes=BUCKET_BYTES), Clock()
                values = contribution(topology.node_index, blocks * BLOCK, torch.float32).to(GPU)
                coded = allocate_coded(payload, values, topology.num_nodes, ways[0])
                before, out = waits.copy(), torch.empty_like(values)
                sum_coded_(topology.leader, topology.node, coded, values, out, *ways)
                found.append(waits - before)
        assert found[0] == found[1]


@pytest.mark.mpi
@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("payload", CODES)
def test_what_is_counted_is_what_is_handed_to_mpi(payload, blocks):
    """Not padded to whole shares, and no call reaches farther than its bucket."""
    with nodes_of(1) as topology:
        leader = Counting(topology.leader)
        values = contribution(topology.node_index, blocks * BLOCK, torch.float32)
        ways = Transport(BUCKET_BYTES), Clock()
        coded = allocate_coded(payload, values, topology.num_nodes, ways[0])
        sum_coded_(leader, topology.node, coded, values, torch.empty_like(values), *ways)
        total = np.array([leader.sent])
        WORLD.Allreduce(MPI.IN_PLACE, total)
        nodes = topology.num_nodes
        operand = coded_bytes(payload, values.numel())
        assert total[0] == pytest.approx(2 * (nodes - 1) * operand)
        assert leader.farthest <= max(BUCKET_BYTES, nodes * coded.records.shape[1])


NUMEL = 101


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.parametrize(("up", "down"), [(1, 1), (1, 2), (2, 4), (2, 8), (2, 16)])
def test_sums_reach_everyone(up, down, monkeypatch):
    """By shares as well, where sending everything to all would do."""
    every = [
        torch.randint(0, 1 << up, (NUMEL,), generator=torch.Generator().manual_seed(rank))
        for rank in range(WORLD.size)
    ]
    wanted = sum(every)
    fits = int(wanted.max()) < 1 << down
    for to_all in {goes_to_all(WORLD.size, up, down), False} if fits else {True}:
        monkeypatch.setattr("prunex_mpi.core.sums.goes_to_all", lambda *_, way=to_all: way)
        link = wire_of(WORLD)
        counts = Counts(link, torch.empty(NUMEL), up, down)
        counts.numbers.view(-1)[:NUMEL].copy_(every[WORLD.rank])
        sums = counts.sum_()
        if not to_all:
            if down == 16:
                sums = sums.to(torch.int16)
            sums = counts.spread_(sums)
        found = sums.reshape(-1)[:NUMEL].to(torch.int64)
        assert torch.equal(found, wanted)
        assert_alike_on_all_ranks(found)
        assert link.traffic.payload == bytes_handed_over(NUMEL, WORLD.size, up, down)


def test_sums_of_many_workers_need_16_bits():
    """100 workers, all of whose numbers are 3."""
    link = SimpleNamespace(
        comm=SimpleNamespace(size=100),
        alltoall_=lambda mine, received: received.copy_(mine),
        gather_=lambda mine, everyone: everyone.copy_(mine),
    )
    counts = Counts(link, torch.empty(NUMEL), 2, 16)
    counts.numbers.fill_(3)
    sums = counts.sum_()
    # As lists: a byte would be compared with 300 modulo 256.
    assert not counts.to_all and set(sums.view(-1).tolist()) == {300}
    assert set(counts.spread_(sums).view(-1).tolist()) == {300}


def test_bytes_by_hand():
    # 2 shares of 408 numbers of a bit; 4 of 208 numbers, of which one goes on in 2 bits.
    assert bytes_handed_over(801, 2, 1, 2) == 102
    assert bytes_handed_over(801, 4, 1, 2) == 104 + 52
    assert ring_bytes(4, 104, passes=1) + ring_bytes(4, 4 * 52, passes=1) == 78 + 156
