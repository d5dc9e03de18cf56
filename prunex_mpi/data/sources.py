"""Where the images of a data set come from; those of data sets that need no files of images.

The files of CIFAR are pickles, which can hold any code. Parsed are the very bytes whose checksum
was compared with the published one, and nothing but plain values and NumPy arrays of numbers.
"""

import hashlib
import pickle
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import download_and_extract_archive

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, one_line
from prunex_mpi.base.files import open_regular
from prunex_mpi.data.decoding import Files

DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610
# More than any of the files of CIFAR has.
MOST_BYTES = 2**28
# All that an array of theirs names; NumPy itself has moved the first one since.
ARRAY_PARTS = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}

# Images, uint8 [n, 3, side, side], and labels, int64 [n].
Arrays = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Source:
    """Images of a data set that a rank takes its part of: in files, in memory or generated."""

    train: Files
    test: Files | None  # None where none are read
    num_classes: int
    flip: bool  # whether mirrored images keep their meaning
    pad: int  # pixels a random crop may move an image by
    found: str = ""  # what lay in the folders of the data, in a line
    left_out: str = ""  # what of it is not read
    class_names: tuple[str, ...] = ()
    digest: str = ""  # of names or labels, where ranks and later jobs could find others


def digits(image_size: int) -> Source:
    """Read scikit-learn's 1,797 digits; a fifth of each class is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        message = 'data set digits needs scikit-learn: pip install "prunex_mpi[digits]"'
        raise UserError(message) from error
    digits = load_digits()
    # The values run from 0 to 16.
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))
    images = pixels[:, None].expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    rng = np.random.default_rng(FIXED_SEED)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(digits.target == label))
        is_test[torch.from_numpy(members[: round(len(members) * DIGITS_TEST_SHARE)])] = True
    train, test = ((images[half], labels[half]) for half in (~is_test, is_test))
    return _in_memory(train, test, tuple(map(str, range(10))), image_size, flip=False)


def _in_memory(
    train: Arrays, test: Arrays | None, names: tuple[str, ...], image_size: int, *, flip: bool
) -> Source:
    """Return the source of images that are in memory, resized if need be."""
    side = image_size or train[0].shape[-1]

    def files(arrays: Arrays) -> Files:
        images, labels = arrays
        return Files(labels, side, lambda index: _resize(images[index], side), str)

    tests = None if test is None else files(test)
    return Source(files(train), tests, len(names), flip, side // 8, class_names=names)


def _resize(image: Tensor, side: int) -> Tensor:
    """Scale uint8 [3, H, W] to [3, side, side], bilinear and antialiased."""
    if image.shape[-1] == side:
        return image
    scaled = F.interpolate(image[None].float(), (side, side), mode="bilinear", antialias=True)[0]
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


# A label takes 8 bytes.
MOST_SYNTHETIC = 10**9


def synthetic(train_samples: int | None, test_samples: int | None, image_size: int) -> Source:
    """Generate a smooth pattern per class under noise, each image from its own seed."""
    side = image_size or SYNTHETIC_SIDE
    rng = np.random.default_rng(FIXED_SEED)
    coarse = torch.from_numpy(rng.uniform(64, 192, (SYNTHETIC_CLASSES, 3, 4, 4)))
    smooth = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    patterns = smooth.to(torch.int16).numpy()

    def files(count: int, split: int) -> Files:
        def generate(index: int) -> Tensor:
            # A seed per image: the data do not depend on how many ranks share them.
            noise = np.random.default_rng([FIXED_SEED, split, index])
            levels = noise.integers(-64, 64, (3, side, side), dtype=np.int16)
            levels += patterns[index % SYNTHETIC_CLASSES]
            return torch.from_numpy(levels.astype(np.uint8))

        return Files(torch.arange(count) % SYNTHETIC_CLASSES, side, generate, str)

    for count, flag in ((train_samples, "--train-samples"), (test_samples, "--test-samples")):
        if count and count > MOST_SYNTHETIC:
            raise UserError(f"synthetic has at most {MOST_SYNTHETIC:,} images; lower {flag}", USAGE)
    train = files(train_samples or SYNTHETIC_TRAIN, 0)
    test = files(test_samples or SYNTHETIC_TEST, 1)
    return Source(train, test, SYNTHETIC_CLASSES, flip=False, pad=0)


class _ArraysOnly(pickle.Unpickler):
    """Parse a pickle of plain values and arrays; raise UnpicklingError for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAY_PARTS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read from a file")
        return ARRAY_PARTS[module, name]


def cifar(name: str, data_dir: Path, download: bool, image_size: int, with_test: bool) -> Source:
    """Read CIFAR-10 or CIFAR-100; where it is incomplete, one process downloads and others wait.

    Raises UserError (UNREADABLE).
    """
    published = CIFAR10 if name == "cifar10" else CIFAR100
    read = partial(_read, published, data_dir, image_size, with_test)
    try:
        return read()
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
                return read()
            archive = {"filename": published.filename, "md5": published.tgz_md5}
            download_and_extract_archive(published.url, data_dir, **archive)
            return read()
    except (RuntimeError, ValueError, OSError, HTTPException) as error:
        message = f"cannot download {name} to {data_dir} ({one_line(error)}): "
        advice = "check the network, or copy the files there from another machine"
        raise UserError(message + advice, UNREADABLE) from error


def _read(published: type[CIFAR10], data_dir: Path, image_size: int, with_test: bool) -> Source:
    """Read all files asked for; raise OSError or ValueError where one is missing or another one."""

    def parsed(name: str, checksum: str) -> dict[str, Any]:
        with open_regular(data_dir / published.base_folder / name) as file:
            content = file.read(MOST_BYTES)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
            raise ValueError(f"{name} is not the file that was published")
        # They were written by Python 2, whose text is bytes.
        return _ArraysOnly(BytesIO(content), encoding="latin1").load()

    def arrays(files: list[list[str]]) -> Arrays:
        parts = [parsed(*file) for file in files]
        pixels = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32)
        labels = [label for part in parts for label in part.get("labels", part.get("fine_labels"))]
        return torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64)

    names = parsed(published.meta["filename"], published.meta["md5"])[published.meta["key"]]
    test = arrays(published.test_list) if with_test else None
    return _in_memory(arrays(published.train_list), test, tuple(names), image_size, flip=True)
