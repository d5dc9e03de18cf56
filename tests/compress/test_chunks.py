"""The largest values of each chunk, in four levels and packed positions."""

import math

import pytest
import torch

from prunex_mpi.compress.chunks import (
    add_decoded_,
    build_chunks,
    encode_,
    kept_per_chunk,
    message_bytes,
    pack_bins,
    pack_positions,
    quantise,
    unpack_bins,
    unpack_positions,
)
from prunex_mpi.models.layout import Layout, Segment


def layout_of(*numels: int) -> Layout:
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    pairs = zip(numels, offsets, strict=True)
    return Layout(tuple(Segment("", (n,), at, n) for n, at in pairs), sum(numels))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 640])
def test_positions_take_twelve_bits_and_bins_two(count):
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(4096, (count,), generator=generator)
    packed = pack_positions(positions)
    assert packed.numel() == 3 * math.ceil(count / 2)
    assert torch.equal(unpack_positions(packed, count), positions)
    bins = torch.randint(4, (count,), generator=generator).to(torch.uint8)
    packed = pack_bins(bins)
    assert packed.numel() == math.ceil(count / 4)
    assert torch.equal(unpack_bins(packed, count), bins.long())


def test_positions_lie_as_their_bits_say():
    # 0xabc, 0x123: the low byte, then both middles, then the high byte of the second.
    assert pack_positions(torch.tensor([0xABC, 0x123])).tolist() == [0xBC, 0x3A, 0x12]
    # Bytes hold numbers 0, 2, 4 and 6, and 1, 3, 5 and 7, the first in the lowest bits.
    packed = pack_bins(torch.tensor([3, 0, 2, 1, 1], dtype=torch.uint8)).tolist()
    assert packed == [0b00011011, 0b00000100]


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
    chunks = build_chunks(layout, 1 / 64, flat, extra=6)
    message = torch.full((chunks.nbytes,), 255, dtype=torch.uint8)
    encode_(flat, chunks, message)
    sent = torch.zeros_like(flat)
    add_decoded_(message, chunks, sent)
    for segment in layout.segments:
        part = slice(segment.offset, segment.offset + segment.numel)
        values, found = flat[part], sent[part]
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
    assert message[chunks.extra : chunks.positions].tolist() == [255] * 6
    left = flat.clone()
    add_decoded_(message, chunks, left, -1.0)
    assert torch.equal(left, flat - sent)
    assert not torch.equal(sent, flat)


def test_the_bytes_of_a_message_are_those_counted_by_hand():
    # Two chunks send 64 values each, ten values travel without positions: 138 of 2 bits.
    layout = layout_of(5000, 10)
    count = 2 * 4 * 4 + 6 + 128 * 12 // 8 + math.ceil(138 / 4)
    assert message_bytes(layout, 1 / 64, 4, 6) == -(-count // 8) * 8
    assert build_chunks(layout, 1 / 64, torch.zeros(5010), 6).nbytes == -(-count // 8) * 8
    # Everything travels: no positions.
    everything = 2 * 4 * 4 + math.ceil(5010 / 4)
    assert message_bytes(layout, 1.0, 4, 0) == -(-everything // 8) * 8
    assert (kept_per_chunk(1 / 64), kept_per_chunk(1e-9), kept_per_chunk(0.1)) == (64, 1, 410)


@pytest.mark.parametrize("ratio", [1e-6, 1.0])
def test_a_vector_of_zeros_stays_inside_its_chunks(ratio):
    layout = layout_of(4097, 3)
    flat = torch.zeros(layout.numel)
    chunks = build_chunks(layout, ratio, flat, 0)
    message = torch.zeros(chunks.nbytes, dtype=torch.uint8)
    encode_(flat, chunks, message)
    add_decoded_(message, chunks, flat)
    assert not flat.any()


def test_weighted_values_have_weighted_levels():
    layout = layout_of(300)
    flat = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sent = []
    for weight in (1.0, 0.25):
        chunks = build_chunks(layout, 0.01, flat, 0)
        message = torch.zeros(chunks.nbytes, dtype=torch.uint8)
        encode_(weight * flat, chunks, message)
        sent.append(torch.zeros_like(flat))
        add_decoded_(message, chunks, sent[-1], 1 / weight)
    torch.testing.assert_close(*sent, rtol=1e-13, atol=1e-13)
