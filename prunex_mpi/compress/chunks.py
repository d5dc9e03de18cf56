"""The sparse, quantised code of SparseLoCo: of each chunk the largest values, in 2 bits each.

Every tensor is cut into chunks of 4,096 consecutive values, the last one shorter. Of each chunk the
`count` values of largest magnitude travel with their positions, 12 bits each; a chunk that has no
more than so many travels whole, without positions. The values of a tensor are sorted into four
bins by their distance from their mean, in steps of 1.5 standard deviations, and each becomes the
mean of its bin (statistical quantisation, as in the code of Sarfi et al. 2025). So

    message = four levels per tensor, room for others' bytes, positions, bins,

and what is sent is linear in scale: contributions may be weighted before they are coded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.compress.quantise import pack_, unpack_
from prunex_mpi.compress.sparse import share_of
from prunex_mpi.models.layout import Layout

CHUNK = 4096
# Bins of a tensor's values, so many bits each, and how many standard deviations they span.
BINS, BIN_BITS, SPAN = 4, 2, 6
# Messages lie behind each other, and levels must not straddle words.
ALIGNMENT = 8


@dataclass(frozen=True)
class Chunks:
    """Which values of a flat vector may travel, and where their codes lie in a message.

    `starts` [rows] int64 are the places of the chunks of which `count` values travel, `whole` int64
    the places that always travel, `tensors` int64 [values] the tensor of each value, in this order,
    and `sizes` [tensors] how many a tensor sends. Of each of `runs` (place, place among the rows,
    length) the magnitudes are copied to `magnitudes` [rows, 4096]. Behind the levels the parts of a
    message begin at bytes `extra`, `positions` and `bins`; it has `nbytes`.
    """

    count: int
    starts: Tensor
    whole: Tensor
    tensors: Tensor
    sizes: Tensor
    runs: tuple[tuple[int, int, int], ...]
    magnitudes: Tensor
    extra: int
    positions: int
    bins: int
    nbytes: int

    @property
    def numel(self) -> int:
        """How many values travel."""
        return self.tensors.numel()


def kept_per_chunk(ratio: float) -> int:
    """Return how many values of a whole chunk travel: at least one, `ratio` of them rounded up."""
    return share_of(CHUNK, ratio)


def cut(layout: Layout, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks that send their largest values, and those that travel whole.

    Each int64 [chunks, 3]: place, length and tensor.
    """
    rows = [
        (segment.offset + start, min(CHUNK, segment.numel - start), tensor)
        for tensor, segment in enumerate(layout.segments)
        for start in range(0, segment.numel, CHUNK)
    ]
    chunks = np.array(rows, dtype=np.int64).reshape(-1, 3)
    long = chunks[:, 1] > kept_per_chunk(ratio)
    return chunks[long], chunks[~long]


def message_bytes(layout: Layout, ratio: float, size: int, extra: int) -> int:
    """Return the bytes of a message with `extra` ones; levels have `size` bytes each."""
    picked, whole = cut(layout, ratio)
    selected = kept_per_chunk(ratio) * len(picked)
    return _places(len(layout.segments), selected, int(whole[:, 1].sum()), size, extra)[-1]


def position_bytes(layout: Layout, ratio: float) -> int:
    """Return how many bytes of a message are positions."""
    picked, _ = cut(layout, ratio)
    return _position_bytes(kept_per_chunk(ratio) * len(picked))


def build_chunks(layout: Layout, ratio: float, like: Tensor, extra: int) -> Chunks:
    """Plan messages for vectors such as `like`, with room for `extra` bytes of others."""
    count, device = kept_per_chunk(ratio), like.device
    picked, whole = cut(layout, ratio)
    lengths = whole[:, 1]
    owners = np.concatenate((np.repeat(picked[:, 2], count), np.repeat(whole[:, 2], lengths)))
    # How far each value that always travels lies from the beginning of its chunk.
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    total, size = len(layout.segments), like.element_size()
    places = _places(total, count * len(picked), len(within), size, extra)
    # Where there is no value no magnitude is as small.
    magnitudes = like.new_full((len(picked), CHUNK), -1.0)
    runs: list[tuple[int, int, int]] = []
    for row, (place, length, _) in enumerate(picked.tolist()):
        first, at, done = runs[-1] if runs else (-1, 0, 0)
        if (first + done, at + done) == (place, row * CHUNK):
            runs[-1] = (first, at, done + length)
        else:
            runs.append((place, row * CHUNK, length))
    return Chunks(
        count,
        torch.from_numpy(picked[:, 0].copy()).to(device),
        torch.from_numpy(np.repeat(whole[:, 0], lengths) + within).to(device),
        torch.from_numpy(owners).to(device),
        torch.from_numpy(np.bincount(owners, minlength=total)).to(device, like.dtype),
        tuple(runs),
        magnitudes,
        *places,
    )


def encode_(flat: Tensor, chunks: Chunks, message: Tensor) -> None:
    """Write the code of `flat` into `message`, uint8 [nbytes]; the extra bytes stay as they are."""
    rows = chunks.magnitudes.view(-1)
    for place, row, length in chunks.runs:
        torch.abs(flat[place : place + length], out=rows[row : row + length])
    chosen = torch.topk(chunks.magnitudes, chunks.count, dim=1, sorted=False).indices
    message[chunks.positions : chunks.bins].copy_(pack_positions(chosen.view(-1)))
    values = flat[_flat_places(chosen, chunks)]
    bins, levels = quantise(values, chunks.tensors, chunks.sizes)
    message[: chunks.extra].copy_(levels.view(-1).view(torch.uint8))
    packed = pack_bins(bins)
    message[chunks.bins : chunks.bins + packed.numel()].copy_(packed)


def add_decoded_(message: Tensor, chunks: Chunks, flat: Tensor, factor: float = 1.0) -> None:
    """Add `factor` times what `message` stands for to `flat`: the same bits wherever it is done."""
    rows = chunks.starts.numel()
    found = message[chunks.positions : chunks.bins]
    chosen = unpack_positions(found, rows * chunks.count).view(rows, chunks.count)
    levels = message[: chunks.extra].view(flat.dtype)
    bins = unpack_bins(message[chunks.bins :], chunks.numel)
    values = levels[chunks.tensors * BINS + bins]
    # All places are different ones: there is nothing to add up in an order.
    flat.index_add_(0, _flat_places(chosen, chunks), values, alpha=factor)


def quantise(values: Tensor, tensors: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin of each value, uint8 [values], and the levels [len(sizes), 4].

    `tensors` says which tensor a value is of, `sizes` how many values a tensor has.
    """
    zeros = torch.zeros_like(sizes)
    centred = values - (zeros.index_add(0, tensors, values) / sizes)[tensors]
    squares = zeros.index_add(0, tensors, centred.square())
    step = (SPAN / BINS) * (squares / (sizes - 1)).sqrt()
    # One value alone, or some that are equal, have a bin of their own.
    step = torch.where(torch.isfinite(step) & (step > 0), step, torch.ones_like(step))
    bins = (centred / step[tensors] + BINS // 2).round_().clamp_(0, BINS - 1).to(torch.int64)
    slots = tensors * BINS + bins
    sums = values.new_zeros(BINS * sizes.numel()).index_add_(0, slots, values)
    counts = torch.bincount(slots, minlength=sums.numel())
    levels = sums / counts.clamp_(min=1)
    return bins.to(torch.uint8), levels.view(-1, BINS)


def pack_positions(positions: Tensor) -> Tensor:
    """Return int64 positions below 4,096 as uint8, two in three bytes."""
    if positions.numel() % 2:
        positions = torch.cat((positions, positions.new_zeros(1)))
    first, second = positions.view(-1, 2).unbind(1)
    parts = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    return torch.stack(parts, dim=1).view(-1).to(torch.uint8)


def unpack_positions(packed: Tensor, count: int) -> Tensor:
    """Return the `count` positions, int64, that `pack_positions` has packed."""
    first, middle, last = packed.view(-1, 3).to(torch.int64).unbind(1)
    parts = (first | ((middle & 15) << 8), (middle >> 4) | (last << 4))
    return torch.stack(parts, dim=1).view(-1)[:count]


def pack_bins(bins: Tensor) -> Tensor:
    """Return uint8 bins below 4, four in a byte."""
    row = bins.new_zeros(1, -(-bins.numel() // 4) * 4)
    row[0, : bins.numel()] = bins
    packed = row.new_empty(1, row.numel() // 4)
    pack_(row, BIN_BITS, packed)
    return packed[0]


def unpack_bins(packed: Tensor, count: int) -> Tensor:
    """Return the `count` bins, int64, that `pack_bins` has packed, from the first byte on."""
    used = packed[None, : -(-count // 4)]
    row = used.new_empty(1, 4 * used.numel())
    unpack_(used, BIN_BITS, row)
    return row[0, :count].to(torch.int64)


def _flat_places(chosen: Tensor, chunks: Chunks) -> Tensor:
    return torch.cat(((chunks.starts[:, None] + chosen).view(-1), chunks.whole))


def _position_bytes(count: int) -> int:
    return 3 * -(-count // 2)


def _places(tensors: int, selected: int, whole: int, size: int, extra: int) -> tuple[int, ...]:
    """Return where extra bytes, positions and bins begin in a message, and its length."""
    begin = BINS * tensors * size
    positions = begin + extra
    bins = positions + _position_bytes(selected)
    end = bins + -(-(selected + whole) // 4)
    return begin, positions, bins, -(-end // ALIGNMENT) * ALIGNMENT
