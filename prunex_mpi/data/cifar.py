"""Read CIFAR-10 and CIFAR-100, downloaded by one process of all that want them.

The files are pickles, which can hold any code. Parsed are the very bytes whose checksum was
compared with the published one, and nothing but plain values and NumPy arrays of numbers.
"""

import hashlib
import pickle
from contextlib import suppress
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import download_and_extract_archive

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import open_regular
from prunex_mpi.data.batches import Shard

# More than any of the files has.
MOST_BYTES = 2**28
# All that an array of theirs names; NumPy itself has moved the first one since.
ARRAY_PARTS = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}

# To train on, to test on (None where it is not read), names of the classes.
Splits = tuple[Shard, Shard | None, tuple[str, ...]]


class _ArraysOnly(pickle.Unpickler):
    """Parse a pickle of plain values and arrays; raise UnpicklingError for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAY_PARTS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read from a file")
        return ARRAY_PARTS[module, name]


def read_cifar(name: str, data_dir: Path, download: bool, test: bool) -> Splits:
    """Return the splits of CIFAR, that to test on if `test`, and the names of its classes.

    Where it is incomplete, one process downloads and others wait. Raises UserError (UNREADABLE).
    """
    published = CIFAR10 if name == "cifar10" else CIFAR100
    try:
        return _read(published, data_dir, test)
    except (ValueError, OSError) as missing:
        if not download:
            # No other program fetches it.
            advice = "correct --data-dir, or train with --download"
            raise UserError(f"no complete {name} in {data_dir}: {advice}", UNREADABLE) from missing

    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f".{name}.lock"):
            # Who comes second finds the files complete.
            with suppress(ValueError, OSError):
                return _read(published, data_dir, test)
            archive = {"filename": published.filename, "md5": published.tgz_md5}
            download_and_extract_archive(published.url, data_dir, **archive)
            return _read(published, data_dir, test)
    except (RuntimeError, ValueError, OSError, HTTPException) as error:
        message = f"cannot download {name} to {data_dir} ({one_line(error)}): "
        advice = "check the network, or copy the files there from another machine"
        raise UserError(message + advice, UNREADABLE) from error


def _read(published: type[CIFAR10], data_dir: Path, test: bool) -> Splits:
    """Read all files asked for; raise OSError or ValueError where one is missing or another one."""
    folder = data_dir / published.base_folder

    def parsed(name: str, checksum: str) -> dict[str, Any]:
        with open_regular(folder / name) as file:
            content = file.read(MOST_BYTES)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
            raise ValueError(f"{name} is not the file that was published")
        # They were written by Python 2, whose text is bytes.
        return _ArraysOnly(BytesIO(content), encoding="latin1").load()

    def split(files: list[list[str]]) -> Shard:
        parts = [parsed(*file) for file in files]
        pixels = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32)
        labels = [label for part in parts for label in part.get("labels", part.get("fine_labels"))]
        return Shard(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64))

    names = parsed(published.meta["filename"], published.meta["md5"])[published.meta["key"]]
    tests = split(published.test_list) if test else None
    return split(published.train_list), tests, tuple(names)
