"""A communicator that adds up what MPI is handed, to compare with what the program counts."""

import numpy as np

from mpi4py import MPI


class Counting:
    """A communicator that adds up what this rank sends others, by ring algorithms where it sums.

    Of what it hands over, int32 are positions. `farthest` is the largest number of elements from
    the beginning of a buffer to the end of what was in a call. `operands` are the bytes of what was
    reduced or broadcast, `digests` those of uint64 among them.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.sent, self.positions, self.farthest = 0.0, 0, 0
        self.operands = self.digests = 0

    def __getattr__(self, name: str):
        return getattr(self.comm, name)

    def _pass(self, array: np.ndarray, passes: int = 1) -> None:
        self.sent += passes * (self.comm.size - 1) / self.comm.size * array.nbytes
        self.operands += array.nbytes
        self.digests += array.nbytes if array.dtype == np.uint64 else 0

    def Allreduce(self, mine, operand, op=MPI.SUM) -> None:
        self._pass(_array(operand), 2)
        self.comm.Allreduce(mine, operand, op=op)

    def Reduce(self, mine, operand, op, root) -> None:
        self._pass(_array(operand if self.comm.rank == root else mine))
        self.comm.Reduce(mine, operand, op=op, root=root)

    def Bcast(self, operand, root) -> None:
        self._pass(_array(operand))
        self.comm.Bcast(operand, root=root)

    def Allgather(self, mine, everyone) -> None:
        share = _array(everyone).nbytes // self.comm.size
        self.sent += (self.comm.size - 1) * share
        self.comm.Allgather(mine, everyone)

    def Allgatherv(self, mine, everyone) -> None:
        array, (counts, places), _ = everyone
        if array.dtype == np.int32:
            self.positions += counts[self.comm.rank] * array.itemsize
        self.sent += (self.comm.size - 1) * counts[self.comm.rank] * array.itemsize
        self._reach(counts, places)
        self.comm.Allgatherv(mine, everyone)

    def Sendrecv(self, mine, dest, recvbuf, source) -> None:
        array = _array(mine)
        self.positions += array.nbytes if array.dtype == np.int32 else 0
        self.sent += array.nbytes
        self.comm.Sendrecv(mine, dest, recvbuf=recvbuf, source=source)

    def Alltoall(self, mine, received) -> None:
        self._pass(_array(mine))
        self.comm.Alltoall(mine, received)

    def Alltoallv(self, mine, received) -> None:
        array, (counts, places), _ = mine
        if array.dtype == np.int32:
            self.positions += sum(counts) * array.itemsize
        self.sent += (sum(counts) - counts[self.comm.rank]) * array.itemsize
        self._reach(counts, places)
        self._reach(*received[1])
        self.comm.Alltoallv(mine, received)

    def _reach(self, counts, places) -> None:
        self.farthest = max(self.farthest, *(c + p for c, p in zip(counts, places, strict=True)))


def _array(buffer) -> np.ndarray:
    return buffer if isinstance(buffer, np.ndarray) else buffer[0]
