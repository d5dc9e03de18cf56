"""Tell by how much the clocks of the ranks differ: each process's counts from a time of its own."""

import time

import numpy as np

from mpi4py import MPI

ROUND_TRIPS = 20
TAG = 7


def seconds_ahead(world: MPI.Comm) -> float:
    """Return by how much this rank's `time.perf_counter` is ahead of world rank 0's.

    By the shortest of several round trips with rank 0, half of which is the most that it can be
    wrong by; 0 where the clocks can't be told apart, as on one machine. Collective on `world`.
    """
    mine = np.zeros(1)
    if world.rank:
        for _ in range(ROUND_TRIPS):
            world.Recv(mine, source=0, tag=TAG)
            mine[0] = time.perf_counter()
            world.Send(mine, dest=0, tag=TAG)
        world.Recv(mine, source=0, tag=TAG)
        return float(mine[0])
    for rank in range(1, world.size):
        trips = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            world.Send(mine, dest=rank, tag=TAG)
            world.Recv(mine, source=rank, tag=TAG)
            ended = time.perf_counter()
            trips.append((ended - started, float(mine[0]) - (started + ended) / 2))
        trip, ahead = min(trips)
        mine[0] = ahead if abs(ahead) > trip / 2 else 0.0
        world.Send(mine, dest=rank, tag=TAG)
    return 0.0
