"""A drill on hosts of network namespaces: nodes go away and come back while a run goes on.

    python tests/campaigns/drill.py --minutes 30 --ranks 1 2 --ways calm in-place relaunch requeue

trains a small network on four hosts of so many ranks, each way in a run of its own: `calm` without
faults; `in-place` with ranks that are killed or stopped, where the others go on in the same
processes, and leave with a checkpoint for a job on all once the host is back; `relaunch` with
hosts that are killed with MPI's daemon, or cut off, where `prunex_mpi.elastic` starts the job again
on the rest; `requeue` with the faults of either, where the job waits for the host and goes on from
its checkpoint. A host is away for a minute, or until a job starts on all. A step takes a tenth
of a second of sleep, so that the hosts, which share processors, do not slow each other down.
Printed is a table: useful steps over what hosts that were there could have done, by the rate of the
calm run.

Needs what tests/harness/cluster.py needs. Ends with code 1 where a run made no progress, claimed
success without it, or did not come to its end.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

import cluster as machines
from cluster import Cluster, Host, on_host

NODES, STEP_S, EVALUATE_STEPS = 4, 0.1, 200
HANG_S = 150.0
FAULTS = {"in-place": ("kill", "kill", "stop"), "relaunch": ("host", "link")}
# The same faults for a job that ends, and is queued again until all hosts are there.
QUEUED = {"requeue-ranks": "in-place", "requeue-hosts": "relaunch"}
WAYS = ("calm", *FAULTS, *QUEUED)
PER_HOUR = {"in-place": 125.0, "relaunch": 12.0}
# What the launcher says when a job starts on all hosts.
TAKEN = f"elastic: starting on {NODES} of {NODES}"
DETECTOR = {"": "1", "_thread": "1", "_period": "0.25", "_timeout": "1"}
TRAIN = (
    "--model drill:slow --dataset drill:digits --data-dir . --data-mode stream --batch-size 16 "
    "--progress off --timeout 15"
)


def slow(num_classes: int, image_size: int):
    """A small network whose training step takes a tenth of a second."""
    from torch import nn

    class Slow(nn.Sequential):
        def forward(self, x):
            if self.training:
                time.sleep(STEP_S)
            return super().forward(x)

    return Slow(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, num_classes)),
    )


def digits(data_dir: str, train: bool):
    """The handwritten digits of scikit-learn, from a file: importing that takes seconds."""
    import numpy as np
    from PIL import Image

    class Digits:
        def __init__(self):
            found = np.load(Path(data_dir) / "digits.npz")
            chosen = np.arange(len(found["target"])) % 5 != 0
            chosen = chosen if train else ~chosen
            self.images = np.round(found["images"][chosen] * 255 / 16).astype(np.uint8)
            self.labels = found["target"][chosen].tolist()
            self.classes = list("0123456789")
            self.flip = False

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            return Image.fromarray(self.images[index]), self.labels[index]

    return Digits()


def write_digits(folder: Path) -> None:
    """Write the file that `digits` reads."""
    import numpy as np
    from sklearn.datasets import load_digits

    found = load_digits()
    np.savez(folder / "digits.npz", images=found.images, target=found.target)


@dataclass
class Away:
    """Hosts that are away, by name: until when, and the process that goes on then."""

    until: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run has shown."""

    way: str
    ranks: int
    minutes: float = 0.0
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    joins: int = 0
    done: int = 0
    could: float = 0.0
    accuracy: float = 0.0
    problem: str = ""


def command(
    made: Cluster, way: str, ranks: int, iterations: int, options: argparse.Namespace
) -> list[str]:
    """Return the launcher's command for one run in the current folder."""
    agent, faults = str(made.folder / "agent"), QUEUED.get(way, way)
    job = [machines.mpirun(), "--prtemca", "plm_ssh_agent", agent, "--host", "{hosts}"]
    job += ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "-n", "{ranks}"]
    flags = [*TRAIN.split(), "--outer-iterations", str(iterations), "--run-dir", "run"]
    flags += ["--local-steps", str(options.local_steps)]
    flags += ["--evaluate-every", str(max(EVALUATE_STEPS // options.local_steps, 1))]
    elastic = ["--tries", "5", "--probe", "sh -c 'test ! -e away/{host}'"]
    if way == "in-place":
        job += ["--with-ft", "ulfm"]
        for name, value in DETECTOR.items():
            job += ["--mca", f"mpi_ft_detector{name}", value]
        flags += ["--on-node-loss", "continue"]
        elastic += ["--regrow-after", f"{options.away:g}"]
    elif way in QUEUED:
        elastic += ["--min-hosts", str(NODES)]
    # Those who go on in place have the last outer iteration in memory.
    if faults in FAULTS and way != "in-place":
        flags += ["--checkpoint-every", "1"]
    hosts = ",".join(f"{host.name}:{ranks}" for host in made.hosts[1:])
    words = [sys.executable, "-m", "prunex_mpi.elastic", "--hosts", hosts, *elastic, "--", *job]
    return [*words, sys.executable, "-m", "prunex_mpi.train", *flags]


def heartbeats(run: Path, there: float) -> list[dict]:
    """Return what the ranks of a job that have told so since `there` tell of themselves."""
    found = []
    for path in sorted(run.glob("heartbeats/rank-*")):
        with suppress(OSError, ValueError):
            beat = json.loads(path.read_text())
            if beat["at"] > there:
                found.append(beat)
    return found


def strike(
    made: Cluster, run: Path, kinds: tuple[str, ...], away: Away, draw: random.Random
) -> str:
    """Take a host away, or a rank of it, if there is another one; return what was done."""
    beats = heartbeats(run, time.time() - 10)
    hosts = sorted({beat["host"] for beat in beats} - away.until.keys())
    if len(hosts) < 2:
        return ""
    name, kind = draw.choice(hosts), draw.choice(kinds)
    host = next(host for host in made.hosts if host.name == name)
    if kind == "host":
        machines.kill_processes(name)
    if kind in ("host", "link"):
        machines.set_link(made, host, "down")
    else:
        beat = draw.choice([beat for beat in beats if beat["host"] == name])
        # A number that comes again must not be hit.
        if not _is_rank(beat["pid"]):
            return ""
        os.kill(beat["pid"], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            away.stopped[name] = beat["pid"]
        kind += f" rank {beat['rank']}"
    (run.parent / "away" / name).touch()
    return f"{kind} on {name}"


def _is_rank(pid: int) -> bool:
    try:
        return b"prunex_mpi" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def bring_back(made: Cluster, run: Path, away: Away, name: str) -> None:
    """Have a host again; what was stopped there goes on, if it is there still."""
    host = next(host for host in made.hosts if host.name == name)
    del away.until[name]
    if (pid := away.stopped.pop(name, 0)) and _is_rank(pid):
        os.kill(pid, signal.SIGCONT)
    machines.set_link(made, host, "up")
    (run.parent / "away" / name).unlink(missing_ok=True)


def iterations_of(run: Path) -> int:
    """Return the outer iterations that a run has done."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


@contextmanager
def started(words: list[str], head: Host, folder: Path) -> Iterator[subprocess.Popen]:
    """Run the launcher on a host; kill what is left of it."""
    here = str(Path(__file__).parent)
    environment = machines.job_environment()
    environment["PYTHONPATH"] += os.pathsep + here
    with open(folder / "log", "w") as log:
        job = subprocess.Popen(
            on_host(head, words),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            machines.kill_processes(head.name)
            job.wait()


def drill(
    made: Cluster, way: str, ranks: int, folder: Path, options: argparse.Namespace
) -> Outcome:
    """Let one run come to its end, with faults; return what it has shown."""
    run, draw, away = folder / "run", random.Random(options.seed), Away()
    (folder / "away").mkdir(parents=True)
    write_digits(folder)
    kind, outcome = QUEUED.get(way, way), Outcome(way, ranks)
    iterations = round(options.minutes * 60 / (options.local_steps * STEP_S * 1.1))
    period_s = 3600 / (options.per_hour or PER_HOUR.get(kind, 1.0))
    words = command(made, way, ranks, iterations, options)
    steps = options.local_steps
    with started(words, made.first, folder) as job:
        began, due, grown = 0.0, 0.0, time.monotonic()
        last, before, takeovers = time.monotonic(), 0, 0
        while job.poll() is None:
            time.sleep(0.05)
            now, count = time.monotonic(), iterations_of(run)
            if (found := len(re.findall(TAKEN, (folder / "log").read_text()))) > takeovers:
                takeovers = found
                away.until = dict.fromkeys(away.until, 0.0)
            if count != before:
                before, grown = count, now
                if not began:
                    began, due = now, now + period_s / 2
                    outcome.could, last = count * steps * NODES * ranks * options.step_s, now
            # What comes after the last outer iteration is no training.
            if began and count < iterations:
                outcome.could += (now - last) * (NODES - len(away.until)) * ranks
            last = now
            for name in [name for name, until in away.until.items() if until < now]:
                bring_back(made, run, away, name)
            if kind in FAULTS and began and now > due and iterations - count > 3:
                what = strike(made, run, FAULTS[kind], away, draw)
                due = now + (period_s if what else 1.0)
                if what:
                    away.until[what.split()[-1]] = now + options.away
                    outcome.faults.append(f"{now - began:.1f} s: {what}")
                    print(f"  {outcome.faults[-1]} at {count} of {iterations}", flush=True)
            if now - grown > HANG_S + options.away:
                outcome.problem = f"no progress for {now - grown:.0f} s"
                break
        outcome.minutes = (time.monotonic() - began) / 60
        for name in list(away.until):
            bring_back(made, run, away, name)
    for host in made.hosts:
        machines.kill_processes(host.name)
    evaluate_on(outcome, job.returncode, folder, iterations, steps)
    return outcome


def evaluate_on(outcome: Outcome, code: int, folder: Path, iterations: int, steps: int) -> None:
    """Read from the run's files what it has reached, and whether that is what it says.

    It was to have so many `iterations` of `steps` local steps.
    """
    run = folder / "run"
    summary = run / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    whole = [record["iteration"] for record in records] == list(range(1, iterations + 1))
    complete = found.get("status") == "completed"
    if not outcome.problem and (code or not complete or not whole):
        outcome.problem = f"code {code}, {len(records)} of {iterations}"
        outcome.problem += ", false success" if code == 0 else ""
    outcome.done = sum(steps * len(row["node"]) for row in rows)
    outcome.accuracy = found.get("test_accuracy") or 0.0
    changes = run / "nodes.jsonl"
    lines = changes.read_text().splitlines() if changes.exists() else []
    outcome.joins = sum(bool(json.loads(line).get("joined")) for line in lines)
    starts = re.findall("elastic: starting on", (folder / "log").read_text())
    outcome.starts = len(starts)


def main() -> int:
    """Do all runs that are wanted; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="length of the calm run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on each host")
    parser.add_argument("--local-steps", type=int, default=10, help="of an outer iteration")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--per-hour", type=float, default=0, help="faults [125 and 12]")
    parser.add_argument("--away", type=float, default=60, help="seconds that a host is away")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--step-s", type=float, default=0.11, help="of a step, where no calm run tells"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where runs are kept [nowhere]")
    options = parser.parse_args()
    if reason := machines.why_not():
        parser.error(reason)
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            for way in options.ways:
                folder = (options.dir or Path(scratch)).resolve() / f"{way}-{NODES}x{ranks}"
                print(f"{way}, {NODES} hosts of {ranks}", flush=True)
                # The first one is where the launcher is: it has no ranks, and stays.
                with machines.cluster(NODES + 1) as made:
                    outcome = drill(made, way, ranks, folder, options)
                if way == "calm":
                    options.step_s = outcome.could / outcome.done
                    print(f"a step takes {options.step_s:.4f} s", flush=True)
                outcomes.append(outcome)
                print(row(outcome, options.step_s), flush=True)
    print("| hosts | way | minutes | faults | starts | joins | useful | accuracy | problem |")
    print("|---|---|---|---|---|---|---|---|---|")
    for outcome in outcomes:
        print(row(outcome, options.step_s))
    return int(any(outcome.problem for outcome in outcomes))


def row(outcome: Outcome, step_s: float) -> str:
    """Return a line of the table."""
    useful = outcome.done * step_s / outcome.could if outcome.could else 0.0
    return (
        f"| {NODES} × {outcome.ranks} | {outcome.way} | {outcome.minutes:.1f} | "
        f"{len(outcome.faults)} | {outcome.starts} | {outcome.joins} | {useful:.1%} | "
        f"{outcome.accuracy:.2%} | {outcome.problem or 'none'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
