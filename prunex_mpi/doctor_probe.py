"""Try the collectives on device tensors in a job of its own, which may crash.

`python -m prunex_mpi.doctor_probe cuda`, under a launcher or alone.
"""

import sys

import torch

from mpi4py import MPI

from prunex_mpi.collectives import mpi_buffer

ELEMENTS = 1 << 18


def main(device: str) -> None:
    """Run Allreduce, Bcast and BOR on `device` tensors; say "probe passed" when they are right."""
    world = MPI.COMM_WORLD
    rank = world.rank
    values = torch.full((ELEMENTS,), float(rank + 1), device=device)
    total = torch.zeros_like(values)
    # Not in place, so that even a world of one rank must copy from and to device memory.
    world.Allreduce(mpi_buffer(values), mpi_buffer(total), op=MPI.SUM)
    expected = world.size * (world.size + 1) / 2
    assert torch.all(total == expected), "Allreduce SUM gave wrong numbers"
    world.Bcast(mpi_buffer(values), root=0)
    assert torch.all(values == 1), "Bcast gave wrong numbers"
    bits = torch.full((ELEMENTS,), 1 << (rank % 8), dtype=torch.uint8, device=device)
    union = torch.zeros_like(bits)
    world.Allreduce(mpi_buffer(bits), mpi_buffer(union), op=MPI.BOR)
    assert torch.all(union == (1 << min(world.size, 8)) - 1), "Allreduce BOR gave wrong bits"
    if rank == 0:
        print("probe passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
