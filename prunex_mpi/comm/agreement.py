"""Agree with other ranks: texts, errors that end every rank alike, digests, means, clocks."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import USAGE, UserError, quote
from prunex_mpi.base.heartbeat import Heartbeat, read_and_written

T = TypeVar("T")

POLL_S, MOST_DOUBLED = 0.005, 6
# What a rank hands over to compare a digest, and to say that it has met no error.
DIGEST_BYTES, VERDICT_BYTES = 16, 8
# Between two rounds in which ranks tell whether they are done; how the threads that do are called.
ROUND_S, ROUNDS = 0.5, "rounds"


def gather_text(world: MPI.Comm, text: str) -> list[str]:
    """Return every rank's text on rank 0 and an empty list elsewhere. Collective on `world`."""
    data = np.frombuffer(_encode(text), dtype=np.uint8)
    counts = np.zeros(world.size, dtype=np.int64)
    world.Gather(np.array([data.size], dtype=np.int64), counts, root=0)
    everything = np.empty(int(counts.sum()), dtype=np.uint8)
    received = [everything, (counts, None)] if world.rank == 0 else None
    world.Gatherv(data, received, root=0)
    if world.rank:
        return []
    ends = np.cumsum(counts)
    return [_decode(everything[e - c : e]) for c, e in zip(counts, ends, strict=True)]


def broadcast_text(world: MPI.Comm, text: str, root: int = 0) -> str:
    """Return rank `root`'s text on every rank. Collective on `world`."""
    data = np.frombuffer(_encode(text), dtype=np.uint8)
    length = np.array([data.size], dtype=np.int64)
    world.Bcast(length, root=root)
    buffer = data.copy() if world.rank == root else np.empty(int(length[0]), dtype=np.uint8)
    world.Bcast(buffer, root=root)
    return _decode(buffer)


def broadcast_json(comm: MPI.Comm, value: Any, root: int = 0) -> Any:
    """Return rank `root`'s value on every rank, as JSON has it. Collective on `comm`."""
    return json.loads(broadcast_text(comm, json.dumps(value) if comm.rank == root else "", root))


def gather_counts(comm: MPI.Comm, count: int) -> list[int]:
    """Return every rank's `count`, alike on all ranks. Collective on `comm`."""
    counts = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([count], dtype=np.int64), counts)
    return counts.tolist()


def count_same(comm: MPI.Comm, text: str) -> int:
    """Return how many ranks have this rank's `text`, with itself. Collective on `comm`."""
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], dtype=np.uint64)
    everyone = np.empty(comm.size, dtype=np.uint64)
    comm.Allgather(mine, everyone)
    return int(np.count_nonzero(everyone == mine))


def _encode(text: str) -> bytes:
    """Return UTF-8, and the bytes of file names that are not UTF-8 as they were."""
    return text.encode(errors="surrogateescape")


def _decode(data: np.ndarray) -> str:
    return bytes(data).decode(errors="surrogateescape")


def raise_together(world: MPI.Comm, error: UserError | None) -> None:
    """Raise the lowest rank's error on every rank, or return when none has one.

    Collective on `world`: a rank without an error passes None.
    """
    mine = world.size if error is None else world.rank
    first = np.array([mine], dtype=np.int64)
    world.Allreduce(MPI.IN_PLACE, first, op=MPI.MIN)
    rank = int(first[0])
    if rank == world.size:
        return
    failed = np.array([error is not None], dtype=np.int64)
    world.Allreduce(MPI.IN_PLACE, failed, op=MPI.SUM)
    code = np.array([error.exit_code if error else 0], dtype=np.int64)
    world.Bcast(code, root=rank)
    where = f"rank {rank} on {socket.gethostname()}: " if failed[0] < world.size else ""
    message = broadcast_text(world, f"{where}{error}" if error else "", root=rank)
    raise of_all(UserError(message, int(code[0])))


def run_collectively(world: MPI.Comm, action: Callable[[], T]) -> T:
    """Return `action()` or raise the first rank's UserError everywhere. Collective on `world`."""
    result, error = None, None
    try:
        result = action()
    except UserError as caught:
        error = caught
    raise_together(world, error)
    return result


def run_on_root(world: MPI.Comm, action: Callable[[], T]) -> T | None:
    """Return `action()` on rank 0, None elsewhere; its UserError is everyone's. Collective."""
    return run_collectively(world, lambda: action() if world.rank == 0 else None)


def run_collectively_while(world: MPI.Comm, action: Callable[[], T], heartbeat: Heartbeat) -> T:
    """Return `action()` or raise the first rank's UserError everywhere. Collective on `world`.

    The action takes long and does not communicate. As long as any rank beats, reads or writes, all
    heartbeats go on: each rank has a thread that tells of it. Where the library lets one thread
    alone call it, a rank tells when it is done.
    """
    result, error = None, None
    done, gone = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix=ROUNDS) as pool:
        rounds = partial(_rounds, world, heartbeat, done, gone)
        alone = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        told = None if alone else pool.submit(rounds)
        try:
            result = action()
        except UserError as caught:
            error = caught
        except BaseException:
            # The job ends, and the others wait no longer.
            gone.set()
            raise
        done.set()
        if told is None:
            rounds()
        else:
            pauses = _pauses()
            # Not in the thread's own functions: where this rank is shows that it waits.
            while not told.done():
                time.sleep(next(pauses))
            told.result()
    raise_together(world, error)
    return result


def _rounds(
    world: MPI.Comm, heartbeat: Heartbeat, done: threading.Event, gone: threading.Event
) -> None:
    """Beat whenever any rank has gone on, until all are `done`. Collective on `world`.

    Nobody waits in MPI. By trees, one way and then back, since each rank that hands a message on
    may sleep meanwhile, and Iallreduce may go around all of them.
    """
    mine, everyone = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    before, beats = 0, 0
    while everyone[0] < world.size and not gone.is_set():
        finished = done.wait(ROUND_S)
        mine[:] = finished, read_and_written() + heartbeat.beats - beats
        for begin in (partial(world.Ireduce, mine, everyone), partial(world.Ibcast, everyone)):
            request, pauses = begin(), _pauses()
            while not request.Test() and not gone.is_set():
                time.sleep(next(pauses))
        if everyone[1] != before:
            before, beats = int(everyone[1]), beats + 1
            heartbeat.go_on()


def _pauses() -> Iterator[float]:
    """Yield seconds between looks at a message: few where it comes at once, in the end POLL_S."""
    for doubled in range(MOST_DOUBLED):
        yield POLL_S / 2 ** (MOST_DOUBLED - doubled)
    yield from repeat(POLL_S)


def require_same(world: MPI.Comm, what: str, value: str) -> None:
    """Raise UserError on every rank unless all pass the same `value`; it names lines that differ.

    Collective on `world`.
    """
    digest = hashlib.sha256(value.encode()).digest()[:8]
    if digests_agree(world, int.from_bytes(digest, "little")):
        return
    first, own = broadcast_text(world, value).splitlines(), value.splitlines()
    lacking, more = (
        next((quote(line) for line in a if line not in b), "")
        for a, b in ((first, own), (own, first))
    )
    found = f": {more or 'not it'} on rank {world.rank}, {lacking or 'not it'} on rank 0"
    told = gather_text(world, found if lacking or more else "")
    found = broadcast_text(world, next(filter(None, told), ""))
    message = f"{what} differ between ranks{found}; give all ranks the same ones"
    raise of_all(UserError(message, USAGE))


def of_all(error: UserError) -> UserError:
    """Return `error` marked as one that every rank raises, which aborts no job."""
    error.together = True
    return error


def digests_agree(comm: MPI.Comm, digest: int) -> bool:
    """Return whether all ranks hold the same 64-bit `digest`. Collective on `comm`."""
    low = np.array([digest, ~np.uint64(digest)], dtype=np.uint64)
    comm.Allreduce(MPI.IN_PLACE, low, op=MPI.MIN)
    # The minimum of the complement is the complement of the maximum.
    return int(low[0]) == int(~low[1])


def sum_alike_(world: MPI.Comm, values: np.ndarray) -> None:
    """Add up over all ranks, in place; all get rank 0's bits. Collective on `world`."""
    world.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM)
    world.Bcast(values, root=0)


def alike_bytes(count: int) -> int:
    """Return what a rank hands to the two collectives of `sum_alike_` for `count` float64."""
    return 2 * 8 * count


def mean_over_ranks(world: MPI.Comm, value: float) -> float:
    """Return the mean of one number, with the same bits on every rank. Collective on `world`."""
    buffer = np.array([value])
    sum_alike_(world, buffer)
    return float(buffer[0]) / world.size
