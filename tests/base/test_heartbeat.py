"""The heartbeat: it counts, and says in words where a rank is."""

import threading
from pathlib import Path

import pytest

from prunex_mpi.base import heartbeat as counting
from prunex_mpi.base.heartbeat import PHASES, WATCHERS, Heartbeat, read_and_written


def test_it_counts_and_tells_where_the_rank_is():
    heartbeat = Heartbeat()
    assert heartbeat.phase in PHASES
    assert heartbeat.describe() == "phase start"
    heartbeat.enter("local", 4)
    heartbeat.beat(17)
    assert heartbeat.describe() == "phase local of outer iteration 4, step 17"
    heartbeat.enter("intra")
    assert heartbeat.describe() == "phase intra of outer iteration 4"
    assert heartbeat.beats == 3


@pytest.mark.parametrize("name", [*WATCHERS, "decode"])
def test_what_is_read_and_written_is_counted_but_by_threads_that_watch(name, tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "COUNTED_BYTES", 1)
    written, go_on = threading.Event(), threading.Event()

    def write() -> None:
        (tmp_path / "file").write_bytes(bytes(50_000))
        written.set()
        go_on.wait()

    before = read_and_written()
    thread = threading.Thread(target=write, name=name)
    thread.start()
    written.wait()
    after = read_and_written()
    go_on.set()
    thread.join()
    assert (after - before >= 50_000) == (name == "decode")


def test_where_nobody_counts_nothing_was_read(monkeypatch):
    def refuse(*_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert read_and_written() == 0
