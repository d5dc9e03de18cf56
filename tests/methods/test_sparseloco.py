"""SparseLoCo's code, what it hands over, and that all ranks hold the same."""

import math

import pytest
import torch
from driving import assert_alike_on_all_ranks, run_driver
from nets import RandomStream, new_net
from nodes import NODE_SHAPES, WORLD, nodes_of

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import sparseloco
from prunex_mpi.methods.sparseloco import (
    add_decoded_,
    build_chunks,
    encode_,
    pack_positions,
    quantise,
    unpack_positions,
)
from prunex_mpi.models.layout import Layout, Segment

COMMON = {"outer_iterations": 3, "lr": 0.05, "lr_schedule": "constant", "bn": "average"}


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_bytes_are_those_that_are_foretold_and_all_ranks_hold_the_same(ranks_per_node):
    settings = make(method="sparseloco", sparseloco_ratio=1e-3, **COMMON)
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        for record, state in run_driver(topology, settings, new_net(torch.float32), stream, 2):
            assert_alike_on_all_ranks(state.z)
            assert_alike_on_all_ranks(state.stats)
            for module in state.bn_modules:
                assert_alike_on_all_ranks(module.running_var)
            each, _ = sparseloco.SparseLoco.payload(settings, state.layout, 4, state.stats.numel())
            counted = record["bytes"]
            if topology.is_leader:
                assert counted["payload"] == each
            nodes = topology.num_nodes
            if WORLD.rank == 0:
                # Each message goes around the ring once.
                assert counted["sent"] == (nodes - 1) * each
            if topology.node_size > 1:
                assert counted["intra"] > nodes * each
            left = state.memory[sparseloco.NOT_SENT]
            assert bool(left.any()) == topology.is_leader


def layout_of(*numels: int) -> Layout:
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    pairs = zip(numels, offsets, strict=True)
    return Layout(tuple(Segment("", (n,), at, n) for n, at in pairs), sum(numels))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 640])
def test_positions_take_twelve_bits(count):
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(4096, (count,), generator=generator)
    packed = pack_positions(positions)
    assert packed.numel() == 3 * math.ceil(count / 2)
    assert torch.equal(unpack_positions(packed, count), positions)


def test_positions_lie_as_their_bits_say():
    # 0xabc, 0x123: the low byte, then both middles, then the high byte of the second.
    assert pack_positions(torch.tensor([0xABC, 0x123])).tolist() == [0xBC, 0x3A, 0x12]


def test_levels_are_those_of_the_published_quantiser():
    """Bins of 1.5 standard deviations (n - 1) about the mean, computed by hand."""
    # Mean 0, deviation 2: 3 lies a step away, -1 a third of one.
    # Mean 10, deviation 10^(1/2), a step of 4.74: 0.84, 0.42, -0.42, -0.84 and 0 of it.
    values = torch.tensor([3.0, -1, -1, -1, 14, 12, 8, 6, 10, 5, 7, 7], dtype=torch.float64)
    tensors = torch.tensor([0] * 4 + [1] * 5 + [2] + [3] * 2)
    bins, levels = quantise(values, tensors, torch.tensor([4.0, 5, 1, 2], dtype=torch.float64))
    assert bins.tolist() == [3, 2, 2, 2, 3, 2, 2, 1, 2, 2, 2, 2]
    found = [levels[t, b].item() for t, b in zip(tensors, bins.long(), strict=True)]
    assert found == [3, -1, -1, -1, 14, 10, 10, 6, 10, 5, 7, 7]


def test_the_largest_of_each_chunk_travel_and_the_rest_stays():
    layout = layout_of(5000, 10, 64, 65, 8192)
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(layout.numel, generator=generator, dtype=torch.float64)
    chunks = build_chunks(layout, 1 / 64, flat, statistics=3)
    message = torch.full((chunks.parts.nbytes,), 255, dtype=torch.uint8)
    encode_(flat, chunks, message)
    sent = torch.zeros_like(flat)
    add_decoded_(message, chunks, sent)
    for segment in layout.segments:
        values, found = flat[segment.place], sent[segment.place]
        places = []
        for start in range(0, segment.numel, 4096):
            chunk = values[start : start + 4096].abs()
            largest = chunk.argsort(descending=True)[: min(64, chunk.numel())]
            places += (start + largest).tolist()
        assert sorted(found.nonzero().squeeze(1).tolist()) == sorted(places)
        levels = found[places].unique()
        assert levels.numel() <= 4
        for level in levels:
            mine = values[(found == level).nonzero().squeeze(1)]
            torch.testing.assert_close(level, mine.mean(), rtol=1e-13, atol=1e-13)
    # Others' bytes are left alone, and what is left is the rest, wherever it is computed.
    assert message[chunks.parts.statistics : chunks.parts.positions].tolist() == [255] * 6
    left = flat.clone()
    add_decoded_(message, chunks, left, -1.0)
    assert torch.equal(left, flat - sent)
    assert not torch.equal(sent, flat)


def test_the_bytes_of_a_message_are_those_counted_by_hand():
    # Two chunks send 64 values each, ten values travel without positions: 138 of 2 bits.
    layout = layout_of(5000, 10)
    count = 2 * 4 * 4 + 6 + 128 * 12 // 8 + math.ceil(138 / 4)
    like = torch.zeros(5010)
    assert build_chunks(layout, 1 / 64, like, 3).parts.nbytes == -(-count // 8) * 8
    # Everything travels: no positions.
    everything = 2 * 4 * 4 + math.ceil(5010 / 4)
    assert build_chunks(layout, 1.0, like, 0).parts.nbytes == -(-everything // 8) * 8


@pytest.mark.parametrize("ratio", [1e-6, 1.0])
def test_a_vector_of_zeros_stays_inside_its_chunks(ratio):
    layout = layout_of(4097, 3)
    flat = torch.zeros(layout.numel)
    chunks = build_chunks(layout, ratio, flat, 0)
    message = torch.zeros(chunks.parts.nbytes, dtype=torch.uint8)
    encode_(flat, chunks, message)
    add_decoded_(message, chunks, flat)
    assert not flat.any()


def test_weighted_values_have_weighted_levels():
    layout = layout_of(300)
    flat = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sent = []
    for weight in (1.0, 0.25):
        chunks = build_chunks(layout, 0.01, flat, 0)
        message = torch.zeros(chunks.parts.nbytes, dtype=torch.uint8)
        encode_(weight * flat, chunks, message)
        sent.append(torch.zeros_like(flat))
        add_decoded_(message, chunks, sent[-1], 1 / weight)
    torch.testing.assert_close(*sent, rtol=1e-13, atol=1e-13)
