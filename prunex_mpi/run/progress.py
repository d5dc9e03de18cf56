"""What the files of a run tell a launcher of how far it has come, and how its last job ended."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import CHECKPOINT, METRICS, SUMMARY, open_regular
from prunex_mpi.run.directory import COMPLETE, read_summary


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def newest_checkpoint(run: Path) -> tuple[int, int]:
    """Return outer iteration and step from which a run goes on, (1, 0) without a checkpoint."""
    found = [(1, 0)]
    with suppress(OSError):
        for path in (run / "checkpoints").iterdir():
            if match := CHECKPOINT.fullmatch(path.name):
                found.append((int(match[2]), int(match[3])))
    return max(found)


def summary(run: Path) -> dict[str, Any]:
    """Return what a job says of its end, {} where it has not come to say it."""
    with suppress(UserError):
        return read_summary(run)
    return {}


def is_complete(run: Path, since: float = 0.0) -> bool:
    """Return whether a job has come to the end of the run, and said so `since` that time."""
    return has_left(run, since) and summary(run).get("status") in COMPLETE


def has_left(run: Path, since: float) -> bool:
    """Return whether a job has said `since` that time how it ends, which is the last it does."""
    with suppress(OSError):
        return (run / SUMMARY).stat().st_mtime >= since
    return False


def what_is_lost(run: Path, at: float) -> tuple[int, float]:
    """Return how many finished outer iterations are done again, and the seconds from the last
    checkpoint until the job ended: theirs, and those of the one that was under way.
    """
    iteration, _ = newest_checkpoint(run)
    lost = [seconds for k, seconds in records(run) if k >= iteration]
    with suppress(OSError):
        return len(lost), sum(lost) + max(at - (run / METRICS).stat().st_mtime, 0.0)
    return 0, 0.0


def records(run: Path) -> list[tuple[int, float]]:
    """Return number and seconds of each outer iteration, as far as lines are whole."""
    found = []
    # A job that was killed may leave half a line.
    with (
        suppress(OSError, ValueError, KeyError, TypeError),
        open_regular(run / METRICS) as file,
    ):
        for line in file:
            record = json.loads(line)
            found.append((record["iteration"], record["seconds"]["total"]))
    return found
