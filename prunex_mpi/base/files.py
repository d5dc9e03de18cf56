"""Read files that may be anything, and write files, some of which survive a crash."""

import errno
import json
import math
import os
import re
import socket
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.units import MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # noqa: F401

CHUNK_BYTES = 4 * MIB
# Of checkpoints, configurations and exported networks: a file of another number is refused.
FORMAT = 8
# The files of a run directory that grow by lines; the last one is not part of checkpoints.
METRICS, LAYERS, RANKS, NODES = "metrics.jsonl", "layers.jsonl", "ranks.jsonl", "nodes.jsonl"
LINES = (METRICS, LAYERS, RANKS)
# The folders of complete checkpoints: number, outer iteration and step.
CHECKPOINT = re.compile(r"(\d{6,12})-iteration-(\d{1,12})-step-(\d{1,12})")
SUMMARY, STATE, EXPORTED = "summary.json", "state.safetensors", "model"
# The copy of the file that text was cut into tokens by, of exported networks too.
TOKENIZER = "tokenizer.json"
# Holds why, in a run that diverged.
DIVERGED = "diverged.json"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file, or of its first `size` bytes."""

    size: int = 0
    crc32: int = 0

    def extended(self, data: bytes) -> "FileRecord":
        """Return the record of the file once `data` is appended."""
        return FileRecord(self.size + len(data), zlib.crc32(data, self.crc32))


def read_record(path: Path, size: int | None = None) -> FileRecord:
    """Return the record of a file, or of its first `size` bytes; raise OSError."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    crc32, done = 0, 0
    with open(path, "rb", buffering=0, opener=regular_only) as file:
        while size is None or done < size:
            count = file.readinto(buffer if size is None else buffer[: size - done])
            if not count:
                break
            crc32 = zlib.crc32(buffer[:count], crc32)
            done += count
    return FileRecord(done, crc32)


def no_links(path: str, flags: int) -> int:
    """Open a file to write for `open(..., opener=no_links)`: a regular one, through no link."""
    return regular_only(path, flags | os.O_NOFOLLOW)


def regular_only(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=regular_only)`; raise OSError for what is none.

    Opening a FIFO would wait for its other end, reading a device may never end.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        # A FIFO that nobody reads.
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "not a regular file", path) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; raise OSError, also for what is none."""
    return open(path, "rb", opener=regular_only)


def read_text(path: Path) -> str:
    """Return the text of a regular file; raise OSError, UnicodeDecodeError."""
    with open(path, encoding="utf-8", opener=regular_only) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Return what a regular file holds, as `loads` does; raise OSError, ValueError."""
    return loads(read_text(path))


def loads(text: str | bytes) -> Any:
    """Return what JSON holds, all numbers finite in float64 too; raise ValueError."""
    try:
        return json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def touch(path: Path) -> None:
    """Make an empty file where there is none; raise OSError for a link."""
    os.close(no_links(str(path), os.O_WRONLY | os.O_CREAT))


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by a file of `text` in one atomic step that survives a crash."""
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        # What a crash has left, or a link that somebody else has put there.
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # Nobody else would write it again under this name.
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json_durably(path: Path, value: Any) -> None:
    """Replace `path` by a file of `value` in JSON, as `write_durably` does; no NaN."""
    write_durably(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_json(path: str, value: Any) -> None:
    """Write `value` in JSON to the file that a user named, which may be no regular file."""
    # What can't be written in JSON leaves the file as it was.
    text = json.dumps(value, indent=2) + "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def telling_disk_errors(what: str) -> Iterator[None]:
    """Say in a UserError why `what` can't be written in the block, or by the function below it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} can't be written: {error.strerror or error}; "
            "make room and go on with --resume",
            FAILURE,
        ) from None


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
