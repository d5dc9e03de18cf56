"""Start a job again on the hosts that answer, until its run is complete.

The job itself ends when a host is lost: MPI or its launcher notices, or a rank's watchdog does.
What is left for here: wait for it, look which hosts answer, and start it on those with --resume.
When others answer again the job is asked to leave with a checkpoint, and started on all. What a run
has reached is read from its files.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import FAILURE, PREEMPTED, UNREADABLE, USAGE, UserError, quote
from prunex_mpi.base.files import DIVERGED, METRICS, NODES, no_links
from prunex_mpi.config.cli import Parser, check_range, program_parser
from prunex_mpi.run.directory import (
    is_complete,
    is_held,
    newest_checkpoint,
    records,
    size_of,
    summary,
    what_is_lost,
)
from prunex_mpi.run.watchdog import READING_S

NAME = "prunex_mpi.elastic"
RESUME = "--resume"
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 {host} true"
# How often to look at the job, and at hosts that do not answer.
LOOK_S, PROBE_EVERY_S = 0.1, 5.0
# From when the ranks have left the job, or have said that they abort it, until its launcher has to
# be gone: Open MPI's waits for ever for a host that is cut off. The rank that reports reads the
# record of each other one meanwhile.
END_S, ABORT_S = 15.0, 6.0
# Between SIGTERM and SIGKILL.
KILL_S = 5.0
# For a host that answers, and with which the job has not trained.
LEFT_OUT_S = 600.0
HOST = re.compile(r"([\w.-]+)(?::(\d{1,6}))?")
# How Slurm writes tasks per node: 4(x2),3.
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# For a host to answer.
PROBE_LIMIT_S = 15.0
EPILOG = """In COMMAND, which ends with the flags of the training, {hosts} stands for the hosts that
answer as mpirun's --host and mpiexec's -hosts take them (a:4,b:4), {names} for their names alone
(a,b), {nodes} and {ranks} for their numbers."""


@dataclass
class Job:
    """A job on `hosts` since `began` (Unix time), and what is known of it.

    `trained` says that the run's records have grown beyond `size`, `regrows` that it leaves for
    hosts that are back. `code` is its exit code.
    """

    process: subprocess.Popen
    hosts: Sequence[str]
    began: float
    size: int
    trained: bool = False
    regrows: bool = False
    code: int = 0


@dataclass
class Change:
    """What the end of a job cost, and on which hosts the run went on before."""

    hosts: Sequence[str]
    code: int
    iteration: int
    lost_iterations: int
    lost_seconds: float
    at: float


def build_parser() -> Parser:
    """Return the parser of the launcher's own flags."""
    parser = program_parser(
        "elastic",
        "Start a job on the hosts that answer, and again on those that are left when one is lost.",
        EPILOG,
        usage="python -m prunex_mpi.elastic [flags] -- COMMAND",
    )
    add = parser.add_argument
    add("--hosts", default="", metavar="A:R,B:R", help="hosts, R ranks on each [those of Slurm]")
    add("--min-hosts", type=int, default=1, metavar="M", help="wait until so many answer [1]")
    add("--probe", default=SSH, metavar="TEXT", help=f"succeeds where {{host}} answers [{SSH}]")
    add(
        "--regrow-after",
        type=float,
        default=60.0,
        metavar="X",
        help="seconds from a loss with --on-node-loss continue until all go on again [60]",
    )
    add("--tries", type=int, default=3, metavar="N", help="starts without a new checkpoint [3]")
    return parser


def parse(argv: Sequence[str]) -> Namespace:
    """Return what `argv` asks for; raise UserError with one line that names the culprit.

    `hosts` are the ranks of each host, `command` the words to start, `run` the run's folder.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given, command = build_parser().parse_all(words[:end]), words[end + 1 :]
    if not command:
        raise UserError("no command: give it after --, as in -- mpirun --host {hosts} ...")
    if not any(name in word for word in command for name in ("{hosts}", "{names}")):
        raise UserError("the command must say where the hosts go: {hosts} or {names}; see --help")
    if "{host}" not in given.probe:
        raise UserError("--probe must say where the host's name goes: {host}")
    try:
        shlex.split(given.probe)
    except ValueError as error:
        raise UserError(f"--probe {quote(given.probe)}: {error}") from None
    given.hosts = read_hosts(given.hosts) if given.hosts else slurm_hosts(os.environ)
    check_range(given, "min_hosts", 1, len(given.hosts))
    check_range(given, "tries", 1, 99)
    if not given.regrow_after >= 0:
        raise UserError(f"--regrow-after must be at least 0, not {given.regrow_after}")
    if (racks := last_value(command, "--rack-of")).isdecimal():
        text = "once a host is lost, consecutive ones are not those of a rack"
        raise UserError(f"--rack-of {racks}: {text}; give a pattern of host names")
    run = last_value(command, "--run-dir")
    if not run:
        raise UserError("give the training a --run-dir: its checkpoints are there")
    given.command, given.run = command, Path(run)
    return given


def last_value(words: Sequence[str], flag: str) -> str:
    """Return what `flag` was given last, as `--flag X` or `--flag=X`; "" where it is not given."""
    found = ""
    for word, after in pairwise([*words, ""]):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found


def say(text: str) -> None:
    """Tell the user."""
    print(f"{time.strftime('%H:%M:%S')} {NAME}: {text}", file=sys.stderr, flush=True)


@contextmanager
def only_launcher(run: Path) -> Iterator[None]:
    """Hold a run among launchers for the time of the block; raise UserError where one has it.

    The files by which a launcher knows its job are of one at a time.
    """
    with ExitStack() as exits:
        try:
            run.mkdir(parents=True, exist_ok=True)
            file = exits.enter_context(open(run / "launcher-lock", "ab", opener=no_links))
        except OSError as error:
            raise UserError(f"--run-dir {run}: {error.strerror}; choose another") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another {NAME} keeps {run} going; end that first, or choose another --run-dir"
            raise UserError(text) from None
        except OSError:
            say(f"there are no locks on the disk of {run}: start no second launcher on it")
        yield


def keep_going(options: Namespace, asked: Sequence[int]) -> int:
    """Start the job again and again, until signals have `asked` to end; return the exit code."""
    run, failures = options.run, 0
    # Where a job has trained; and until when those are left out with which one has not.
    worked: Sequence[str] = ()
    left_out: dict[str, float] = {}
    change: Change | None = None
    # No job outlives its launcher.
    with only_launcher(run), ExitStack() as exits:
        while True:
            if change is not None:
                wait_until_free(run, asked)
            hosts = wait_for_hosts(options, asked, left_out)
            if asked or not hosts:
                return PREEMPTED
            said_ended(run).unlink(missing_ok=True)
            job = start(options, hosts, change is not None)
            exits.callback(end_job, job.process)
            say(f"starting on {len(hosts)} of {len(options.hosts)} hosts: {', '.join(hosts)}")
            before = newest_checkpoint(run)
            attend(job, options, asked, change, left_out)
            if job.trained:
                change = None
            if job.code == 0 and is_complete(run):
                return 0
            reason = why_no_more(job, run, asked)
            if newest_checkpoint(run) > before:
                failures = 0
            elif not job.regrows:
                failures += 1
            if not reason and failures >= options.tries:
                reason = f"{failures} starts in a row brought no new checkpoint"
            if reason:
                say(f"the job ended with code {job.code}, and is not started again: {reason}")
                # What refuses a later job, the time or the hosts that are left, holds for this
                # allocation alone; and one may be told to leave before it can be.
                late = worked and not job.trained and job.code == USAGE
                early = asked and job.code == 128 + signal.SIGUSR1
                return PREEMPTED if late or early else job.code or FAILURE
            if job.trained:
                worked = hosts
            elif new := [name for name in hosts if worked and name not in worked]:
                say(f"the job did not train with {', '.join(new)}: left out for {LEFT_OUT_S:.0f} s")
                left_out |= dict.fromkeys(new, time.monotonic() + LEFT_OUT_S)
            at = time.time()
            lost, seconds = what_is_lost(run, at)
            if change is None:
                change = Change(hosts, job.code, newest_checkpoint(run)[0], lost, seconds, at)
            say(f"the job ended with code {job.code}; {lost} outer iterations are done again")


def sure(hosts: Collection[str], left_out: Mapping[str, float]) -> list[str]:
    """Return the `hosts` that are not `left_out` any more."""
    now = time.monotonic()
    return [name for name in hosts if left_out.get(name, now) <= now]


def why_no_more(job: Job, run: Path, asked: Sequence[int]) -> str:
    """Return why not to start a job again that has ended, "" to do so."""
    if asked:
        return "this was asked for"
    if job.code in (USAGE, UNREADABLE):
        return "it would end so again"
    if (run / DIVERGED).exists():
        return "it diverged"
    # A loss may leave too few nodes; all else that has a job leave is meant for the whole.
    reason = str(summary(run).get("reason", ""))
    if job.code == PREEMPTED and not job.regrows and "lost" not in reason:
        return f"it was told to leave ({reason})"
    return ""


# --------------------------------------------------------------------------------------------------
# A job
# --------------------------------------------------------------------------------------------------


def start(options: Namespace, hosts: Sequence[str], resumes: bool) -> Job:
    """Start the job on `hosts` in a process group of its own; one that `resumes` is told so."""
    ranks = [options.hosts[name] for name in hosts]
    values = {
        "{hosts}": ",".join(f"{name}:{n}" for name, n in zip(hosts, ranks, strict=True)),
        "{names}": ",".join(hosts),
        "{nodes}": str(len(hosts)),
        "{ranks}": str(sum(ranks)),
    }
    words = list(options.command)
    if resumes and RESUME not in words:
        words.append(RESUME)
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    size, began = size_of(options.run / METRICS), time.time()
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise UserError(f"{quote(words[0])} can't be started: {error.strerror}") from None
    return Job(process, hosts, began, size)


def has_ended(job: subprocess.Popen) -> bool:
    """Return whether a job has ended; its number is not free for others before it is waited for."""
    if job.returncode is not None:
        return True
    return os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def said_ended(run: Path) -> Path:
    """Return the file by which the first rank of a job to do so says that it ends it."""
    return run / "heartbeats" / "ended"


def attend(
    job: Job,
    options: Namespace,
    asked: Sequence[int],
    change: Change | None,
    left_out: Mapping[str, float],
) -> None:
    """Wait for the end of a job; have it leave once hosts are back that are not `left_out`.

    Once it has trained, the `change` before it is noted.
    """
    run, process, told = options.run, job.process, 0
    missing = [name for name in options.hosts if name not in job.hosts]
    abort_s = ABORT_S + READING_S * sum(options.hosts[name] for name in job.hosts)
    probes: dict[str, subprocess.Popen] = {}
    back: list[str] = []
    ended_at, probed_at = 0.0, time.monotonic()
    lost_at, told_bytes = 0.0, size_of(run / NODES)
    while True:
        time.sleep(LOOK_S)
        over = has_ended(process)
        now, before, job.size = time.monotonic(), job.size, size_of(run / METRICS)
        if job.size > before and not job.trained:
            if change is not None:
                note(options, job.hosts, change)
                told_bytes = size_of(run / NODES)
            job.trained = True
        if over:
            break
        if not lost_at and size_of(run / NODES) > told_bytes:
            # The job has lost a node and goes on without it.
            lost_at = now
        if lost_at and not back and now - lost_at > options.regrow_after:
            back = ["a lost node"]
        if len(asked) > told:
            # Open MPI's mpirun would end its ranks at a SIGTERM.
            end_group(process) if told else os.kill(process.pid, signal.SIGUSR1)
            told = len(asked)
        elif back and job.trained and not (job.regrows or told):
            say(f"{', '.join(back)} can be had again: the job leaves with a checkpoint")
            os.kill(process.pid, signal.SIGUSR1)
            job.regrows = True
        elif missing and not back and not probes and now - probed_at > PROBE_EVERY_S:
            probes, probed_at = start_probes(options.probe, sure(missing, left_out)), now
        elif probes and probes_are_over(probes, probed_at):
            back, probes, probed_at = close_probes(probes), {}, now
        aborted = said_ended(run).exists()
        ended_at = (ended_at or now) if aborted or is_complete(run, job.began) else 0.0
        if ended_at and now - ended_at > (abort_s if aborted else END_S):
            say("the ranks have ended the job; its launcher is ended too")
            end_group(process)
    close_probes(probes)
    # Before its number is free for others.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    left = summary(run, job.began)
    if is_complete(run, job.began):
        # What ranks and launcher do after that is nothing to the run: MPI may fail to end.
        code = 0
    elif left.get("status") == "preempted":
        code = PREEMPTED
    job.code = code if code >= 0 else 128 - code
    # Who was told to leave by others at the same time is not started again.
    job.regrows = job.regrows and left.get("reason") == signal.SIGUSR1.name


def note(options: Namespace, hosts: Sequence[str], change: Change) -> None:
    """Note in the run's files that it goes on, on which hosts, and what that has cost."""
    now, done = time.time(), sum(seconds for _, seconds in records(options.run)[-1:])
    line = {
        "time": now,
        "iteration": change.iteration,
        # Until it trains again.
        "seconds": max(now - change.at - done, 0.0),
        "left": [name for name in change.hosts if name not in hosts],
        "joined": [name for name in hosts if name not in change.hosts],
        "lost_iterations": change.lost_iterations,
        "lost_seconds": change.lost_seconds,
        "code": change.code,
        "hosts": len(hosts),
        "ranks": sum(options.hosts[name] for name in hosts),
    }
    with (
        suppress(OSError),
        open(options.run / NODES, "a", encoding="utf-8", opener=no_links) as file,
    ):
        file.write(json.dumps(line) + "\n")


def end_job(job: subprocess.Popen) -> None:
    """End a job that has not been waited for: the number of one that was may be another's."""
    if job.returncode is None:
        end_group(job)
        job.wait()


def end_group(job: subprocess.Popen) -> None:
    """End the launcher of a job and all that it has started on this host."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
        end = time.monotonic() + KILL_S
        while time.monotonic() < end:
            if has_ended(job):
                return
            time.sleep(LOOK_S)
        os.killpg(job.pid, signal.SIGKILL)


def wait_until_free(run: Path, asked: Sequence[int]) -> None:
    """Have ranks of the last job that outlive their launcher end, as the watchdog of a rank whose
    record is gone does; wait until none holds the run.
    """
    for record in (run / "heartbeats").glob("rank-*"):
        record.unlink(missing_ok=True)
    told = False
    while is_held(run) and not asked:
        if not told:
            say(f"{run} is still held by a rank of the last job: waiting until it has ended")
        told = True
        time.sleep(LOOK_S)


# --------------------------------------------------------------------------------------------------
# Hosts
# --------------------------------------------------------------------------------------------------


def wait_for_hosts(
    options: Namespace, asked: Sequence[int], left_out: Mapping[str, float]
) -> list[str]:
    """Return the hosts that answer, as soon as there are enough of them; none at the end.

    Those that are `left_out` are taken only where it needs them.
    """
    told = False
    while not asked:
        began = time.monotonic()
        probes = start_probes(options.probe, options.hosts)
        while not probes_are_over(probes, began) and not asked:
            time.sleep(LOOK_S)
        found = close_probes(probes)
        there = [name for name in options.hosts if name in found or is_here(name)]
        for some in (sure(there, left_out), there):
            if len(some) >= options.min_hosts:
                return some
        lost = lost_to_slurm(os.environ)
        if sum(name not in lost for name in options.hosts) < options.min_hosts:
            say(f"Slurm has taken {', '.join(sorted(lost))} away: too few hosts are left")
            return []
        if not told:
            say(f"{len(there)} of {len(options.hosts)} hosts answer: waiting for more")
        told, end = True, time.monotonic() + PROBE_EVERY_S
        while time.monotonic() < end and not asked:
            time.sleep(LOOK_S)
    return []


def read_hosts(text: str) -> dict[str, int]:
    """Return the ranks of each host of a list such as a:4,b:4."""
    found = {}
    for word in text.split(","):
        match = HOST.fullmatch(word.strip())
        if match is None or not int(match[2] or 1):
            raise UserError(f"--hosts: {quote(word)} is no host such as node1 or node1:4")
        if match[1] in found:
            raise UserError(f"--hosts names {match[1]} twice: give all its ranks at once")
        found[match[1]] = int(match[2] or 1)
    return found


def slurm_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the ranks of each host of the Slurm job that this is part of."""
    nodes, tasks = (environment.get(f"SLURM_{x}", "") for x in ("JOB_NODELIST", "TASKS_PER_NODE"))
    if not nodes or not tasks:
        raise UserError("which hosts? give --hosts A:RANKS,B:RANKS, or start it in a Slurm job")
    try:
        names = _scontrol("show", "hostnames", nodes).split()
    except (OSError, subprocess.CalledProcessError) as error:
        text = f"`scontrol show hostnames {nodes}` failed ({error}); give --hosts"
        raise UserError(text) from None
    counts = [int(n) for n, times in TASKS.findall(tasks) for _ in range(int(times or 1))]
    if len(names) != len(counts):
        raise UserError("this step has a part of its Slurm job's hosts; give --hosts A:RANKS,...")
    return dict(zip(names, counts, strict=True))


def lost_to_slurm(environment: Mapping[str, str]) -> set[str]:
    """Return the hosts that Slurm has taken out of the job that this is part of, for good."""
    before, job, array, task = (
        environment.get(f"SLURM_{x}", "")
        for x in ("JOB_NODELIST", "JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID")
    )
    if not before or not job:
        return set()
    # Where Slurm does not tell, nothing is known to be lost.
    with suppress(OSError, subprocess.CalledProcessError):
        text = _scontrol("--oneliner", "show", "job", f"{array}_{task}" if array else job)
        if now := re.search(r"\sNodeList=([^\s(]+)", text):
            then, left = (_scontrol("show", "hostnames", x).split() for x in (before, now[1]))
            return {*then} - {*left}
    return set()


def _scontrol(*words: str) -> str:
    """Return what a command of Slurm says; raise OSError or CalledProcessError."""
    command = ["scontrol", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_here(name: str) -> bool:
    """Return whether a host is this one."""
    return name in ("localhost", socket.gethostname(), socket.gethostname().split(".")[0])


def start_probes(probe: str, names: Sequence[str] | Mapping[str, int]) -> dict[str, Any]:
    """Ask hosts for an answer, all at once."""
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    found = {}
    for name in names:
        if is_here(name):
            continue
        words = [word.replace("{host}", name) for word in shlex.split(probe)]
        try:
            found[name] = subprocess.Popen(words, start_new_session=True, **quiet)
        except OSError as error:
            raise UserError(f"--probe: {quote(words[0])}: {error.strerror}") from None
    return found


def probes_are_over(probes: Mapping[str, subprocess.Popen], began: float) -> bool:
    """Return whether all hosts have answered, or have had the time to."""
    late = time.monotonic() - began > PROBE_LIMIT_S
    return late or all(probe.poll() is not None for probe in probes.values())


def close_probes(probes: Mapping[str, subprocess.Popen]) -> list[str]:
    """Return who has answered; end the probes of the others."""
    found = [name for name, probe in probes.items() if probe.poll() == 0]
    for probe in probes.values():
        if probe.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
    return found
