"""Sums over workers in fewer bits: block codes, packed integers, sparse vectors.

**Block codes.** A vector of whole blocks of 128 values, filled up with zeros, is added up over the
leaders, and the sum goes to all ranks of their nodes. The blocks of each bucket are cut into as
many shares as there are leaders. A leader encodes its contribution and sends each share to its
owner (Alltoallv); the owner adds up the shares in the vector's own precision, encodes the sum and
sends it to everyone (Allgather, Allgatherv where shares are not of one size). So each leader sends
2 (M - 1)/M of the coded vector, whatever algorithms MPI chooses, nothing is added up by MPI in a
type that it may not know, and all ranks decode the same bytes: they hold the same bits. The
quantisation error stays with the rank that rounded, to be sent later. With racks the vectors of
each are added up as they are, and their first leaders do the rest among themselves: M are racks.

**Packed integers** of few bits, in as few bits as they and their sums need. Either each worker's
numbers go to all (Allgather), who add them up, or, with more workers, each worker adds up one share
of them (Alltoall) and hands what comes of it to all (Allgather), which is what TernGrad's and
Distributed Lion's servers do. With `up` bits for a number and `down` for a result the first sends
(W - 1) up, the second (W - 1)/W (up + down) per number.

**Sparse vectors**, of which each worker sends some elements, others than the others do.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm import collectives
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.comm.traffic import Clock
from prunex_mpi.compress import quantise
from prunex_mpi.compress.quantise import BLOCK, ROW
from prunex_mpi.compress.sparse import add_sparse_


@dataclass(frozen=True)
class Coded:
    """The memory of one vector of `blocks` blocks on its way between leaders.

    `records` uint8 [blocks, bytes] are the codes as they travel, with their scales. They travel by
    buckets; the codes of `together` whole ones are made at once, a run. `received` has room for
    what an owner gets in it.
    """

    payload: str
    blocks: int
    bucket_blocks: int
    together: int
    records: Tensor
    received: Tensor

    @property
    def numel(self) -> int:
        return self.blocks * BLOCK


def whole_blocks(numel: int) -> int:
    """Return `numel` rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


def coded_bytes(payload: str, numel: int) -> int:
    """Return the bytes that a leader hands over for `numel` values, scales too."""
    return whole_blocks(numel) // BLOCK * quantise.record_bytes(payload)


def allocate_coded(payload: str, like: Tensor, workers: int, transport: Transport) -> Coded:
    """Allocate what adding up vectors of the size of `like` [blocks * 128] needs."""
    blocks, size = like.numel() // BLOCK, quantise.record_bytes(payload)
    bucket_blocks = max(1, transport.bucket_bytes // (size * workers)) * workers
    together = collectives.buckets_at_once(like, bucket_blocks * size, transport)
    # All leaders' parts of a share are, at most, as many blocks as are coded at once.
    room = min(bucket_blocks * together, -(-blocks // workers) * workers)
    records = torch.empty(blocks, size, dtype=torch.uint8, device=like.device)
    received = records.new_empty(room, size)
    return Coded(payload, blocks, bucket_blocks, together, records, received)


def first_blocks(coded: Coded, like: Tensor) -> Coded:
    """Return the memory of a vector as long as `like` in that of one which is as long or longer."""
    blocks = like.numel() // BLOCK
    return replace(coded, blocks=blocks, records=coded.records[:blocks])


def sum_coded_(
    between: MPI.Comm,
    node: MPI.Comm,
    coded: Coded,
    values: Tensor,
    out: Tensor,
    transport: Transport,
    clock: Clock,
) -> None:
    """Set `out` [blocks * 128] on all ranks to the decoded sum of the leaders' `values`.

    On the leaders `values`, as long, become what rounding left over of them. The broadcast of a
    run overlaps the exchange of the one behind it, except for memory of a device. `clock` counts
    messages without the codes. Collective on `between` (where it is not MPI.COMM_NULL), then on
    `node`.
    """
    device = values.device
    previous: list[MPI.Request] = []
    last = slice(0, 0)
    leads, racks = between != MPI.COMM_NULL, transport.racks
    transport = collectives.without_racks(transport)
    if racks is not None:
        between = racks.between
    for run in collectives.runs(coded.blocks, coded.bucket_blocks, coded.together):
        if leads and racks is not None:
            with clock.exchanging(device, "Reduce in the rack"):
                collectives.reduce_(racks.inside, _values_of(values, run), transport)
            if between == MPI.COMM_NULL:
                # The first of the rack has what rounding leaves over.
                _values_of(values, run).zero_()
        if between != MPI.COMM_NULL:
            _sum_records_(between, coded, values, run, transport, clock)
        if leads and racks is not None:
            with clock.exchanging(device, "Bcast in the rack"):
                MPI.Request.Waitall(_broadcast_(racks.inside, coded, run, transport))
        with clock.broadcasting(device):
            requests = _broadcast_(node, coded, run, transport)
            MPI.Request.Waitall(previous)
        _decode_(coded, last, out)
        previous, last = requests, run
    with clock.broadcasting(device):
        MPI.Request.Waitall(previous)
    _decode_(coded, last, out)


def _values_of(flat: Tensor, run: slice) -> Tensor:
    return flat[run.start * BLOCK : run.stop * BLOCK]


def _sum_records_(
    between: MPI.Comm, coded: Coded, values: Tensor, run: slice, transport: Transport, clock: Clock
) -> None:
    """Add up a run of blocks over the leaders, into `records`: whole buckets, or a part of one."""
    payload, workers, mine = coded.payload, between.size, between.rank
    blocks = run.stop - run.start
    buckets = max(1, blocks // coded.bucket_blocks)
    cuts = collectives.share_ends(blocks // buckets, workers)
    own, after = cuts[mine], cuts[mine + 1]
    # Of several buckets the same share of each.
    lead, size = ((buckets,) if buckets > 1 else ()), coded.records.shape[1]
    records = coded.records[run].view(*lead, cuts[-1], size)
    offered = _values_of(values, run).view(*lead, cuts[-1], BLOCK)
    # An owner's own part of its share needs no code.
    for a, b in ((0, own), (after, cuts[-1])):
        quantise.encode_(offered[..., a:b, :], records[..., a:b, :], payload)
    received = coded.received[: buckets * (workers - 1) * (after - own)]
    ends, rows = [cut * size for cut in cuts], records.view(buckets, -1)
    with clock.exchanging(values.device, "Alltoallv"):
        arriving = received.view(buckets, -1)
        collectives.alltoall_shares_(between, rows, ends, arriving, transport, own=False)
    total = offered[..., own:after, :]
    for part in received.view(*lead, workers - 1, after - own, size).unbind(-3):
        quantise.add_decoded_(part, total, payload)
    quantise.encode_(total, records[..., own:after, :], payload)
    with clock.exchanging(values.device, "Allgather"):
        collectives.allgather_shares_(between, rows, ends, transport)


def _broadcast_(
    node: MPI.Comm, coded: Coded, run: slice, transport: Transport
) -> list[MPI.Request]:
    """Start to hand a run of blocks to the ranks of the node. Collective on `node`."""
    records = coded.records[run].view(-1)
    if node.size == 1 or not records.numel():
        return []
    if records.device.type == "cuda":
        collectives.bcast_(node, records, transport)
        return []
    return [node.Ibcast(collectives.mpi_buffer(records), root=0)]


def _decode_(coded: Coded, run: slice, out: Tensor) -> None:
    quantise.decode_(coded.records[run], _values_of(out, run), coded.payload)


def goes_to_all(workers: int, up: int, down: int) -> bool:
    """Return whether it takes no more bits to send everyone's numbers to all."""
    return (workers - 1) * up <= down


def share_of_row(numel: int, workers: int) -> int:
    """Return how many numbers are in a worker's share, filled up to whole bytes."""
    return -(-numel // (ROW * workers)) * ROW


def bytes_handed_over(numel: int, workers: int, up: int, down: int) -> int:
    """Return what a worker hands over: its numbers, and its share of what comes of them."""
    share = share_of_row(numel, workers)
    sent = workers * share * up // 8
    return sent if goes_to_all(workers, up, down) else sent + share * down // 8


class Counts:
    """Whole numbers of `up` bits, one per element of a vector, and the way to their sums.

    This worker's are in `numbers`, uint8 [comm.size, share]. Where they go `to_all`, every worker
    adds them up, else each one share, and hands what comes of it to all in `down` bits.
    """

    def __init__(self, link: CountedComm, like: Tensor, up: int, down: int) -> None:
        self.link, self.up, self.down = link, up, down
        workers = link.comm.size
        share, self.to_all = share_of_row(like.numel(), workers), goes_to_all(workers, up, down)
        self.numbers = torch.zeros(workers, share, dtype=torch.uint8, device=like.device)
        # The largest sum: all workers' largest numbers.
        wide = workers * ((1 << up) - 1) > torch.iinfo(torch.uint8).max
        rows, dtype = workers if self.to_all else 1, torch.int16 if wide else torch.uint8
        self._sums = torch.empty(rows, share, dtype=dtype, device=like.device)
        self._part = torch.empty_like(self._sums, dtype=torch.uint8)
        new, packed = self.numbers.new_empty, share * up // 8
        self._packed = new(workers, packed)
        self._received = new(*((workers,) if self.to_all else ()), workers, packed)
        self._result = new(0 if self.to_all else share * down // 8)
        self._results = new(workers, self._result.numel())

    def sum_(self) -> Tensor:
        """Return the sums over all workers of `numbers` [comm.size, share]: of all, or of a share.

        `numbers` must be below 2^up. Collective on the link.
        """
        link, packed, sums = self.link, self._packed, self._sums
        quantise.pack_(self.numbers, self.up, packed)
        if self.to_all:
            link.gather_(packed.view(-1), self._received.view(link.comm.size, -1))
        else:
            link.alltoall_(packed, self._received)
        sums.zero_()
        for part in self._received:
            quantise.unpack_(part.view(sums.shape[0], -1), self.up, self._part)
            sums.add_(self._part)
        return sums

    def spread_(self, share: Tensor) -> Tensor:
        """Return every worker's share of results as numbers [comm.size, share].

        `share` [1, share] is uint8 and below 2^down, or of 16 bits. Collective on the link.
        """
        result = self._result.view(1, -1)
        if self.down == 16:
            result.copy_(share.view(torch.uint8))
        else:
            quantise.pack_(share, self.down, result)
        self.link.gather_(self._result, self._results)
        if self.down == 16:
            return self._results.view(share.dtype)
        quantise.unpack_(self._results, self.down, self.numbers)
        return self.numbers


class SparseParts:
    """Up to `count` elements of each worker: `values` and int32 `positions`."""

    def __init__(self, link: CountedComm, like: Tensor, count: int) -> None:
        self.link, workers = link, link.comm.size
        self._room = max(1, link.transport.bucket_bytes // (like.element_size() * workers))
        self.values = like.new_empty(count)
        self.positions = torch.empty_like(self.values, dtype=torch.int32)
        self._all_values = like.new_empty(workers * min(count, self._room))
        self._all_positions = torch.empty_like(self._all_values, dtype=torch.int32)

    def add_to_(self, flat: Tensor, count: int) -> None:
        """Add to `flat` what all workers send, of this one the first `count` elements.

        Piece by piece and in them worker by worker, so that all workers get the same bits.
        Collective on the link.
        """
        link, room, everyone = self.link, self._room, (self._all_positions, self._all_values)
        counts = link.gather_counts(count)
        for start in range(0, max(counts), room):
            pieces = [min(max(c - start, 0), room) for c in counts]
            mine = slice(start, start + pieces[link.comm.rank])
            link.gather_parts_(self.values[mine], pieces, self._all_values)
            link.gather_parts_(self.positions[mine], pieces, self._all_positions)
            places, addends = (t[: sum(pieces)].split(pieces) for t in everyone)
            add_sparse_(flat, addends, places)


class EqualParts:
    """As many elements, or rows, of each worker: `values` [n] or [n, row], and `positions` [n]."""

    def __init__(self, link: CountedComm, values: Tensor, positions: Tensor) -> None:
        self.link, self.values, self.positions = link, values, positions
        workers, bucket = link.comm.size, link.transport.bucket_bytes
        self._rows = min(len(values), max(1, bucket // (values[:1].nbytes * workers)))
        self._all_values = values.new_empty(workers, self._rows, *values.shape[1:])
        self._all_positions = positions.new_empty(workers, self._rows)

    def sum_(self, out: Tensor) -> None:
        """Set `out` to the sum of what the workers send. Collective on the link."""
        out.zero_()
        for start in range(0, len(self.positions), self._rows):
            values = self._gather(self.values, self._all_values, start)
            add_sparse_(out, values, self._gather(self.positions, self._all_positions, start))

    def _gather(self, mine: Tensor, everyone: Tensor, start: int) -> Tensor:
        """Return every worker's rows of a bucket, from `start` on. Collective on the link."""
        mine, workers = mine[start : start + self._rows], len(everyone)
        gathered = everyone.view(-1)[: workers * mine.numel()].view(workers, -1)
        self.link.gather_(mine.view(-1), gathered)
        return gathered.view(-1, *mine.shape)
