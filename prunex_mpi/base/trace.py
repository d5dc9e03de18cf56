"""Remember what a thread of a rank did when, and write it as events of Chrome's trace format.

Perfetto (ui.perfetto.dev) and chrome://tracing open what comes of it.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAIN, HELPER = 0, 1


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
        self,
        category: str,
        name: str,
        start: float,
        end: float,
        args: Mapping[str, int],
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
    named = [("process_name", MAIN, name), ("thread_name", MAIN, "main")]
    named += [("thread_name", HELPER, "helper")]
    events = [
        {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": text}}
        for kind, thread, text in named
    ]
    order = {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    return [json.dumps(event) for event in (*events, order)]
