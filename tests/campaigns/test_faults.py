"""Faults at every place of a job: nothing hangs, nothing is lost, no false success.

A chain is one run that takes several jobs: each goes on where the one before was broken, now and
then the newest checkpoint is damaged in between, and the last job, unbroken, must deliver what an
undisturbed run delivers, bit for bit. Each fault and each damage is one trial.

    pytest -m faults -s --fault-trials 100 --fault-seed 1

runs chains of seeds 1, 2, ... until there are 100 trials; `--fault-trials 1 --fault-seed 7` repeats
the chain of seed 7 alone.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faulty import FAULTS
from launch import environment, is_open_mpi, launcher, repeatable_metrics

pytestmark = [pytest.mark.faults, pytest.mark.jobs]

ITERATIONS = 8
LOCAL_STEPS = 4
# For jobs that must not wait long for what never comes, and for all others.
TIMEOUT_S, PATIENCE_S = 12, 120
STALLS = ("stop", "hang", "vanish")
# From the fault to the end of the job, beyond --timeout: reporting, aborting, leaving.
ALLOWANCE_S = 60
# For the start of the interpreters and all the rest, on a busy machine.
LAUNCH_LIMIT_S = 400
LONGEST_CHAIN = 7
HOST = re.escape(socket.gethostname())
COMPLETE = ("completed", "converged")
PREEMPTED = 75
IN_USE = 2

COMMON = (
    "--device cpu --dataset synthetic --train-samples 256 --test-samples 64 --batch-size 16 "
    f"--outer-iterations {ITERATIONS} --local-steps {LOCAL_STEPS}"
)

# Most exchanges go on behind two steps of the next outer iteration.
BEHIND = "--payload int4 --overlap-steps 2 --evaluate-every 4 --residuals off"


@dataclass(frozen=True)
class Case:
    """Ranks, virtual nodes and settings of a run."""

    name: str
    ranks: int
    flags: str


CASES = (
    Case("2+0", 2, "--ranks-per-node 2 --node-sync step --model odd_models:small"),
    Case("1+1", 2, "--ranks-per-node 1 --node-sync outer --mask-agreement or --model faulty:noisy"),
    Case("1+1 small", 2, "--ranks-per-node 1 --mask-agreement vote --model odd_models:small"),
    Case("2+1", 3, "--ranks-per-node 2 --node-sync step --momentum 0 --model faulty:noisy"),
    Case(
        "2+2",
        4,
        "--ranks-per-node 2 --node-sync outer --mask-agreement vote --after-freeze admm "
        "--model faulty:noisy",
    ),
    Case(
        "3+1",
        4,
        "--ranks-per-node 3 --node-sync step --mask-agreement or --bn recalibrate "
        "--model faulty:noisy",
    ),
    Case("1+1 behind", 2, f"--ranks-per-node 1 --node-sync step --model faulty:noisy {BEHIND}"),
    Case(
        "2+2 behind",
        4,
        "--ranks-per-node 2 --node-sync outer --mask-agreement or --after-freeze admm "
        f"--model faulty:noisy {BEHIND}",
    ),
)


@dataclass(frozen=True)
class Place:
    """A function at which a fault can strike, and how often it runs.

    From a `finishing` one on, a rank that is broken may still complete the run: a launcher that
    ends a job lets stopped processes go on first.
    """

    at: str
    per_job: int = 0
    per_iteration: int = 0
    per_checkpoint: int = 0
    only_rank_0: bool = False
    finishing: bool = False
    resuming: bool = False


PLACES = (
    Place("prunex_mpi.run.start:build_problem", per_job=1),
    Place("prunex_mpi.run.directory:RunDirectory.__init__", per_job=1, only_rank_0=True),
    Place("prunex_mpi.run.checkpoint:restore", per_job=1, resuming=True),
    Place("prunex_mpi.data.batches:BatchStream.next", per_iteration=LOCAL_STEPS),
    Place("prunex_mpi.data.batches:BatchStream.next", per_iteration=LOCAL_STEPS),
    Place("prunex_mpi.methods.hsadmm:local_computation", per_iteration=1),
    Place("prunex_mpi.methods.hsadmm:intra_node_consensus", per_iteration=1),
    Place("prunex_mpi.methods.hsadmm:project", per_iteration=1),
    Place("prunex_mpi.methods.hsadmm:inter_node_consensus", per_iteration=1),
    # In the helper thread, where there is one.
    Place("prunex_mpi.core.message:Message.sum_", per_iteration=1),
    Place("prunex_mpi.core.admm:update_duals", per_iteration=1),
    Place("prunex_mpi.core.exchange:take_over_", per_iteration=1),
    Place("prunex_mpi.core.loop:evaluate", per_iteration=1),
    Place("prunex_mpi.run.directory:RunDirectory.append", per_iteration=2, only_rank_0=True),
    Place("prunex_mpi.run.directory:RunDirectory.rewind", 1, only_rank_0=True, resuming=True),
    # After the last one nothing is missing but the summary, which rank 0 writes by itself.
    Place("prunex_mpi.run.checkpoint:save", per_checkpoint=1, finishing=True),
    Place("prunex_mpi.run.checkpoint_files:begin", per_checkpoint=1, only_rank_0=True),
    Place("prunex_mpi.run.checkpoint_files:write_rank_file", per_checkpoint=1),
    Place("prunex_mpi.run.checkpoint_files:save_tensors", per_checkpoint=1),
    Place("prunex_mpi.run.checkpoint_files:publish", per_checkpoint=1, only_rank_0=True),
    # Both a checkpoint that becomes valid and one that is about to be removed.
    Place("prunex_mpi.run.checkpoint_files:os.rename", per_checkpoint=2, only_rank_0=True),
    Place(
        "prunex_mpi.base.files:os.replace", 2, per_checkpoint=1, only_rank_0=True, finishing=True
    ),
    Place("prunex_mpi.run.job:save_model", 1, only_rank_0=True, finishing=True),
    Place(
        "prunex_mpi.run.directory:RunDirectory.write_summary", 1, only_rank_0=True, finishing=True
    ),
)


class Problem(Exception):
    """What a trial must not show; `kind` is hang, false success, lost checkpoint or other."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class Tally:
    """What the trials showed."""

    trials: Counter = field(default_factory=Counter)
    missed: Counter = field(default_factory=Counter)
    problems: list[tuple[str, str]] = field(default_factory=list)
    longest_s: float = 0.0
    excused: int = 0

    def note(self, kind: str, text: str) -> None:
        """Keep a problem, and show it at once."""
        self.problems.append((kind, text))
        print(text, flush=True)

    def line(self) -> str:
        kinds = Counter(kind for kind, _ in self.problems)
        return (
            f"{self.trials.total()} trials, {kinds['hang']} hangs, {kinds['false success']} false "
            f"successes, {kinds['lost checkpoint']} lost checkpoints, {kinds['unsaid']} "
            f"without a message, {kinds['other']} other problems\n"
            f"exit code 0 by the launcher alone: {self.excused}\n"
            f"longest from a fault to the end of its job: {self.longest_s:.1f} s\n"
            f"by kind: {dict(sorted(self.trials.items()))}\n"
            f"never reached (not counted): {dict(sorted(self.missed.items()))}"
        )


@dataclass(frozen=True)
class Ended:
    """A job that is over: its exit code, what it said, and whether its fault happened."""

    code: int
    output: str
    errors: str
    struck: bool
    seconds_since_fault: float


# --------------------------------------------------------------------------------------------------
# Jobs
# --------------------------------------------------------------------------------------------------


class Job:
    """A started job, in a session of its own; every process of it carries a tag."""

    def __init__(self, case: Case, folder: Path, fault: dict[str, Any], flags: list[str]) -> None:
        self.limit_s = (TIMEOUT_S if fault["what"] in STALLS else PATIENCE_S) + ALLOWANCE_S
        self.tag = f"PRUNEX_FAULT_JOB={uuid.uuid4().hex}"
        self.mark = folder / f"mark-{self.tag[-8:]}"
        self.out, self.err = folder / "stdout", folder / "stderr"
        program = str(Path(__file__).parents[1] / "harness" / "faulty.py")
        text = json.dumps({**fault, "mark": str(self.mark)})
        command = [*launcher(), "-n", str(case.ranks), sys.executable, program, text, *flags]
        name, value = self.tag.split("=")
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(**{name: value}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """Return the processes of this job, wherever the launcher has put them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            # Others end meanwhile, or are not ours to read.
            with contextlib.suppress(OSError):
                if self.tag.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """End whatever is left of the job."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> Ended:
        """Wait for the end; raise Problem, with nothing left running, when it does not come."""
        started = time.time()
        try:
            while self.process.poll() is None:
                time.sleep(0.1)
                fault_s = time.time() - self.mark.stat().st_mtime if self.mark.exists() else 0.0
                if fault_s > self.limit_s or time.time() - started > LAUNCH_LIMIT_S:
                    raise Problem("hang", f"{fault_s:.0f} s after the fault\n{self.tail()}")
            struck = self.mark.exists()
            seconds = time.time() - self.mark.stat().st_mtime if struck else 0.0
            limit = time.time() + ALLOWANCE_S
            while left := self.processes():
                if time.time() > limit:
                    raise Problem("hang", f"processes {left} outlived the job\n{self.tail()}")
                time.sleep(0.1)
        finally:
            self.kill()
        texts = self.out.read_text(errors="replace"), self.err.read_text(errors="replace")
        return Ended(self.process.returncode, *texts, struck, seconds)

    def tail(self) -> str:
        """Return the end of what the job said."""
        return self.err.read_text(errors="replace")[-3000:]


# --------------------------------------------------------------------------------------------------
# Run directories
# --------------------------------------------------------------------------------------------------


def results(run: Path) -> tuple[list[dict[str, Any]], str, bytes]:
    """Return what two runs alike must agree in."""
    return (
        repeatable_metrics(run),
        (run / "layers.jsonl").read_text(),
        (run / "state.safetensors").read_bytes(),
    )


def status_of(run: Path) -> str:
    """Return how the run ended, as its summary says."""
    path = run / "summary.json"
    return json.loads(path.read_text())["status"] if path.exists() else "none"


def checkpoints(run: Path) -> list[str]:
    """Return the names of the published checkpoints, the oldest first."""
    names = [path.name for path in (run / "checkpoints").glob("*")]
    return sorted(name for name in names if not name.endswith(".partial"))


def iteration_of(name: str) -> int:
    """Return the outer iteration that a checkpoint goes on with."""
    return int(name.split("-")[2])


def damage(folder: Path, rng: random.Random) -> str:
    """Do to one file of a checkpoint what disks and people do; return what it was, in words."""
    path = rng.choice(sorted(folder.iterdir()))
    how = rng.choice(("cut", "flip", "delete"))
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return f"{path.name} deleted"
    place = rng.randrange(len(data))
    if how == "cut":
        path.write_bytes(data[:place])
        return f"{path.name} cut at {place} of {len(data)} bytes"
    bit = rng.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} of {path.name} flipped"


# --------------------------------------------------------------------------------------------------
# Chains
# --------------------------------------------------------------------------------------------------

NO_FAULT = {
    "rank": 0,
    "at": "prunex_mpi.methods.hsadmm:project",
    "side": "before",
    "call": 0,
    "what": "",
}


def draw(rng: random.Random, case: Case, run: Path, every: int, resumes: bool) -> dict[str, Any]:
    """Draw a fault that the next job of the run is likely to meet."""
    names = checkpoints(run)
    left = ITERATIONS - (iteration_of(names[-1]) - 1 if names else 0)
    place = rng.choice([place for place in PLACES if resumes or not place.resuming])
    calls = place.per_job + place.per_iteration * left + place.per_checkpoint * (left // every)
    return {
        "rank": 0 if place.only_rank_0 else rng.randrange(case.ranks),
        "at": place.at,
        "side": rng.choice(("before", "after")),
        "call": rng.randint(1, max(1, calls)),
        "what": rng.choice(FAULTS),
    }


class Chain:
    """One run and the jobs it takes."""

    def __init__(self, case: Case, folder: Path, every: int, reference: Path, tally: Tally) -> None:
        self.case, self.folder, self.every = case, folder, every
        self.reference, self.tally = reference, tally
        self.run = folder / "run"
        # What was done to which folder, known by its time: names may be used again.
        self.damaged: dict[tuple[str, int], str] = {}
        self.pending: list[str] = []
        self.jobs = 0

    def flags(self, timeout_s: float) -> list[str]:
        """Return the flags of the next job."""
        resume = ["--resume"] if self.jobs else []
        own = f"--run-dir run --checkpoint-every {self.every} --timeout {timeout_s:g}"
        return [*resume, *COMMON.split(), *self.case.flags.split(), *own.split()]

    def usable(self) -> list[str]:
        """Return the names of the checkpoints that nobody has damaged, the oldest first."""
        return [name for name in checkpoints(self.run) if self.stamp(name) not in self.damaged]

    def expected_start(self) -> str:
        """Return the name of the checkpoint that the next job has to go on from, "" for none."""
        return max(self.usable(), default="")

    def stamp(self, name: str) -> tuple[str, int]:
        """Return what tells a checkpoint from a later one of the same name."""
        return name, (self.run / "checkpoints" / name).stat().st_mtime_ns

    def strike(self, fault: dict[str, Any]) -> bool:
        """Run a job with a fault and check how it ends; return whether it ended well."""
        before, expected = self.usable(), self.expected_start()
        self.forget_what_is_gone()
        what = fault["what"]
        timeout_s = TIMEOUT_S if what in STALLS else PATIENCE_S
        job = Job(self.case, self.folder, fault, self.flags(timeout_s))
        self.jobs += 1
        try:
            ended = job.wait()
        except Problem:
            self.tally.trials[what] += 1
            raise
        status = status_of(self.run)
        said = f"exit code {ended.code}, status {status}, struck: {ended.struck}\n{job.tail()}"
        if ended.struck:
            self.tally.trials[what] += 1
            self.tally.longest_s = max(self.tally.longest_s, ended.seconds_since_fault)
        elif what:
            self.tally.missed[what] += 1
        print(f"    {describe(fault)}: exit code {ended.code}, status {status}", flush=True)
        self.check_start(ended, expected)
        self.check_nothing_lost(before, preempted=ended.code == PREEMPTED)
        if status in COMPLETE:
            self.check_results()
        elif ended.code == 0 and what == "vanish" and ended.struck and not is_open_mpi():
            # MPICH's launcher kills the other ranks at once, and takes _exit(0) for a good end.
            self.tally.excused += 1
            return False
        elif ended.code == 0:
            raise Problem("false success", said)
        if ended.code == 0:
            return True
        if not ended.struck:
            raise Problem("other", f"the job failed before any fault: {said}")
        if (what == "term") != (ended.code == PREEMPTED and status == "preempted"):
            raise Problem("other", said)
        # The results are all there then: they have been compared above.
        if status in COMPLETE and not any(p.at == fault["at"] and p.finishing for p in PLACES):
            raise Problem("other", f"a summary was written although the job broke: {said}")
        self.check_message(fault, ended, said)
        return False

    def check_message(self, fault: dict[str, Any], ended: Ended, said: str) -> None:
        """Check that somebody said which rank it was."""
        what, rank = fault["what"], fault["rank"]
        # Before the ranks share a folder, those that wait can only speak for themselves.
        shared = "build_problem" not in fault["at"] and "__init__" not in fault["at"]
        told = {"raise": "broken on purpose", "exit": "sys.exit", "stop": "", "hang": ""}
        if what in ("raise", "exit") or (what in ("stop", "hang") and shared):
            wanted = rf"prunex_mpi: error: rank {rank} on {HOST}\b.*{told[what]}"
        elif what in ("stop", "hang"):
            wanted = rf"prunex_mpi: error: rank \d on {HOST}\b"
        elif what == "full-disk":
            wanted = "error: .*File too large"
        else:
            wanted = ""
        if not re.search(wanted, ended.errors):
            # The run can go on all the same.
            self.tally.note("unsaid", f"{describe(fault)}: no line like {wanted!r}: {said}")

    def check_start(self, ended: Ended, expected: str) -> None:
        """Check where the job went on, if it came so far, and what it refused on the way."""
        found = re.search(r"going on from checkpoint (\S+)", ended.errors)
        if found is None and "there is no checkpoint" not in ended.errors:
            return
        start = found.group(1) if found else ""
        if start != expected:
            raise Problem(
                "lost checkpoint", f"went on from {start!r}, not {expected!r}\n{ended.errors}"
            )
        for name in self.pending:
            found = re.search(rf"refused checkpoint {name}: .*", ended.errors)
            if found is None:
                raise Problem("other", f"{name} was not refused\n{ended.errors}")
            print(f"      {found.group()}", flush=True)
        self.tally.trials["damage"] += len(self.pending)
        self.pending = []

    def forget_what_is_gone(self) -> None:
        """Don't wait for the refusal of what a broken job has put aside without a word."""
        left = [name for name in self.pending if name in checkpoints(self.run)]
        self.tally.trials["damage"] += len(self.pending) - len(left)
        self.pending = left

    def check_nothing_lost(self, before: list[str], preempted: bool) -> None:
        """Check that a job leaves the checkpoints it found, or newer ones."""
        after = self.usable()
        if before and (not after or after[-1] < before[-1]):
            raise Problem("lost checkpoint", f"there were {before}, there are {after}")
        if preempted and after[-1:] == before[-1:]:
            raise Problem("lost checkpoint", f"preempted without a new one: {after}")
        path = self.run / "metrics.jsonl"
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        # The record after a due checkpoint is begun when that is complete, which may be damaged
        # by now.
        due = self.every * ((lines - 1) // self.every) if lines else 0
        names = checkpoints(self.run)
        if due and (not names or iteration_of(names[-1]) <= due):
            raise Problem("lost checkpoint", f"{lines} records, but only {names}")

    def check_results(self) -> None:
        """Compare a complete run with the undisturbed one."""
        try:
            same = results(self.run) == results(self.reference)
        except (OSError, ValueError) as error:
            raise Problem("false success", f"complete, but {error}") from None
        if not same:
            raise Problem("false success", "complete, but the results are not the reference's")

    def damage_newest(self, rng: random.Random) -> None:
        """Damage the newest checkpoint, if that leaves one that is whole."""
        usable = self.usable()
        if len(usable) < 2 or usable[-1] != checkpoints(self.run)[-1]:
            return
        name = usable[-1]
        what = damage(self.run / "checkpoints" / name, rng)
        self.damaged[self.stamp(name)] = what
        self.pending.append(name)
        print(f"    damage to {name}: {what}", flush=True)

    def finish(self, rng: random.Random) -> None:
        """Run a last job without a fault, now and then with a second job on its directory."""
        if status_of(self.run) not in COMPLETE and rng.random() < 0.2:
            self.duel()
        elif not self.strike(NO_FAULT):
            raise Problem("other", "the last job did not complete the run")

    def duel(self) -> None:
        """Start a second job on the run directory while a first one holds it."""
        expected = self.expected_start()
        self.forget_what_is_gone()
        wait = {
            **NO_FAULT,
            "what": "wait",
            "at": "prunex_mpi.data.batches:BatchStream.next",
            "call": 1,
        }
        first = Job(self.case, self.folder, wait, self.flags(LAUNCH_LIMIT_S))
        self.jobs += 1
        try:
            limit = time.time() + LAUNCH_LIMIT_S
            while not first.mark.exists():
                if time.time() > limit or first.process.poll() is not None:
                    raise Problem("other", f"the first job did not start\n{first.tail()}")
                time.sleep(0.1)
            aside = self.folder / "second"
            aside.mkdir()
            flags = [word if word != "run" else "../run" for word in self.flags(PATIENCE_S)]
            second = Job(self.case, aside, NO_FAULT, flags).wait()
            lines = [line for line in second.errors.splitlines() if "prunex_mpi.train: err" in line]
            if second.code != IN_USE or len(lines) != 1 or "in use by another job" not in lines[0]:
                raise Problem("other", f"second job: exit code {second.code}\n{second.errors}")
            first.mark.unlink()
            ended = first.wait()
        finally:
            first.kill()
        print(f"    two jobs: exit codes {ended.code} and {second.code}", flush=True)
        self.tally.trials["two jobs"] += 1
        self.check_start(ended, expected)
        if ended.code or status_of(self.run) != "completed":
            raise Problem("other", f"first job: exit code {ended.code}\n{ended.errors}")
        self.check_results()


def describe(fault: dict[str, Any]) -> str:
    """Return a fault in words."""
    if not fault["what"]:
        return "no fault"
    place = f"{fault['side']} call {fault['call']} of {fault['at']}"
    return f"{fault['what']} on rank {fault['rank']} {place}"


def run_chain(seed: int, folder: Path, reference_of: Callable[[Case], Path], tally: Tally) -> None:
    """Run the chain that `seed` draws; note in `tally` what went wrong."""
    rng = random.Random(seed)
    case, every = rng.choice(CASES), rng.choice((1, 1, 2))
    print(f"  chain {seed}: {case.name}, --checkpoint-every {every}", flush=True)
    chain = Chain(case, folder, every, reference_of(case), tally)
    fault, complete = NO_FAULT, False
    try:
        while status_of(chain.run) not in COMPLETE and chain.jobs < LONGEST_CHAIN:
            if rng.random() < 0.6:
                chain.damage_newest(rng)
            fault = draw(rng, case, chain.run, every, chain.jobs > 0)
            complete = chain.strike(fault)
        fault = NO_FAULT
        if not complete:
            chain.finish(rng)
    except Problem as problem:
        text = f"chain {seed} ({case.name}): {describe(fault)}: {problem}\nin {folder}"
        tally.note(problem.kind, text)
    else:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory) -> Callable[[Case], Path]:
    """Return the run directory of a case's undisturbed run, made when first asked for."""
    made: dict[Case, Path] = {}

    def find(case: Case) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("reference")
            flags = [*COMMON.split(), *case.flags.split(), "--run-dir", "run"]
            ended = Job(case, folder, NO_FAULT, flags).wait()
            assert ended.code == 0, ended.errors
            made[case] = folder / "run"
        return made[case]

    return find


def test_faults_that_are_drawn(request, tmp_path, reference_of):
    """The campaign; see the top of this file."""
    wanted, seed = request.config.getoption("fault_trials"), request.config.getoption("fault_seed")
    if not wanted:
        pytest.skip("a campaign needs --fault-trials N")
    tally, started, first = Tally(), time.time(), seed
    while tally.trials.total() < wanted:
        folder = tmp_path / f"chain-{seed}"
        folder.mkdir()
        run_chain(seed, folder, reference_of, tally)
        print(f"  {tally.trials.total()} trials after {time.time() - started:.0f} s", flush=True)
        seed += 1
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    seconds = time.time() - started
    terminal.write_line(f"\nchains {first} to {seed - 1}, {seconds:.0f} s\n{tally.line()}")
    assert not tally.problems, "\n\n".join(text for _, text in tally.problems)


def fault_before(what: str, rank: int, at: str, call: int) -> dict[str, Any]:
    return {"what": what, "rank": rank, "at": f"prunex_mpi.{at}", "call": call, "side": "before"}


@pytest.mark.long
def test_a_run_survives_faults_one_after_the_other(tmp_path, reference_of):
    case, rng = CASES[1], random.Random(0)
    chain = Chain(case, tmp_path, 1, reference_of(case), Tally())

    def broken(*fault: Any) -> None:
        assert not chain.strike(fault_before(*fault))

    # Killed between writing the second checkpoint and its rename.
    broken("kill", 0, "run.checkpoint_files:os.rename", 2)
    assert [iteration_of(name) for name in checkpoints(chain.run)] == [2]
    broken("full-disk", 1, "run.checkpoint_files:write_rank_file", 2)
    broken("stop", 1, "methods.hsadmm:project", 2)
    assert [iteration_of(name) for name in checkpoints(chain.run)] == [3, 4]
    chain.damage_newest(rng)
    broken("term", 1, "data.batches:BatchStream.next", 6)
    assert chain.tally.trials["damage"] == 1
    broken("exit", 0, "run.job:save_model", 1)
    chain.duel()
    assert chain.tally.trials.total() == 7
    assert not chain.tally.problems
