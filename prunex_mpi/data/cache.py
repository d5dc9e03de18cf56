"""Keep decoded images in files on a disk, where the next epoch and the next job find them.

An image is written by whoever decodes it first, at its own place in a file that begins as a hole:
nobody waits for anybody, and what two write at a time is the same. A record says of which state of
the image's file it was made and has a checksum; what was not written, not whole or of another state
counts as not there, and is decoded again.
"""

import errno
import hashlib
import os
import struct
import threading
import zlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import PIL
import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.base.files import write_json_durably
from prunex_mpi.base.logs import log
from prunex_mpi.data.reading import Files

# Of a file of many records.
FILE_BYTES = 2**30
# A process may have 1,024 open files by default on most systems, and there are two splits.
MOST_OPEN = 256
# Of the decoder and of this file: what it writes anew is not found under the older number.
FORMAT = 1
MAGIC = 0x50525831
HEADER = struct.Struct("<8sII")  # state of the file, checksum of the pixels and it, magic number
UNKNOWN = bytes(8)  # no file's state


def cached(files: Files, folder: str, split: str) -> Files:
    """Return the same images, which are kept below `folder`; raise UserError if it can't be made.

    Images of other files, sizes or another Pillow lie in a folder of their own. Files are told
    apart by their paths without links, however they were spelled: two projects may share `folder`.
    """
    real = lru_cache(maxsize=None)(os.path.realpath)
    names = hashlib.blake2b(digest_size=8)
    about = {
        "format": FORMAT,
        "pillow": PIL.__version__,
        "split": split,
        "images": len(files.labels),
        "side": files.side,
        "way": files.way,
    }
    names.update(repr(about).encode())
    for index in range(len(files.labels)):
        # Of a file that is a link the state tells: to resolve each would take long on some disks.
        parent, name = os.path.split(files.path(index))
        for part in (real(parent), name, files.within(index)):
            names.update(os.fsencode(part) + b"\0")
    path = Path(folder) / f"{split}-{names.hexdigest()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "about.json").exists():
            write_json_durably(path / "about.json", about)
    except OSError as error:
        message = f"--data-cache {quote(folder, 250)}: {error.strerror}; choose another"
        raise UserError(message) from None
    log.info("decoded images are kept in %s", path)
    return replace(files, decode=_Cache(files, path).decode)


class _Cache:
    """The records of one split."""

    def __init__(self, files: Files, path: Path) -> None:
        self.files, self.path = files, path
        self.shape = (3, files.side, files.side)
        self.bytes = HEADER.size + 3 * files.side**2
        self.each = max(1, FILE_BYTES // self.bytes)
        # The state that each file was found in, zeros for none yet.
        self.states = bytearray(len(UNKNOWN) * len(files.labels))
        # Those last used stand last.
        self.open: dict[int, _Opened] = {}
        self.lock = threading.Lock()
        self.writes = True

    def decode(self, index: int) -> Tensor:
        """Return an image as `Files.decode` does, from its record where there is one."""
        try:
            record = self._file(index).read(self.bytes, self._place(index))
        except OSError as error:
            self._write_no_more(error)
            record = b""
        place = slice(len(UNKNOWN) * index, len(UNKNOWN) * (index + 1))
        known = bytes(self.states[place])
        image = None if known == UNKNOWN else self._image(record, known)
        if image is not None:
            return image
        try:
            state = _state(self.files.path(index))
        except OSError:
            # Decoding says what is wrong with the image's file.
            return self.files.decode(index)
        image = self._image(record, state)
        if image is None:
            image = self.files.decode(index)
            self._write(index, state, image)
        self.states[place] = state
        return image

    def _image(self, record: bytes, state: bytes) -> Tensor | None:
        """Return the image of a record that is whole and of this state."""
        if len(record) < self.bytes:
            return None
        found, checksum, magic = HEADER.unpack_from(record)
        if magic != MAGIC or found != state:
            return None
        pixels = memoryview(record)[HEADER.size :]
        if zlib.crc32(pixels, zlib.crc32(found)) != checksum:
            return None
        # A copy, since bytes can't be written to and a tensor can.
        return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(self.shape)

    def _write(self, index: int, state: bytes, image: Tensor) -> None:
        if not self.writes:
            return
        pixels = image.contiguous().numpy().tobytes()
        header = HEADER.pack(state, zlib.crc32(pixels, zlib.crc32(state)), MAGIC)
        try:
            self._file(index).write(header + pixels, self._place(index))
        except OSError as error:
            self._write_no_more(error)

    def _write_no_more(self, error: OSError) -> None:
        with self.lock:
            first, self.writes = self.writes, False
        if first:
            log.warning("no more images are kept in %s: %s", self.path, error.strerror)

    def _place(self, index: int) -> int:
        return index % self.each * self.bytes

    def _file(self, index: int) -> "_Opened":
        """Return an image's file, which is made where there is none."""
        number = index // self.each
        with self.lock:
            file = self.open.pop(number, None) or _Opened(self.path / f"{number:05}.u8")
            self.open[number] = file
            if len(self.open) > MOST_OPEN:
                del self.open[next(iter(self.open))]
            return file


class _Opened:
    """An open file, which is closed once no thread holds it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            # Somebody else's, which may be read.
            self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read(self, size: int, place: int) -> bytes:
        """Return what stands there, less than asked for at the end; raise OSError."""
        return os.pread(self.descriptor, size, place)

    def write(self, data: bytes, place: int) -> None:
        """Write there; raise OSError."""
        os.pwrite(self.descriptor, data, place)


def _state(path: str) -> bytes:
    """Return what changes with the content of a file; raise OSError."""
    status = os.stat(path)
    what = f"{status.st_size} {status.st_mtime_ns}".encode()
    return hashlib.blake2b(what, digest_size=len(UNKNOWN)).digest()
