"""List the images of class folders, and what else lies there."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from prunex_mpi.base.errors import UNREADABLE, UserError, listed


@dataclass(frozen=True)
class Names:
    """What lies in one folder, hidden names apart, sorted; `state` tells when it is another one.

    "" where that can't be told.
    """

    state: str
    folders: list[str]
    files: list[str]


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


def class_folders(folder: Path) -> list[str]:
    """Return the folders in a folder, sorted by name."""
    return [f"{folder}/{name}" for name in _entries(str(folder))[0]]


def list_images(folder: Path, known: Mapping[str, Names], going: Callable[[], None]) -> Listing:
    """List folder/<class>/*; raise UserError (UNREADABLE) where there is no image.

    `known` is what others have found in class folders, by path; all others are read here, and those
    that are not the same here. `going` is called once for each class.
    """
    found = Listing(str(folder), [], [], [], [])
    folders, beside = _entries(found.folder)
    found.foreign.extend(beside)
    for name in folders:
        path = f"{folder}/{name}"
        names = known.get(path)
        if names is None or not names.state or names.state != _state(path):
            names = read_names(path, going)
        else:
            going()
        # By the name alone: what is no image in spite of it is named when it can't be decoded.
        every = chain(names.folders, names.files)
        images = [x for x in every if x.lower().endswith(IMG_EXTENSIONS)]
        found.images.extend(f"{path}/{image}" for image in images)
        chosen = {*images}
        for rest, others in ((found.deeper, names.folders), (found.foreign, names.files)):
            rest.extend(f"{name}/{other}" for other in others if other not in chosen)
        if not images:
            found.empty.append(name)
    # By whole paths: the order decides which images a rank gets.
    found.images.sort()
    if not found.images:
        message = f"no image in {folder}: --data-dir must hold train/<class>/* and test/<class>/*"
        raise UserError(f"{message} with names in {' '.join(IMG_EXTENSIONS)}", UNREADABLE)
    return found


def read_names(path: str, going: Callable[[], None]) -> Names:
    """Read what lies in a folder; raise UserError (UNREADABLE). `going` is called once."""
    going()
    # Before it is read: what is added meanwhile makes it another one.
    state = _state(path)
    return Names(state, *_entries(path))


def describe(train: Listing, test: Listing) -> tuple[str, str]:
    """Say in a line what was found, and what was left out, "" for nothing."""
    found = (
        f"{len(train.images):,} images in {train.folder}, {len(test.images):,} in {test.folder}, "
        f"{len(train.classes()):,} classes"
    )
    return found, "; ".join([*train.left_out(), *test.left_out()])


def _state(path: str) -> str:
    """Return what is the same for all hosts that share a folder, until a name in it changes."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns}"


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
