"""End a job that does not go on: a heartbeat per rank, watched by a thread of each rank.

The main thread counts its progress in a Heartbeat. The thread publishes it in a file of the run
directory, so that the one line that ends a job can name the rank that everyone waits for, and
watches two things: that its own rank goes on, and that the next rank's thread is alive, since a
process that is stopped can't report itself.
"""

import contextlib
import errno
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import open_regular
from prunex_mpi.base.heartbeat import PHASES, Heartbeat, read_and_written

PACKAGE = Path(__file__).parents[1]
RECORD_BYTES = 1024
CHECKS_PER_TIMEOUT = 10
# Between looks at this rank itself; and at the records, which a thousand ranks write and read on
# one file system. A report takes who has not written for a minute for dead.
LONGEST_PAUSE_S, LONGEST_SILENCE_S = 5.0, 30.0
GRACE_S = 3.0
# For the record of one rank, on a slow file system.
READING_S = 0.01
# NFS believes for up to a minute that what was not there is not there.
SHARE_LIMIT_S = 90.0


@dataclass(frozen=True)
class Record:
    """What one rank's thread last published of its rank; `at` is the wall clock there."""

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    step: int
    beats: int
    at: float
    frame: str
    computing: bool

    def place(self) -> str:
        """Return where the rank was, in words."""
        return f"{Heartbeat(self.phase, self.iteration, self.step).describe()} ({self.frame})"


class Watchdog:
    """Watch one rank, and the next one once there is a folder to meet in.

    `abort` ends the whole job and may be called from the thread. Call `close` before leaving.
    """

    def __init__(
        self, heartbeat: Heartbeat, rank: int, timeout_s: float, abort: Callable[[], None]
    ) -> None:
        self.heartbeat = heartbeat
        self.rank = rank
        self.timeout_s = timeout_s
        self.pause_s = min(LONGEST_PAUSE_S, timeout_s / CHECKS_PER_TIMEOUT)
        self.silence_s = min(LONGEST_SILENCE_S, timeout_s / CHECKS_PER_TIMEOUT)
        self.abort = abort
        self.host = socket.gethostname()
        self.main_thread = threading.main_thread().ident
        self.folder: Path | None = None
        self.size = 1
        self.file = -1
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def share(self, folder: Path, size: int) -> None:
        """Publish this rank in `folder`, which rank 0 has made and all `size` ranks see.

        Raises UserError when this rank does not see it.
        """
        limit = time.monotonic() + SHARE_LIMIT_S
        while self.file < 0:
            try:
                self.file = os.open(
                    _path(folder, self.rank), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644
                )
            except OSError as error:
                # A network file system may show a new folder late.
                if time.monotonic() > limit:
                    raise UserError(
                        f"{folder.parent} can't be written from {self.host} ({error.strerror}); "
                        "--run-dir must be on a file system that all nodes share"
                    ) from None
                # The limit is nearer, which may be further away than the timeout.
                self.heartbeat.go_on()
                time.sleep(0.2)
        self._publish()
        self.size, self.folder = size, folder

    def move(self, rank: int) -> None:
        """Watch this rank under the number that it has from now on, until it meets others anew."""
        # Its file stays open: the thread may be about to write, by a number that another may get.
        self.folder, self.file, self.size, self.rank = None, -1, 1, rank

    def leave_if_lost(self) -> None:
        """End this process where the others have gone on without it: their records are new ones."""
        if self.folder is not None and _is_removed(self.file):
            text = f"prunex_mpi: rank {self.rank} on {self.host} was lost to the others, and ends"
            print(text, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Stop watching and take this rank's record away."""
        self.ended.set()
        self.thread.join()
        if self.folder is not None:
            with contextlib.suppress(OSError):
                record = _path(self.folder, self.rank)
                # Another job that has the run already has records of the same names.
                if os.path.samestat(os.fstat(self.file), record.stat()):
                    record.unlink()
                    # The last rank to leave finds the folder empty.
                    self.folder.rmdir()
            os.close(self.file)

    def first_to_report(self) -> bool:
        """Return whether this rank, as far as it knows, is the first to report the end."""
        if self.folder is None:
            return True
        try:
            os.close(os.open(self.folder / "ended", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:
            # On a full disk nobody can be the first: better twice than never.
            return True
        return True

    def _watch(self) -> None:
        own, next_one = _Idle(self.pause_s), _Idle(self.silence_s)
        silent_s, told_at = 0.0, -math.inf
        while not self.ended.wait(self.pause_s):
            # Beside phases that go on: imports, which take long on some file systems, and files.
            progress = self.heartbeat.beats, len(sys.modules), read_and_written()
            idle_s = own.seconds_since_change(progress)
            if self.folder is None:
                if idle_s > self.timeout_s:
                    self._end(self._own_reason, idle_s)
                continue
            self.leave_if_lost()
            now = time.monotonic()
            # To the nearest look.
            if now - told_at > self.silence_s - self.pause_s / 2:
                told_at = now
                self._publish()
                successor = read_heartbeat(self.folder, (self.rank + 1) % self.size)
                # A rank that has left takes its record away.
                silent_s = next_one.seconds_since_change(successor.at if successor else time.time())
            if max(idle_s, silent_s) > self.timeout_s:
                self._end(self._reason, max(idle_s, silent_s))

    def _reason(self, seconds: float) -> str:
        """Name the rank that the others wait for, as well as the records tell."""
        records = [read_heartbeat(self.folder, rank) for rank in range(self.size)]
        found = [record for record in records if record is not None]
        if not found:
            return self._own_reason(seconds)
        alive_since = max(record.at for record in found) - self.timeout_s / 2
        late = find_hung_rank(found, alive_since)
        state = "is stopped or gone" if late.at < alive_since else "hangs"
        return (
            f"rank {late.rank} on {late.host} (process {late.pid}) {state} in {late.place()}: no "
            f"progress for {seconds:.0f} s (--timeout {self.timeout_s:g})"
        )

    def _own_reason(self, seconds: float) -> str:
        return (
            f"rank {self.rank} on {self.host}: no progress for {seconds:.0f} s in "
            f"{self.heartbeat.describe()} ({self._frame()[0]}, --timeout {self.timeout_s:g})"
        )

    def _end(self, reason: Callable[[float], str], seconds: float) -> None:
        # One rank alone reads the records of all.
        if self.first_to_report():
            text = f"prunex_mpi: error: {reason(seconds)}; the job is ended"
            print(text, file=sys.stderr, flush=True)
        else:
            # Whoever reports should not be cut off.
            time.sleep(GRACE_S + self.size * READING_S)
        self.abort()

    def _frame(self) -> tuple[str, bool]:
        """Return where the main thread is, and whether that is outside the package.

        Where comm/ waits for its helper thread, the rank waits for others.
        """
        frame = inside = sys._current_frames().get(self.main_thread)
        if frame is None:
            return "ended", False
        while inside is not None and PACKAGE not in Path(inside.f_code.co_filename).parents:
            inside = inside.f_back
        if inside is not None and Path(inside.f_code.co_filename).parent.name == "comm":
            frame = inside
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        return place, inside is not frame

    def _publish(self) -> None:
        frame, computing = self._frame()
        beat = asdict(self.heartbeat)
        fields = {**beat, "frame": frame[:200], "computing": computing, "at": time.time()}
        record = Record(rank=self.rank, host=self.host[:200], pid=os.getpid(), **fields)
        text = json.dumps(asdict(record)).encode()
        # The watchdog has to outlive a full disk.
        with contextlib.suppress(OSError):
            os.pwrite(self.file, text.ljust(RECORD_BYTES), 0)


class _Idle:
    """Add up the time since a value changed, without the time this process itself stood still.

    A job that its scheduler suspends must not be taken for a dead one when it goes on.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.value: object = None
        self.seconds = 0.0
        self.last = time.monotonic()

    def seconds_since_change(self, value: object) -> float:
        now = time.monotonic()
        self.seconds += min(now - self.last, 2 * self.pause_s)
        self.last = now
        if value != self.value:
            self.value, self.seconds = value, 0.0
        return self.seconds


def find_hung_rank(records: list[Record], alive_since: float) -> Record:
    """Return the record of the rank that the others wait for.

    One whose thread is silent; else the one with the least progress (outer iteration, phase, step),
    and of several the one that is not inside this package, where it would wait for others.
    """

    def key(record: Record) -> tuple:
        phase = PHASES.index(record.phase) if record.phase in PHASES else 0
        silent = record.at < alive_since
        return (not silent, record.iteration, phase, record.step, not record.computing)

    return min(records, key=key)


def read_heartbeat(folder: Path, rank: int) -> Record | None:
    """Return what `rank` published, None when there is nothing that can be read."""
    try:
        with open_regular(_path(folder, rank)) as file:
            return Record(**json.loads(file.read(RECORD_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _is_removed(file: int) -> bool:
    """Return whether an open file has no name any more."""
    try:
        return os.fstat(file).st_nlink == 0
    except OSError as error:
        # As NFS says it.
        return error.errno == errno.ESTALE


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"
