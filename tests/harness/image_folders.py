"""Small image folders on disk, for tests of data that are files."""

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def write_folder(root: Path, train: int = 20, test: int = 5) -> Path:
    """Write so many random images of each class, PNG and JPEG; return `root`."""
    rng = np.random.default_rng(7)
    for split, count in (("train", train), ("test", test)):
        for number, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 200, (8, 8, 3), dtype=np.uint8)
                pixels[..., number] += 55
                Image.fromarray(pixels).save(folder / f"{index:03}.{('png', 'jpg')[index % 2]}")
    return root


def damage(path: Path) -> str:
    """Cut a file within its pixels; return its name."""
    path.write_bytes(path.read_bytes()[:40])
    return str(path)


def write_tars(root: Path, folder: Path) -> Path:
    """Pack a folder's images into tar files of 7, as WebDataset does; return `root`."""
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        files = sorted((folder / split).glob("*/*"))
        for start in range(0, len(files), 7):
            with tarfile.open(root / split / f"{start:04}.tar", "w") as tar:
                for file in files[start : start + 7]:
                    key = f"{file.parent.name}_{file.stem}"
                    add(tar, f"{key}.cls", str(CLASSES.index(file.parent.name)).encode())
                    add(tar, f"{key}{file.suffix}", file.read_bytes())
    return root


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file of this content."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, BytesIO(content))
