"""Sets of blocks: which hold anything, packed and back, taken out and put back."""

import math

import pytest
import torch

from prunex_mpi.compress.quantise import pack_, unpack_
from prunex_mpi.compress.sparse import (
    block_count,
    find_nonzero_,
    new_bits,
    put_blocks_,
    take_blocks_,
)

# Elements and the size of a block: whole blocks only, one over, one short, less than a block.
SHAPES = [(64, 8), (65, 8), (63, 8), (5, 8), (8, 8), (37, 1), (37, 37)]


@pytest.mark.parametrize(("numel", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_block_is_found_by_any_of_its_elements(numel: int, size: int, dtype) -> None:
    count = math.ceil(numel / size)
    assert block_count(numel, size) == count
    bits = new_bits(numel, size, torch.device("cpu"))
    assert (bits.numel() % 8, bits.numel() - count < 8) == (0, True)
    find_nonzero_(torch.full((numel,), -0.0, dtype=dtype), size, bits)
    assert not bits.any()
    for value in (1e-45 if dtype == torch.float32 else 5e-324, -1.0, math.inf, math.nan):
        for i in range(numel):
            flat = torch.zeros(numel, dtype=dtype)
            flat[i] = value
            find_nonzero_(flat, size, bits)
            assert bits.nonzero().squeeze(1).tolist() == [i // size]


@pytest.mark.parametrize(("numel", "size"), SHAPES)
def test_bits_come_back_and_unite(numel: int, size: int) -> None:
    def draw(seed: int) -> torch.Tensor:
        bits = new_bits(numel, size, torch.device("cpu"))
        count = block_count(numel, size)
        bits[:count] = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.4
        return bits

    first, second = draw(1), draw(2)
    packed = [torch.full((1, first.numel() // 8), 7, dtype=torch.uint8) for _ in range(2)]
    for bits, bytes_ in zip((first, second), packed, strict=True):
        pack_(bits.view(torch.uint8)[None], 1, bytes_)
    found = torch.ones_like(first)
    unpack_(packed[0], 1, found.view(torch.uint8)[None])
    assert torch.equal(found, first)
    unpack_(packed[0] | packed[1], 1, found.view(torch.uint8)[None])
    assert torch.equal(found, first | second)


@pytest.mark.parametrize(("numel", "size"), SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("last", [False, True])
def test_chosen_blocks_travel_and_the_others_stay(numel, size, share, last) -> None:
    count = block_count(numel, size)
    wanted = torch.rand(count, generator=torch.Generator().manual_seed(3)) < share
    wanted[-1] = last
    chosen = wanted.nonzero().squeeze(1)
    flat = torch.arange(1.0, numel + 1)
    before = flat.clone()
    travels = wanted.repeat_interleave(size)[:numel]
    message = take_blocks_(flat, size, chosen, torch.full((numel,), 9.0))
    assert message.tolist() == before[travels].tolist()
    message.mul_(10)
    put_blocks_(flat, size, chosen, message)
    assert torch.equal(flat, torch.where(travels, 10 * before, before))
