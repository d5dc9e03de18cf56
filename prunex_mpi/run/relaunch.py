"""Start a job again on the hosts that answer, until its run is complete.

The job itself ends when a host is lost: MPI or its launcher notices, or a rank's watchdog does.
What is left for here: wait for it, look which hosts answer, and start it on those with --resume.
When others answer again the next job is started on all beside the one that runs, which leaves with
a checkpoint once that stands by. What a run has reached is read from its files.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prunex_mpi.base.errors import FAILURE, PREEMPTED, UNREADABLE, USAGE, UserError, quote
from prunex_mpi.base.files import (
    DIVERGED,
    GO,
    LEAVE,
    METRICS,
    NEXT,
    NODES,
    READY,
    no_links,
    read_text,
    touch,
    write_durably,
)
from prunex_mpi.base.signals import handling
from prunex_mpi.config.parser import Parser, check_range, last_value, program_parser
from prunex_mpi.run.directory import is_held
from prunex_mpi.run.hosts import (
    close_probes,
    is_here,
    lost_to_slurm,
    probes_are_over,
    read_hosts,
    slurm_hosts,
    start_probes,
)
from prunex_mpi.run.progress import (
    has_left,
    is_complete,
    made_room,
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
# For a job to stand by: then the one before leaves without it, as where it has failed. And how long
# before it is to go on it is started where its hosts are there.
STAND_BY_S, AHEAD_S = 300.0, 30.0
# For a host that answers, and with which the job has not trained.
LEFT_OUT_S = 600.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EPILOG = """In COMMAND, which ends with the flags of the training, {hosts} stands for the hosts that
answer as mpirun's --host and mpiexec's -hosts take them (a:4,b:4), {names} for their names alone
(a,b), {nodes} and {ranks} for their numbers."""


@dataclass(frozen=True)
class Options:
    """What to start and where: the ranks of each host, the words of the command and of a probe."""

    hosts: Mapping[str, int]
    min_hosts: int
    probe: str
    tries: int
    regrow_after: float
    command: tuple[str, ...]
    run: Path


@dataclass
class Asked:
    """How often this process was asked to end."""

    times: int = 0


@dataclass(frozen=True)
class Following:
    """A job that stands by to go on with the run on `hosts`."""

    job: subprocess.Popen
    hosts: Sequence[str]
    since: float

    def may_go_on(self, run: Path, due: float, between: bool) -> bool:
        """Return whether, at the time `due` or later, it stands by, or is not waited for.

        Without it little is lost only `between` two outer iterations of the job before.
        """
        now = time.monotonic()
        over = has_ended(self.job) or now - self.since > STAND_BY_S
        return now >= due and ((run / READY).exists() or (over and between))


@dataclass(frozen=True)
class End:
    """How a job has ended, and when: its code, whether it `regrows`, that is has left for hosts
    that are back, whether it has trained, what stands by, and the size of the run's records.
    """

    at: float
    code: int
    regrows: bool
    trained: bool
    following: Following | None
    size: int


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


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` asks for; raise UserError with one line that names the culprit."""
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
    hosts = read_hosts(given.hosts) if given.hosts else slurm_hosts(os.environ)
    check_range(given, "min_hosts", 1, len(hosts))
    check_range(given, "tries", 1, 99)
    if not given.regrow_after >= 0:
        raise UserError(f"--regrow-after must be at least 0, not {given.regrow_after}")
    if (racks := last_value(command, "--rack-of")).isdecimal():
        text = "once a host is lost, consecutive ones are not those of a rack"
        raise UserError(f"--rack-of {racks}: {text}; give a pattern of host names")
    numbers = given.tries, given.regrow_after
    run = run_dir_of(command)
    return Options(hosts, given.min_hosts, given.probe, *numbers, tuple(command), run)


def run_dir_of(command: Sequence[str]) -> Path:
    """Return the folder of the run that a command trains: the last one that is named."""
    found = last_value(command, "--run-dir")
    if not found:
        raise UserError("give the training a --run-dir: its checkpoints are there")
    return Path(found)


def say(text: str) -> None:
    """Tell the user."""
    print(f"{time.strftime('%H:%M:%S')} {NAME}: {text}", file=sys.stderr, flush=True)


@contextmanager
def asked_to_end() -> Iterator[Asked]:
    """Count the signals that ask for the end, for the time of the block."""
    asked = Asked()

    def count(*_: object) -> None:
        asked.times += 1

    with handling(SIGNALS, count):
        yield asked


def keep_going(options: Options) -> int:
    """Start the job as often as it takes; return the exit code of the last one."""
    run, failures = options.run, 0
    # Where a job has trained; and until when those are left out with which one has not.
    worked: Sequence[str] = ()
    left_out: dict[str, float] = {}
    change: Change | None = None
    following: Following | None = None
    # No job outlives its launcher.
    with asked_to_end() as asked, ExitStack() as exits:
        while True:
            if change is not None:
                wait_until_free(run, asked, following)
            if following is not None and not has_ended(following.job):
                job, hosts, following = following.job, following.hosts, None
                let_go(run)
                what = "taking over"
            else:
                end_following(run, following)
                now = time.monotonic()
                sure = [name for name in options.hosts if left_out.get(name, now) <= now]
                hosts = wait_for_hosts(options, asked, sure)
                if asked.times or not hosts:
                    return PREEMPTED
                for path in (said_ended(run), run / NEXT, run / READY):
                    path.unlink(missing_ok=True)
                job, size = start(options, hosts, change is not None), size_of(run / METRICS)
                exits.callback(end_job, job)
                what = "starting"
            say(f"{what} on {len(hosts)} of {len(options.hosts)} hosts: {', '.join(hosts)}")
            before = newest_checkpoint(run)
            end = attend(job, options, hosts, asked, exits, change, size, left_out)
            code, following, size = end.code, end.following, end.size
            if end.trained:
                change = None
            if code == 0 and is_complete(run):
                return 0
            reason = why_no_more(code, run, asked, end.regrows)
            if newest_checkpoint(run) > before:
                failures = 0
            elif not end.regrows:
                failures += 1
            if not reason and failures >= options.tries:
                reason = f"{failures} starts in a row brought no new checkpoint"
            if reason:
                say(f"the job ended with code {code}, and is not started again: {reason}")
                # What refuses a later job, the time or the hosts that are left, holds for this
                # allocation alone.
                late = worked and not end.trained and code == USAGE
                return PREEMPTED if late else code or FAILURE
            if end.trained:
                worked = hosts
            elif new := [name for name in hosts if worked and name not in worked]:
                say(f"the job did not train with {', '.join(new)}: left out for {LEFT_OUT_S:.0f} s")
                left_out |= dict.fromkeys(new, time.monotonic() + LEFT_OUT_S)
            lost, seconds = what_is_lost(run, end.at)
            if change is None:
                change = Change(hosts, code, newest_checkpoint(run)[0], lost, seconds, end.at)
            say(f"the job ended with code {code}; {lost} outer iterations are done again")


def why_no_more(code: int, run: Path, asked: Asked, regrows: bool) -> str:
    """Return why not to start the job again once it has ended with `code`, "" to do so."""
    if asked.times:
        return "this was asked for"
    if code in (USAGE, UNREADABLE):
        return "it would end so again"
    if (run / DIVERGED).exists():
        return "it diverged"
    # A loss may leave too few nodes; all else that has a job leave is meant for the whole.
    reason = str(summary(run).get("reason", ""))
    if code == PREEMPTED and not regrows and "lost" not in reason:
        return f"it was told to leave ({reason})"
    return ""


# --------------------------------------------------------------------------------------------------
# A job
# --------------------------------------------------------------------------------------------------


def start(options: Options, hosts: Sequence[str], resumes: bool) -> subprocess.Popen:
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
    try:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise UserError(f"{quote(words[0])} can't be started: {error.strerror}") from None


def start_following(options: Options, hosts: Sequence[str]) -> Following:
    """Start a job on `hosts` beside the one that holds the run, to stand by."""
    for name in (NEXT, READY):
        (options.run / name).unlink(missing_ok=True)
    touch(options.run / NEXT)
    return Following(start(options, hosts, resumes=True), hosts, time.monotonic())


def end_following(run: Path, following: Following | None) -> None:
    """End a job that stands by, if there is one."""
    if following is not None and following.job.returncode is None:
        end_job(following.job)
        for name in (NEXT, READY):
            (run / name).unlink(missing_ok=True)


def let_go(run: Path) -> None:
    """Let the job that stands by go on with the run, unless it has been told so already."""
    with suppress(FileNotFoundError):
        # It takes the file away, which a second word would bring back.
        if read_text(run / NEXT) != GO:
            write_durably(run / NEXT, GO)


def stay_in_touch(run: Path) -> None:
    """Tell a job that stands by that the launcher is there; a file that is gone stays so."""
    with suppress(OSError):
        os.utime(run / NEXT)


def has_ended(job: subprocess.Popen) -> bool:
    """Return whether a job has ended; its number is not free for others before it is waited for."""
    if job.returncode is not None:
        return True
    return os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def said_ended(run: Path) -> Path:
    """Return the file by which the first rank of a job to do so says that it ends it."""
    return run / "heartbeats" / "ended"


def attend(
    job: subprocess.Popen,
    options: Options,
    hosts: Sequence[str],
    asked: Asked,
    exits: ExitStack,
    change: Change | None,
    size: int,
    left_out: Mapping[str, float],
) -> End:
    """Wait for the end of a job on `hosts` and return it; `exits` end what it starts beside it.

    Once the job has trained, by records of the run beyond `size`, the `change` before it is noted.
    Those that are `left_out` are not asked whether they answer before their time.
    """
    run, told, regrows, trained, began = options.run, 0, False, False, time.time()
    following: Following | None = None
    left_at = 0.0
    missing = [name for name in options.hosts if name not in hosts]
    abort_s = ABORT_S + READING_S * sum(options.hosts[name] for name in hosts)
    probes: dict[str, subprocess.Popen] = {}
    back: list[str] = []
    ended_at, probed_at = 0.0, time.monotonic()
    lost_at, due, told_bytes = 0.0, 0.0, size_of(run / NODES)
    while True:
        time.sleep(LOOK_S)
        over = has_ended(job)
        if following is not None:
            stay_in_touch(run)
        now, before, found = time.monotonic(), size, size_of(run / METRICS)
        taken = following is not None and not (run / NEXT).exists()
        # What the files tell from then on is of the job that stood by.
        size = before if taken else found
        if size > before:
            if change is not None and not trained:
                note(options, hosts, change)
                told_bytes = size_of(run / NODES)
            trained = True
        if over:
            break
        if not lost_at and size_of(run / NODES) > told_bytes:
            # The job has lost a node and goes on without it.
            lost_at = now
        if lost_at and not back and now - lost_at > options.regrow_after - AHEAD_S:
            back, due = ["a lost node"], lost_at + options.regrow_after
        if asked.times > told:
            # Open MPI's mpirun would end its ranks at a SIGTERM.
            job.send_signal(signal.SIGUSR1) if not told else end_group(job)
            end_following(run, following)
            following, told = None, asked.times
        elif back and following is None and trained and not (regrows or told):
            say(f"{', '.join(back)} can be had again: starting the next job beside this one")
            all_there = [name for name in options.hosts if name in hosts or name in back]
            following = start_following(options, all_there)
            exits.callback(end_following, run, following)
        elif following and not regrows and following.may_go_on(run, due, size > before):
            say("the job leaves with a checkpoint")
            if (run / READY).exists():
                # At the end of its outer iteration: then no step is taken again.
                write_durably(run / NEXT, LEAVE)
            else:
                end_following(run, following)
                following = None
                job.send_signal(signal.SIGUSR1)
            regrows = True
        elif regrows and not left_at and has_left(run, began):
            left_at = time.time()
            if made_room(run):
                let_go(run)
        elif missing and not back and not probes and now - probed_at > PROBE_EVERY_S:
            sure = [name for name in missing if left_out.get(name, now) <= now]
            probes, probed_at = start_probes(options.probe, sure), now
        elif probes and probes_are_over(probes, probed_at):
            back, probes, probed_at = close_probes(probes), {}, now
        aborted = said_ended(run).exists()
        ended = taken or aborted or is_complete(run, began)
        ended_at = (ended_at or now) if ended else 0.0
        if ended_at and now - ended_at > (abort_s if aborted else END_S):
            say("the ranks have ended the job; its launcher is ended too")
            end_group(job)
    close_probes(probes)
    # Before its number is free for others.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    code = job.wait()
    if not taken and is_complete(run, began):
        # What ranks and launcher do after that is nothing to the run: MPI may fail to end.
        code = 0
    elif not taken and has_left(run, began) and summary(run).get("status") == "preempted":
        code = PREEMPTED
    code = code if code >= 0 else 128 - code
    at = left_at or time.time()
    # Who stands by is not to go on with a run that was told to leave at the same time.
    regrows = regrows and code == PREEMPTED and (following is None or taken or made_room(run))
    return End(at, code, regrows, trained, following, size)


def note(options: Options, hosts: Sequence[str], change: Change) -> None:
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


def wait_until_free(run: Path, asked: Asked, following: Following | None) -> None:
    """Have ranks of the last job that outlive their launcher end, as the watchdog of a rank whose
    record is gone does; wait until none holds the run, unless a job stands by that waits itself.
    """
    stands = following is not None and not has_ended(following.job)
    if stands and not (run / NEXT).exists():
        # It has the run already, and records of its own.
        return
    for record in (run / "heartbeats").glob("rank-*"):
        record.unlink(missing_ok=True)
    if stands:
        said_ended(run).unlink(missing_ok=True)
    told = False
    while not stands and is_held(run) and not asked.times:
        if not told:
            say(f"{run} is still held by a rank of the last job: waiting until it has ended")
        told = True
        time.sleep(LOOK_S)


# --------------------------------------------------------------------------------------------------
# Hosts
# --------------------------------------------------------------------------------------------------


def wait_for_hosts(options: Options, asked: Asked, sure: Collection[str]) -> list[str]:
    """Return the hosts that answer, as soon as there are enough of them; none at the end.

    Those that are not `sure` are taken only where it needs them.
    """
    told = False
    while not asked.times:
        began = time.monotonic()
        probes = start_probes(options.probe, options.hosts)
        while not probes_are_over(probes, began) and not asked.times:
            time.sleep(LOOK_S)
        found = close_probes(probes)
        there = [name for name in options.hosts if name in found or is_here(name)]
        for some in ([name for name in there if name in sure], there):
            if len(some) >= options.min_hosts:
                return some
        lost = lost_to_slurm(os.environ)
        if sum(name not in lost for name in options.hosts) < options.min_hosts:
            say(f"Slurm has taken {', '.join(sorted(lost))} away: too few hosts are left")
            return []
        if not told:
            say(f"{len(there)} of {len(options.hosts)} hosts answer: waiting for more")
        told, end = True, time.monotonic() + PROBE_EVERY_S
        while time.monotonic() < end and not asked.times:
            time.sleep(LOOK_S)
    return []
