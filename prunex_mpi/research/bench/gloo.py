"""A process group of torch.distributed over gloo beside MPI, on the same ranks."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mpi4py import MPI

from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text, together

# torch's default for the buckets of DistributedDataParallel.
DDP_BUCKET_BYTES = 25 * MIB
TIMEOUT_S = 60


@contextmanager
def gloo_group(world: MPI.Comm) -> Iterator[None]:
    """Let torch.distributed have the same ranks for the time of the block. Collective on `world`.

    GLOO_SOCKET_IFNAME chooses its interface.
    """

    def place() -> str:
        if world.rank:
            return ""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"

    where = broadcast_text(world, place())
    together(
        world,
        lambda: dist.init_process_group(
            "gloo",
            init_method=where,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=TIMEOUT_S),
        ),
    )
    yield
    dist.destroy_process_group()
