"""Jobs that go on when nodes are lost, under Open MPI with ULFM; what they refuse."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import LIMIT_S, environment, launcher, repeatable_metrics, train

from prunex_mpi.base.errors import log
from prunex_mpi.config.resolve import make
from prunex_mpi.core.lasting import SUM
from prunex_mpi.run import kept as kept_module
from prunex_mpi.run.kept import InMemoryCheckpoint, LostNodes, Member
from prunex_mpi.run.survival import divide, together

FAULTY = str(Path(__file__).parents[1] / "harness" / "faulty.py")
ITERATIONS = 8
SMALL = [
    *("--model", "faulty:noisy", "--dataset", "synthetic", "--image-size", "8"),
    *("--train-samples", "96", "--test-samples", "16", "--batch-size", "8"),
    *("--outer-iterations", str(ITERATIONS), "--local-steps", "3", "--progress", "off"),
]
CONTINUE = ["--on-node-loss", "continue"]
WRITES_SUMMARY = "prunex_mpi.run.directory:RunDirectory.write_summary"
BEHIND = ["--payload", "int4", "--overlap-steps", "1", "--evaluate-every", "4"]
# What a node may be at when it is lost, and flags with which it comes to that.
PLACES = {
    "start": ("prunex_mpi.run.job:load_dataset", []),
    "step": ("prunex_mpi.core.loop:step_optimizer_", []),
    "masks": ("prunex_mpi.core.mask_choice:agree_by_vote", []),
    "message": ("prunex_mpi.core.exchange:pack_", []),
    "helper": ("prunex_mpi.core.message:Message.sum_", [*BEHIND, "--method", "diloco"]),
    "evaluation": ("prunex_mpi.core.evaluation:evaluate_on", []),
    "checkpoint": ("prunex_mpi.run.checkpoint_files:write_rank_file", ["--checkpoint-every", "2"]),
    "freeze": ("prunex_mpi.methods.hsadmm:freeze", []),
    "removal": ("prunex_mpi.core.lasting:remove_", ["--groups", "coupled", "--remove-dropped"]),
    "keeping": ("prunex_mpi.run.kept:common_contents", []),
    "end": ("prunex_mpi.run.job:deliver", []),
}


def with_ulfm() -> list[str]:
    """Return the launcher that lets the others go on when a process fails; else skip."""
    command = launcher()
    told = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in told:
        pytest.skip("only Open MPI goes on when a process fails")
    return [*command, "--with-ft", "ulfm"]


def start(ranks: int, arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    command = [*with_ulfm(), "-n", str(ranks), sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(), **pipes)


def run_with_fault(
    ranks: int, fault: dict[str, Any], flags: list[str], cwd: Path
) -> tuple[int, str]:
    """Run a training with one fault; return the exit code and what it printed."""
    fault = {"side": "before", "what": "kill", "mark": str(cwd / "mark"), **fault}
    flags = [*SMALL, *CONTINUE, "--run-dir", "run", *flags]
    job = start(ranks, [FAULTY, json.dumps(fault), *flags], cwd)
    text, _ = job.communicate(timeout=LIMIT_S)
    return job.returncode, text


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def assert_whole(run: Path) -> None:
    """Assert that a run came to its end with each outer iteration once."""
    assert summary(run)["status"] == "completed"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))


def kill_rank(
    run: Path, rank: int, job: subprocess.Popen[str], number: int = signal.SIGKILL
) -> None:
    """Kill a rank of a job that trains, or send it the signal `number`."""
    record, end = run / f"heartbeats/rank-{rank:05}", time.monotonic() + LIMIT_S / 2
    while not ((run / "metrics.jsonl").exists() and record.exists()):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    os.kill(json.loads(record.read_text())["pid"], number)


@pytest.mark.jobs
def test_the_others_go_on_without_a_node_and_rank_0(tmp_path):
    fault = {"rank": 1, "at": PLACES["step"][0], "call": 8}
    # What is left is smaller than a virtual node.
    code, text = run_with_fault(3, fault, ["--ranks-per-node", "2"], tmp_path)
    assert code == 0, text
    assert_whole(tmp_path / "run")
    (change,) = summary(tmp_path / "run")["changes"]
    assert change["lost_nodes"] == [0] and change["lost_ranks"] == [0, 1]
    assert change["nodes"] == 1 and change["ranks"] == 1
    assert "rank 0 on" in text and "leaves, as its node is not whole" in text
    assert "node 0 lost: 1 nodes with 1 ranks go on from outer iteration 3" in text


@pytest.mark.jobs
@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        # Once the summary is written, before the others know; and when they do.
        {"rank": 0, "at": WRITES_SUMMARY, "call": 1, "side": "after"},
        {"rank": 1, "at": "prunex_mpi.run.survival:leave", "call": 1},
    ],
)
def test_a_run_that_is_over_is_not_begun_anew(fault, tmp_path):
    code, text = run_with_fault(3, fault, [], tmp_path)
    assert code == 0, text
    assert_whole(tmp_path / "run")
    assert "go on from" not in text and "Traceback" not in text


def test_losses_one_after_the_other_are_told_together():
    members = [Member(rank, rank, "host", rank, "") for rank in range(4)]
    kept = InMemoryCheckpoint(make(), began=True, members=members)
    stay, first = divide(kept, [1, 2, 3], 4)
    kept.members = [members[rank] for rank in stay]
    # The second one's numbers are those among the others.
    _, second = divide(kept, [0, 2], 3)
    assert (first, second) == (LostNodes((0,), (0,)), LostNodes((2,), (2,)))
    assert together(first, second) == LostNodes((0, 2), (0, 2))


@pytest.mark.parametrize(
    ("memory", "told"),
    [((), "node 1 lost: 1"), (("residual",), "node 1 lost with what had not been sent yet: 1")],
)
def test_a_line_says_what_is_lost_with_a_node(memory, told, caplog, monkeypatch):
    summed = dict.fromkeys(memory, SimpleNamespace(elsewhere=SUM))
    monkeypatch.setattr(kept_module, "lasting", lambda *_: summed)
    state = SimpleNamespace(position=SimpleNamespace(iteration=3))
    problem = SimpleNamespace(train=SimpleNamespace(batch_size=8), model=None)
    kept = InMemoryCheckpoint(make(), loss=LostNodes((1,), (2, 3)))
    topology = SimpleNamespace(world_size=2, num_nodes=1)
    with caplog.at_level("INFO", log.name):
        kept.tell(topology, None, SimpleNamespace(state=state, problem=problem))
    assert told in caplog.text


@pytest.mark.jobs
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [name for name in PLACES if name != "start"])
def test_a_node_may_be_lost_at_any_time(tmp_path, place, rank):
    at, flags = PLACES[place]
    call = {"end": 1, "freeze": 1, "removal": 1, "checkpoint": 2, "evaluation": 2}.get(place, 3)
    fault = {"rank": rank, "at": at, "call": call}
    code, text = run_with_fault(3, fault, ["--ranks-per-node", "1", *flags], tmp_path)
    assert code == 0, text
    assert (tmp_path / "mark").exists()
    assert_whole(tmp_path / "run")
    assert summary(tmp_path / "run")["changes"][0]["lost_ranks"] == [rank]


@pytest.mark.jobs
@pytest.mark.long
def test_another_node_may_be_lost_as_the_others_recover(tmp_path):
    at = "prunex_mpi.run.kept:put_common"
    fault = {"rank": 2, "at": at, "call": 1, "side": "before", "what": "kill"}
    fault["mark"] = str(tmp_path / "mark")
    flags = [*SMALL, *CONTINUE, "--outer-iterations", "300", "--ranks-per-node", "1"]
    job = start(3, [FAULTY, json.dumps(fault), *flags, "--run-dir", "run"], tmp_path)
    kill_rank(tmp_path / "run", 0, job)
    text, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, text
    assert (tmp_path / "mark").exists()
    assert summary(tmp_path / "run")["status"] == "completed"
    changes = summary(tmp_path / "run")["changes"]
    assert changes[-1]["ranks"] == 1
    assert sorted(rank for change in changes for rank in change["lost_ranks"]) == [0, 2]


@pytest.mark.jobs
@pytest.mark.long
def test_a_node_that_is_lost_before_training_ends_the_job(tmp_path):
    fault = {"rank": 1, "at": PLACES["start"][0], "call": 1}
    code, text = run_with_fault(3, fault, ["--ranks-per-node", "1"], tmp_path)
    assert code == 1 and "rank 1 was lost before training began; start the job again" in text


@pytest.mark.jobs
@pytest.mark.long
def test_a_mistake_of_one_rank_after_a_loss_ends_the_job_at_once(tmp_path):
    at = {"at": PLACES["step"][0], "side": "before", "mark": str(tmp_path / "mark")}
    faults = [
        {**at, "rank": 0, "call": 8, "what": "kill"},
        # A step of the job that goes on.
        {**at, "rank": 2, "call": 20, "what": "mistake"},
    ]
    flags = [*SMALL, *CONTINUE, "--ranks-per-node", "1", "--run-dir", "run"]
    job = start(3, [FAULTY, json.dumps(faults), *flags], tmp_path)
    text, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1, text
    assert "node 0 lost" in text and "a mistake on purpose" in text


@pytest.mark.jobs
@pytest.mark.long
def test_below_the_least_number_of_nodes_it_ends_with_a_checkpoint(tmp_path):
    fault = {"rank": 1, "at": PLACES["step"][0], "call": 8}
    flags = ["--ranks-per-node", "1", "--min-nodes", "2"]
    code, text = run_with_fault(2, fault, flags, tmp_path)
    assert code == 75, text
    assert "stopped by node 1 lost: --min-nodes: go on with --resume" in text
    assert list((tmp_path / "run/checkpoints").glob("*-iteration-3-*"))
    flags = ["--run-dir", "run", "--model", "faulty:noisy", "--on-node-loss", "stop"]
    assert train(1, ["--resume", *flags], tmp_path).returncode == 0
    assert_whole(tmp_path / "run")


@pytest.mark.jobs
@pytest.mark.long
def test_a_node_lost_as_the_time_limit_comes_costs_no_work(tmp_path, monkeypatch):
    """The others leave with a checkpoint, where a job that has just begun would be refused."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 150))
    flags = [*SMALL, *CONTINUE, "--outer-iterations", "9000", "--ranks-per-node", "1"]
    job = start(2, ["-m", "prunex_mpi.train", *flags, "--run-dir", "run"], tmp_path)
    kill_rank(tmp_path / "run", 1, job)
    kill_rank(tmp_path / "run", 0, job, signal.SIGUSR1)
    text, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 75, text
    assert "node 1 lost: 1 nodes" in text and "stopped by SIGUSR1: go on with" in text
    assert list((tmp_path / "run/checkpoints").glob("*-iteration-*"))


@pytest.mark.jobs
@pytest.mark.long
def test_without_a_loss_no_bit_is_another(tmp_path):
    for name, flags in (("stop", []), ("continue", CONTINUE)):
        flags = [*SMALL, "--ranks-per-node", "1", "--run-dir", name, *flags]
        job = start(2, ["-m", "prunex_mpi.train", *flags], tmp_path)
        job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0
    assert repeatable_metrics(tmp_path / "stop") == repeatable_metrics(tmp_path / "continue")


@pytest.mark.jobs
@pytest.mark.long
def test_a_node_of_two_goes_on_alone_and_has_the_other_one_again(tmp_path):
    """The launcher starts the job again with the lost process, from a checkpoint of the one."""
    length = 2000
    flags = [*SMALL, *CONTINUE, "--outer-iterations", str(length), "--ranks-per-node", "1"]
    flags += ["--evaluate-every", str(length), "--run-dir", "run"]
    words = [sys.executable, "-m", "prunex_mpi.elastic", "--hosts", "localhost:2"]
    words += ["--regrow-after", "1", "--", *with_ulfm(), "--host", "{hosts}", "-n", "{ranks}"]
    words += [sys.executable, "-m", "prunex_mpi.train", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(words, cwd=tmp_path, env=environment(), **pipes)
    kill_rank(tmp_path / "run", 1, job)
    text, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, text
    lost, again = map(json.loads, (tmp_path / "run/nodes.jsonl").read_text().splitlines())
    assert lost["lost_ranks"] == [1] and lost["ranks"] == 1
    assert again["ranks"] == 2 and again["lost_iterations"] == 0
    found = [line["iteration"] for line in repeatable_metrics(tmp_path / "run")]
    assert found == list(range(1, length + 1))


@pytest.mark.faults
@pytest.mark.jobs
def test_drawn_losses(tmp_path, request):
    """A loss in any place, of a third of them with another one as the rest recover: no hang, and
    the run comes to its end, or says why not and goes on with --resume.
    """
    wanted, seed = request.config.getoption("fault_trials"), request.config.getoption("fault_seed")
    if not wanted:
        pytest.skip("a campaign needs --fault-trials N")
    for number in range(wanted):
        draw = random.Random(seed + number)
        folder = tmp_path / str(number)
        folder.mkdir()
        place = draw.choice([*PLACES, "recovery", "recovery"])
        ranks, each = draw.choice([(2, 1), (3, 1), (4, 2), (3, 2)])
        fault = {"rank": draw.randrange(ranks), "call": draw.choice([1, 1, 2, 3, 4, 6])}
        fault |= {"side": draw.choice(["before", "after"]), "what": "kill"}
        fault["mark"] = str(folder / "mark")
        fault["at"], flags = "prunex_mpi.run.kept:put_common", ["--outer-iterations", "60"]
        if place != "recovery":
            fault["at"], flags = PLACES[place]
        if place in ("freeze", "removal", "recovery", "end"):
            # It happens once.
            fault["call"] = 1
        flags = [*SMALL, *CONTINUE, "--ranks-per-node", str(each), *flags, "--run-dir", "run"]
        began = time.monotonic()
        job = start(ranks, [FAULTY, json.dumps(fault), *flags], folder)
        if place == "recovery":
            kill_rank(folder / "run", draw.choice(sorted({*range(ranks)} - {fault["rank"]})), job)
        text, _ = job.communicate(timeout=LIMIT_S)
        found = summary(folder / "run") if (folder / "run/summary.json").exists() else {}
        struck = (folder / "mark").exists()
        print(f"{number} {place} {ranks}/{each} rank {fault['rank']} {fault['side']}", end=" ")
        print(f"call {fault['call']}: code {job.returncode}, {found.get('status')}", end=", ")
        print(f"{'' if struck else 'not '}struck, {time.monotonic() - began:.0f} s", flush=True)
        lines = (folder / "run/metrics.jsonl").exists() and repeatable_metrics(folder / "run")
        if found.get("status") == "completed":
            length = 60 if place == "recovery" else ITERATIONS
            assert [line["iteration"] for line in lines] == list(range(1, length + 1)), text
        elif not (place == "recovery" and struck and -(-ranks // each) == 2 and not found):
            # Else nobody may be left to say so, and mpirun says nothing of it.
            told = "lost before training began", "stopped by"
            assert job.returncode and any(words in text for words in told), text
