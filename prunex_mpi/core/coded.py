"""Add up vectors of the leaders in fewer bits, and hand the sum to all ranks of their nodes.

A vector is cut into blocks of 128 values, the blocks of each bucket into as many shares as there
are leaders. A leader encodes its contribution and sends each share to its owner (Alltoallv); the
owner adds up the shares in the vector's own precision, encodes the sum and sends it to everyone
(Allgather). So each leader sends 2 (M - 1)/M of the coded vector, whatever algorithms MPI chooses,
nothing is added up by MPI in a type that it may not know, and all ranks decode the same bytes: they
hold the same bits. What rounding leaves over stays with the rank that rounded, to be sent later.

`int8sum` needs nothing but Allreduce, which every CUDA-aware MPI does on the device: the leaders
share the scale of a block, so that their integers can be added up as they are.

Vectors have a whole number of blocks, filled up with zeros. With several lanes a node has as many
leaders: each does all of this for its part of every bucket, over a communicator of its own. All
shares of a part are as long, the last one filled up with what nobody decodes: Allgatherv, which
needs no such thing, takes MPICH 3 times as long as Allgather.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, allreduce_, bcast_, mpi_buffer
from prunex_mpi.comm.traffic import Clock
from prunex_mpi.compress.quantise import (
    BLOCK,
    add_decoded_,
    block_maxima_,
    decode_,
    decode_shared_,
    encode_,
    encode_shared_,
    record_bytes,
)

SUMMED = "int8sum"
# Then each leader has 7 levels on either side of zero, as many as int4.
MOST_SUMMED = 18


@dataclass(frozen=True)
class Coded:
    """The memory of one vector of `blocks` blocks on its way between `workers` leaders.

    `records` uint8 [blocks, bytes] are the codes as they travel, with their scales, and what fills
    up the last share; of int8sum they are int8 [blocks, 128] and `maxima` [blocks] the scales.
    `received` has room for what an owner gets in one bucket. `twins` are host memory for records
    and what is received, where tensors of a device are staged; else these tensors themselves.
    """

    payload: str
    blocks: int
    workers: int
    bucket_blocks: int
    records: Tensor
    maxima: Tensor
    received: Tensor
    twins: tuple[Tensor, Tensor]

    @property
    def numel(self) -> int:
        return self.blocks * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes that a leader hands over, scales included, without what fills up the last share."""
        return self.records[: self.blocks].nbytes + self.maxima.nbytes

    @property
    def levels(self) -> int:
        """Levels of int8sum on either side of zero: the sum over all leaders fits into 8 bits."""
        return 127 // self.workers


def whole_blocks(numel: int) -> int:
    """Return `numel` rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


def coded_bytes(payload: str, numel: int, size: int) -> int:
    """Return the bytes that a leader hands over for `numel` values of `size` bytes each.

    Scales and what fills up the last block are included: `nbytes` of what `allocate_coded` makes.
    """
    blocks = whole_blocks(numel) // BLOCK
    return blocks * (BLOCK + size if payload == SUMMED else record_bytes(payload))


def allocate_coded(payload: str, like: Tensor, workers: int, transport: Transport) -> Coded:
    """Allocate what adding up vectors of the size of `like` [blocks * 128] needs."""
    blocks = like.numel() // BLOCK
    summed = payload == SUMMED
    size = BLOCK if summed else record_bytes(payload)
    bucket_blocks = max(1, transport.bucket_bytes // (size * workers)) * workers
    filled = -(-blocks // workers) * workers
    # All leaders' parts of a share are, at most, as many blocks as the bucket has.
    room = 0 if summed else min(bucket_blocks, filled)
    dtype = torch.int8 if summed else torch.uint8
    records = torch.empty(blocks if summed else filled, size, dtype=dtype, device=like.device)
    received = torch.empty(room, size, dtype=dtype, device=like.device)
    maxima = like.new_empty(blocks if summed else 0)
    twins = records, received
    if transport.staging is not None and not summed:
        twins = tuple(torch.empty(t.shape, dtype=dtype, pin_memory=True) for t in twins)
    return Coded(payload, blocks, workers, bucket_blocks, records, maxima, received, twins)


def sum_coded_(
    between: MPI.Comm,
    node: MPI.Comm,
    coded: Coded,
    values: Tensor,
    out: Tensor,
    transport: Transport,
    clock: Clock,
    lanes: int = 1,
) -> None:
    """Set `out` [blocks * 128] on all ranks to the decoded sum of the leaders' `values`.

    On the leaders `values`, as long, become what rounding left over of them, zero in the parts of
    the node's other leaders. The broadcast of a bucket overlaps the exchange of the one behind it,
    except for memory of a device. `clock` counts messages without the codes. Collective on
    `between` (where it is not MPI.COMM_NULL), then on `node`.
    """
    device = values.device
    previous: list[MPI.Request] = []
    done = 0
    for first in range(0, coded.blocks, coded.bucket_blocks):
        end = min(first + coded.bucket_blocks, coded.blocks)
        cuts = _cut(first, end, coded.workers, lanes)
        if between != MPI.COMM_NULL:
            own, after = cuts[node.rank], cuts[node.rank + 1]
            _run(values, first, own).zero_()
            _run(values, after, end).zero_()
            if coded.payload == SUMMED:
                _sum_integers_(between, coded, values, (own, after), transport, clock)
            else:
                _sum_records_(between, coded, values, (own, after), clock)
        requests = []
        with clock.broadcasting(device):
            for root, (start, stop) in enumerate(pairwise(cuts)):
                requests += _broadcast_(node, coded, start, stop, transport, root)
            MPI.Request.Waitall(previous)
        _decode_(coded, done, first, out)
        previous, done = requests, first
    with clock.broadcasting(device):
        MPI.Request.Waitall(previous)
    _decode_(coded, done, coded.blocks, out)


def _cut(start: int, stop: int, workers: int, lanes: int) -> list[int]:
    """Return the ends of `lanes` runs of blocks, all but the last as many for each worker."""
    rounds = -(-(stop - start) // workers)
    ends = [start + rounds * lane // lanes * workers for lane in range(lanes + 1)]
    return [min(end, stop) for end in ends]


def _run(flat: Tensor, start: int, stop: int) -> Tensor:
    return flat[start * BLOCK : stop * BLOCK]


def _sum_records_(
    between: MPI.Comm, coded: Coded, values: Tensor, run: tuple[int, int], clock: Clock
) -> None:
    """Add up a run of blocks over the leaders, into `records`."""
    start, stop = run
    payload, records, received = coded.payload, coded.records, coded.received
    mine, share = between.rank, -(-(stop - start) // between.size)
    cuts = [min(start + share * rank, stop) for rank in range(between.size + 1)]
    own, after = cuts[mine], cuts[mine + 1]
    # An owner's own part of its share needs no code.
    for a, b in ((start, own), (after, stop)):
        encode_(_run(values, a, b), records[a:b], payload)
    size = records.shape[1]
    counts = [(b - a) * size for a, b in pairwise(cuts)]
    counts[mine] = 0
    arriving = [(after - own) * size] * between.size
    arriving[mine] = 0
    _leave(coded, start, stop)
    leaving = _bytes(coded.twins[0], counts, [a * size for a in cuts[:-1]])
    coming = _bytes(coded.twins[1], arriving, list(accumulate(arriving, initial=0))[:-1])
    with clock.exchanging(values.device, "Alltoallv"):
        between.Alltoallv(leaving, coming)
    parts = (between.size - 1) * (after - own)
    if coded.twins[1] is not received:
        received[:parts].copy_(coded.twins[1][:parts])
    total = _run(values, own, after)
    for part in received[:parts].split(max(1, after - own)):
        add_decoded_(part, total, payload)
    encode_(total, records[own:after], payload)
    _leave(coded, own, after)
    shares = coded.twins[0][start : start + share * between.size]
    with clock.exchanging(values.device, "Allgather"):
        between.Allgather(MPI.IN_PLACE, mpi_buffer(shares.view(-1)))
    if coded.twins[0] is not records:
        records[start:stop].copy_(coded.twins[0][start:stop])


def _leave(coded: Coded, start: int, stop: int) -> None:
    """Have blocks `start` to `stop` of `records` where MPI reads them."""
    if coded.twins[0] is not coded.records:
        coded.twins[0][start:stop].copy_(coded.records[start:stop])


def _bytes(memory: Tensor, counts: list[int], places: list[int]) -> list:
    buffer, kind = mpi_buffer(memory.view(-1))
    return [buffer, (counts, places), kind]


def _sum_integers_(
    between: MPI.Comm,
    coded: Coded,
    values: Tensor,
    run: tuple[int, int],
    transport: Transport,
    clock: Clock,
) -> None:
    """Add up a run of blocks over the leaders, into `records` and `maxima`."""
    start, stop = run
    part, maxima = _run(values, start, stop), coded.maxima[start:stop]
    integers = coded.records[start:stop].view(-1)
    block_maxima_(part, maxima)
    with clock.exchanging(values.device, "Allreduce"):
        allreduce_(between, maxima, transport, MPI.MAX)
    encode_shared_(part, maxima, coded.levels, integers)
    with clock.exchanging(values.device, "Allreduce"):
        allreduce_(between, integers, transport)


def _broadcast_(
    node: MPI.Comm, coded: Coded, start: int, stop: int, transport: Transport, root: int
) -> list[MPI.Request]:
    """Start to hand blocks `start` to `stop` to the ranks of the node. Collective on `node`."""
    if node.size == 1 or start == stop:
        return []
    pieces = [coded.records[start:stop].view(-1), coded.maxima[start:stop]]
    pieces = [piece for piece in pieces if piece.numel()]
    if coded.records.device.type == "cuda":
        for piece in pieces:
            bcast_(node, piece, transport, root)
        return []
    return [node.Ibcast(mpi_buffer(piece), root=root) for piece in pieces]


def _decode_(coded: Coded, start: int, stop: int, out: Tensor) -> None:
    part = _run(out, start, stop)
    if coded.payload == SUMMED:
        integers = coded.records[start:stop].view(-1)
        decode_shared_(integers, coded.maxima[start:stop], coded.levels, part)
    else:
        decode_(coded.records[start:stop], part, coded.payload)
