"""The training program as its users start it: files, table, exit codes, errors on any rank."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import environment, launcher, repeatable_metrics, start, train

from mpi4py import MPI

from prunex_mpi.base.files import tomllib
from prunex_mpi.base.record_keys import RESIDUALS
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images

pytestmark = pytest.mark.jobs

# Reading the digits takes each rank a second or two: scikit-learn is large.
SYNTHETIC = ["--dataset", "synthetic", "--image-size", "8", "--train-samples", "1024"]
SYNTHETIC += ["--test-samples", "64"]
SMALL = [*SYNTHETIC, "--outer-iterations", "2", "--local-steps", "2"]
TRAIN = [sys.executable, "-m", "prunex_mpi.train"]
QUICK = ["--model", "resnet8", "--outer-iterations", "8", "--ranks-per-node", "2", *SYNTHETIC]
RECORD = {
    *("iteration", "seconds", "bytes", "density", "mask_drift", "replica_distance", "frozen"),
    *("residuals", "rho1", "rho2", "lr", "data_wait_seconds"),
    *("train_loss", "test_loss", "test_accuracy"),
}
PHASES = {"local", "intra", "project", "inter", "dual", "evaluate", "setup", "total"}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run of 4 ranks as 2x2, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("train")
    result = train(4, [*QUICK, "--run-dir", "run"], folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_run_directory_is_complete(finished):
    folder, _ = finished
    records = read_lines(folder / "run/metrics.jsonl")
    assert [r["iteration"] for r in records] == list(range(1, 9))
    assert all(set(r) == RECORD for r in records)
    assert all(set(r["seconds"]) == PHASES for r in records)
    assert set(records[0]["residuals"]) == set(RESIDUALS)
    config = tomllib.loads((folder / "run/config.toml").read_text())
    assert config["model"] == "resnet8"
    assert {"torch", "mpi", "python", "prunex_mpi"} <= set(config["versions"])
    layers = read_lines(folder / "run/layers.jsonl")
    assert len(layers) == 8 * len([r for r in layers if r["iteration"] == 1])
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["nodes"] == [2, 2]


def test_bytes_are_those_of_the_tensors(finished):
    """Payload, dense and intra from the model's shapes, not from the program's own counters."""
    folder, _ = finished
    records = read_lines(folder / "run/metrics.jsonl")
    model = build_model("resnet8", Images(8, 10))
    parameters = sum(p.numel() for p in model.parameters())
    statistics = sum(b.numel() for n, b in model.named_buffers() if "running" in n)
    pruned = sum(
        p.numel() // 2 for n, p in model.named_parameters() if p.dim() == 4 and n != "conv1.weight"
    )
    dense = 4 * (parameters + statistics)
    assert {r["bytes"]["dense"] for r in records} == {dense}
    assert records[0]["bytes"]["payload"] == dense
    last = records[-1]
    assert last["frozen"] and last["density"] == 0.5
    assert last["bytes"]["payload"] == dense - 4 * pruned
    assert last["bytes"]["mask"] == 0
    # Between two leaders an Allreduce sends its operand once each way.
    assert last["bytes"]["sent"] == last["bytes"]["payload"]
    # Frozen: T gradients, the statistics, and the payload's broadcast. With gradients averaged at
    # each step all ranks of a node hold the same theta.
    steps = round(0.25 * (256 // 32))
    inside = 4 * steps * parameters + 4 * statistics + last["bytes"]["payload"]
    assert last["bytes"]["intra"] == inside


def test_closing_table_and_lines(finished):
    _, result = finished
    for words in ("test accuracy", "parameters", "whole network", "seconds per phase", "results"):
        assert words in result.stdout
    assert "2 nodes, 4 ranks" in result.stderr
    assert result.stderr.count("iteration 8/8") == 1
    assert "not pruned: conv1.weight" in result.stderr


@pytest.mark.any_mpi
@pytest.mark.long
def test_saved_config_repeats_the_run_exactly(finished):
    folder, _ = finished
    result = train(4, ["--config", "run/config.toml", "--run-dir", "again"], folder)
    assert result.returncode == 0, result.stderr
    assert repeatable_metrics(folder / "run") == repeatable_metrics(folder / "again")


def assert_refused(result, code: int, words: str) -> None:
    """One line of ours, the right code, no traceback; the launcher may add its own remarks."""
    assert result.returncode == code, result.stdout + result.stderr
    ours = [line for line in result.stderr.splitlines() if "prunex_mpi.train: error:" in line]
    assert len(ours) == 1, result.stderr
    assert words in ours[0]
    assert "Traceback" not in result.stderr


def test_exception_on_one_rank_ends_the_job(tmp_path):
    flags = ["--model", "odd_models:fails_on_rank_1", "--local-steps", "3"]
    arguments = [*SMALL, *flags, "--run-dir", "run"]
    result = train(2, arguments, tmp_path)
    assert result.returncode != 0
    assert "broken on purpose" in result.stderr
    assert "in phase local of outer iteration 1, step 2: ValueError" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.any_mpi
@pytest.mark.long
def test_what_cannot_compile_says_so_before_it_trains(tmp_path):
    places = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    result = train(2, [*QUICK, "--compile", "--run-dir", "run"], tmp_path, **places)
    assert_refused(result, 2, "compile: torch.compile fails on ")


@pytest.mark.long
def test_a_signal_that_the_launcher_passes_on_leaves_a_checkpoint(tmp_path):
    """Ctrl-C with MPICH; with Open MPI, which ends its ranks on that, SIGUSR1."""
    by_open_mpi = "Open MPI" in MPI.Get_library_version()
    asked = signal.SIGUSR1 if by_open_mpi else signal.SIGINT
    flags = [*QUICK[:2], "--outer-iterations", "500", "--local-steps", "2", "--run-dir", "run"]
    job = start([*launcher(), "-n", "2", *TRAIN, *flags], tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    limit = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < limit:
        time.sleep(0.1)
    job.send_signal(asked)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 75, out
    assert f"stopped by {asked.name}: go on with --resume" in out
    assert json.loads((tmp_path / "run/summary.json").read_text())["reason"] == asked.name


@pytest.mark.any_mpi
@pytest.mark.long
def test_digits_train_above_95_percent(tmp_path):
    """The quickstart: 4 ranks on 2 virtual nodes, half of the channels, no other flags."""
    result = train(4, ["--ranks-per-node", "2", "--run-dir", "run"], tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["test_accuracy"] > 0.95
    assert summary["density"] == 0.5


@pytest.mark.any_mpi
def test_a_signal_before_torch_and_mpi_are_there_leaves_a_checkpoint(tmp_path):
    command = [TRAIN[0], "-X", "importtime", *TRAIN[1:], *SMALL]
    command += ["--model", "resnet8-w4", "--run-dir", "run", "--outer-iterations", "500"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes)
    for line in job.stderr:
        if "prunex_mpi.base.signals" in line:
            break
    time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    text = job.communicate(timeout=120)[1]
    assert job.returncode == 75, text
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"
    assert list((tmp_path / "run/checkpoints").iterdir())
