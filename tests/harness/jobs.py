"""What a job holds, for tests that need no launcher of their own."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from faulty import noisy
from nodes import WORLD
from torch import nn

from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.run.directory import RunDirectory


class NoisyNet(nn.Module):
    """BatchNorm, dropout of torch's own generator, noise of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = noisy(num_classes=10, image_size=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.01 * float(np.random.rand()) if self.training else 1.0
        return self.body(x * scale)


@contextmanager
def run_directory() -> Iterator[RunDirectory | None]:
    """Make a run directory that all ranks see; rank 0 receives it, the others None."""
    folder = broadcast_text(WORLD, tempfile.mkdtemp() if WORLD.rank == 0 else "")
    files = RunDirectory(Path(folder), "config") if WORLD.rank == 0 else None
    yield files
    WORLD.Barrier()
    if files is not None:
        files.close()
        shutil.rmtree(folder)
