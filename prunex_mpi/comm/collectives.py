"""Collectives on torch tensors: typed buffers, 32 MiB buckets, CUDA tensors handed over or staged.

Each function takes the communicator(s) it uses first; one without does not communicate. Tensors are
contiguous and 1-D. On the CPU MPI reads and writes the tensor's own memory. A CUDA tensor is handed
to MPI as it is (`device`; the stream is synchronised first, since MPI does not know streams;
blocking calls only, since Open MPI's non-blocking reductions crash on device memory) or goes
through two pinned buckets (`host`), so that copying one overlaps the reduction of the other. What
goes between nodes in small pieces is not copied in pieces as small: each copy is waited for.

An Allreduce folds what there are of ranks above a power of two onto the others: then one of 3
leaders sent 1.88 (Open MPI 5.0) or 1.50 times (MPICH 5.0) what is enough, 2 (M - 1)/M of the
operand. There an Alltoall, sums of the shares and an Allgather take its place, which send no more
than that at any size; MPICH's Reduce_scatter folds as well, below 512 KiB.

Where the transport has racks, its communicator is that of the leaders, and reductions and
broadcasts go by racks: a sum for each, one between their first leaders, one message back. Between
two racks of two hosts codes then took half of the bytes, float32 did where neighbours in rank were
of different racks; an Allreduce of neighbours in equal racks sends no more without.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.units import KIB, MIB
from prunex_mpi.comm.topology import Racks

# Every other dtype is refused before MPI sees it: bfloat16 sums are silently wrong under Open MPI.
MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}

# Bytes for each rank from which what is sent decides, and not the number of messages.
LEAST_SHARE_BYTES = 1024
# Elements from the beginning of a buffer to what a rank sends or receives of it: MPI counts in int.
FARTHEST = 2**31 - 1


@dataclass(frozen=True)
class Transport:
    """How tensors reach MPI: bucket size in bytes and, where they are staged, two host buckets.

    Between nodes a bucket has `piece_bytes` for each of them, where that is less; 0: as all others.
    `racks` are for messages between leaders alone.
    """

    bucket_bytes: int
    staging: tuple[Tensor, Tensor] | None = None
    piece_bytes: int = 0
    racks: Racks | None = None


# For what is on the host, and fits into a bucket.
HOST = Transport(0)


# Messages are cut into buckets of so many MiB.
BUCKET_MIB = 32.0


def build_transport(
    device: torch.device, bucket_mib: float, mpi_buffers: str, piece_kib: int = 0
) -> Transport:
    """Allocate what `mpi_buffers` (device | host) needs for tensors on `device`."""
    bucket_bytes = max(8, int(bucket_mib * MIB) // 8 * 8)
    if device.type == "cpu":
        return Transport(bucket_bytes, None, piece_kib * KIB)
    if mpi_buffers == "device":
        return Transport(bucket_bytes)
    first = torch.empty(bucket_bytes, dtype=torch.uint8, pin_memory=True)
    staging = first, torch.empty_like(first, pin_memory=True)
    return Transport(bucket_bytes, staging, piece_kib * KIB)


def between_nodes(transport: Transport, nodes: int) -> Transport:
    """Return the transport for messages between so many nodes.

    A large message waits, before it may go on, for answers that queue behind those of the other
    direction: one of 11 MB took up to 1.8 times as long as the link needs, under Open MPI 5.0 and
    MPICH 5.0 over TCP. With 60 KiB for each of 2 to 4 nodes it took 1.05 to 1.2 times. 28 MiB
    between two hosts in these pieces, in 480 KiB, and whole: 2.6, 4.8 and 3.9 s at 100 Mbit/s;
    246, 376 and 252 ms at 1 Gbit/s; 31, 30 and 29 ms without a limit.
    """
    if not transport.piece_bytes:
        return transport
    wanted = transport.piece_bytes * nodes
    return replace(transport, bucket_bytes=min(transport.bucket_bytes, wanted))


def without_racks(transport: Transport) -> Transport:
    """Return the same transport for messages in a rack, between first leaders, or in a node."""
    return replace(transport, racks=None)


def for_another_thread(transport: Transport) -> Transport:
    """Return the same transport with host buckets of its own."""
    if transport.staging is None:
        return transport
    first, second = (torch.empty_like(t, pin_memory=True) for t in transport.staging)
    return replace(transport, staging=(first, second))


def staged_if_far(transport: Transport, rows: Tensor) -> Transport:
    """Return a transport that copies buckets of `rows` [ranks, n] where MPI can't count to them."""
    if transport.staging is not None or rows.numel() <= FARTHEST:
        return transport
    first = torch.empty(transport.bucket_bytes, dtype=torch.uint8, device=rows.device)
    return replace(transport, staging=(first, torch.empty_like(first)))


def _as_staged(transport: Transport, whole: Tensor) -> Transport:
    """Return a transport whose buckets are as much as is staged at once, or all of `whole`."""
    room = transport.staging[0].nbytes if transport.staging else whole.nbytes
    return replace(transport, bucket_bytes=room)


def mpi_buffer(tensor: Tensor) -> list:
    """Return the MPI buffer of a tensor without copying.

    Raises TypeError for a dtype whose reduction is not known to be right, ValueError for a tensor
    that is not contiguous.
    """
    if tensor.dtype not in MPI_TYPES:
        raise TypeError(f"{tensor.dtype} is not reduced over MPI; use one of {list(MPI_TYPES)}")
    if not tensor.is_contiguous():
        raise ValueError("a tensor handed to MPI must be contiguous")
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
        return [tensor, MPI_TYPES[tensor.dtype]]
    return [tensor.numpy(), MPI_TYPES[tensor.dtype]]


def buckets(flat: Tensor, transport: Transport) -> Iterator[Tensor]:
    """Cut `flat` into views of at most one bucket."""
    yield from flat.split(max(1, transport.bucket_bytes // flat.element_size()))


def staged(
    flat: Tensor, transport: Transport, fetch: bool = True, back: bool = True
) -> Iterator[Tensor]:
    """Yield memory that MPI gets with the values of `flat`, and keep what is in it afterwards.

    `flat` itself where nothing is staged; else stretches of whole buckets, of which the next one is
    copied while the caller is busy. `fetch` and `back` say which way to copy.
    """
    for operand, _ in staged_parts([flat], [lambda: None], transport, fetch, back):
        yield operand


def staged_parts(
    parts: Sequence[Tensor],
    ready: Sequence[Callable[[], None]],
    transport: Transport,
    fetch: bool = True,
    back: bool = True,
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the same of several parts of a vector, and whether it is the last, one after the other.

    `ready` has the current stream wait for the values of a part, without waiting itself.
    """
    if transport.staging is None:
        for number, (part, wait) in enumerate(zip(parts, ready, strict=True), 1):
            wait()
            yield part, number == len(parts)
        return
    fit = max(1, transport.staging[0].nbytes // transport.bucket_bytes)
    stretches, waits = [], []
    for part, wait in zip(parts, ready, strict=True):
        cut = part.split(fit * max(1, transport.bucket_bytes // part.element_size()))
        stretches += cut
        waits += [wait] + [lambda: None] * (len(cut) - 1)
    # A stretch shares its memory with the one before the last.
    operands = [
        _shaped(transport.staging[number % 2], stretch) for number, stretch in enumerate(stretches)
    ]
    waits[0]()
    if fetch:
        operands[0].copy_(stretches[0])
    for number, operand in enumerate(operands):
        last = number + 1 == len(operands)
        if not last:
            waits[number + 1]()
            if fetch:
                operands[number + 1].copy_(stretches[number + 1], non_blocking=True)
        yield operand, last
        if back:
            stretches[number].copy_(operand, non_blocking=True)
        if stretches[number].device.type == "cuda":
            torch.cuda.current_stream(stretches[number].device).synchronize()


def host_memory(transport: Transport, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return memory that MPI gets in place of one or two `parts`, each of about what is staged.

    The parts themselves where nothing is staged: to copy to and from them then does nothing.
    """
    if transport.staging is None:
        return parts
    return tuple(
        _shaped(memory, part) for memory, part in zip(transport.staging, parts, strict=False)
    )


@contextmanager
def lent(transport: Transport, given: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Have memory that MPI gets with what is `given`, and such that `target` is filled from."""
    sent, received = host_memory(transport, given, target)
    sent.copy_(given)
    yield sent, received
    target.copy_(received)


def _shaped(memory: Tensor, part: Tensor) -> Tensor:
    """Return the beginning of `memory` in shape and type of `part`; more of it if it is short."""
    nbytes = part.numel() * part.element_size()
    if nbytes > memory.numel():
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=part.device.type == "cuda")
    return memory[:nbytes].view(part.dtype).view(part.shape)


def allreduce_(comm: MPI.Comm, flat: Tensor, transport: Transport, op: MPI.Op = MPI.SUM) -> None:
    """Reduce `flat` over `comm` in place. Collective on `comm`; every rank receives the result."""
    if comm.size == 1:
        return
    for operand in staged(flat, transport):
        reduce_operand_(comm, operand, transport, op)


def reduce_operand_(
    comm: MPI.Comm, operand: Tensor, transport: Transport, op: MPI.Op = MPI.SUM
) -> None:
    """Reduce in place what MPI can take, bucket by bucket. Collective on `comm`."""
    # Blocking: Open MPI's Iallreduce over TCP took twice as long between two nodes.
    for bucket in buckets(operand, transport):
        _reduce_bucket_(comm, bucket, op, transport.racks)


def reduce_(comm: MPI.Comm, flat: Tensor, transport: Transport) -> None:
    """Sum `flat` over `comm` in place on rank 0; the others keep theirs. Collective on `comm`.

    With racks the first ones of other racks get the sum of those.
    """
    if racks := transport.racks:
        for level in (racks.inside, racks.between):
            if level != MPI.COMM_NULL:
                reduce_(level, flat, without_racks(transport))
        return
    if comm.size == 1:
        return
    leads = comm.rank == 0
    for operand in staged(flat, transport, back=leads):
        for bucket in buckets(operand, transport):
            mine, total = mpi_buffer(bucket), None
            if leads:
                mine, total = MPI.IN_PLACE, mine
            comm.Reduce(mine, total, op=MPI.SUM, root=0)


def bcast_(comm: MPI.Comm, flat: Tensor, transport: Transport) -> None:
    """Broadcast `flat` from rank 0 in place. Collective on `comm`."""
    if racks := transport.racks:
        for level in (racks.between, racks.inside):
            if level != MPI.COMM_NULL:
                bcast_(level, flat, without_racks(transport))
        return
    if comm.size == 1:
        return
    leads = comm.rank == 0
    for operand in staged(flat, transport, fetch=leads, back=not leads):
        for bucket in buckets(operand, transport):
            comm.Bcast(mpi_buffer(bucket), root=0)


def allreduce_then_bcast_(
    leader: MPI.Comm, node: MPI.Comm, flat: Tensor, transport: Transport
) -> float:
    """Sum `flat` over the nodes and hand the sum to every rank of each node, bucket by bucket.

    Collective on `leader` (where it is not MPI.COMM_NULL), then on `node`. The broadcast of a
    bucket overlaps the reduction of the one behind it, except for device memory. Returns the
    seconds that the broadcasts were waited for.
    """
    leads = leader != MPI.COMM_NULL and leader.size > 1
    if not leads and node.size == 1:
        return 0.0
    if flat.device.type == "cuda" and transport.staging is None:
        if leads:
            allreduce_(leader, flat, transport)
        started = time.perf_counter()
        bcast_(node, flat, without_racks(transport))
        return time.perf_counter() - started
    spent = 0.0
    for operand in staged(flat, transport, fetch=leader != MPI.COMM_NULL):
        pending: list[MPI.Request] = []
        for bucket in buckets(operand, transport):
            if leads:
                _reduce_bucket_(leader, bucket, MPI.SUM, transport.racks)
            started = time.perf_counter()
            requests = [node.Ibcast(mpi_buffer(bucket), root=0)] if node.size > 1 else []
            MPI.Request.Waitall(pending)
            pending = requests
            spent += time.perf_counter() - started
        started = time.perf_counter()
        MPI.Request.Waitall(pending)
        spent += time.perf_counter() - started
    return spent


def allgather_(comm: MPI.Comm, mine: Tensor, everyone: Tensor, transport: Transport) -> None:
    """Gather `mine` [n] of every rank into `everyone` [comm.size, n], alike on all ranks.

    One Allgatherv per bucket; as much as is staged is copied at once. Collective on `comm`.
    """
    if comm.size == 1:
        everyone[0].copy_(mine)
        return
    transport = staged_if_far(transport, everyone)
    for start, stop in _columns(everyone, _as_staged(transport, everyone)):
        with lent(transport, mine[start:stop], everyone[:, start:stop]) as (sent, received):
            for a, b in _columns(received, transport):
                comm.Allgatherv(mpi_buffer(sent[a:b]), _rows(received, a, b))


def allgatherv_(
    comm: MPI.Comm, mine: Tensor, counts: Sequence[int], everyone: Tensor, transport: Transport
) -> None:
    """Gather `counts[r]` elements of each rank r, one behind the other, into `everyone`.

    All of them fit into one bucket, and `everyone` may be longer. Collective on `comm`.
    """
    target = everyone[: sum(counts)]
    if comm.size == 1:
        target.copy_(mine)
        return
    with lent(transport, mine, target) as (sent, received):
        comm.Allgatherv(mpi_buffer(sent), _stretches(received, counts))


def alltoallv_(
    comm: MPI.Comm,
    mine: Tensor,
    leaving: Sequence[int],
    received: Tensor,
    arriving: Sequence[int],
    transport: Transport,
) -> None:
    """Send `leaving[r]` elements to each rank r, one behind the other; `arriving[r]` come from it.

    Either fits into one bucket. Collective on `comm`.
    """
    with lent(transport, mine, received) as (sent, coming):
        comm.Alltoallv(_stretches(sent, leaving), _stretches(coming, arriving))


def alltoall_(comm: MPI.Comm, mine: Tensor, received: Tensor, transport: Transport) -> None:
    """Send row r of `mine` [comm.size, n] to rank r; `received`, as large, is what came to here.

    One Alltoallv per bucket; as much as is staged is copied at once. Row r of what is received came
    from rank r. Collective on `comm`.
    """
    if comm.size == 1:
        received.copy_(mine)
        return
    transport = staged_if_far(transport, mine)
    for start, stop in _columns(mine, _as_staged(transport, mine)):
        with lent(transport, mine[:, start:stop], received[:, start:stop]) as (leaving, coming):
            for a, b in _columns(leaving, transport):
                comm.Alltoallv(_rows(leaving, a, b), _rows(coming, a, b))


def sendrecv_(
    comm: MPI.Comm, mine: Tensor, to: int, received: Tensor, source: int, transport: Transport
) -> None:
    """Send `mine` to rank `to` while as much comes from rank `source`. Collective on `comm`."""
    whole = _as_staged(transport, mine)
    for part, target in zip(buckets(mine, whole), buckets(received, whole), strict=True):
        with lent(transport, part, target) as (leaving, coming):
            pairs = zip(buckets(leaving, transport), buckets(coming, transport), strict=True)
            for out, into in pairs:
                comm.Sendrecv(mpi_buffer(out), to, recvbuf=mpi_buffer(into), source=source)


# --------------------------------------------------------------------------------------------------
# Sums by shares: each rank adds up everyone's part of its own share, and hands the sum to all
# --------------------------------------------------------------------------------------------------


def share_ends(count: int, ranks: int) -> list[int]:
    """Return the ends of the ranks' shares of `count` elements, of one size but for the last."""
    size = -(-count // ranks)
    return [min(size * rank, count) for rank in range(ranks + 1)]


def buckets_at_once(like: Tensor, nbytes: int, transport: Transport) -> int:
    """Return how many buckets of `nbytes` are coded, staged and added up at once, 1 on the CPU.

    On a GPU kernels and copies of a bucket of 120 KiB take longer to start than to run.
    """
    if like.device.type == "cpu":
        return 1
    room = transport.staging[0].nbytes if transport.staging else transport.bucket_bytes
    return max(1, room // nbytes)


def runs(count: int, bucket: int, together: int) -> Iterator[slice]:
    """Cut `count` elements into runs of whole buckets, `together` at most, and what is left."""
    start = 0
    while start < count:
        whole = min(together, (count - start) // bucket)
        stop = start + (whole * bucket or count - start)
        yield slice(start, stop)
        start = stop


def alltoall_shares_(
    comm: MPI.Comm,
    rows: Tensor,
    ends: Sequence[int],
    received: Tensor,
    transport: Transport,
    own: bool = True,
) -> None:
    """Send each rank everyone's part of its share of each of `rows` [buckets, n].

    Share r of a row is row[ends[r] : ends[r + 1]]. `received` [buckets, parts * size of this rank's
    share] are the ranks' parts in their order; without `own` this rank's is not sent, and is not
    among them. All rows are staged together, and travel one by one. Collective on `comm`.
    """
    leaving = [stop - start for start, stop in pairwise(ends)]
    arriving = [leaving[comm.rank]] * comm.size
    alike = own and len(set(leaving)) == 1
    if not own:
        leaving[comm.rank] = arriving[comm.rank] = 0
    with lent(transport, rows, received) as (sent, coming):
        for row, into in zip(sent, coming, strict=True):
            if alike:
                comm.Alltoall(mpi_buffer(row), mpi_buffer(into))
            else:
                comm.Alltoallv(_stretches(row, leaving, ends), _stretches(into, arriving))


def allgather_shares_(
    comm: MPI.Comm, rows: Tensor, ends: Sequence[int], transport: Transport
) -> None:
    """Hand each rank's share of each of `rows`, cut as in `alltoall_shares_`, to all.

    Shares of one size by Allgather: MPICH's Allgatherv takes 3 times as long. Collective on `comm`.
    """
    counts = [stop - start for start, stop in pairwise(ends)]
    (everyone,) = host_memory(transport, rows)
    if everyone is not rows:
        own = slice(ends[comm.rank], ends[comm.rank + 1])
        everyone[:, own].copy_(rows[:, own])
    for row in everyone:
        if len(set(counts)) == 1:
            comm.Allgather(MPI.IN_PLACE, mpi_buffer(row))
        else:
            comm.Allgatherv(MPI.IN_PLACE, _stretches(row, counts))
    rows.copy_(everyone)


def allreduce_halves_(comm: MPI.Comm, flat: Tensor, transport: Transport) -> None:
    """Sum a float16 or bfloat16 vector over `comm` in place, alike on all ranks.

    MPI adds up neither type: ranks add up shares in float32, in the order of the ranks, and round
    each sum once. Collective on `comm`.
    """
    if comm.size == 1:
        return
    room = max(1, transport.bucket_bytes // (flat.element_size() * comm.size)) * comm.size
    together = buckets_at_once(flat, room * flat.element_size(), transport)
    for run in runs(flat.numel(), room, together):
        rows = flat[run].view(max(1, (run.stop - run.start) // room), -1)
        carried, ends = rows.view(torch.int16), share_ends(rows.shape[1], comm.size)
        mine = rows[:, ends[comm.rank] : ends[comm.rank + 1]]
        received = carried.new_empty(len(rows), comm.size * mine.shape[1])
        alltoall_shares_(comm, carried, ends, received, transport)
        total = torch.zeros_like(mine, dtype=torch.float32)
        for part in received.view(flat.dtype).view(len(rows), comm.size, -1).unbind(1):
            total.add_(part)
        mine.copy_(total)
        allgather_shares_(comm, carried, ends, transport)


def _reduce_bucket_(
    comm: MPI.Comm, operand: Tensor, op: MPI.Op, racks: Racks | None = None
) -> None:
    """Reduce `operand` over `comm` in place by blocking calls. Collective on `comm`."""
    if racks is not None:
        buffer, first = mpi_buffer(operand), racks.between != MPI.COMM_NULL
        racks.inside.Reduce(*((MPI.IN_PLACE, buffer) if first else (buffer, None)), op=op, root=0)
        if first:
            _reduce_bucket_(racks.between, operand, op)
        racks.inside.Bcast(buffer, root=0)
        return
    if not _folds(comm, operand) or op not in (MPI.SUM, MPI.MAX):
        comm.Allreduce(MPI.IN_PLACE, mpi_buffer(operand), op=op)
        return
    share = operand.numel() // comm.size
    shared, rest = operand[: share * comm.size], operand[share * comm.size :]
    ends, received = share_ends(shared.numel(), comm.size), torch.empty_like(shared)
    alltoall_shares_(comm, shared.view(1, -1), ends, received.view(1, -1), HOST)
    first, *parts = received.view(comm.size, share)
    # In the type of the operand, as MPI does: torch would widen integers.
    mine = shared.view(comm.size, share)[comm.rank].copy_(first)
    for part in parts:
        mine.add_(part) if op == MPI.SUM else torch.maximum(mine, part, out=mine)
    allgather_shares_(comm, shared.view(1, -1), ends, HOST)
    if rest.numel():
        comm.Allreduce(MPI.IN_PLACE, mpi_buffer(rest), op=op)


def _folds(comm: MPI.Comm, operand: Tensor) -> bool:
    """Return whether an Allreduce of `operand` over `comm` would send much more than is enough."""
    # Device memory stays with Allreduce, which is what is probed.
    power_of_two = comm.size & (comm.size - 1) == 0
    small = operand.nbytes < LEAST_SHARE_BYTES * comm.size
    return not (power_of_two or small or operand.device.type == "cuda")


def _columns(rows: Tensor, transport: Transport) -> Iterator[tuple[int, int]]:
    """Walk the columns of `rows` [ranks, n], as many at a time as fit into one bucket."""
    room = max(1, transport.bucket_bytes // (rows.element_size() * rows.shape[0]))
    for start in range(0, rows.shape[1], room):
        yield start, min(start + room, rows.shape[1])


def _rows(rows: Tensor, start: int, stop: int) -> list:
    """Return the MPI buffer of some columns of `rows`, a stretch of them for each rank."""
    ranks, width = rows.shape
    buffer, kind = mpi_buffer(rows.view(-1)[start:])
    return [buffer, ([stop - start] * ranks, [rank * width for rank in range(ranks)]), kind]


def _stretches(flat: Tensor, counts: Sequence[int], places: Sequence[int] | None = None) -> list:
    """Return the MPI buffer of a stretch for each rank: one behind the other, or at `places`."""
    places = list(accumulate(counts, initial=0) if places is None else places)
    buffer, kind = mpi_buffer(flat)
    return [buffer, (list(counts), places[: len(counts)]), kind]


def broadcast_weights_(world: MPI.Comm, model: nn.Module, transport: Transport) -> None:
    """Make rank 0's parameters and buffers everyone's. Collective on `world`."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast_tensor_(world, tensor.detach(), transport)


def broadcast_tensor_(world: MPI.Comm, tensor: Tensor, transport: Transport) -> None:
    """Make rank 0's values of a tensor, of any dtype, everyone's. Collective on `world`."""
    # The memory may be out of order, as in a model that is channels_last itself. Bytes, since
    # counters travel as well.
    flat = tensor.contiguous().view(-1)
    bcast_(world, flat.view(torch.uint8), transport)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
