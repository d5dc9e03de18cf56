"""Decode the images of a tar file once, for many runs: uint8 arrays, in the order of imagefolder.

python batch/image_arrays.py cifar10.tar.xz FOLDER         (train/CLASS/* and test/CLASS/*)
... --dataset image_arrays:Images --data-dir FOLDER        (with batch/ on PYTHONPATH)
"""

import sys
import tarfile
from pathlib import Path

import numpy as np

from prunex_mpi.data.decoding import open_rgb


class Images:
    """The images to train on, or to test on: uint8 [3, H, W], and their labels."""

    def __init__(self, data_dir: str, train: bool) -> None:
        found = np.load(Path(data_dir, f"{'train' if train else 'test'}.npz"))
        self.images, self.targets = found["images"], found["targets"]
        self.classes = found["classes"].tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.targets[index])


def decode(tar_file: str, folder: Path) -> None:
    """Write train.npz and test.npz."""
    found: dict[str, list[tuple[str, np.ndarray]]] = {"train": [], "test": []}
    with tarfile.open(tar_file) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            part, name = Path(member.name).parts[-3], member.name
            pixels = np.array(open_rgb(tar.extractfile(member), name=name)).transpose(2, 0, 1)
            found[part].append((name, pixels))
    folder.mkdir(parents=True, exist_ok=True)
    for part, images in found.items():
        images.sort(key=lambda pair: pair[0])
        names = [name.split("/")[-2] for name, _ in images]
        classes, targets = np.unique(names, return_inverse=True)
        pixels = np.stack([pixels for _, pixels in images])
        np.savez(folder / f"{part}.npz", images=pixels, targets=targets, classes=classes)


if __name__ == "__main__":
    decode(sys.argv[1], Path(sys.argv[2]))
