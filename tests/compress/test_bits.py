"""Numbers of few bits in bytes: what is packed comes back, and by hand."""

import pytest
import torch

from prunex_mpi.compress.quantise import ROW, pack_, unpack_


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "width"), [(1, ROW), (3, 5 * ROW), (2, 0)])
def test_what_is_packed_comes_back(bits: int, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 1 << bits, (rows, width), generator=generator).to(torch.uint8)
    packed = torch.full((rows, width * bits // 8), 255, dtype=torch.uint8)
    pack_(numbers, bits, packed)
    found = torch.full_like(numbers, 255)
    unpack_(packed, bits, found)
    assert torch.equal(found, numbers)


def test_parts_of_a_row_share_bytes() -> None:
    packed = torch.empty(1, 2, dtype=torch.uint8)
    pack_(torch.tensor([[0, 1, 2, 3, 1, 0, 2, 2]], dtype=torch.uint8), 2, packed)
    # Bytes hold numbers 0, 2, 4, 6 and 1, 3, 5, 7, the first in the lowest bits.
    assert packed.tolist() == [[0 + 4 * 2 + 16 * 1 + 64 * 2, 1 + 4 * 3 + 16 * 0 + 64 * 2]]
