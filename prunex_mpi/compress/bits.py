"""Whole numbers of few bits in bytes, each row of numbers on its own.

A byte holds 8 / bits numbers, which lie a part of the row apart: parts are whole vectors, and
packing is a few passes over them.
"""

import torch
from torch import Tensor

# Numbers in a row are a multiple of this, so that rows of 1 bit fill whole bytes.
ROW = 8


def pack_(numbers: Tensor, bits: int, packed: Tensor) -> None:
    """Write `numbers` uint8 [rows, n] below 2^bits to `packed` uint8 [rows, n bits / 8].

    `bits` is 1, 2, 4 or 8, n a multiple of 8 / bits.
    """
    *others, last = _parts(numbers, bits)
    packed.copy_(last)
    for part in reversed(others):
        packed.mul_(1 << bits).add_(part)


def unpack_(packed: Tensor, bits: int, numbers: Tensor) -> None:
    """Read what `pack_` wrote."""
    for place, part in enumerate(_parts(numbers, bits)):
        torch.bitwise_right_shift(packed, place * bits, out=part)
        part.bitwise_and_((1 << bits) - 1)


def _parts(numbers: Tensor, bits: int) -> list[Tensor]:
    return list(numbers.chunk(8 // bits, dim=1))
