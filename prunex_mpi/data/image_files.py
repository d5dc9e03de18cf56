"""Find the images of a data set in files: in class folders, or in tar files.

Names and headers are read at the start, which ranks may share among them, pixels by the rank that
they go to, when they are needed. Tar files are laid out as WebDataset does: KEY.jpg and KEY.cls one
behind the other, where KEY.cls holds the number of the class. A key ends at the first dot of a
name: KEY.seg.jpg is no image here, and such members are refused.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tarfile import TarError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from prunex_mpi.base.errors import UNREADABLE, UserError, listed, one_line
from prunex_mpi.base.files import CHUNK_BYTES, open_regular
from prunex_mpi.data.decoding import MOST_LABEL, MOST_PIXELS, Files, as_uint8, open_rgb
from prunex_mpi.data.request import TEST, Classes, Known, Request
from prunex_mpi.data.sources import Source

BLOCK = 512  # of a tar file
SIZE = slice(124, 136)  # where a header says how many bytes follow, in octal digits
VALIDATION = "val"  # a folder of the name that the test set may have instead
# Of what is read into memory: a class, an image.
MOST_BYTES_CLASS, MOST_BYTES_IMAGE = 32, 8 * MOST_PIXELS


@dataclass(frozen=True)
class FileSplit:
    """The images to train on, or those to test on, in an order that is the same on every rank."""

    folder: str
    labels: Tensor  # int64 [n]
    class_names: tuple[str, ...]  # () where classes are numbers
    name: Callable[[int], str]  # returns what messages call an image
    content: Callable[[int], str | BytesIO]  # returns an image's file, or its path
    identities: Iterator[str]  # tell images from others, wherever the folder is; read once
    where: str  # the folder, for a message
    left_out: str = ""  # what lies there and is not read


def find_image_files(request: Request, known: Known, classes: Classes | None = None) -> Source:
    """Return the images below the data set's folder, cropped and scaled where that is asked for.

    What is not `known` from other ranks is read. With the `classes` of a network there need be none
    to train on, and those to test on are found alone. Raises UserError (UNREADABLE).
    """
    data_dir, image_size = request.data_dir, request.image_size
    find = _in_class_folders if request.dataset == "imagefolder" else _in_tar_files
    splits = [find(folder, known) for folder in _split_folders(request)]
    if classes:
        splits = [_numbered_as(classes, split) for split in splits]
    train, test = splits[0], splits[-1]
    odd = sorted({*train.class_names} ^ {*test.class_names})
    if odd:
        message = f"class {odd[0]!r} of {data_dir} must have images for training and for testing"
        raise UserError(message, UNREADABLE)
    # Of numbers some may be unused.
    odd = np.setdiff1d(test.labels, train.labels)
    if odd.size:
        message = f"class {odd[0]} of {test.folder} has no image in {train.folder}"
        raise UserError(f"{message}: give all classes images for training", UNREADABLE)
    count = len(train.class_names) or int(train.labels.max()) + 1
    if classes and not train.class_names:
        # Not all may be tested.
        count = max(count, classes.count)

    side = image_size or min(open_rgb(train.content(0), name=train.name(0)).size)
    digest = hashlib.blake2b(digest_size=8)
    for split in splits:
        digest.update(os.fsencode("\0".join(split.identities)) + b"\n")
    found = [f"{len(split.labels):,} images in {split.where}" for split in splits]
    found.append(f"{count:,} classes")
    if os.path.basename(test.folder) == VALIDATION:
        found.append(f"the test set is {VALIDATION}/, as there is no test/")
    files = [_files_of(split, image_size, side) for split in splits]
    if classes:
        files.insert(0, replace(files[0], labels=files[0].labels[:0]))
    return Source(
        train=files[0],
        test=files[1] if files[1:] else None,
        num_classes=count,
        flip=True,
        pad=side // 8,
        found=", ".join(found),
        left_out="; ".join(split.left_out for split in splits if split.left_out),
        class_names=train.class_names,
        digest=digest.hexdigest(),
    )


def _numbered_as(classes: Classes, split: FileSplit) -> FileSplit:
    """Return images whose classes have the numbers of those of a network, if both have names."""
    if not (classes.names and split.class_names):
        return split
    numbers = {name: number for number, name in enumerate(classes.names)}
    for name in split.class_names:
        if name not in numbers:
            message = f"class {name!r} of {split.folder} is none that the network knows"
            raise UserError(f"{message}: give those that it was trained for", UNREADABLE)
    table = torch.tensor([numbers[name] for name in split.class_names])
    return replace(split, labels=table[split.labels], class_names=classes.names)


def _files_of(split: FileSplit, image_size: int, side: int) -> Files:
    """Return the images, cropped and scaled where `image_size` asks for it."""

    def decode(index: int) -> Tensor:
        return as_uint8(split.content(index), side, fit=image_size > 0, name=split.name(index))

    return Files(split.labels, side, decode, split.name)


def read_share(request: Request, rank: int, size: int) -> Iterator[tuple[str, Any]]:
    """Yield path and contents of every `size`-th class folder or tar file, from number `rank` on.

    Raises UserError (UNREADABLE).
    """
    find, read = CONTENTS[request.dataset]
    paths = [path for folder in _split_folders(request) for path in find(folder)]
    return ((path, read(path)) for path in paths[rank::size])


def _split_folders(request: Request) -> list[Path]:
    """Return the folders of the parts asked for; that of test images may be called val."""
    root = Path(request.data_dir)
    # os.path says no where Path.is_dir raises, as for names that are too long.
    val_only = os.path.isdir(root / VALIDATION) and not os.path.isdir(root / TEST)
    return [root / (VALIDATION if part == TEST and val_only else part) for part in request.parts]


def class_folders(folder: Path) -> list[str]:
    """Return the folders in a folder, sorted by name."""
    return [f"{folder}/{name}" for name in read_names(str(folder))[0]]


def _in_class_folders(folder: Path, known: Known) -> FileSplit:
    """List folder/<class>/*; raise UserError (UNREADABLE) where there is no image."""
    images: list[str] = []
    # Other files, folders inside class folders, and class folders without an image.
    folders, left_out = read_names(str(folder))
    for name in folders:
        path = f"{folder}/{name}"
        inside, files = known.get(path) or read_names(path)
        # By the name alone: what is no image in spite of it is named when it can't be decoded.
        here = {x for x in (*inside, *files) if x.lower().endswith(IMG_EXTENSIONS)}
        images.extend(f"{path}/{image}" for image in here)
        left_out += [f"{name}/{other}" for other in (*inside, *files) if other not in here]
        if not here:
            left_out.append(name)
    if not images:
        message = f"no image in {folder}: --data-dir must hold train/<class>/*, to train on, and"
        message += " test/<class>/*"
        raise UserError(f"{message} with names in {' '.join(IMG_EXTENSIONS)}", UNREADABLE)
    # By whole paths: the order decides which images a rank gets.
    images.sort()
    of_images = [path.rsplit(os.sep, 2)[1] for path in images]
    classes = tuple(sorted({*of_images}))
    numbers = {name: number for number, name in enumerate(classes)}
    return FileSplit(
        folder=str(folder),
        labels=torch.tensor([numbers[name] for name in of_images]),
        class_names=classes,
        name=images.__getitem__,
        content=images.__getitem__,
        identities=(path[len(str(folder.parent)) :] for path in images),
        where=str(folder),
        left_out=listed(f"{folder.name}/{name}" for name in left_out),
    )


def read_names(folder: str) -> list[list[str]]:
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
    return [sorted(folders), sorted(files)]


def tar_files(folder: Path) -> list[str]:
    """Return the tar files of a folder, sorted by name."""
    return sorted(str(path) for path in folder.glob("*.tar"))


def _in_tar_files(folder: Path, known: Known) -> FileSplit:
    """List the images in folder/*.tar, in the order of the names of these files.

    Raises UserError (UNREADABLE) where there are none, or a tar file is damaged.
    """
    paths = tar_files(folder)
    every = [known.get(path) or read_headers(path) for path in paths]
    names = [name for headers in every for name in headers["names"]]
    if not names:
        message = f"no image in {folder}/*.tar: --data-dir must hold train/*.tar and test/*.tar"
        raise UserError(f"{message} of KEY.jpg and KEY.cls, not compressed", UNREADABLE)
    file = np.repeat(np.arange(len(every)), [len(headers["names"]) for headers in every])
    starts, sizes, labels = (
        np.array([value for headers in every for value in headers[what]], dtype=np.int64)
        for what in ("starts", "sizes", "labels")
    )

    def name(index: int) -> str:
        return f"{paths[file[index]]}:{names[index]}"

    def content(index: int) -> BytesIO:
        return _member(paths[file[index]], int(starts[index]), int(sizes[index]), name(index))

    return FileSplit(
        folder=str(folder),
        labels=torch.from_numpy(labels),
        class_names=(),
        name=name,
        content=content,
        identities=(f"{n} {s} {c}" for n, s, c in zip(names, sizes, labels, strict=True)),
        where=f"{len(paths):,} tar file{'s' * (len(paths) > 1)} in {folder}",
    )


def _member(path: str, start: int, size: int, name: str) -> BytesIO:
    """Read an image's file from a tar file; raise UserError where it isn't there as listed."""
    try:
        if size > MOST_BYTES_IMAGE:
            raise ValueError(f"{size:,} bytes")
        with open_regular(path) as file:
            file.seek(start - BLOCK)
            header, content = file.read(BLOCK), file.read(size)
        if header[SIZE].strip(b" \0").lstrip(b"0") != (b"%o" % size).lstrip(b"0"):
            raise ValueError("the file is not as it was listed")
    except (OSError, ValueError) as error:
        message = f"cannot read image {name} ({one_line(error)})"
        raise UserError(f"{message}: repair or remove {path}", UNREADABLE) from error
    return BytesIO(content)


def read_headers(path: str) -> dict[str, list]:
    """Read all headers and classes of a tar file, and no image; raise UserError (UNREADABLE).

    Returns `names`, `starts`, `sizes` and `labels` of the images in their order.
    """
    # Ending, start and size of each image by its key.
    images: dict[str, tuple[str, int, int]] = {}
    classes: dict[str, int] = {}
    try:
        with open_regular(path) as file, tarfile.open(mode="r:", fileobj=file) as tar:
            for member in tar:
                # The module would read the same members again and again, for ever.
                if member.size < 0 or tar.offset <= member.offset or member.sparse is not None:
                    raise ValueError(f"{member.name} is sparse, or has {member.size} bytes")
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                key = f"{folder}/{key}" if folder else key
                if not member.isreg() or not key:
                    continue
                if f".{ending.lower()}" in IMG_EXTENSIONS:
                    if key in images:
                        raise ValueError(f"{key} has two images")
                    images[key] = ending, member.offset_data, member.size
                elif ending == "cls":
                    if member.size > MOST_BYTES_CLASS:
                        raise ValueError(f"the class of {key} has {member.size:,} bytes")
                    file.seek(member.offset_data)
                    classes[key] = int(file.read(member.size))
                    if not 0 <= classes[key] <= MOST_LABEL:
                        raise ValueError(f"the class of {key} is not in 0..{MOST_LABEL}")
                elif f".{ending.rpartition('.')[2].lower()}" in (*IMG_EXTENSIONS, ".cls"):
                    raise ValueError(f"{member.name} has a dot in its key: rename it")
                # The module remembers all that it has read.
                tar.members = []
            # The module also takes a damaged header, and a file that was cut off, for the end.
            file.seek(tar.offset)
            block = file.read(BLOCK)
            if block.strip(b"\0"):
                raise ValueError(f"no header at byte {tar.offset:,}")
            if len(block) < BLOCK:
                raise ValueError(f"cut off at byte {tar.offset:,}: no block of zeros ends it")
            while rest := file.read(CHUNK_BYTES):
                if more := rest.lstrip(b"\0"):
                    place = (
                        f"ends at byte {tar.offset:,} and goes on at {file.tell() - len(more):,}"
                    )
                    raise ValueError(f"it {place}: keep tar files that were joined apart")
    # What the module raises where a header is damaged.
    except (OSError, ValueError, IndexError, OverflowError, TarError) as error:
        message = f"cannot read tar file {path} ({one_line(error)}): repair or remove it"
        raise UserError(message, UNREADABLE) from error
    odd = sorted(images.keys() ^ classes.keys())
    if odd:
        lacks = "a class (.cls)" if odd[0] in images else "an image"
        raise UserError(f"{odd[0]} in {path} lacks {lacks}: add or remove it", UNREADABLE)
    return {
        "names": [f"{key}.{ending}" for key, (ending, _, _) in images.items()],
        "starts": [start for _, start, _ in images.values()],
        "sizes": [size for _, _, size in images.values()],
        "labels": [classes[key] for key in images],
    }


# How what there is is found, and how read.
CONTENTS = {"imagefolder": (class_folders, read_names), "webdataset": (tar_files, read_headers)}
