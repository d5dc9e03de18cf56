"""What a job holds, for tests that need no launcher of their own."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from faulty import noisy
from nodes import WORLD
from torch import nn

from prunex_mpi.base.errors import log
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.job import run
from prunex_mpi.run.program import watched
from prunex_mpi.settings.fields import Settings


class NoisyNet(nn.Module):
    """BatchNorm, dropout of torch's own generator, noise of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = noisy(num_classes=10, image_size=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.01 * float(np.random.rand()) if self.training else 1.0
        return self.body(x * scale)


@contextmanager
def run_folder() -> Iterator[Path]:
    """Have a folder that all ranks see."""
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else ""))
    yield folder
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(folder)


@contextmanager
def run_directory() -> Iterator[RunDirectory | None]:
    """Make a run directory that all ranks see; rank 0 receives it, the others None."""
    with run_folder() as folder:
        files = RunDirectory(folder, "config") if WORLD.rank == 0 else None
        yield files
        WORLD.Barrier()
        if files is not None:
            files.close()


def metrics_of(path: Path) -> list[list[float]]:
    """Return what of a run's metrics two runs have in common."""
    keys = ("iteration", "train_loss", "test_loss", "test_accuracy")
    return [[json.loads(line)[key] for key in keys] for line in path.read_text().splitlines()]


def run_job_here(settings: Settings) -> int:
    """Run a job on the ranks of this test, as the program does."""
    hook, handlers = sys.excepthook, log.handlers[:]
    try:
        with watched(WORLD, 60.0) as watchdog:
            return run(WORLD, settings, watchdog, ReceivedSignal())
    finally:
        sys.excepthook, log.handlers = hook, handlers
