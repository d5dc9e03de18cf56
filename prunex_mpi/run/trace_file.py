"""The file of a trace: a JSON array that grows by lines, in Chrome's trace format.

Its elements stand on lines of their own, so that what an interrupted run leaves can be opened, and
continued: the format asks for no closing bracket.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UNREADABLE, UserError

# The name of the first element, which says when (Unix time) the trace has its zero.
ZERO = "trace_begins"
END = "\n]\n"
# The last lines of a file that may have been cut lie in so many bytes.
TAIL_BYTES = 2**16


class TraceFile:
    """The file of all ranks' events, which grows by lines; `zero` is the Unix time of its zero.

    With `resume` a file that is there is continued. Raises UserError where it is none of ours, and
    OSError.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.zero = read_zero(path) if resume and path.exists() else None
        if self.zero is None:
            self.zero = time.time()
            first = {"ph": "M", "pid": 0, "name": ZERO, "args": {"unix_s": self.zero}}
            path.write_text(f"[\n{json.dumps(first)}", encoding="utf-8")
        else:
            reopen(path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, events: list[str]) -> None:
        """Add events, each in JSON."""
        self.file.write("".join(f",\n{event}" for event in events))
        self.file.flush()

    def close(self, ended: bool) -> None:
        """Let go of the file; where the run has `ended`, the array does as well."""
        if ended:
            self.file.write(END)
        self.file.close()


def read_zero(path: Path) -> float:
    """Return the Unix time of the zero of a trace; raise UserError where the file is none."""
    try:
        with open(path, encoding="utf-8") as file:
            bracket, first = file.readline(), file.readline().rstrip("\n").rstrip(",")
        found: Any = json.loads(first)
        if bracket == "[\n" and found["name"] == ZERO:
            return float(found["args"]["unix_s"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is not a trace of this program; move it away", UNREADABLE)


def reopen(path: Path) -> None:
    """Cut off the end of the array, or an element that was not written to its end."""
    size = path.stat().st_size
    with open(path, "rb+") as file:
        start = max(0, size - TAIL_BYTES)
        file.seek(start)
        tail = file.read()
        closed = tail.endswith(END.encode())
        kept = tail.removesuffix(END.encode()) if closed else tail
        head, _, last = kept.rpartition(b"\n")
        try:
            json.loads(last.removesuffix(b","))
        except ValueError:
            kept = head
        # Each element is written behind a comma of its own.
        os.truncate(path, start + len(kept.removesuffix(b",")))
