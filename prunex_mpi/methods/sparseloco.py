"""SparseLoCo (Sarfi et al. 2025): leaders exchange the largest of what local steps have changed.

With z of the last exchange, z_i the node's mean and w_i = P_i/N, the node's weight:

    e_i = 0.95 e_i + w_i (z - z_i),   e_i = e_i - q_i,   z = z - outer_lr sum_i q_i,

q_i being the code of e_i. What has not been sent stands in for DiLoCo's momentum. BatchNorm
statistics travel along as differences to the last ones that all know, in bfloat16.

**The code.** Every tensor is cut into chunks of 4,096 consecutive values, the last one shorter. Of
each chunk the `count` values of largest magnitude travel with their positions, 12 bits each; a
chunk that has no more than so many travels whole, without positions. The values of a tensor are
sorted into four bins by their distance from their mean, in steps of 1.5 standard deviations, and
each becomes the mean of its bin (statistical quantisation, as in the authors' code). So

    message = four levels per tensor, statistics, positions, bins,

and what is sent is linear in scale: contributions may be weighted before they are coded.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from prunex_mpi.compress.quantise import pack_, unpack_
from prunex_mpi.compress.sparse import share_of
from prunex_mpi.core.memory import Declared, summed
from prunex_mpi.core.state import KNOWN, State
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

NOT_SENT = "error_feedback"
ERROR_DECAY = 0.95  # the authors' beta
STATISTICS = torch.bfloat16
CHUNK = 4096
# Bins of a tensor's values, so many bits each, and how many standard deviations they span.
BINS, BIN_BITS, SPAN = 4, 2, 6
# Bins in a byte.
NUMBERS = 8 // BIN_BITS
# Messages lie behind each other, and levels must not straddle words.
ALIGNMENT = 8


class SparseLoco(Exchange):
    """Send the largest changes of each chunk, as messages uint8 [nodes, bytes] of all leaders."""

    OPERATIONS = (
        (
            "changes of parameters",
            "leader",
            "Allgather",
            "the largest of each chunk, 2 bits and a position of 12, and BatchNorm statistics",
        ),
    )
    everywhere = True

    def allocate(self) -> None:
        state, ratio = self.state, self.options.ratio
        self.chunks = build_chunks(state.layout, ratio, state.theta, state.stats.numel())
        shape = self.link.ring, self.chunks.parts.nbytes
        self.everyone = torch.zeros(shape, dtype=torch.uint8, device=state.theta.device)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet: the leader's, and zero on the other ranks."""
        return {NOT_SENT: summed(torch.zeros_like(theta))}

    def exchange_(self, flat: Tensor) -> None:
        """Move z, `flat`, and the statistics by what all leaders send; z_i must be the node's mean.

        Every rank decodes the same bytes in the same order, so all hold the same bits. Collective
        on the workers, then on the node.
        """
        state, modules, known = self.state, self.state.bn_modules, self.state.memory[KNOWN]
        statistics = slice(self.chunks.parts.statistics, self.chunks.parts.positions)
        total = batchnorm.of_reference(modules, known)
        if self.link.is_member:
            self.link.gather_(self.fill(), self.everyone)
        self.comms.node.broadcast_(self.everyone.view(-1))
        for message in self.everyone:
            add_decoded_(message, self.chunks, flat, -self.options.outer_lr)
            total.add_(message[statistics].view(STATISTICS))
        batchnorm.as_plain_(modules, total, known)
        batchnorm.write_plain(modules, total)
        state.stats.copy_(total)
        known.copy_(total)
        dense = state.layout.numel + state.stats.numel()
        state.position.traffic.dense += dense * state.theta.element_size()

    def fill(self) -> Tensor:
        """Return this node's message; what it leaves out stays to be sent."""
        state, chunks, weight = self.state, self.chunks, self.link.weight
        message = torch.empty_like(self.everyone[0])
        left = state.memory[NOT_SENT].mul_(ERROR_DECAY)
        torch.sub(state.z, state.z_node, out=state.scratch)
        left.add_(state.scratch, alpha=weight)
        encode_(left, chunks, message)
        add_decoded_(message, chunks, left, -1.0)
        known = batchnorm.of_reference(state.bn_modules, state.memory[KNOWN])
        gap = torch.sub(state.stats, known).mul_(weight).to(STATISTICS)
        message[chunks.parts.statistics : chunks.parts.positions].copy_(gap.view(torch.uint8))
        return message

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many bytes are positions: 12 bits each."""
        size, statistics = state.theta.element_size(), state.stats.numel()
        parts = plan_message(state.layout, settings.options.ratio, size, statistics)
        return rounds * (parts.bins - parts.positions)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, statistics: int) -> tuple[int, str]:
        """Return the bytes that a leader hands over in an outer iteration, and what they are.

        They depend on the number of `statistics`, and not on that of workers.
        """
        ratio = settings.options.ratio
        how = f"{share_of(CHUNK, ratio):,} values of 4,096, 2 bits and a position each"
        return plan_message(layout, ratio, size, statistics).nbytes, how


class Parts(NamedTuple):
    """Where the parts of a message begin behind the levels, and how many bytes it has."""

    statistics: int
    positions: int
    bins: int
    nbytes: int


@dataclass(frozen=True)
class Chunks:
    """Which values of a flat vector may travel, and where their codes lie in a message.

    `starts` [rows] int64 are the places of the chunks of which `count` values travel, `whole` int64
    the places that always travel, `tensors` int64 [values] the tensor of each value, in this order,
    and `sizes` [tensors] how many a tensor sends. Of each of `runs` (place, place among the rows,
    length) the magnitudes are copied to `magnitudes` [rows, 4096].
    """

    count: int
    starts: Tensor
    whole: Tensor
    tensors: Tensor
    sizes: Tensor
    runs: tuple[tuple[int, int, int], ...]
    magnitudes: Tensor
    parts: Parts


def cut(layout: Layout, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks that send their largest values, and those that travel whole.

    Each int64 [chunks, 3]: place, length and tensor.
    """
    rows = [
        (segment.offset + start, min(CHUNK, segment.numel - start), tensor)
        for tensor, segment in enumerate(layout.segments)
        for start in range(0, segment.numel, CHUNK)
    ]
    chunks = np.array(rows, dtype=np.int64)
    long = chunks[:, 1] > share_of(CHUNK, ratio)
    return chunks[long], chunks[~long]


def plan_message(layout: Layout, ratio: float, size: int, statistics: int) -> Parts:
    """Return the parts of a message with so many `statistics`; levels have `size` bytes each."""
    picked, whole = cut(layout, ratio)
    selected = share_of(CHUNK, ratio) * len(picked)
    begin = BINS * len(layout.segments) * size
    positions = begin + statistics * STATISTICS.itemsize
    bins = positions + 3 * -(-selected // 2)
    end = bins + -(-(selected + int(whole[:, 1].sum())) // NUMBERS)
    return Parts(begin, positions, bins, -(-end // ALIGNMENT) * ALIGNMENT)


def build_chunks(layout: Layout, ratio: float, like: Tensor, statistics: int) -> Chunks:
    """Plan messages for vectors such as `like`, with room for so many `statistics`."""
    count, device = share_of(CHUNK, ratio), like.device
    picked, whole = cut(layout, ratio)
    lengths = whole[:, 1]
    owners = np.concatenate((np.repeat(picked[:, 2], count), np.repeat(whole[:, 2], lengths)))
    # How far each value that always travels lies from the beginning of its chunk.
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
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
        torch.from_numpy(np.bincount(owners, minlength=len(layout.segments))).to(
            device, like.dtype
        ),
        tuple(runs),
        # Where there is no value no magnitude is as small.
        like.new_full((len(picked), CHUNK), -1.0),
        plan_message(layout, ratio, like.element_size(), statistics),
    )


def encode_(flat: Tensor, chunks: Chunks, message: Tensor) -> None:
    """Write the code of `flat` into `message`, uint8 [nbytes]; the statistics stay as they are."""
    rows, parts = chunks.magnitudes.view(-1), chunks.parts
    for place, row, length in chunks.runs:
        torch.abs(flat[place : place + length], out=rows[row : row + length])
    chosen = torch.topk(chunks.magnitudes, chunks.count, dim=1, sorted=False).indices
    message[parts.positions : parts.bins].copy_(pack_positions(chosen.view(-1)))
    values = flat[flat_places(chosen, chunks)]
    bins, levels = quantise(values, chunks.tensors, chunks.sizes)
    message[: parts.statistics].copy_(levels.view(-1).view(torch.uint8))
    packed = message[None, parts.bins :]
    pack_(pad(bins, (0, NUMBERS * packed.numel() - len(bins)))[None], BIN_BITS, packed)


def add_decoded_(message: Tensor, chunks: Chunks, flat: Tensor, factor: float = 1.0) -> None:
    """Add `factor` times what `message` stands for to `flat`: the same bits wherever it is done."""
    rows, parts = len(chunks.starts), chunks.parts
    found = message[parts.positions : parts.bins]
    chosen = unpack_positions(found, rows * chunks.count).view(rows, chunks.count)
    levels = message[: parts.statistics].view(flat.dtype)
    packed = message[None, parts.bins :]
    bins = packed.new_empty(1, NUMBERS * packed.numel())
    unpack_(packed, BIN_BITS, bins)
    values = levels[chunks.tensors * BINS + bins[0, : len(chunks.tensors)]]
    # All places are different ones: there is nothing to add up in an order.
    flat.index_add_(0, flat_places(chosen, chunks), values, alpha=factor)


def flat_places(chosen: Tensor, chunks: Chunks) -> Tensor:
    """Return the places of the values that travel, of each chunk the `chosen` ones."""
    return torch.cat(((chunks.starts[:, None] + chosen).view(-1), chunks.whole))


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
    first, second = pad(positions, (0, len(positions) % 2)).view(-1, 2).unbind(1)
    parts = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    return torch.stack(parts, dim=1).view(-1).to(torch.uint8)


def unpack_positions(packed: Tensor, count: int) -> Tensor:
    """Return the `count` positions, int64, that `pack_positions` has packed."""
    first, middle, last = packed.view(-1, 3).to(torch.int64).unbind(1)
    parts = (first | ((middle & 15) << 8), (middle >> 4) | (last << 4))
    return torch.stack(parts, dim=1).view(-1)[:count]
