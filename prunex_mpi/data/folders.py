"""List the images of class folders, and what else lies there."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
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
        names = _entries(f"{folder}/{name}")
        # By the name alone: what is no image in spite of it is named when it can't be decoded.
        images = [x for x in chain(*names) if x.lower().endswith(IMG_EXTENSIONS)]
        found.images.extend(f"{folder}/{name}/{image}" for image in images)
        chosen = {*images}
        for rest, others in zip((found.deeper, found.foreign), names, strict=True):
            rest.extend(f"{name}/{other}" for other in others if other not in chosen)
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
    """Return the names of the visible folders and files in `folder`, sorted; none if it is none."""
    folders, files = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    # Not the entry's own is_dir, which raises for a link to itself.
                    is_folder = entry.is_symlink() and os.path.isdir(entry.path)
                    is_folder = is_folder or entry.is_dir(follow_symlinks=False)
                    (folders if is_folder else files).append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"cannot read folder {folder}: {error.strerror}", UNREADABLE) from None
    return sorted(folders), sorted(files)
