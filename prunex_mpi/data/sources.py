"""Where the images of a data set come from; those of data sets that need no files of images."""

from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, one_line
from prunex_mpi.data.decoding import Files
from prunex_mpi.data.request import TEST, Request

DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610
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


def digits(request: Request) -> Source:
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
    return _in_memory(train, test, tuple(map(str, range(10))), request.image_size, flip=False)


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


def synthetic(request: Request) -> Source:
    """Generate a smooth pattern per class under noise, each image from its own seed."""
    side = request.image_size or SYNTHETIC_SIDE
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

    counts = request.train_samples, request.test_samples
    for count, flag in zip(counts, ("--train-samples", "--test-samples"), strict=True):
        if count and count > MOST_SYNTHETIC:
            raise UserError(f"synthetic has at most {MOST_SYNTHETIC:,} images; lower {flag}", USAGE)
    train, test = files(counts[0] or SYNTHETIC_TRAIN, 0), files(counts[1] or SYNTHETIC_TEST, 1)
    return Source(train, test, SYNTHETIC_CLASSES, flip=False, pad=0)


def cifar(request: Request) -> Source:
    """Read CIFAR-10 or CIFAR-100; where it is incomplete, one process downloads and others wait.

    Raises UserError (UNREADABLE).
    """
    name, folder = request.dataset, Path(request.data_dir)
    published = CIFAR10 if name == "cifar10" else CIFAR100
    if TEST not in request.parts:
        # Its checksums are of all files, and those to test on are not to be opened.
        published = type(published.__name__, (published,), {"test_list": []})
    try:
        return _read(published, request)
    except (RuntimeError, OSError) as missing:
        if not request.download:
            # No other program fetches it.
            advice = "correct --data-dir, or train with --download"
            raise UserError(f"no complete {name} in {folder}: {advice}", UNREADABLE) from missing
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name}.lock"):
            # Who comes second finds the files complete.
            with suppress(RuntimeError, OSError):
                return _read(published, request)
            return _read(published, request, download=True)
    except (RuntimeError, ValueError, OSError, HTTPException) as error:
        message = f"cannot download {name} to {folder} ({one_line(error)}): "
        advice = "check the network, or copy the files there from another machine"
        raise UserError(message + advice, UNREADABLE) from error


def _read(published: type[CIFAR10], request: Request, download: bool = False) -> Source:
    """Read all files asked for; raise OSError or RuntimeError where one is missing or damaged."""
    trains = (True, False) if TEST in request.parts else (True,)
    halves = [published(request.data_dir, train, download=download) for train in trains]
    train, *test = (
        (torch.from_numpy(half.data).permute(0, 3, 1, 2), torch.tensor(half.targets))
        for half in halves
    )
    names = tuple(halves[0].classes)
    return _in_memory(train, test[0] if test else None, names, request.image_size, flip=True)
