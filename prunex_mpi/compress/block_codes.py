"""Codes of 2 to 32 bits for vectors in blocks of 128 values, each block a record of bytes.

A record of int8, int4 or int2 is the block's scale s in bfloat16, which has the range of float32,
and then the codes. What a code decodes to is a small integer times s. That product of at most 16
bits is exact in float32, so that the same bytes decode to the same bits on every processor, whether
or not it fuses the multiplication with an addition.

int8 and int4: integers up to 127 and 7, s = max|v| / 127 and / 7. s is rounded to nearest, by at
most 2^-9 of itself: the largest value becomes at most 127.25 or 7.02 times s, which rounds to 127
and 7, so nothing has to be clamped. s is at least 2^-126, so that 1 / s is finite and a block of
zeros needs no case of its own.

int2: the nearest of +-3 s and +-10 s, Lloyd and Max's quantiser of a Gaussian (0.4528 and 1.510
standard deviations) with s = 0.1509 times the block's root mean square. It needs no refit by least
squares, which would win 1 % of the squared error of Gaussian and 2 % of that of Laplace blocks:
|v - decoded|^2 <= 0.955 |v|^2 always. The proof: with x = |v| / 3s the square falls by 9 s^2 f(x)
per value, f(x) = 2x - 1 below 13/6 and (20x - 100/3) / 3 from there on. Of all blocks with the
same sum of x^2, that with a single value differing from 0 has the least sum of f, and it is
positive for blocks of 128.

Everything passes through a tile of values that stays in the cache. int4 pairs the first half of a
block with its second half, one byte being lo + 16 hi; int2 puts four neighbours into a byte, eight
bytes at a time in the int64 that hold them, on a little-endian processor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import threshold_

BLOCK = 128
PAYLOADS = ("fp32", "fp16", "bf16", "int8", "int4", "int2")

_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_SCALE_BYTES = 2
# Of the CPU: two tiles of float32 stay in a cache of 1 MiB.
_TILE_BLOCKS = 1024
# The smallest normal number of float32 and of bfloat16.
_TINY = 2.0**-126
_NORM_TO_INT2 = 0.4528 / 3 / BLOCK**0.5
# Between 3 and 10, where int2 changes from one level to the other.
_INT2_MIDDLE = 6.5
# Squares of float32 lose their precision below: such blocks are left to error feedback.
_SMALLEST_INT2 = 1e-18


def record_bytes(payload: str) -> int:
    """Return the bytes of one block of 128 values, its scale included."""
    if payload in _FLOATS:
        return BLOCK * _FLOATS[payload].itemsize
    return _SCALE_BYTES + BLOCK * _BITS[payload] // 8


def encode_(values: Tensor, records: Tensor, payload: str) -> None:
    """Write the codes of `values` to `records`; `values` become what rounding has left over.

    `values` is [n], float32 or float64, contiguous, n a multiple of 128; `records` is uint8
    [n / 128, record_bytes(payload)] and begins at an even byte (a multiple of 4 for fp32). A block
    with a value that is not finite decodes to values of which some are not. int2 leaves blocks with
    a root mean square below 1e-17 as they are, and takes values above 1e18 for infinite.
    """
    blocks = values.view(-1, BLOCK)
    for rows, spare in _tiles(blocks):
        if payload in _FLOATS:
            _encode_floats_(blocks[rows], records[rows].view(_FLOATS[payload]), spare)
        elif payload == "int2":
            _encode_int2_(blocks[rows], records[rows], spare)
        else:
            _encode_by_maxima_(blocks[rows], records[rows], _BITS[payload], spare)


def decode_(records: Tensor, out: Tensor, payload: str) -> None:
    """Set `out` to what `records` stand for; shapes and dtypes as in `encode_`.

    Elementwise in records: any range of them decodes on its own to the same bits.
    """
    blocks = out.view(-1, BLOCK)
    if payload in _FLOATS:
        blocks.copy_(records.view(_FLOATS[payload]))
        return
    for rows, spare in _tiles(blocks):
        scale = _scales(records[rows], out.dtype)
        for columns, integers in _integers(records[rows], _BITS[payload], spare):
            torch.mul(integers, scale, out=blocks[rows, columns])


def add_decoded_(records: Tensor, out: Tensor, payload: str) -> None:
    """Add what `records` stand for to `out`; shapes and dtypes as in `encode_`."""
    blocks = out.view(-1, BLOCK)
    for rows, spare in _tiles(blocks):
        if payload in _FLOATS:
            blocks[rows].add_(spare.copy_(records[rows].view(_FLOATS[payload])))
            continue
        scale = _scales(records[rows], out.dtype)
        for columns, integers in _integers(records[rows], _BITS[payload], spare):
            blocks[rows, columns].addcmul_(integers, scale)


def block_maxima_(values: Tensor, maxima: Tensor) -> None:
    """Set `maxima` [n / 128] to the largest |value| of each block of `values` [n], same dtype.

    NaN counts as infinite, since a maximum by MPI may drop a NaN.
    """
    blocks = values.view(-1, BLOCK)
    for rows, spare in _tiles(blocks):
        torch.amax(torch.abs(blocks[rows], out=spare), 1, out=maxima[rows])
    maxima.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def encode_shared_(values: Tensor, maxima: Tensor, levels: int, integers: Tensor) -> None:
    """Set `integers` (int8 [n]) to `values` [n] in units of maximum / `levels`.

    `values` become what rounding has left over. `maxima` [n / 128] are at least |values|, the same
    on all workers: with `levels` 127 // M the integers of M workers add up in int8.
    """
    blocks, codes = values.view(-1, BLOCK), integers.view(-1, BLOCK)
    for rows, spare in _tiles(blocks):
        units = _shared_units(maxima[rows], levels)
        torch.mul(blocks[rows], units.reciprocal(), out=spare).round_()
        codes[rows].copy_(spare)
        blocks[rows].addcmul_(spare, units, value=-1)


def decode_shared_(integers: Tensor, maxima: Tensor, levels: int, out: Tensor) -> None:
    """Set `out` [n] to `integers` (int8 [n], of one worker or summed) times maximum / `levels`."""
    blocks, codes = out.view(-1, BLOCK), integers.view(-1, BLOCK)
    for rows, _ in _tiles(blocks):
        blocks[rows].copy_(codes[rows]).mul_(_shared_units(maxima[rows], levels))


def _shared_units(maxima: Tensor, levels: int) -> Tensor:
    # Not a division, which torch does in other ways on a GPU: all workers need the same bits.
    return maxima.mul(1 / levels).clamp_min_(_TINY).unsqueeze(1)


def _tiles(blocks: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Walk `blocks` [b, 128] by tiles: the rows, and room for as many values.

    The room is made here, once per call, since two threads may be at it at once. On a GPU one tile
    holds everything.
    """
    count = len(blocks)
    size = min(count, _TILE_BLOCKS) if blocks.device.type == "cpu" else count
    spare = blocks.new_empty(size, BLOCK)
    for start in range(0, count, max(size, 1)):
        stop = min(start + size, count)
        yield slice(start, stop), spare[: stop - start]


def _encode_floats_(values: Tensor, numbers: Tensor, spare: Tensor) -> None:
    if numbers.dtype == torch.float16:
        # Clamped, so that error feedback carries the rest; 0 * inf and 0 * nan are nan.
        largest = torch.finfo(torch.float16).max
        torch.clamp(values, -largest, largest, out=spare).add_(values, alpha=0)
        numbers.copy_(spare)
    else:
        numbers.copy_(values)
    if numbers.dtype == values.dtype:
        values.zero_()
    else:
        values.sub_(spare.copy_(numbers))


def _encode_by_maxima_(values: Tensor, records: Tensor, bits: int, spare: Tensor) -> None:
    largest = torch.amax(torch.abs(values, out=spare), 1, keepdim=True)
    scale = _write_scales_(records, largest.mul_(1 / (2 ** (bits - 1) - 1)).clamp_min_(_TINY))
    torch.mul(values, scale.reciprocal(), out=spare).round_()
    values.addcmul_(spare, scale, value=-1)
    if bits == 4:
        low, high = spare.split(BLOCK // 2, dim=1)
        spare = low.add_(high, alpha=16)
    _codes(records).view(torch.int8).copy_(spare)


def _encode_int2_(values: Tensor, records: Tensor, spare: Tensor) -> None:
    scale = torch.linalg.vector_norm(values, dim=1, keepdim=True).mul_(_NORM_TO_INT2)
    scale = _write_scales_(records, threshold_(scale, _SMALLEST_INT2, 0.0))
    # 0 to 3, truncated by the conversion.
    middle = (scale * _INT2_MIDDLE).clamp_min_(_TINY)
    torch.mul(values, middle.reciprocal_(), out=spare).add_(2).clamp_(0, 3)
    codes = spare.to(torch.int8)
    # Four bytes of two bits each become the lowest byte of 32 bits.
    packed = codes.view(torch.int64) >> 6
    packed |= codes.view(torch.int64)
    packed |= packed >> 12
    _codes(records).copy_(packed.view(torch.int32))
    values.addcmul_(spare.copy_(_int2_levels_(codes)), scale, value=-1)


def _int2_levels_(codes: Tensor) -> Tensor:
    """Turn the int8 0 to 3 into -10, -3, 3 and 10: 7 c - (c >> 1) - 10, eight at a time.

    For bytes x - 10 is (x + 118) ^ 128, which borrows nothing from the next byte.
    """
    eights = codes.view(torch.int64)
    upper = (eights >> 1).bitwise_and_(_in_all_bytes(1))
    eights.mul_(7).sub_(upper).add_(_in_all_bytes(118)).bitwise_xor_(_in_all_bytes(128))
    return codes


def _in_all_bytes(byte: int) -> int:
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


def _integers(records: Tensor, bits: int, spare: Tensor) -> list[tuple[slice, Tensor]]:
    """Return the integers of `records` by columns of the blocks, in the memory of `spare`."""
    everything = slice(None)
    if bits == 8:
        return [(everything, spare.copy_(_codes(records).view(torch.int8)))]
    if bits == 4:
        half = BLOCK // 2
        low, high = spare.view(2, -1, half)
        low.copy_(_codes(records).view(torch.int8))
        torch.mul(low, 1 / 16, out=high).round_()
        low.sub_(high, alpha=16)
        return [(slice(0, half), low), (slice(half, BLOCK), high)]
    spread = _codes(records).to(torch.int32, memory_format=torch.contiguous_format)
    eights = spread.view(torch.int64)
    eights |= eights << 12
    eights |= eights << 6
    eights &= _in_all_bytes(3)
    return [(everything, spare.copy_(_int2_levels_(spread.view(torch.int8))))]


def _codes(records: Tensor) -> Tensor:
    return records[:, _SCALE_BYTES:]


def _write_scales_(records: Tensor, scale: Tensor) -> Tensor:
    """Write `scale` [rows, 1] into `records` and return it as written."""
    records[:, :_SCALE_BYTES].view(torch.bfloat16).copy_(scale)
    return _scales(records, scale.dtype)


def _scales(records: Tensor, dtype: torch.dtype) -> Tensor:
    return records[:, :_SCALE_BYTES].view(torch.bfloat16).to(dtype)
