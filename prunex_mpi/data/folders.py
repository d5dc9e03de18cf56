"""List the images of class folders, and what else lies there."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.checks.findings import listed


@dataclass(frozen=True)
class Listing:
    """What lies in the class folders of `folder`; hidden names count nowhere.

    `images` are whole paths, in the same order on every rank. What is not read is named from
    `folder` on.
    """

    folder: str
    images: list[str]
    empty: list[str]  # class folders without an image
    deeper: list[str]  # folders inside class folders
    foreign: list[str]  # files beside the class folders, or whose names aren't those of images

    def classes(self) -> list[str]:
        """Return the names of the folders with images, in order."""
        return sorted({Path(image).parent.name for image in self.images})

    def left_out(self) -> list[str]:
        """Say in a phrase each, with numbers and some names, what is not read."""
        here = os.path.basename(self.folder)
        return [
            f"{len(names):,} {what}{'s' * (len(names) > 1)} {which}"
            f"({listed(f'{here}/{name}' for name in names)})"
            for names, what, which in (
                (self.empty, "class folder", "without an image "),
                (self.deeper, "folder", "inside a class folder "),
                (self.foreign, "other file", ""),
            )
            if names
        ]


def list_images(folder: Path, beat: Callable[[], None]) -> Listing:
    """List folder/<class>/*; raise UserError (UNREADABLE) where there is no image.

    `beat` is called once for each class.
    """
    found = Listing(str(folder), [], [], [], [])
    folders, beside = _entries(found.folder)
    found.foreign.extend(beside)
    for name in folders:
        beat()
        deeper, files = _entries(f"{folder}/{name}")
        images = [file for file in files if file.lower().endswith(IMG_EXTENSIONS)]
        found.images.extend(f"{folder}/{name}/{file}" for file in images)
        found.deeper.extend(f"{name}/{inner}" for inner in deeper)
        found.foreign.extend(f"{name}/{file}" for file in sorted({*files} - {*images}))
        if not images:
            found.empty.append(name)
    # By whole paths: the order decides which images a rank gets.
    found.images.sort()
    if not found.images:
        message = f"no image in {folder}: --data-dir must hold train/<class>/* and test/<class>/*"
        raise UserError(f"{message} with names in {' '.join(IMG_EXTENSIONS)}", UNREADABLE)
    return found


def describe(train: Listing, test: Listing) -> tuple[str, str]:
    """Say in a line what was found, and what was left out, "" for nothing."""
    found = (
        f"{len(train.images):,} images in {train.folder}, {len(test.images):,} in {test.folder}, "
        f"{len(train.classes()):,} classes"
    )
    return found, "; ".join([*train.left_out(), *test.left_out()])


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the visible folders and files in `folder`, sorted; none if unreadable."""
    folders, files = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise UserError(f"cannot read folder {folder}: {error.strerror}", UNREADABLE) from None
    return sorted(folders), sorted(files)
