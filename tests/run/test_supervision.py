"""The course of a run in one process: going back, time limits, what is complete, what it costs."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beats import count_closely
from image_folders import write_folder
from launch import repeatable_metrics
from safetensors.torch import load_file

from mpi4py import MPI

from prunex_mpi import train
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm import preemption
from prunex_mpi.config.resolve import make
from prunex_mpi.core import evaluation, loop
from prunex_mpi.data import image_files
from prunex_mpi.methods import per_step
from prunex_mpi.run import job, supervision
from prunex_mpi.run.start import look_at_model
from prunex_mpi.run.supervision import Checkpoints

pytestmark = pytest.mark.usefixtures("failing_instead_of_aborting")
MODEL = ("--model", "odd_models:small")
SMALL = [
    *(*MODEL, "--dataset", "synthetic", "--image-size", "8"),
    *("--train-samples", "64", "--test-samples", "16", "--batch-size", "8"),
    *("--outer-iterations", "6", "--local-steps", "2"),
]


def run(path: Path, *flags: str) -> int:
    return train.main([*SMALL, "--run-dir", str(path), *flags])


def status(path: Path) -> str:
    return json.loads((path / "summary.json").read_text())["status"]


def test_a_consensus_that_is_not_finite_enters_no_checkpoint(tmp_path, monkeypatch, capfd):
    """Nothing is evaluated in the iteration whose exchange overflows."""
    real, spoilt = supervision.checkpoint.save, []
    due = Checkpoints.due

    def overflow(self, iteration: int) -> bool:
        if iteration == 3 and not spoilt:
            spoilt.append(contexts[0].state.z)
            contexts[0].state.z[0] = torch.inf
        return due(self, iteration)

    def save(topology, files, context) -> None:
        assert torch.isfinite(context.state.z).all()
        contexts.append(context)
        real(topology, files, context)

    contexts: list = []
    monkeypatch.setattr(supervision.checkpoint, "save", save)
    monkeypatch.setattr(Checkpoints, "due", overflow)
    assert run(tmp_path / "run", "--checkpoint-every", "1", "--evaluate-every", "6") == 1
    assert spoilt
    assert "weights are not finite after outer iteration 3" in capfd.readouterr().err


def test_a_loss_that_explodes_is_a_divergence(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(evaluation, "DIVERGED", 0.5)
    assert run(tmp_path / "run") == 1
    assert "is 0.5 times the first iteration's or more" in capfd.readouterr().err


@pytest.mark.parametrize(("method", "driver"), [("prunex", evaluation), ("dense", per_step)])
def test_what_was_trained_before_may_lose_more_than_at_first(
    tmp_path, monkeypatch, capfd, method, driver
):
    real, losses = evaluation.check_divergence, []

    def refuse(topology, context, loss: float) -> None:
        if losses:
            context.state.position.first_loss = 0.002
        losses.append(loss)
        real(topology, context, loss)

    monkeypatch.setattr(driver, "check_divergence", refuse)
    flags = ["--method", method, "--outer-iterations", "3"]
    assert run(tmp_path / "run", *flags) == 0
    assert min(losses) > 10 * 0.002
    losses.clear()
    monkeypatch.setattr(evaluation, "DIVERGED", 0.1)
    assert run(tmp_path / "other", *flags) == 1
    assert "is 0.1 times that of guessing or more" in capfd.readouterr().err


def test_ctrl_c_leaves_with_a_checkpoint(tmp_path, monkeypatch, capfd):
    real = evaluation.check_divergence

    def interrupt(topology, context, loss: float) -> None:
        if context.state.position.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
        real(topology, context, loss)

    monkeypatch.setattr(evaluation, "check_divergence", interrupt)
    before = signal.getsignal(signal.SIGINT)
    assert run(tmp_path / "run", "--outer-iterations", "60") == 75
    assert signal.getsignal(signal.SIGINT) == before
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary == {"status": "preempted", "reason": "SIGINT"}
    assert [*(tmp_path / "run/checkpoints").iterdir()]
    assert "leaving with a checkpoint; Ctrl-C again ends at once" in capfd.readouterr().err


def test_a_run_is_not_left_with_what_has_diverged(tmp_path, monkeypatch, capfd):
    """Asked to leave in the steps that diverge, it ends as it would have."""
    real, left = loop.step_optimizer_, [1]

    def step(context) -> None:
        real(context)
        position = context.state.position
        if left[0] and (position.iteration, position.step) == (3, 0):
            left[0] = 0
            context.state.theta.fill_(float("nan"))
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(loop, "step_optimizer_", step)
    monkeypatch.setattr(preemption, "PERIOD_S", 0.0)
    code = run(tmp_path / "run", "--checkpoint-every", "1", "--local-steps", "4")
    assert "not finite in phase local of outer iteration 3" in capfd.readouterr().err
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert (code, names[-1]) == (1, "000002-iteration-3-step-0")
    assert not (tmp_path / "run/summary.json").exists()


def test_loading_data_is_progress(tmp_path, monkeypatch, capfd):
    write_folder(tmp_path, train=14, test=1)
    (tmp_path / "train/dog").mkdir()
    real = image_files.as_uint8

    def slow(*words: object, **options: object) -> torch.Tensor:
        time.sleep(0.2)
        return real(*words, **options)

    monkeypatch.setattr(image_files, "as_uint8", slow)
    count_closely(monkeypatch)
    flags = ["--dataset", "imagefolder", "--data-dir", str(tmp_path), "--timeout", "1"]
    flags += ["--train-samples", "0", "--test-samples", "0", "--outer-iterations", "3"]
    assert run(tmp_path / "run", *flags) == 0
    text = capfd.readouterr().err
    assert "no progress" not in text
    assert "3 classes; left out: train/dog" in text


def test_batches_larger_than_the_data_are_told(tmp_path, capfd):
    assert run(tmp_path / "run", "--batch-size", "64") == 0
    assert "batch-size" not in capfd.readouterr().err
    assert run(tmp_path / "other", "--batch-size", "100000") == 0
    assert "batch-size 100000: a rank has 64 images" in capfd.readouterr().err


def test_files_of_a_run_have_the_rights_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        assert run(tmp_path / "run", "--checkpoint-every", "2", "--trace") == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"state.safetensors", "rank-00000.safetensors"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o640" for path in files
    }


@pytest.mark.usefixtures("leaving_early")
def test_a_time_limit_leaves_and_the_run_goes_on_exactly(tmp_path, capfd):
    assert run(tmp_path / "whole") == 0
    assert run(tmp_path / "run", "--time-limit", "1", "--trace") == 75
    assert status(tmp_path / "run") == "preempted"
    again = ["--resume", "--run-dir", str(tmp_path / "run"), *MODEL, "--time-limit", "0", "--trace"]
    assert train.main(again) == 0
    assert "versions of the software" not in capfd.readouterr().err
    assert status(tmp_path / "run") == "completed"
    assert repeatable_metrics(tmp_path / "run") == repeatable_metrics(tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "run/ranks.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # The first row, and the first of the job that went on where it was.
    named = [row["iteration"] for row in rows if "hosts" in row]
    assert len(named) <= 2 and 1 in named
    assert json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "whole/trace.json").exists()
    first, second = (load_file(tmp_path / x / "state.safetensors") for x in ("whole", "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_complete_run_is_left_alone(tmp_path, capfd):
    assert run(tmp_path / "run", "--resume") == 0
    assert "there is no checkpoint: the run begins" in capfd.readouterr().err
    before = (tmp_path / "run/summary.json").read_bytes()
    assert run(tmp_path / "run", "--resume") == 0
    assert "nothing left to do" in capfd.readouterr().err
    assert (tmp_path / "run/summary.json").read_bytes() == before


def test_a_run_that_had_converged_only_writes_what_is_missing(tmp_path):
    """Its job ended between the last checkpoint and summary.json."""
    flags = ["--freeze-iteration", "0", "--warmup-iterations", "1", "--keep-ramp-iterations", "1"]
    flags += ["--eps-abs", "1000", "--eps-rel", "1000"]
    assert run(tmp_path, *flags) == 0
    assert status(tmp_path) == "converged"
    before = repeatable_metrics(tmp_path), (tmp_path / "state.safetensors").read_bytes()
    (tmp_path / "summary.json").unlink()
    assert train.main([*MODEL, "--run-dir", str(tmp_path), "--resume"]) == 0
    assert status(tmp_path) == "converged"
    assert (repeatable_metrics(tmp_path), (tmp_path / "state.safetensors").read_bytes()) == before


def test_automatic_checkpoints_cost_little(monkeypatch):
    """On a clock of our own: an iteration takes 7 s, a checkpoint 2 s, so 100 s lie between two."""
    now = [0.0]
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now[0])

    def save(topology: None, files: None, context: Any) -> None:
        now[0] += 2.0

    monkeypatch.setattr(supervision.checkpoint, "save", save)
    checkpoints, written = Checkpoints(None, None, "auto", ReceivedSignal()), []
    for iteration in range(1, 1001):
        now[0] += 7.0
        if checkpoints.due(iteration):
            position = SimpleNamespace(iteration=iteration + 1)
            checkpoints.save(SimpleNamespace(state=SimpleNamespace(position=position)))
            written.append(iteration)
    assert written[0] == 1
    assert checkpoints.seconds == 2.0 * checkpoints.count
    assert 0.015 < checkpoints.seconds / now[0] < 0.02


@pytest.mark.parametrize(("every", "expected"), [("off", []), ("3", [3, 6, 9]), ("4", [4, 8])])
def test_checkpoints_are_due_as_asked(every, expected):
    checkpoints = Checkpoints(None, None, every, ReceivedSignal())
    due = [i for i in range(1, 10) if checkpoints.due(i)]
    assert due == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "resnet8", "--stem", "imagenet"], "--stem imagenet does not fit resnet8"),
        (["--model", "odd_models:none"], "has no function 'none'"),
        (["--model", "alexnet"], "does not fit 10 classes of 8x8 images"),
        (["--loss", "json:none"], "loss json:none"),
    ],
)
def test_model_and_loss_are_looked_at_before_the_data_are_loaded(
    tmp_path, monkeypatch, capfd, flags, words
):
    monkeypatch.setattr(job, "load_dataset", lambda *_: pytest.fail("the data were loaded"))
    assert run(tmp_path / "run", *flags) == 2
    assert words in capfd.readouterr().err


def test_looking_at_the_model_draws_no_random_numbers():
    settings = make(model="resnet8", dataset="digits", seed=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    look_at_model(MPI.COMM_SELF, settings, {}, Heartbeat())
    assert torch.equal(torch.rand(3), expected)


def test_tasks_of_slurm_that_do_not_find_each_other_are_refused(tmp_path, monkeypatch, capfd):
    """N silent singletons would train otherwise, each by itself."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    assert run(tmp_path / "run") == 2
    assert "Slurm started 2 tasks" in capfd.readouterr().err
