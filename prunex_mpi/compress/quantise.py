"""Quantisation: block codes of 2 to 16 bits, packed integers of few bits, ternary numbers.

A vector is coded in blocks of 128 values, each block a record of bytes.

A record of int8, int4 or int2 is the block's scale s in bfloat16, which has the range of float32,
and then the codes. What a code decodes to is a small integer times s. That product of at most 16
bits is exact in float32, so that the same bytes decode to the same bits on every processor, whether
or not it fuses the multiplication with an addition.

int8 and int4: integers up to 127 and 7, s = max|v| / 127 and / 7. s is rounded to nearest, by at
most 2^-9 of itself: the largest value becomes at most 127.25 or 7.02 times s, which rounds to 127
and 7, so nothing has to be clamped. s is at least 2^-126, so that 1 / s is finite and a block of
zeros needs no case of its own.

int2: the nearest of +-20 s and +-68 s, with s = 0.0225 times the block's root mean square: 0.45 and
1.53 standard deviations, where Lloyd and Max have 0.4528 and 1.510 for a Gaussian. A refit by least
squares would win 1 to 2 % of the squared error; |v - decoded|^2 <= 0.95 |v|^2 always. For with x =
|v| / 20 s the square falls by (20 s)^2 f(x) per value, f(x) = 2x - 1 below 2.2 and 6.8x - 11.56
above; of blocks with the same sum of x^2 one with a single value has the least sum of f, above 0.

Everything passes through a tile of values that stays in the cache. int4 pairs the first half of a
block with its second half, one byte being lo + 16 hi; int2 puts four neighbours into a byte by way
of the int32 that holds them on a little-endian processor.

Packed integers: a byte holds 8 / bits numbers, which lie a part of the row apart. Parts are whole
vectors, and packing is a few passes over them.

Ternary numbers, -1, 0 or 1 times a scale that all workers share (TernGrad, Wen et al. 2017, Eq. 1
to 4): an element becomes its sign with probability |g| / s and 0 otherwise, s = max|g| over all
workers. Its expectation is g, and since s is shared the integers of all workers add up as they are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import threshold_

BLOCK = 128
PAYLOADS = ("fp16", "bf16", "int8", "int4", "int2")

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_LARGEST = {"int8": 127, "int4": 7}
_SCALE_BYTES = 2
# Per thread of the CPU: two tiles of float32 stay in a cache of 1 MiB.
_TILE_BLOCKS = 1024
# The smallest normal number of float32 and of bfloat16.
_TINY = 2.0**-126
_NORM_TO_INT2 = 0.45 / 20 / BLOCK**0.5
# Between 20 and 68, where int2 changes from one level to the other.
_INT2_MIDDLE = 44
# Squares of float32 lose their precision below: such blocks are left to error feedback.
_SMALLEST_INT2 = 2e-19


def record_bytes(payload: str) -> int:
    """Return the bytes of one block of 128 values, its scale included."""
    if payload in _FLOATS:
        return BLOCK * _FLOATS[payload].itemsize
    return _SCALE_BYTES + BLOCK * _BITS[payload] // 8


def encode_(values: Tensor, records: Tensor, payload: str) -> None:
    """Write the codes of `values` to `records`; `values` become what rounding has left over.

    `values` is [n], float32 or float64, contiguous, n a multiple of 128; `records` is uint8
    [n / 128, record_bytes(payload)] and begins at an even byte. Where blocks lie apart they are
    [buckets, blocks, 128] and [buckets, blocks, record_bytes(payload)]. A block with a value that
    is not finite decodes to values of which some are not. int2 leaves blocks with a root mean
    square below 1e-17 as they are, and takes values above 1e18 for infinite.
    """
    if payload in _FLOATS:
        for block, spare, numbers in _tiles(values, records.view(_FLOATS[payload])):
            _encode_floats_(block, numbers, spare)
        return
    twos = values.new_full((1, BLOCK), 2.0)
    for block, spare, scales, codes in _tiles(values, *_parts(records)):
        if payload == "int2":
            _encode_int2_(block, scales, codes, spare, twos)
        else:
            _encode_by_maxima_(block, scales, codes.view(torch.int8), payload, spare)


def decode_(records: Tensor, out: Tensor, payload: str) -> None:
    """Set `out` to what `records` stand for; shapes and dtypes as in `encode_`.

    Elementwise in records: any range of them decodes on its own to the same bits.
    """
    if payload in _FLOATS:
        out.view(-1, BLOCK).copy_(records.view(_FLOATS[payload]))
        return
    for block, spare, scales, codes in _tiles(out, *_parts(records)):
        scale = scales.to(out.dtype)
        for columns, integers in _integers(codes, payload, spare):
            torch.mul(integers, scale, out=block[..., columns])


def add_decoded_(records: Tensor, out: Tensor, payload: str) -> None:
    """Add what `records` stand for to `out`; shapes and dtypes as in `encode_`."""
    if payload in _FLOATS:
        for block, spare, numbers in _tiles(out, records.view(_FLOATS[payload])):
            block.add_(spare.copy_(numbers))
        return
    for block, spare, scales, codes in _tiles(out, *_parts(records)):
        scale = scales.to(out.dtype)
        for columns, integers in _integers(codes, payload, spare):
            block[..., columns].addcmul_(integers, scale)


def _parts(records: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales [..., 1] in bfloat16 and the bytes of the codes of `records`."""
    return records[..., :_SCALE_BYTES].view(torch.bfloat16), records[..., _SCALE_BYTES:]


def _tiles(values: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk the blocks of `values` by tiles: [rows, 128], room for as many, and rows of `others`.

    The room is made here, once per call, since two threads may be at it at once. One tile holds
    everything on a GPU, and where blocks lie apart.
    """
    if values.dim() > 2:
        if values.numel():
            yield values, values.new_empty(values.shape), *others
        return
    blocks = values.view(-1, BLOCK)
    size = max(1, len(blocks))
    if blocks.device.type == "cpu":
        size = min(size, _TILE_BLOCKS * torch.get_num_threads())
    spare = blocks.new_empty(size, BLOCK)
    # Split at once: views cost as much as the arithmetic on a small tensor.
    for tile, *rest in zip(*(tensor.split(size) for tensor in (blocks, *others)), strict=True):
        if len(tile):
            yield tile, spare[: len(tile)], *rest


def _encode_floats_(values: Tensor, numbers: Tensor, spare: Tensor) -> None:
    if numbers.dtype == torch.float16:
        # Clamped, so that error feedback carries the rest; 0 * inf and 0 * nan are nan.
        largest = torch.finfo(torch.float16).max
        numbers.copy_(torch.clamp(values, -largest, largest, out=spare).add_(values, alpha=0))
    else:
        numbers.copy_(values)
    values.sub_(spare.copy_(numbers))


def _encode_by_maxima_(
    values: Tensor, scales: Tensor, codes: Tensor, payload: str, spare: Tensor
) -> None:
    scale = torch.amax(torch.abs(values, out=spare), -1, keepdim=True)
    # As it is written.
    scale.copy_(scales.copy_(scale.mul_(1 / _LARGEST[payload]).clamp_min_(_TINY)))
    torch.mul(values, scale.reciprocal(), out=spare).round_()
    values.addcmul_(spare, scale, value=-1)
    if payload == "int4":
        low, high = spare.split(BLOCK // 2, dim=-1)
        spare = low.add_(high, alpha=16)
    codes.copy_(spare)


def _encode_int2_(
    values: Tensor, scales: Tensor, codes: Tensor, spare: Tensor, twos: Tensor
) -> None:
    scale = torch.linalg.vector_norm(values, dim=-1, keepdim=True).mul_(_NORM_TO_INT2)
    scale.copy_(scales.copy_(threshold_(scale, _SMALLEST_INT2, 0.0)))
    # v / middle + 2 is truncated to an integer of at most 13 (a value is at most 11.4 times the
    # root mean square), and limited to 0 to 3 where that is cheap, in a byte.
    inverse = scale.clamp_min(_TINY).reciprocal_()
    torch.addcmul(twos, values, inverse, value=1 / _INT2_MIDDLE, out=spare)
    fours = spare.to(torch.int8).clamp_(0, 3).view(torch.int32)
    # Times 2^24, 2^18, 2^12 and 2^6 the two bits of four bytes meet in the highest one.
    codes.copy_((fours * 0x01041040).bitwise_right_shift_(24))
    values.addcmul_(spare.copy_(_int2_levels_(fours)), scale, value=-1)


def _int2_levels_(fours: Tensor) -> Tensor:
    """Turn the bytes 0 to 3 of int32 into -68, -20, 20 and 68, and return them as int8.

    Times 84 = 64 + 16 + 4 the two bits stand in a byte three times, and need only be flipped:
    00000000, 01010000, 10101000 and 11111000 become 10111100, 11101100, 00010100 and 01000100.
    """
    fours.mul_(84).bitwise_and_(_in_all_bytes(0xF8)).bitwise_xor_(_in_all_bytes(0xBC))
    return fours.view(torch.int8)


def _in_all_bytes(byte: int) -> int:
    return int.from_bytes(bytes([byte]) * 4, "little", signed=True)


def _integers(codes: Tensor, payload: str, spare: Tensor) -> list[tuple[slice, Tensor]]:
    """Return the integers of `codes` by columns of the blocks, in the memory of `spare`."""
    everything, half = slice(None), BLOCK // 2
    if payload == "int8":
        return [(everything, spare.copy_(codes.view(torch.int8)))]
    if payload == "int4":
        low, high = spare.view(2, *codes.shape)
        low.copy_(codes.view(torch.int8))
        torch.mul(low, 1 / 16, out=high).round_()
        low.sub_(high, alpha=16)
        return [(slice(0, half), low), (slice(half, BLOCK), high)]
    # Nibbles 16 bits apart, then pairs of bits in bytes.
    fours = codes.to(torch.int32, memory_format=torch.contiguous_format)
    fours.mul_(1 + (1 << 12)).bitwise_and_(0x000F000F)
    fours.mul_(1 + (1 << 6)).bitwise_and_(_in_all_bytes(3))
    return [(everything, spare.copy_(_int2_levels_(fours)))]


# Numbers in a row are a multiple of this, so that rows of 1 bit fill whole bytes.
ROW = 8


def pack_(numbers: Tensor, bits: int, packed: Tensor) -> None:
    """Write `numbers` uint8 [rows, n] below 2^bits to `packed` uint8 [rows, n bits / 8].

    `bits` is 1, 2, 4 or 8, n a multiple of 8 / bits.
    """
    *others, last = numbers.chunk(8 // bits, dim=1)
    packed.copy_(last)
    for part in reversed(others):
        packed.mul_(1 << bits).add_(part)


def unpack_(packed: Tensor, bits: int, numbers: Tensor) -> None:
    """Read what `pack_` wrote."""
    for place, part in enumerate(numbers.chunk(8 // bits, dim=1)):
        torch.bitwise_right_shift(packed, place * bits, out=part)
        part.bitwise_and_((1 << bits) - 1)


def integer_type(workers: int) -> torch.dtype:
    """Return the smallest integer type that holds the sum of -1, 0 and 1 of so many workers."""
    kinds = (torch.int8, torch.int16)
    return next((t for t in kinds if workers <= torch.iinfo(t).max), torch.int32)


def ternarise_(
    values: Tensor,
    scale: Tensor,
    draws: Tensor,
    spare: tuple[Tensor, Tensor],
    out: Tensor,
    generator: torch.Generator | None = None,
) -> None:
    """Set the integers `out` to the signs of `values` with probability |values| / scale, else 0.

    All are [n]; `scale` is a scalar. `draws` (values' dtype) and two `spare` bool tensors are
    overwritten. Without `generator` it draws from torch's global one, which checkpoints hold.
    """
    up, down = spare
    draws.uniform_(generator=generator).mul_(scale)
    torch.gt(values, draws, out=up)
    torch.lt(values, draws.neg_(), out=down)
    torch.sub(up.view(torch.int8), down.view(torch.int8), out=out)
