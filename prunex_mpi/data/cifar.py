"""Read CIFAR-10 and CIFAR-100, downloaded by one process of all that want them."""

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import torch
from filelock import FileLock
from torchvision.datasets import CIFAR10, CIFAR100

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import while_growing
from prunex_mpi.data.batches import Shard


def read_cifar(
    name: str, data_dir: Path, download: bool, train: bool, going: Callable[[], None]
) -> tuple[Shard, tuple[str, ...]]:
    """Read one half of CIFAR, and the names of its classes.

    Where it is incomplete, one process downloads and others wait.
    """
    cifar = CIFAR10 if name == "cifar10" else CIFAR100
    try:
        half = cifar(data_dir, train=train, download=False)
    except (RuntimeError, OSError) as missing:
        if not download:
            # No other program fetches it.
            advice = "correct --data-dir, or train with --download"
            raise UserError(f"no complete {name} in {data_dir}: {advice}", UNREADABLE) from missing
        try:
            data_dir.mkdir(parents=True, exist_ok=True)

            def fetch() -> CIFAR10:
                # Who comes second finds the files complete: torchvision checks before it downloads.
                with FileLock(data_dir / f".{name}.lock"):
                    return cifar(data_dir, train=train, download=True)

            def files() -> list[Path]:
                return [data_dir / cifar.filename, *(data_dir / cifar.base_folder).glob("*")]

            half = while_growing(files, going, fetch)
        except (RuntimeError, OSError, HTTPException) as error:
            message = f"cannot download {name} to {data_dir} ({one_line(error)}): "
            advice = "check the network, or copy the files there from another machine"
            raise UserError(message + advice, UNREADABLE) from error
    going()
    images = torch.from_numpy(half.data).permute(0, 3, 1, 2)
    return Shard(images, torch.tensor(half.targets, dtype=torch.int64)), tuple(half.classes)
