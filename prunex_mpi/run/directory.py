"""The directory of a run: who holds it, its lines that grow, and how the run ended."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from prunex_mpi.base.errors import UNREADABLE, DamagedCheckpoint, UserError, log
from prunex_mpi.base.files import (
    CHECKPOINT,
    DIVERGED,
    LINES,
    METRICS,
    SUMMARY,
    TOKENIZER,
    FileRecord,
    no_links,
    open_regular,
    read_json,
    read_record,
    read_text,
    sync,
    telling_disk_errors,
    tomllib,
    touch,
    write_durably,
    write_json_durably,
)
from prunex_mpi.base.record_keys import check_summary

# How a run ends that has come to its end.
COMPLETE = ("completed", "converged")
# For who only looks whether a run is held to let go of its lock.
LOOKED_AT_S = 2.0


def check_run_dir(path: Path, resume: bool) -> None:
    """Raise UserError for what would be refused once the data are loaded; nothing is made."""
    try:
        if not resume and (path / "config.toml").exists():
            raise _held(path)
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(path, error) from None


def _held(path: Path) -> UserError:
    return UserError(
        f"--run-dir {path} already holds a run; --resume goes on with it, or choose another"
    )


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"--run-dir {path}: {error.strerror}; choose another")


def _can_lock(file: Path) -> bool:
    """Return whether the file system of a file supports locks."""
    with open_regular(file) as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
    return True


def is_held(run: Path) -> bool:
    """Return whether a job holds a run, as far as its file system can tell."""
    try:
        with open_regular(run / "lock") as file:
            # An exclusive one NFS gives only to who may write.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class RunDirectory:
    """The files of one run, which one job at a time holds; only world rank 0 makes one.

    `config` is the text of config.toml. A run that is to `resume` keeps its own. Raises UserError
    when `path` can't be written, when another job holds it, and when it already holds a run, unless
    that one is to resume.
    """

    def __init__(self, path: Path, config: str, resume: bool = False) -> None:
        self.path = path
        self.config = config
        self.records = {name: FileRecord() for name in LINES}
        self.lock = FileLock(path / "lock", timeout=LOOKED_AT_S)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # FileLock takes any failure to make its file for a lock that is held.
            touch(path / "lock")
            if _can_lock(path / "lock"):
                self.lock.acquire()
            else:
                log.warning("there are no locks on the disk of %s: start no second job on it", path)
            file = path / "config.toml"
            if resume and file.exists():
                self.config = read_text(file)
            elif file.exists():
                raise _held(path)
            elif any((path / name).exists() for name in (*LINES, "checkpoints")):
                raise UserError(
                    f"--run-dir {path} holds a run without its config.toml; put that back, or "
                    "choose another",
                    UNREADABLE,
                )
            else:
                write_durably(file, config)
        except Timeout:
            raise UserError(f"--run-dir {path} is in use by another job; choose another") from None
        except OSError as error:
            raise _unusable(path, error) from None

    def close(self) -> None:
        """Let other jobs have the run."""
        self.lock.release()

    def append(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Append one JSON object per line to the file `name`; only LINES are in checkpoints."""
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with open(self.path / name, "a", encoding="utf-8", opener=no_links) as file:
            file.write(text)
        if name in LINES:
            self.records[name] = self.records[name].extended(text.encode())

    def sizes(self) -> dict[str, list[int]]:
        """Bring the lines to the disk; return the size and checksum that each file then has."""
        for name in LINES:
            if (self.path / name).exists():
                sync(self.path / name)
        return self.lengths()

    def lengths(self) -> dict[str, list[int]]:
        """Return the size and checksum of each file of lines."""
        return {name: [record.size, record.crc32] for name, record in self.records.items()}

    def check(self, sizes: dict[str, list[int]]) -> None:
        """Raise DamagedCheckpoint unless the files begin with what `sizes` was returned for."""
        for name, (size, crc32) in sizes.items():
            try:
                found = read_record(self.path / name, size) if size else FileRecord()
            except OSError as error:
                raise DamagedCheckpoint(f"{name}: {error.strerror}") from None
            if found != FileRecord(size, crc32):
                raise DamagedCheckpoint(f"{name} does not hold what it held then")

    def rewind(self, sizes: dict[str, list[int]]) -> None:
        """Cut the files to `sizes` (all of them when empty) and forget how the run ended."""
        for name in LINES:
            size, crc32 = sizes.get(name, (0, 0))
            self.records[name] = FileRecord(size, crc32)
            if (self.path / name).exists():
                try:
                    # Through no link: the folder may be somebody else's.
                    with open(self.path / name, "r+b", opener=no_links) as file:
                        file.truncate(size)
                except OSError as error:
                    reason = f"{self.path / name} can't be cut: {error.strerror}; move it away"
                    raise UserError(reason, UNREADABLE) from None
        for name in (SUMMARY, DIVERGED):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                reason = f"{self.path / name} is in the way: {error.strerror}; move it away"
                raise UserError(reason, UNREADABLE) from None

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file."""
        if not (self.path / name).exists():
            return []
        with open_regular(self.path / name) as file:
            return [json.loads(line) for line in file]

    def complete(self) -> bool:
        """Return whether the run has come to its end."""
        return read_summary(self.path).get("status") in COMPLETE

    def versions(self) -> dict[str, str]:
        """Return the versions of the software that began the run."""
        found = tomllib.loads(self.config).get("versions", {})
        return {name: version for name, version in found.items() if name != "format"}

    def make_folder(self, name: str) -> None:
        """Make an empty folder in the run directory; raise UserError where that can't be."""
        folder = self.path / name
        try:
            if folder.is_dir() and not folder.is_symlink():
                folder.rename(tempfile.mkdtemp(prefix=f".{name}-", dir=self.path))
            folder.mkdir()
        except OSError as error:
            raise UserError(f"{folder} is in the way: {error.strerror}; remove it") from None
        for old in self.path.glob(f".{name}-*"):
            # On NFS what a rank still has open stays, by another name, and its folder with it.
            shutil.rmtree(old, ignore_errors=True)

    def keep_tokenizer(self, name: str, digest: str) -> None:
        """Copy a tokenizer's file, whose `digest` is "" for none, into a run that has it not yet.

        The run then does not depend on where the file lies. Raises UserError.
        """
        kept = self.path / TOKENIZER
        if not digest or kept.exists():
            return
        try:
            with open_regular(name) as file:
                data = file.read()
        except OSError:
            data = b""
        if sha256(data).hexdigest() != digest:
            raise UserError(
                f"--tokenizer {name} is not the file that was read any more; start again"
            )
        with telling_disk_errors(TOKENIZER):
            write_durably(kept, data.decode())

    def note_divergence(self, reason: str) -> None:
        """Write why the run diverged to diverged.json; a full disk is ignored."""
        with contextlib.suppress(OSError):
            write_json_durably(self.path / DIVERGED, {"reason": reason})

    @telling_disk_errors(SUMMARY)
    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json in one atomic step: its presence says that the run ended well."""
        write_json_durably(self.path / SUMMARY, summary)


def new_folder(name: str) -> str:
    """Make a folder for a run and return its path: `name`, with a number where that is taken.

    Runs may begin in the same second.
    """
    path, number = name, 1
    while True:
        try:
            Path(path).mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = f"{name}-{number}"
            continue
        except OSError:
            # Who opens the run says why.
            pass
        return path


def read_summary(run: Path) -> dict[str, Any]:
    """Return how a run ended, {} where it did not; raise UserError where that can't be read."""
    remove = "remove it to go on with the run"
    try:
        summary = read_json(run / SUMMARY)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise UserError(f"{run / SUMMARY} can't be read; {remove}", UNREADABLE) from None
    try:
        check_summary(summary)
    except ValueError as error:
        text = f"{run / SUMMARY} is not what the run wrote ({error}): put it back, or {remove}"
        raise UserError(text, UNREADABLE) from None
    return summary


# --------------------------------------------------------------------------------------------------
# What the files tell a launcher of how far a run has come, and how its last job ended
# --------------------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def newest_checkpoint(run: Path) -> tuple[int, int]:
    """Return outer iteration and step from which a run goes on, (1, 0) without a checkpoint."""
    found = [(1, 0)]
    with contextlib.suppress(OSError):
        for path in (run / "checkpoints").iterdir():
            if match := CHECKPOINT.fullmatch(path.name):
                found.append((int(match[2]), int(match[3])))
    return max(found)


def summary(run: Path, since: float = 0.0) -> dict[str, Any]:
    """Return what a job has said `since` that time of its end, which is the last it does, or {}."""
    with contextlib.suppress(OSError, UserError):
        if (run / SUMMARY).stat().st_mtime >= since:
            return read_summary(run)
    return {}


def is_complete(run: Path, since: float = 0.0) -> bool:
    """Return whether a job has come to the end of the run, and said so `since` that time."""
    return summary(run, since).get("status") in COMPLETE


def what_is_lost(run: Path, at: float) -> tuple[int, float]:
    """Return how many finished outer iterations are done again, and the seconds from the last
    checkpoint until the job ended: theirs, and those of the one that was under way.
    """
    iteration, _ = newest_checkpoint(run)
    lost = [seconds for k, seconds in records(run) if k >= iteration]
    with contextlib.suppress(OSError):
        return len(lost), sum(lost) + max(at - (run / METRICS).stat().st_mtime, 0.0)
    return 0, 0.0


def records(run: Path) -> list[tuple[int, float]]:
    """Return number and seconds of each outer iteration, as far as lines are whole."""
    found = []
    # A job that was killed may leave half a line.
    with (
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        open_regular(run / METRICS) as file,
    ):
        for line in file:
            record = json.loads(line)
            found.append((record["iteration"], record["seconds"]["total"]))
    return found
