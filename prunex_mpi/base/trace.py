"""Remember what a thread of a rank did when, and keep it in a file of Chrome's trace format.

Perfetto (ui.perfetto.dev) and chrome://tracing open the file, a JSON array that grows by lines. Its
elements are on lines of their own, so that what an interrupted run leaves can be opened, and
continued: the format asks for no closing bracket.
"""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.files import no_links

MAIN, HELPER = 0, 1
# The name of the first element, which says when (Unix time) the trace has its zero.
ZERO = "trace_begins"
END = "\n]\n"
# The last lines of a file that may have been cut lie in so many bytes.
TAIL_BYTES = 2**16


class Event(NamedTuple):
    """What happened from `start` to `end`, by this process's clock; `args` are whole numbers."""

    category: str
    name: str
    start: float
    end: float
    args: Mapping[str, int]


@dataclass
class Trace:
    """The events of one thread of rank `rank` that have not been written yet.

    `base` is what this process's clock says at the beginning of the trace. Two threads may use one:
    what is noted by one while the other takes is taken then or the next time.
    """

    rank: int
    thread: int = MAIN
    base: float = 0.0
    events: deque[Event] = field(default_factory=deque)

    def note(
        self, category: str, name: str, start: float, end: float, args: Mapping[str, int]
    ) -> None:
        """Add an event."""
        self.events.append(Event(category, name, start, end, args))

    def take(self) -> list[str]:
        """Return the events so far in JSON and forget them; whatever lies in another follows it."""
        taken = []
        while self.events:
            taken.append(self.events.popleft())
        taken.sort(key=lambda event: (event.start, -event.end))
        return [self._in_json(event) for event in taken]

    def _in_json(self, event: Event) -> str:
        category, name, start, end, counted = event
        # Nanoseconds, both ends on one grid, so that what lies inside another still does.
        began, ended = round((start - self.base) * 1e9), round((end - self.base) * 1e9)
        args = ",".join([f'"{key}":{value}' for key, value in counted.items()])
        return (
            f'{{"ph":"X","pid":{self.rank},"tid":{self.thread},"ts":{began / 1000:.3f},'
            f'"dur":{(ended - began) / 1000:.3f},"cat":"{category}","name":"{name}",'
            f'"args":{{{args}}}}}'
        )


def label(rank: int, name: str) -> list[str]:
    """Return the events that name a rank and its threads."""
    named = [("process_name", MAIN, name)]
    named += [("thread_name", MAIN, "main"), ("thread_name", HELPER, "helper")]
    events = [
        {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": text}}
        for kind, thread, text in named
    ]
    order = {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    return [json.dumps(event) for event in (*events, order)]


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
            with open(path, "w", encoding="utf-8", opener=no_links) as file:
                file.write(f"[\n{json.dumps(first)}")
        else:
            reopen(path)
        self.file = open(path, "a", encoding="utf-8", opener=no_links)  # noqa: SIM115

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
    with open(path, "rb+", opener=no_links) as file:
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
