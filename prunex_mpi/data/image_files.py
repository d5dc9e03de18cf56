"""Images in tar files, laid out as WebDataset does: KEY.jpg and KEY.cls one behind the other.

KEY.cls holds the number of the class. The headers of all tar files are read at the start, which
ranks may share among them, the pictures by the rank that they go to, when they are needed. A key
ends at the first dot of a name, as in WebDataset: KEY.seg.jpg is no picture here, and such members
are left out and told of.
"""

import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tarfile import TarError

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import CHUNK_BYTES, open_regular
from prunex_mpi.data.decoding import MOST_LABEL, Files
from prunex_mpi.data.images import MOST_PIXELS, as_uint8, open_rgb

BLOCK = 512  # of a tar file
SIZE = slice(124, 136)  # where a header says how many bytes follow, in octal digits
# Members that are read between two signs of life.
BETWEEN = 1000
# Of what is read into memory: long names and other records about a member, a class, a picture.
MOST_BYTES_ABOUT, MOST_BYTES_CLASS, MOST_BYTES_PICTURE = 2**16, 32, 8 * MOST_PIXELS
ABOUT = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


@dataclass(frozen=True)
class Headers:
    """What one tar file holds, in the order of its pictures; `total` is its own size in bytes.

    `dotted` members would be pictures or classes, were it not for a dot in their keys.
    """

    total: int
    names: list[str]
    starts: list[int]
    sizes: list[int]
    labels: list[int]
    dotted: list[str]


@dataclass(frozen=True)
class Members:
    """The pictures of all tar files of a folder, by file and by their order in it."""

    folder: str
    paths: list[str]
    file: np.ndarray  # int64 [n]: which of the paths
    start: np.ndarray  # int64 [n], bytes
    size: np.ndarray  # int64 [n], bytes
    labels: np.ndarray  # int64 [n]
    names: list[str]
    dotted: tuple[int, str]  # members whose last ending alone is a picture's or class's, the first

    def name(self, index: int) -> str:
        """Return what messages call a picture."""
        return f"{self.path(index)}:{self.names[index]}"

    def identities(self) -> Iterator[str]:
        """Yield what tells each picture from others, wherever the folder is: name, bytes, class."""
        for name, size, label in zip(self.names, self.size, self.labels, strict=True):
            yield f"{name} {size} {label}"

    def path(self, index: int) -> str:
        """Return the tar file of a picture."""
        return self.paths[self.file[index]]

    def content(self, index: int) -> BytesIO:
        """Read a picture's file; raise UserError where that is not possible.

        Or where another one lies there, as in a file that was listed on another host.
        """
        start, size = int(self.start[index]), int(self.size[index])
        try:
            if size > MOST_BYTES_PICTURE:
                raise ValueError(f"{size:,} bytes")
            with open_regular(self.path(index)) as file:
                file.seek(start - BLOCK)
                header, content = file.read(BLOCK), file.read(size)
            if header[SIZE].strip(b" \0").lstrip(b"0") != (b"%o" % size).lstrip(b"0"):
                raise ValueError("the file is not as it was listed")
        except (OSError, ValueError) as error:
            message = f"cannot read image {self.name(index)} ({one_line(error)})"
            raise UserError(
                f"{message}: repair or remove {self.path(index)}", UNREADABLE
            ) from error
        return BytesIO(content)


class _Header(tarfile.TarInfo):
    """A header whose size the tarfile module may act on, which reads on at the place that it says.

    Below 0 it would go back and read the same members for ever.
    """

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Header":
        """Parse a header; raise ReadError, which ends the reading, for an impossible size."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError(f"a member of {header.size} bytes")
        if header.type in ABOUT and header.size > MOST_BYTES_ABOUT:
            raise tarfile.ReadError(f"{header.size:,} bytes about a member")
        return header


def tar_files(folder: Path) -> list[str]:
    """Return the tar files of a folder, sorted by name."""
    return sorted(str(path) for path in folder.glob("*.tar"))


def list_members(folder: Path, known: Mapping[str, Headers], going: Callable[[], None]) -> Members:
    """List the pictures in folder/*.tar, in the order of the names of these files.

    `known` are the headers of files that others have read; all others are read here. Raises
    UserError (UNREADABLE) where there are none, a tar file is damaged, or has another size here
    than where it was read, or a picture has no class. `going` is called as it goes on.
    """
    paths = tar_files(folder)
    every = [
        _as_here(path, known[path]) if path in known else read_headers(path, going)
        for path in paths
    ]
    dotted = [f"{path}:{name}" for path, h in zip(paths, every, strict=True) for name in h.dotted]
    told = len(dotted), (dotted or [""])[0]
    names = [name for headers in every for name in headers.names]
    if not names:
        message = f"no picture in {folder}/*.tar: --data-dir must hold train/*.tar and test/*.tar"
        message += " of KEY.jpg and KEY.cls, not compressed"
        raise UserError("; left out: ".join([message, *left_out(told)]), UNREADABLE)
    file = np.repeat(np.arange(len(every)), [len(headers.names) for headers in every])
    columns = (
        np.array([value for headers in every for value in getattr(headers, what)], dtype=np.int64)
        for what in ("starts", "sizes", "labels")
    )
    return Members(str(folder), paths, file, *columns, names, told)


def _as_here(path: str, headers: Headers) -> Headers:
    """Return headers that were read elsewhere; raise UserError where the file is another here."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f"cannot read tar file {path} ({one_line(error)})", UNREADABLE) from error
    if size != headers.total:
        raise UserError(
            f"tar file {path} has {size:,} bytes here and {headers.total:,} on another rank: give "
            "all hosts the same files",
            UNREADABLE,
        )
    return headers


def read_headers(path: str, going: Callable[[], None]) -> Headers:
    """Read all headers and classes of a tar file, and no picture; raise UserError (UNREADABLE)."""
    # Ending, start and size of each picture by its key.
    pictures: dict[str, tuple[str, int, int]] = {}
    classes: dict[str, int] = {}
    dotted: list[str] = []
    try:
        with (
            open_regular(path) as file,
            tarfile.open(mode="r:", fileobj=file, tarinfo=_Header) as tar,
        ):
            total = os.fstat(file.fileno()).st_size
            for number, member in enumerate(tar):
                if number % BETWEEN == 0:
                    going()
                # Records about a member replace the size that its header holds.
                if member.sparse is not None or tar.offset <= member.offset:
                    raise ValueError(f"{member.name} is sparse, or has {member.size} bytes")
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                key = f"{folder}/{key}" if folder else key
                if not member.isreg() or not key:
                    continue
                if f".{ending.lower()}" in IMG_EXTENSIONS:
                    if key in pictures:
                        raise ValueError(f"{key} has two pictures")
                    pictures[key] = ending, member.offset_data, member.size
                elif ending == "cls":
                    if member.size > MOST_BYTES_CLASS:
                        raise ValueError(f"the class of {key} has {member.size:,} bytes")
                    file.seek(member.offset_data)
                    classes[key] = int(file.read(member.size))
                    if not 0 <= classes[key] <= MOST_LABEL:
                        raise ValueError(f"the class of {key} is not in 0..{MOST_LABEL}")
                elif f".{ending.rpartition('.')[2].lower()}" in (*IMG_EXTENSIONS, ".cls"):
                    dotted.append(member.name)
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
                going()
                if more := rest.lstrip(b"\0"):
                    place = (
                        f"ends at byte {tar.offset:,} and goes on at {file.tell() - len(more):,}"
                    )
                    raise ValueError(f"it {place}: keep tar files that were joined apart")
    # What the module raises where a header is damaged.
    except (OSError, ValueError, IndexError, OverflowError, RecursionError, TarError) as error:
        message = f"cannot read tar file {path} ({one_line(error)}): repair or remove it"
        raise UserError(message, UNREADABLE) from error
    odd = sorted(pictures.keys() ^ classes.keys())
    if odd:
        lacks = "a class (.cls)" if odd[0] in pictures else "a picture"
        raise UserError(f"{odd[0]} in {path} lacks {lacks}: add or remove it", UNREADABLE)
    return Headers(
        total,
        names=[f"{key}.{ending}" for key, (ending, _, _) in pictures.items()],
        starts=[start for _, start, _ in pictures.values()],
        sizes=[size for _, _, size in pictures.values()],
        labels=[classes[key] for key in pictures],
        dotted=dotted,
    )


def left_out(dotted: tuple[int, str]) -> list[str]:
    """Say what is not read for its name, given as in `Members`."""
    count, first = dotted
    if not count:
        return []
    number = "1 member" if count == 1 else f"{count:,} members"
    return [f"{number} with more than one dot in the name, such as {first}"]


def describe(train: Members, test: Members) -> tuple[str, str]:
    """Say in a line what was found, and what was left out, "" for nothing."""
    halves = (
        f"{len(half.names):,} images in {len(half.paths):,} tar file{'s' * (len(half.paths) > 1)} "
        f"in {half.folder}"
        for half in (train, test)
    )
    found = ", ".join((*halves, f"{class_count(train, test):,} classes"))
    return found, "; ".join([*left_out(train.dotted), *left_out(test.dotted)])


def class_count(train: Members, test: Members) -> int:
    """Return the number of classes; raise UserError where only test images have one."""
    odd = np.setdiff1d(test.labels, train.labels)
    if odd.size:
        message = f"class {odd[0]} of {test.folder} has no image in {train.folder}"
        raise UserError(f"{message}: give all classes images for training", UNREADABLE)
    return int(train.labels.max()) + 1


def files_of(members: Members, image_size: int, side: int) -> Files:
    """Return the pictures, cropped and scaled where `image_size` asks for it."""

    def decode(index: int) -> Tensor:
        content, name = members.content(index), members.name(index)
        return as_uint8(content, side, fit=image_size > 0, name=name)

    return Files(torch.from_numpy(members.labels), side, decode, members.name)


def side_of(members: Members, index: int) -> int:
    """Return the shorter side of a picture."""
    return min(open_rgb(members.content(index), name=members.name(index)).size)
