"""Several real hosts: nodes found by MPI, Slurm's jobs, and bytes as the kernel counts them.

Needs root, iproute2 and Slurm; .ci/run installs them where it may.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cluster as machines
import pytest
from cluster import Cluster, mpirun_words, run_on, srun_words, start_on
from launch import repeatable_metrics

HOSTS = 4
LIMIT_S = 600
ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, "-m", "prunex_mpi.train"]
SMALL = (
    *("--model", "resnet8", "--dataset", "synthetic", "--image-size", "8"),
    *("--train-samples", "64", "--test-samples", "16", "--batch-size", "4"),
    *("--outer-iterations", "4", "--local-steps", "2", "--progress", "off"),
)
# Long enough to be met by a signal, on the fastest machine.
LONGER = (*SMALL, "--outer-iterations", "12", "--local-steps", "10", "--node-sync", "outer")
LONGER += ("--model", "odd_models:unhurried", "--checkpoint-every", "off", "--evaluate-every", "12")
# No round before the keep ratio holds.
PRUNED = ("--warmup-iterations", "0", "--keep-ramp-iterations", "0", "--mask-agreement", "vote")

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    reason = machines.why_not()
    if reason:
        pytest.skip(reason)
    with machines.cluster(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Cluster) -> Iterator[dict[str, str]]:
    reason = machines.why_not("slurm")
    if reason:
        pytest.skip(reason)
    with machines.slurm(hosts) as found:
        yield found


@pytest.fixture(scope="module")
def whole(hosts: Cluster, slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an srun on two hosts that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*srun_words(2, 2), *TRAIN, *LONGER, "--run-dir", "run"]
    require(run_on(hosts, words, folder, **slurm))
    return folder / "run"


def summary(run: Path) -> dict:
    """Return summary.json, {} while there is none: a job that goes on takes it away first."""
    path = run / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def require(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def count_sent(
    hosts: Cluster, tasks: list[int], flags: Sequence[str], folder: Path, **extra: str
) -> tuple[list[dict], list[list[int]]]:
    """Return the records of a run on hosts with so many tasks, and what the link of each carried.

    The bytes are those of each exchange.
    """
    script = str(ROOT / "tests" / "harness" / "count_phase4.py")
    some = Cluster(hosts.hosts[: len(tasks)], hosts.folder)
    words = [*mpirun_words(some, tasks), sys.executable, script, str(folder / "sent"), *SMALL]
    words += [*flags, "--model", "resnet20", "--run-dir", "run"]
    require(run_on(some, words, folder, **extra))
    assert summary(folder / "run")["nodes"] == tasks
    sent = [json.loads((folder / f"sent-{node}").read_text()) for node in range(len(tasks))]
    return repeatable_metrics(folder / "run"), sent


def assert_carried(carried: Sequence[float], wanted: Sequence[float]) -> None:
    """Assert that a link has carried so many bytes in each exchange, and little more.

    The rest is headers and agreements; what TCP sends again is in some iterations alone.
    """
    ratios = [there / asked for there, asked in zip(carried, wanted, strict=True)]
    assert 0.99 < min(ratios) < 1.05
    assert max(ratios) < 1.2


@pytest.mark.parametrize(
    ("tasks", "flags", "share"),
    [
        pytest.param([2, 2], "", 0.53, marks=pytest.mark.long),
        pytest.param([1, 1, 1], "--payload int4", 0.08, marks=pytest.mark.long),
        pytest.param([1, 1, 1], "", 0.53, marks=pytest.mark.long),
        pytest.param([2, 2], "--payload int8", 0.15, marks=pytest.mark.long),
        pytest.param([3, 1], "", 0.53, marks=pytest.mark.long),
        pytest.param([1, 1], "--payload int4", 0.08, marks=pytest.mark.long),
        pytest.param([1, 1, 1, 1], "--payload int2", 0.05, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_link_carries_no_more_than_is_enough(tasks, flags, share, hosts, tmp_path):
    records, everyone = count_sent(hosts, tasks, [*PRUNED, *flags.split()], tmp_path)
    payloads, dense = ([r["bytes"][kind] for r in records] for kind in ("payload", "dense"))
    assert all(p < share * d for p, d in zip(payloads, dense, strict=True))
    nodes = len(tasks)
    for sent in everyone:
        assert_carried(sent, [2 * (nodes - 1) * p / nodes for p in payloads])


@pytest.mark.long
@pytest.mark.parametrize(
    ("payload", "order", "least"),
    [("int4", (0, 1, 2, 3), 1.9), ("int4", (2, 3, 0), 1.25), ("fp32", (0, 2, 1, 3), 1.8)],
)
def test_racks_send_over_the_link_between_them_what_two_nodes_would(
    payload, order, least, hosts, tmp_path
):
    """Hosts 0 and 1, and 2 and 3, each behind a bridge; without racks it is so much more at least.

    An Allreduce of neighbours in racks of equal size would send no more without.
    """
    some = Cluster(tuple(hosts.hosts[place] for place in order), hosts.folder)
    flags = [*PRUNED, "--payload", payload]
    link, tasks = {"LINK_OF": f"{os.getpid()}:{machines.BETWEEN[0]}"}, [2, 1, 1, 1][: len(order)]
    totals = []
    for rack_of in ([], ["--rack-of", "(prunex(?=[01])|x(?=[23]))"]):
        folder = tmp_path / f"racks{len(rack_of)}"
        folder.mkdir()
        records, (carried, *_) = count_sent(some, tasks, [*flags, *rack_of], folder, **link)
        totals.append(sum(carried))
        leaves = [record["bytes"]["racks"] for record in records]
        assert [n > 0 for n in leaves] == [bool(rack_of)] * len(records)
    # Messages of phase 4 alone, without those for masks, go both ways.
    assert_carried(carried, [2 * record["bytes"]["payload"] for record in records])
    assert totals[0] > least * totals[1]


@pytest.mark.long
@pytest.mark.parametrize("tasks", [[1, 1], [1, 1, 1], [2, 1]], ids=str)
@pytest.mark.parametrize(
    "flags", ["spardl --spardl-ratio 0.5 --aggregation hierarchical", "gossip"]
)
def test_the_link_carries_what_ranks_send_each_other(tasks, flags, hosts, tmp_path):
    records, everyone = count_sent(hosts, tasks, ["--method", *flags.split()], tmp_path)
    nodes, steps, rounds = len(tasks), 2, len(records)
    # Of an outer iteration, without its statistics: those of resnet20 are 2 of 688 channels.
    statistics = 2 * (nodes - 1) * 4 * 2 * 688 // nodes
    wanted = [(record["bytes"]["sent"] - statistics) / steps for record in records]
    assert min(wanted) > 500_000
    for sent in everyone:
        assert len(sent) == steps * rounds
        assert_carried(sent, [wanted[step // steps] for step in range(len(sent))])


@pytest.mark.long
@pytest.mark.parametrize("payload", ["fp32", "int4"])
def test_the_link_carries_a_message_in_equal_parts(payload, hosts, tmp_path):
    flags = ["--method", "diloco", "--fragments", "2", "--payload", payload, "--bn", "average"]
    records, everyone = count_sent(hosts, [1, 1], flags, tmp_path)
    wanted = [record["bytes"]["sent"] for record in records]
    for sent in everyone:
        # The last outer iteration sends all at its end.
        *in_parts, at_once = sent
        parts = list(zip(in_parts[::2], in_parts[1::2], strict=True))
        assert_carried([*map(sum, parts), at_once], wanted)
        # Statistics go with the last part.
        assert all(max(pair) < 0.55 * sum(pair) for pair in parts)


@pytest.mark.any_mpi
@pytest.mark.long
def test_a_job_on_hosts_is_stopped_and_goes_on_exactly(hosts, whole, tmp_path):
    pair = Cluster(hosts.hosts[:2], hosts.folder)
    words = [*mpirun_words(pair, [2, 2]), *TRAIN, *LONGER]
    flags = ["--run-dir", "run", "--resume"]
    job = start_on(pair.first, [*words, *flags], tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, job)
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 75, out
    assert summary(tmp_path / "run")["status"] == "preempted"
    require(run_on(pair, [*words, *flags], tmp_path))
    assert repeatable_metrics(tmp_path / "run") == repeatable_metrics(whole)


@pytest.mark.long
@pytest.mark.parametrize("what", ["host", "link"])
def test_a_run_goes_on_without_a_lost_host_and_takes_it_in_again(what, hosts, tmp_path):
    """A host is killed with MPI's daemon, or its link is cut, of which nobody is told."""
    head, *others = hosts.hosts
    lost, run, away = others[-1], tmp_path / "run", tmp_path / "away"
    launcher = mpirun_words(Cluster(tuple(others), hosts.folder), [1] * len(others))
    places = ",".join(f"{host.name}:1" for host in others)
    launcher = ["{hosts}" if word == places else word for word in launcher]
    launcher[launcher.index("-n") + 1] = "{ranks}"
    flags = [*LONGER, "--outer-iterations", "40", "--evaluate-every", "40", "--timeout", "15"]
    words = [sys.executable, "-m", "prunex_mpi.elastic", "--hosts", places]
    words += ["--probe", f"sh -c 'test {{host}} != {lost.name} || test ! -e {away}'", "--"]
    words += [*launcher, *TRAIN, *flags, "--checkpoint-every", "1", "--run-dir", "run"]
    job = start_on(head, words, tmp_path)

    def count(name: str) -> int:
        path = run / name
        return path.read_text().count("\n") if path.exists() else 0

    wait_for(lambda: count("metrics.jsonl") >= 3, job)
    away.touch()
    try:
        if what == "host":
            machines.kill_processes(lost.name)
        machines.set_link(hosts, lost, "down")
        wait_for(lambda: count("nodes.jsonl") == 1, job)
    finally:
        machines.set_link(hosts, lost, "up")
        away.unlink()
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, out
    left, joined = map(json.loads, (run / "nodes.jsonl").read_text().splitlines())
    assert left["left"] == [lost.name] and left["ranks"] == len(others) - 1
    # Beside the one that was under way, where its checkpoint was being written.
    assert left["lost_iterations"] <= 1
    assert joined["joined"] == [lost.name] and joined["ranks"] == len(others)
    assert [record["iteration"] for record in repeatable_metrics(run)] == list(range(1, 41))


def complete(run: Path, nodes: int) -> bool:
    """Return whether `run` has all its files and was one of two ranks on each of `nodes` hosts."""
    found = summary(run)
    names = ("config.toml", "metrics.jsonl", "layers.jsonl", "state.safetensors")
    return (
        found["status"] == "completed"
        and found["nodes"] == [2] * nodes
        and all((run / name).exists() for name in names)
    )


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_srun_finds_hosts(count, hosts, slurm, tmp_path):
    words = [*srun_words(count, 2), *TRAIN, *SMALL, "--run-dir", "run"]
    require(run_on(hosts, words, tmp_path, **slurm))
    assert complete(tmp_path / "run", count)


@dataclass(frozen=True)
class Job:
    """A job of Slurm."""

    number: str
    folder: Path
    slurm: dict[str, str]
    hosts: Cluster

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"prunex-{self.number}"

    def log(self) -> str:
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else "no output"

    def state(self) -> str:
        """Return what Slurm says of it; nothing once it has been forgotten."""
        words = ["squeue", "-h", "-j", self.number, "-o", "%T"]
        return run_on(self.hosts, words, self.folder, **self.slurm).stdout.strip()

    def control(self, *words: str) -> None:
        """Run a command of Slurm."""
        require(run_on(self.hosts, [*words], self.folder, **self.slurm))


def submit(
    hosts: Cluster,
    slurm: dict[str, str],
    folder: Path,
    nodes: int,
    script: str = "train",
    flags: Sequence[str] = LONGER,
) -> Job:
    """Hand a script of batch/ to Slurm, two tasks on each of `nodes`."""
    words = ["sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=2"]
    words += ["--cpus-per-task=1", "--output=job.out", str(ROOT / "batch" / f"{script}.sbatch")]
    environment = Path(sys.executable).parent.parent
    places = {"PRUNEX_HOME": str(ROOT), "PRUNEX_VENV": str(environment)}
    done = run_on(hosts, [*words, *flags], folder, **slurm, **places)
    require(done)
    return Job(done.stdout.strip(), folder, slurm, hosts)


@pytest.mark.long
def test_sbatch_requeues_a_preempted_job_which_goes_on(hosts, slurm, whole, tmp_path):
    job = submit(hosts, slurm, tmp_path, 2)
    run = job.run
    metrics = run / "metrics.jsonl"

    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, log=job.log)
    job.control("scontrol", "requeue", job.number)
    wait_for(lambda: summary(run).get("status") == "preempted", log=job.log)
    reached = len(repeatable_metrics(run))
    assert reached < 12
    # Slurm holds a requeued job back for a while.
    wait_for(lambda: job.state().startswith("PENDING"), log=job.log)
    job.control("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    wait_for(lambda: summary(run).get("status") == "completed", log=job.log)
    assert "restart 1" in job.log()
    assert "going on from checkpoint" in job.log()
    assert repeatable_metrics(run) == repeatable_metrics(whole)


def second_host(job: Job) -> str:
    """Return the host of two that the job does not run its script on."""
    return re.search(r"starting on 2 of 2 hosts: \S+, (\S+)", job.log())[1]


@pytest.mark.long
def test_an_allocation_goes_on_without_a_node(hosts, slurm, tmp_path):
    flags = [*LONGER, "--outer-iterations", "30", "--evaluate-every", "30", "--timeout", "15"]
    flags += ["--checkpoint-every", "1"]
    job = submit(hosts, slurm, tmp_path, 2, "elastic", flags)
    run = job.run

    wait_for(lambda: list(run.glob("checkpoints/000002-iteration-*[0-9]")), log=job.log)
    # The node comes back by itself, but not into the allocation.
    name = second_host(job)
    command = f"scontrol update NodeName={name} State=DOWN Reason=test"
    job.control(*command.split())
    wait_for(lambda: summary(run).get("status") == "completed", log=job.log)
    (line,) = map(json.loads, (run / "nodes.jsonl").read_text().splitlines())
    assert line["left"] == [name] and line["ranks"] == 2
    assert line["iteration"] > 1 and line["lost_iterations"] <= 1
    assert [record["iteration"] for record in repeatable_metrics(run)] == list(range(1, 31))


@pytest.mark.long
def test_an_allocation_takes_a_node_in_again_whose_link_was_cut(hosts, slurm, tmp_path):
    flags = [*LONGER, "--outer-iterations", "60", "--evaluate-every", "60", "--timeout", "15"]
    flags += ["--checkpoint-every", "1"]
    job = submit(hosts, slurm, tmp_path, 2, "elastic", flags)
    run, changes = job.run, job.run / "nodes.jsonl"

    wait_for(lambda: list(run.glob("checkpoints/000002-iteration-*[0-9]")), log=job.log)
    name = second_host(job)
    lost = next(host for host in hosts.hosts if host.name == name)
    machines.set_link(hosts, lost, "down")
    try:
        wait_for(lambda: changes.exists() and changes.read_text().endswith("\n"), log=job.log)
    finally:
        machines.set_link(hosts, lost, "up")
    wait_for(lambda: summary(run).get("status") == "completed", log=job.log)
    left, joined = map(json.loads, changes.read_text().splitlines())
    assert left["left"] == [lost.name] and left["ranks"] == 2
    assert joined["joined"] == [lost.name] and joined["ranks"] == 4
    assert joined["lost_iterations"] == 0
    assert [record["iteration"] for record in repeatable_metrics(run)] == list(range(1, 61))


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--signal=USR1"]])
def test_a_cancelled_job_stays_ended_and_one_whose_time_is_over_does_not(
    hosts, slurm, tmp_path, flags
):
    job = submit(hosts, slurm, tmp_path, 1)
    run = job.run

    wait_for(lambda: (run / "metrics.jsonl").exists() and repeatable_metrics(run), log=job.log)
    job.control("scancel", *flags, job.number)
    wait_for(lambda: summary(run).get("status") == "preempted", log=job.log)
    wait_for(lambda: job.state() == ("PENDING" if flags else ""), log=job.log)
    assert ("is queued again" in job.log()) == bool(flags)
    assert ("stopped after a checkpoint" in job.log()) != bool(flags)
    if flags:
        job.control("scancel", job.number)


def wait_for(condition, job: subprocess.Popen | None = None, log=lambda: "") -> None:
    """Wait until `condition()`; fail when `job` ends before, or nothing happens for long."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert job is None or job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end, f"it did not happen within {LIMIT_S} s: {log()[-4000:]}"
        time.sleep(0.3)
