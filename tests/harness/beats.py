"""A heartbeat that notes for how long a rank has not gone on."""

import time
from collections.abc import Callable

import pytest

from prunex_mpi.base import heartbeat
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm import agreement

PAUSE_S = 0.05


def count_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take half a KiB that is read or written for progress, and tell the others at once."""
    monkeypatch.setattr(heartbeat, "COUNTED_BYTES", 512)
    monkeypatch.setattr(agreement, "ROUND_S", PAUSE_S)


class Noted(Heartbeat):
    """Keeps when the rank went on, how often, and the longest time for which it did not."""

    last = longest = 0.0
    times = 0

    def __setattr__(self, name: str, value: object) -> None:
        if name == "beats":
            now = time.monotonic()
            self.longest = max(self.longest, now - self.last if self.last else 0.0)
            self.last = now
            self.times += 1
        super().__setattr__(name, value)

    def check(self, action: Callable[[], object]) -> None:
        """Assert that the rank goes on in an action that takes long, however busy the machine."""
        started, before = time.monotonic(), self.times
        action()
        took, times = time.monotonic() - started, self.times - before
        assert took > 10 * PAUSE_S and times > 9, (took, times)
