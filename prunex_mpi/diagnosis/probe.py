"""Try collectives on device tensors in a job of its own, which may crash.

`python -m prunex_mpi.diagnosis.probe cuda [sum | reduce | bcast | bor | alltoallv | allgather |
allgatherv | speed]`, under a launcher or alone. Started as a job is, it tries what that job would
go over.
"""

import sys
import traceback

import numpy as np
import torch

from mpi4py import MPI

from prunex_mpi.base.signals import abort_job
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import allreduce_, build_transport, mpi_buffer
from prunex_mpi.comm.traffic import now

ELEMENTS = 1 << 18
SPEED_MIB, SPEED_TURNS = 16, 6
# Some libraries take device memory and copy it themselves, more slowly: Open MPI 4.1 over shared
# memory took 3.7 to 4.4 times as long on one H200 as pinned buffers of ours.
SLOWER = 1.2
# Of how many ranks: a launcher of another MPI starts jobs of one.
PASSED = "probe passed on {} ranks"


def require(right: object, problem: str) -> None:
    """Raise RuntimeError where a trial is not `right`; an assert may be left out (python -O)."""
    if not right:
        raise RuntimeError(problem)


def try_sum(world: MPI.Comm, device: str) -> None:
    """Allreduce SUM. Collective on `world`."""
    values = torch.full((ELEMENTS,), float(world.rank + 1), device=device)
    total = torch.zeros_like(values)
    # Not in place, so that even a world of one rank must copy from and to device memory.
    world.Allreduce(mpi_buffer(values), mpi_buffer(total), op=MPI.SUM)
    expected = world.size * (world.size + 1) / 2
    require(torch.all(total == expected), "Allreduce SUM gave wrong numbers")
    # As training does it.
    world.Allreduce(MPI.IN_PLACE, mpi_buffer(values), op=MPI.SUM)
    require(torch.all(values == expected), "Allreduce SUM in place gave wrong numbers")


def try_reduce(world: MPI.Comm, device: str) -> None:
    """Reduce SUM to the last rank, as energies are voted on. Collective on `world`."""
    values = torch.full((ELEMENTS,), float(world.rank + 1), device=device)
    total = torch.zeros_like(values)
    root = world.size - 1
    world.Reduce(mpi_buffer(values), mpi_buffer(total), op=MPI.SUM, root=root)
    expected = world.size * (world.size + 1) / 2 if world.rank == root else 0
    require(torch.all(total == expected), "Reduce SUM gave wrong numbers")


def try_bcast(world: MPI.Comm, device: str) -> None:
    """Bcast. Collective on `world`."""
    values = torch.full((ELEMENTS,), float(world.rank + 1), device=device)
    world.Bcast(mpi_buffer(values), root=0)
    require(torch.all(values == 1), "Bcast gave wrong numbers")


def try_bor(world: MPI.Comm, device: str) -> None:
    """Allreduce BOR. Collective on `world`."""
    bits = torch.full((ELEMENTS,), 1 << (world.rank % 8), dtype=torch.uint8, device=device)
    union = torch.zeros_like(bits)
    world.Allreduce(mpi_buffer(bits), mpi_buffer(union), op=MPI.BOR)
    require(torch.all(union == (1 << min(world.size, 8)) - 1), "Allreduce BOR gave wrong bits")


def try_alltoallv(world: MPI.Comm, device: str) -> None:
    """Alltoallv of bytes, as codes go to those who add them up. Collective on `world`."""
    sent = torch.full((world.size * ELEMENTS,), world.rank + 1, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    parts = [ELEMENTS] * world.size, [rank * ELEMENTS for rank in range(world.size)]
    world.Alltoallv(*([buffer, parts, kind] for buffer, kind in map(mpi_buffer, (sent, received))))
    ranks = torch.arange(1, world.size + 1, dtype=torch.uint8, device=device)
    require(torch.all(received.view(world.size, -1) == ranks[:, None]), "Alltoallv: wrong bytes")


def try_allgather(world: MPI.Comm, device: str) -> None:
    """Allgather of bytes in place, as their sum comes back. Collective on `world`."""
    shares = torch.zeros((world.size, ELEMENTS), dtype=torch.uint8, device=device)
    shares[world.rank] = world.rank + 1
    world.Allgather(MPI.IN_PLACE, mpi_buffer(shares.view(-1)))
    ranks = torch.arange(1, world.size + 1, dtype=torch.uint8, device=device)
    require(torch.all(shares == ranks[:, None]), "Allgather gave wrong bytes")


def try_allgatherv(world: MPI.Comm, device: str) -> None:
    """Allgatherv in place of shares of several sizes, as sums of blocks. Collective on `world`."""
    counts = [ELEMENTS + rank for rank in range(world.size)]
    starts = [sum(counts[:rank]) for rank in range(world.size)]
    shares = torch.zeros(sum(counts), dtype=torch.uint8, device=device)
    mine = slice(starts[world.rank], starts[world.rank] + counts[world.rank])
    shares[mine] = world.rank + 1
    buffer, kind = mpi_buffer(shares)
    world.Allgatherv(MPI.IN_PLACE, [buffer, counts, starts, kind])
    ranks = torch.arange(1, world.size + 1, dtype=torch.uint8, device=device)
    expected = ranks.repeat_interleave(torch.tensor(counts, device=device))
    require(torch.all(shares == expected), "Allgatherv gave wrong bytes")


def try_speed(world: MPI.Comm, device: str) -> None:
    """Allreduce SUM, which must not be slower than through host memory. Collective on `world`."""
    flat = torch.ones(SPEED_MIB * MIB // 4, device=device)
    kinds = ("device", "host")
    transports = {kind: build_transport(flat.device, SPEED_MIB, kind) for kind in kinds}
    if transports["host"].staging is None:
        # On the CPU there is one way.
        return
    best = np.zeros(len(kinds))
    for number, transport in enumerate(transports.values()):
        taken = []
        for _ in range(SPEED_TURNS):
            world.Barrier()
            started = now(flat.device)
            allreduce_(world, flat, transport)
            taken.append(now(flat.device) - started)
        # The first turn prepares.
        best[number] = min(taken[1:])
    world.Allreduce(MPI.IN_PLACE, best, op=MPI.MAX)
    times = best[0] / best[1]
    require(
        times < SLOWER, f"{SPEED_MIB} MiB take {times:.1f} times as long as through host memory"
    )


# What no number is wrong for: a job that has to be sure of the numbers alone leaves it away.
SPEED = "speed"
# By the words that ask for them: what they are called in MPI, and what tries them.
TRIALS = {
    "sum": ("Allreduce SUM", try_sum),
    "reduce": ("Reduce SUM", try_reduce),
    "bcast": ("Bcast", try_bcast),
    "bor": ("Allreduce BOR", try_bor),
    "alltoallv": ("Alltoallv", try_alltoallv),
    "allgather": ("Allgather", try_allgather),
    "allgatherv": ("Allgatherv", try_allgatherv),
    SPEED: ("Allreduce SUM in time", try_speed),
}


def main(device: str, *operations: str) -> None:
    """Try `operations`, by default all but the speed, on `device` tensors; say that they passed."""
    world = MPI.COMM_WORLD
    if device == "cuda":
        # As ranks of training, each on a GPU of its own; where there is none torch says so.
        torch.cuda.set_device(world.rank % max(1, torch.cuda.device_count()))
    for operation in operations or (name for name in TRIALS if name != SPEED):
        TRIALS[operation][1](world, device)
    if world.rank == 0:
        print(PASSED.format(world.size), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        # The other ranks would wait for this one.
        traceback.print_exc()
        abort_job(MPI.COMM_WORLD)
