"""The watchdog: which rank it names, when it stays silent, what it leaves behind."""

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch import run_job

import prunex_mpi
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import COUNTED_BYTES, Heartbeat
from prunex_mpi.run import watchdog
from prunex_mpi.run.watchdog import Record, Watchdog, find_hung_rank, read_heartbeat

LIMIT_S = 20


def record(rank: int, **changes: object) -> Record:
    fields = {
        "host": "a",
        "pid": 1,
        "phase": "intra",
        "iteration": 3,
        "step": 0,
        "beats": 7,
        "at": 100.0,
        "frame": "collectives.py:80 allreduce_",
        "computing": False,
    }
    return Record(rank=rank, **{**fields, **changes})


def test_a_silent_rank_is_named_before_one_with_less_progress():
    records = [record(0, phase="local"), record(1), record(2, at=50.0)]
    assert find_hung_rank(records, alive_since=97.0).rank == 2


def test_the_rank_with_the_least_progress_is_named():
    assert find_hung_rank([record(0), record(1, phase="local", step=9), record(2)], 97.0).rank == 1
    assert (
        find_hung_rank([record(0), record(1, phase="dual"), record(2, iteration=2)], 97.0).rank == 2
    )


def test_of_equals_the_rank_that_computes_is_named():
    records = [record(0), record(1), record(2, computing=True, frame="mine.py:3 forward")]
    assert find_hung_rank(records, 97.0).rank == 2


def test_the_rank_that_hangs_is_named_whatever_others_got_done_in_its_phase():
    """Ranks that wait go on with the rounds of the others, which write files of other sizes."""
    beats = [Heartbeat() for _ in range(3)]
    for number, heartbeat in enumerate(beats):
        heartbeat.enter("checkpoint", 3)
        for _ in range(9 - number):
            heartbeat.go_on()
    assert [heartbeat.beats for heartbeat in beats] == [10, 9, 8]
    records = [record(rank, **vars(heartbeat)) for rank, heartbeat in enumerate(beats)]
    records[0] = replace(records[0], computing=True)
    assert find_hung_rank(records, 97.0).rank == 0


class Job:
    """Collect what a watchdog does instead of aborting."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def wait(self) -> bool:
        return self.aborted.wait(LIMIT_S)


def test_no_progress_ends_the_job_with_one_line(capfd):
    job, heartbeat = Job(), Heartbeat()
    heartbeat.enter("local", 4)
    heartbeat.beat(17)
    dog = Watchdog(heartbeat, 3, 0.3, job.aborted.set)
    assert job.wait()
    dog.close()
    text = capfd.readouterr().err
    assert "rank 3 on" in text
    assert "no progress for 0 s in phase local of outer iteration 4, step 17" in text
    assert text.splitlines()[0].startswith("prunex_mpi: error: ")


def test_imports_are_progress(monkeypatch):
    job = Job()
    dog = Watchdog(Heartbeat(), 0, 0.4, job.aborted.set)
    for number in range(12):
        monkeypatch.setitem(sys.modules, f"imported{number}", sys)
        time.sleep(0.08)
    assert not job.aborted.is_set()
    assert job.wait()
    dog.close()


@pytest.mark.parametrize("writes", [True, False])
def test_a_rank_that_writes_goes_on_and_one_that_computes_without_end_does_not(tmp_path, writes):
    job = Job()
    dog = Watchdog(Heartbeat(), 0, 0.4, job.aborted.set)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        if writes:
            (tmp_path / "file").write_bytes(bytes(2 * COUNTED_BYTES))
    assert job.aborted.is_set() != writes
    assert job.wait()
    dog.close()


def test_progress_keeps_it_silent(capfd):
    job, heartbeat = Job(), Heartbeat()
    dog = Watchdog(heartbeat, 0, 1.0, job.aborted.set)
    started = time.monotonic()
    while time.monotonic() < started + 2.5:
        heartbeat.beat(0)
        time.sleep(0.01)
    dog.close()
    assert not job.aborted.is_set()
    assert capfd.readouterr().err == ""


def test_a_silent_neighbour_is_named(tmp_path, capfd):
    """Rank 1's thread never publishes again, as in a process that was stopped."""
    job, heartbeat = Job(), Heartbeat()
    dogs = [Watchdog(heartbeat, rank, 0.5, job.aborted.set) for rank in (0, 1)]
    for dog in dogs:
        dog.share(tmp_path, 2)
    dogs[1].ended.set()
    waiting = threading.Thread(target=job.wait)
    waiting.start()
    while waiting.is_alive():
        heartbeat.beat(0)
        time.sleep(0.01)
    assert job.aborted.is_set()
    for dog in dogs:
        dog.close()
    assert "rank 1 on" in capfd.readouterr().err


def test_one_rank_reports_and_none_of_it_stays(tmp_path):
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    dogs = [Watchdog(Heartbeat(), rank, 100, pytest.fail) for rank in range(3)]
    for dog in dogs:
        dog.share(folder, 3)
    found = read_heartbeat(folder, 2)
    assert found is not None
    assert (found.rank, found.phase) == (2, "start")
    for dog in dogs:
        dog.close()
    assert not folder.exists()
    folder.mkdir()
    dog = Watchdog(Heartbeat(), 0, 100, pytest.fail)
    dog.share(folder, 3)
    assert [dog.first_to_report() for _ in range(3)] == [True, False, False]
    dog.close()


def test_files_are_read_and_written_less_often_than_the_rank_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(watchdog, "LONGEST_SILENCE_S", 0.5)
    looks: list[str] = []
    dog = Watchdog(Heartbeat(), 0, 1800, pytest.fail)
    monkeypatch.setattr(dog, "leave_if_lost", lambda: looks.append("itself"))
    monkeypatch.setattr(watchdog, "read_heartbeat", lambda *_: looks.append("next one"))
    dog.share(tmp_path, 2)
    time.sleep(1.2)
    dog.close()
    assert 1 <= looks.count("next one") <= 3
    assert looks.count("itself") > 2 * looks.count("next one")


def test_a_folder_that_is_not_shared_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SHARE_LIMIT_S", 0.3)
    dog = Watchdog(Heartbeat(), 0, 100, pytest.fail)
    with pytest.raises(UserError, match="all nodes share"):
        dog.share(tmp_path / "elsewhere", 2)
    dog.close()


def test_a_folder_may_be_waited_for_longer_than_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SHARE_LIMIT_S", 3.0)
    ended = []
    dog = Watchdog(Heartbeat(), 0, 1.0, lambda: ended.append(1))
    with pytest.raises(UserError, match="all nodes share"):
        dog.share(tmp_path / "elsewhere", 2)
    dog.close()
    assert not ended


BLIND = """
import os, sys
from pathlib import Path
from prunex_mpi import train
from prunex_mpi.run import watchdog

watchdog.SHARE_LIMIT_S = 20.0
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    watchdog._path = lambda folder, rank: Path("/nowhere/there")
sys.exit(train.main())
"""


@pytest.mark.jobs
@pytest.mark.long
def test_all_wait_for_the_rank_that_does_not_see_the_folder(tmp_path):
    (tmp_path / "blind.py").write_text(BLIND)
    words = "blind.py --method dense --model resnet8-w4 --dataset synthetic --image-size 8"
    words += " --train-samples 32 --test-samples 8 --batch-size 4 --timeout 10 --run-dir run"
    ended = run_job(2, words.split(), tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "must be on a file system that all nodes share" in ended.stderr
    assert "no progress" not in ended.stderr


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rank": 0}', b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_none(content, tmp_path):
    (tmp_path / "rank-00000").write_bytes(content)
    assert read_heartbeat(tmp_path, 0) is None
    assert read_heartbeat(tmp_path, 1) is None


@pytest.mark.parametrize(
    ("module", "calls", "computing"),
    [
        ("run/job.py", False, False),
        ("comm/collectives.py", False, False),
        ("train.py", False, False),
        ("../mine/comm/collectives.py", False, True),
        ("../torch/nn/functional.py", False, True),
        ("core/loop.py", True, True),
        # A thread that exchanges behind the steps is waited for by a function of Python's.
        ("comm/async_exchange.py", True, False),
    ],
)
def test_only_what_is_outside_the_package_computes(module, calls, computing):
    """Whoever is in a function of the package waits, whatever folder of it that is in."""
    dog = Watchdog(Heartbeat(), 0, 100, pytest.fail)
    path = (Path(prunex_mpi.__file__).parent / module).resolve()
    # In C, as MPI waits: the innermost frame of Python is the one that called.
    inside, go_on = threading.Lock(), threading.Lock()
    text = "def allreduce_():\n    inside.release()\n    wait()\n"
    wait = (lambda: go_on.acquire()) if calls else go_on.acquire
    names = {"inside": inside, "wait": wait}
    exec(compile(text, path, "exec"), names)
    with inside, go_on:
        thread = threading.Thread(target=names["allreduce_"])
        thread.start()
        inside.acquire()
        dog.main_thread = thread.ident
        frame, found = dog._frame()
    thread.join()
    dog.close()
    assert (frame.split()[1], found) == (
        "<lambda>" if calls and computing else "allreduce_",
        computing,
    )
