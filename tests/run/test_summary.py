"""Progress: lines of what happens in an outer iteration and of what is left."""

import threading
import time
from typing import Any

import pytest

from prunex_mpi.base.errors import set_up_logging
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.run import summary as module
from prunex_mpi.run.summary import Progress

# 8 outer iterations of 10 steps of 64 images.
LENGTH = {"iterations": 8, "steps": 80, "count": 64, "unit": "images"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock, and the thread that looks by it."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "LOOK_S", 1000.0)
    return now


def begin(heartbeat: Heartbeat, enabled: bool = True) -> Progress:
    set_up_logging(0, 2)
    return Progress(**LENGTH, enabled=enabled, heartbeat=heartbeat)


def record(iteration: int, accuracy: float | None = 0.9512, frozen: bool = False) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "train_loss": 0.25,
        "test_accuracy": accuracy,
        "density": 0.5,
        "bytes": {"payload": 3 * 2**20},
        "seconds": {"total": 1.5, "evaluate": 0.25},
        "frozen": frozen,
    }


def test_it_is_one_line_per_iteration(capsys, clock):
    progress = begin(Heartbeat())
    progress.start(0, 10)
    clock[0] += 2.0
    progress.update(record(1, accuracy=None), 10, 10)
    clock[0] += 1.0
    progress.update(record(2, frozen=True), 20, 10)
    progress.close()
    first, second = capsys.readouterr().err.splitlines()
    # 640 images in the 1.25 s without the evaluation; 70 steps of 0.2 s are left.
    assert first == (
        "[0/2] iteration 1/8: loss 0.2500, accuracy -, density 0.500, payload 3.00 MiB, 1.50 s, "
        "512 images/s, 0:00:14 left"
    )
    assert "iteration 2/8" in second
    assert "accuracy 95.12 %" in second
    # 0.3 of the way from 0.2 to 0.1 s for each of 60 steps.
    assert second.endswith("0:00:10 left, frozen")


def test_nothing_is_left_after_the_last(capsys, clock):
    progress = begin(Heartbeat())
    progress.start(70, 10)
    clock[0] += 2.0
    progress.update(record(8), 80, 10)
    progress.close()
    assert capsys.readouterr().err.endswith("512 images/s\n")


def test_a_long_iteration_says_every_half_minute_where_it_is(capsys, clock):
    heartbeat = Heartbeat()
    progress = begin(heartbeat)
    progress.start(20, 10)
    heartbeat.enter("local", 3)
    lines = []
    for second in range(0, 101, 5):
        # A step of 10 s, of which 10 make an iteration.
        clock[0] = 100.0 + second
        heartbeat.beat(second // 10)
        progress.look()
        lines += [(second, line) for line in capsys.readouterr().err.splitlines()]
    # How long a step takes is known from the end of the first outer iteration on.
    assert lines == [
        (30, "[0/2] iteration 3/8: local step 4 of 10"),
        (60, "[0/2] iteration 3/8: local step 7 of 10"),
        (90, "[0/2] iteration 3/8: local step 10 of 10"),
    ]
    progress.update(record(3), 30, 10)
    capsys.readouterr()
    heartbeat.enter("evaluate", 4)
    for _ in range(7):
        clock[0] += 5
        progress.look()
    # 40 steps of 10 s, of the iterations after this one.
    assert capsys.readouterr().err == "[0/2] iteration 4/8: phase evaluate, 0:06:40 left\n"
    progress.close()


def test_its_thread_looks_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "LINE_S", 0.02)
    heartbeat = Heartbeat()
    heartbeat.enter("inter", 5)
    progress = begin(heartbeat)
    shown, end = "", time.monotonic() + 20
    while shown.count("iteration 5/8: phase inter") < 2 and time.monotonic() < end:
        time.sleep(0.02)
        shown += capsys.readouterr().err
    progress.close()
    assert shown.count("iteration 5/8: phase inter") >= 2
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_it_is_silent_where_it_is_not_enabled(capsys):
    progress = begin(Heartbeat(), enabled=False)
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    progress.start(0, 10)
    progress.update(record(1), 10, 10)
    progress.close()
    assert capsys.readouterr().err == ""
