"""The launcher that starts a job again on the hosts that are left, with jobs that are a script."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prunex_mpi.base.errors import UserError
from prunex_mpi.run import relaunch
from prunex_mpi.run.relaunch import lost_to_slurm, parse, read_hosts, slurm_hosts

HOSTS = ("a", "b", "c")
# What a job does, by words: `it 3` makes outer iteration 3 and its checkpoint, `bare 3` without the
# checkpoint, `down b` takes host b away, `exit 1` ends, `usr1` waits for the signal and leaves with
# a checkpoint, `end 0` completes the run, `hang 0` does and stays.
JOB = """
import json, signal, sys, time
from pathlib import Path
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
run, up = Path("run"), Path("up")
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
with open("starts", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
plan = Path("plan").read_text().splitlines()
Path("plan").write_text("\\n".join(plan[1:]))
def iterate(k, checkpoint):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": k, "seconds": {"total": 2.0}}) + "\\n")
    if checkpoint:
        (run / f"checkpoints/{k:06}-iteration-{k + 1}-step-0").mkdir()
def leave(status, code, **more):
    (run / "summary.json").write_text(json.dumps({"status": status, **more}))
    sys.exit(code)
for what, value in (word.split(" ") for word in plan[0].split(", ")):
    if what in ("it", "bare"):
        iterate(int(value), what == "it")
    elif what == "down":
        (up / value).unlink()
    elif what == "lost":
        line = json.dumps({"lost_ranks": [int(value)], "ranks": 5})
        (run / "nodes.jsonl").write_text(line + "\\n")
    elif what == "up":
        (up / value).touch()
    elif what == "exit":
        sys.exit(int(value))
    elif what == "sleep":
        time.sleep(float(value))
    elif what == "told":
        leave("preempted", 75, reason=value)
    elif what == "unsaid":
        leave("preempted", 1, reason=value)
    elif what == "ended":
        (run / "heartbeats").mkdir(exist_ok=True)
        (run / "heartbeats/ended").touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    elif what == "usr1":
        k = int(value)
        while not told:
            time.sleep(0.1)
            iterate(k, False)
            k += 1
        iterate(k, True)
        leave("preempted", 75, reason="SIGUSR1")
    elif what == "asked":
        while not told:
            time.sleep(0.02)
        leave("preempted", 75, reason=value)
    elif what == "end":
        leave("completed", int(value))
    elif what == "hang":
        (run / "summary.json").write_text(json.dumps({"status": "completed"}))
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relaunch, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(relaunch, "LOOK_S", 0.02)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "up").mkdir()
    for name in HOSTS:
        (tmp_path / "up" / name).touch()


def go(*plan: str, flags: str = "") -> int:
    """Let jobs do what the lines of `plan` say, one after the other; return the last code."""
    Path("plan").write_text("\n".join(plan))
    words = ["--hosts", "a:2,b:2,c:2", "--probe", "test -e up/{host}", *flags.split(), "--"]
    job = [sys.executable, "job.py", "{hosts}", "{names}", "{nodes}", "{ranks}", "--run-dir", "run"]
    return relaunch.keep_going(parse([*words, *job]), [])


def starts() -> list[list[str]]:
    return [json.loads(line) for line in Path("starts").read_text().splitlines()]


def notes() -> list[dict]:
    return [json.loads(line) for line in Path("run/nodes.jsonl").read_text().splitlines()]


def test_a_job_goes_on_where_hosts_answer(capfd):
    code = go("it 1, it 2, bare 3, down b, exit 137", "bare 3, it 4, sleep 0.2, end 0")
    assert code == 0
    whole = ["a:2,b:2,c:2", "a,b,c", "3", "6", "--run-dir", "run"]
    rest = ["a:2,c:2", "a,c", "2", "4", "--run-dir", "run", "--resume"]
    assert starts() == [whole, rest]
    (line,) = notes()
    assert (line["left"], line["joined"], line["code"]) == (["b"], [], 137)
    assert (line["iteration"], line["lost_iterations"]) == (3, 1)
    assert (line["hosts"], line["ranks"]) == (2, 4)
    assert 2 <= line["lost_seconds"] < 10 and 0 <= line["seconds"] < 20
    assert "starting on 2 of 3 hosts: a, c" in capfd.readouterr().err


def test_hosts_that_answer_again_are_taken_in_after_a_checkpoint(capfd):
    again = "it 50, it 51, it 52, sleep 0.2, end 0"
    assert go("down c, it 1, exit 1", "sleep 0.3, up c, it 2, usr1 3", again) == 0
    assert [words[1] for words in starts()] == ["a,b,c", "a,b", "a,b,c"]
    # The checkpoint with which the job leaves has all that it has done.
    assert (notes()[1]["lost_iterations"], notes()[1]["iteration"] > 3) == (0, True)
    assert notes()[1]["lost_seconds"] < 1
    assert [(n["left"], n["joined"], n["code"]) for n in notes()] == [
        (["c"], [], 1),
        ([], ["c"], 75),
    ]
    assert "c can be had again: the job leaves with a checkpoint" in capfd.readouterr().err


def test_a_job_that_does_not_train_yet_does_not_leave_for_others(capfd):
    lines = "down c, it 1, exit 1", "up c, sleep 1, exit 1", "it 50, end 0"
    assert go(*lines) == 0
    assert [words[1] for words in starts()] == ["a,b,c", "a,b", "a,b,c"]
    assert "can be had again" not in capfd.readouterr().err


def test_no_job_outlives_a_launcher_that_fails(monkeypatch):
    start, jobs = relaunch.start, []

    def noted(*given, **named):
        jobs.append(start(*given, **named))
        return jobs[-1]

    def full(*_) -> None:
        raise OSError("no room")

    monkeypatch.setattr(relaunch, "start", noted)
    monkeypatch.setattr(relaunch, "note", full)
    with pytest.raises(OSError, match="no room"):
        go("down c, it 1, exit 1", "it 2, sleep 60")
    assert len(jobs) == 2 and all(job.process.returncode is not None for job in jobs)


def test_the_number_of_a_job_that_has_ended_is_not_free_for_others():
    """A signal that comes late must not hit a process of somebody else."""
    job = subprocess.Popen(["true"])
    while not relaunch.has_ended(job):
        time.sleep(0.01)
    os.kill(job.pid, 0)
    assert job.wait() == 0 and relaunch.has_ended(job)


def test_a_second_launcher_is_refused():
    """The first one's job would take the loss of its records for its own end."""
    Path("run/heartbeats").mkdir(parents=True)
    (record := Path("run/heartbeats/rank-0")).touch()
    refused = pytest.raises(UserError, match=r"another prunex_mpi.elastic keeps run going")
    with relaunch.only_launcher(Path("run")), refused:
        go("it 1, exit 1", "end 0")
    assert record.exists() and not Path("starts").exists()
    assert go("end 0") == 0


def test_a_host_that_answers_and_can_not_run_is_left_out(capfd):
    lines = "it 1, down b, exit 1", "it 2, up b, usr1 3", "exit 1", "it 50, exit 1"
    assert go(*lines, "it 60, sleep 0.5, exit 1", "end 0") == 0
    whole, rest = "a,b,c", "a,c"
    assert [words[1] for words in starts()] == [whole, rest, whole, rest, rest, rest]
    assert "the job did not train with b: left out for 600 s" in capfd.readouterr().err


def test_a_job_that_is_told_to_leave_meanwhile_is_not_started_again():
    assert go("down c, it 1, exit 1", "up c, it 2, asked SIGTERM", "end 0") == 75
    assert len(starts()) == 2


@pytest.mark.parametrize(
    ("plan", "code", "count", "why"),
    [
        (["exit 2"], 2, 1, "it would end so again"),
        (["it 1, exit 3"], 3, 1, "it would end so again"),
        (["it 1, exit 2"], 2, 1, "it would end so again"),
        (["it 1, exit 1", "exit 2"], 75, 2, "it would end so again"),
        (["exit 9"] * 2 + ["it 1, exit 9"] + ["exit 9"] * 4, 9, 6, "no new checkpoint"),
        # Nothing is a success whose run is not complete.
        (["exit 0"] * 3, 1, 3, "no new checkpoint"),
        (["it 1, told SIGTERM"], 75, 1, "it was told to leave (SIGTERM)"),
        # MPI has not come to its end.
        (["it 1, unsaid SIGTERM"], 75, 1, "it was told to leave (SIGTERM)"),
        (["it 1, told node_1_lost:_--min-nodes", "end 0"], 0, 2, ""),
    ],
)
def test_codes_and_what_follows(plan, code, count, why, capfd):
    assert go(*plan) == code
    assert len(starts()) == count
    assert why in capfd.readouterr().err


def test_a_node_that_was_lost_in_place_comes_back_later():
    lines = "it 1, lost 1, usr1 2", "it 50, sleep 0.2, end 0"
    assert go(*lines, flags="--regrow-after 0.5") == 0
    assert [words[1] for words in starts()] == ["a,b,c", "a,b,c"]
    lost, again = notes()
    assert lost["lost_ranks"] == [1] and (again["code"], again["ranks"]) == (75, 6)


def test_it_waits_for_enough_hosts(capfd):
    def answer_again() -> None:
        while Path("up/b").exists():
            time.sleep(0.05)
        time.sleep(0.8)
        Path("up/b").touch()

    threading.Thread(target=answer_again).start()
    code = go("down a, down b, it 1, exit 1", "end 0", flags="--min-hosts 2")
    assert code == 0
    assert [words[1] for words in starts()] == ["a,b,c", "b,c"]
    assert "1 of 3 hosts answer: waiting for more" in capfd.readouterr().err


def test_a_launcher_that_outlives_its_ranks_is_killed(monkeypatch):
    monkeypatch.setattr(relaunch, "ABORT_S", 0.2)
    monkeypatch.setattr(relaunch, "KILL_S", 0.2)
    assert go("it 1, ended 1", "end 0") == 0


def test_a_job_that_does_not_end_after_its_run_is_ended(monkeypatch):
    monkeypatch.setattr(relaunch, "END_S", 0.2)
    assert go("it 1, hang 0") == 0
    assert len(starts()) == 1


def test_a_rank_that_holds_the_run_is_waited_for():
    hold = "import fcntl, time; f = open('run/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    Path("run").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", hold + "print(flush=True); time.sleep(1)"])
    began = time.monotonic()
    assert go("sleep 0.5, it 1, exit 1", "end 0") == 0
    assert time.monotonic() - began > 0.9
    assert holder.wait() == 0


@pytest.mark.parametrize(
    ("number", "early"),
    [
        *zip((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), 3 * [False], strict=True),
        (signal.SIGTERM, True),
    ],
)
def test_a_signal_goes_to_the_job_which_ends_with_a_checkpoint(number, early):
    """One that comes before the job has begun to listen ends it, and the code tells no failure."""
    Path("plan").write_text("usr1 1")
    words = [sys.executable, "-m", "prunex_mpi.elastic", "--hosts", "localhost", "--"]
    job = ["sh", "-c", "touch began; sleep 30"] if early else [sys.executable, "job.py"]
    command = [*job, "{hosts}", "--run-dir", "run"]
    launcher = subprocess.Popen([*words, *command], stderr=subprocess.PIPE, text=True)
    while not Path("began" if early else "run/metrics.jsonl").exists():
        time.sleep(0.05)
    launcher.send_signal(number)
    _, text = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert "not started again: this was asked for" in text
    assert early or len(starts()) == 1


def test_the_launcher_takes_signals_before_it_has_read_its_flags():
    words = [sys.executable, "-X", "importtime", "-m", "prunex_mpi.elastic", "--hosts", "localhost"]
    command = ["--", sys.executable, "job.py", "{hosts}", "--run-dir", "run"]
    launcher = subprocess.Popen([*words, *command], stderr=subprocess.PIPE, text=True)
    for line in launcher.stderr:
        if "prunex_mpi.base.signals" in line:
            break
    time.sleep(0.01)
    launcher.send_signal(signal.SIGUSR1)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 75 and not Path("starts").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts a", "no command"),
        ("--hosts a -- mpirun train --run-dir r", "{hosts} or {names}"),
        ("--hosts a -- mpirun {hosts}", "--run-dir"),
        ("--hosts a:0 -- mpirun {hosts} --run-dir r", "'a:0' is no host"),
        ("--hosts a;b -- mpirun {hosts} --run-dir r", "is no host"),
        ("--hosts a --min-hosts 2 -- mpirun {hosts} --run-dir r", "--min-hosts must be"),
        ("--hosts a --probe '{host} -- mpirun {hosts} --run-dir r", "No closing quotation"),
        ("--hosts a --probe ping -- mpirun {hosts} --run-dir r", "--probe must say"),
        ("--hosts a -- mpirun {hosts} --run-dir r --rack-of=2", "--rack-of 2: once a host is lost"),
        ("-- mpirun {hosts} --run-dir r", "which hosts?"),
    ],
)
def test_what_is_refused(words, message, monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=re.escape(message)):
        parse(words.split())


def test_hosts_are_read():
    assert read_hosts("n-1.x:4, b") == {"n-1.x": 4, "b": 1}
    with pytest.raises(UserError, match="--hosts names a twice"):
        read_hosts("a:2,b:2,a:2")


# What `scontrol` says of a job that had the hosts n1 to n3.
SCONTROL = """#!/bin/sh
case "$*" in
    "show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n' ;;
    "show hostnames n3") echo n3 ;;
    "--oneliner show job 5_1") echo 'JobId=7 ReqNodeList=n[1-3] NodeList=n3 NumNodes=1' ;;
    "--oneliner show job 8") echo 'JobId=8 NodeList=(null) NumNodes=1' ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_slurm_tells_hosts(scontrol):
    found = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    assert slurm_hosts(found) == {"n1": 4, "n2": 4, "n3": 3}
    assert shutil.which("scontrol") == str(scontrol)
    with pytest.raises(UserError, match="give --hosts"):
        slurm_hosts({**found, "SLURM_TASKS_PER_NODE": "4"})
    with pytest.raises(UserError, match=r"`scontrol show hostnames n9` failed .*; give --hosts"):
        slurm_hosts({**found, "SLURM_JOB_NODELIST": "n9"})


def test_slurm_tells_which_hosts_it_has_taken(scontrol):
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7"}
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert lost_to_slurm({**job, **task}) == {"n1", "n2"}
    # Where it does not tell none is.
    assert [lost_to_slurm(x) for x in ({}, job, {**job, "SLURM_JOB_ID": "8"})] == [set()] * 3


def test_too_few_hosts_that_slurm_has_left_are_not_waited_for(monkeypatch, capfd):
    monkeypatch.setattr(relaunch, "lost_to_slurm", lambda _: {"a", "b"})
    assert go("down a, down b, it 1, exit 1", flags="--min-hosts 2") == 75
    assert len(starts()) == 1
    assert "Slurm has taken a, b away: too few hosts are left" in capfd.readouterr().err
