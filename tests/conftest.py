"""Fixtures shared by serial and parallel tests."""

import gc
import os

import pytest
import torch

# Every rank of a parallel test and the oracle in one process must add in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _end_together(request):
    """Let all ranks finish a parallel test before the next one starts its collectives."""
    yield
    if request.node.get_closest_marker("mpi"):
        from mpi4py import MPI

        gc.collect()
        MPI.COMM_WORLD.Barrier()
