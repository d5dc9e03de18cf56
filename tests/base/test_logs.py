"""Log records, progress lines and the files of a run directory."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prunex_mpi.base import files
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.logs import Progress, RunDirectory, format_table, log, set_up_logging


@pytest.fixture(autouse=True)
def _restore_the_logger() -> Iterator[None]:
    saved = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = saved[:2]
    log.setLevel(saved[2])


def record(iteration: int, accuracy: float | None = 0.9512, frozen: bool = False) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "train_loss": 0.25,
        "test_accuracy": accuracy,
        "density": 0.5,
        "bytes": {"payload": 3 * 2**20},
        "seconds": {"total": 1.5},
        "frozen": frozen,
    }


def test_records_name_the_rank_and_others_say_only_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging(0, 4)
    set_up_logging(0, 4)
    log.info("started")
    set_up_logging(3, 4)
    log.info("not shown")
    log.warning("trouble")
    assert capsys.readouterr().err == "[0/4] started\n[3/4] trouble\n"
    assert not log.propagate


def test_progress_is_one_line_per_iteration_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging(0, 2)
    progress = Progress(8, "auto", 0)
    progress.update(record(1, accuracy=None))
    progress.update(record(2, frozen=True))
    progress.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "[0/2] iteration 1/8: loss 0.2500, accuracy -, density 0.500, payload 3.00 MiB, 1.50 s"
    )
    assert "iteration 2/8" in second
    assert "accuracy 95.12 %" in second
    assert second.endswith(", frozen")


@pytest.mark.parametrize(("mode", "rank"), [("off", 0), ("auto", 1)])
def test_progress_is_silent_when_off_and_on_other_ranks(
    mode: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(0, 2)
    progress = Progress(8, mode, rank)
    progress.update(record(1))
    progress.close()
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    set_up_logging(0, 1)
    progress = Progress(2, "auto", 0)
    for iteration in (1, 2):
        progress.update(record(iteration))
    progress.close()
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "accuracy 95.12 %" in shown
    assert "[0/1] iteration" not in shown


def test_run_directory_is_made_with_its_configuration_and_grows_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    run = RunDirectory(path, 'model = "resnet20"\n# θ\n')
    assert (path / "config.toml").read_text(encoding="utf-8") == 'model = "resnet20"\n# θ\n'
    run.append("metrics.jsonl", [{"iteration": 1}])
    run.append("metrics.jsonl", [{"iteration": 2}, {"iteration": 3, "test_accuracy": None}])
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert not (path / "summary.json").exists()


def test_an_existing_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    RunDirectory(tmp_path, "seed = 1\n")
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory(tmp_path, "seed = 2\n")
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == "seed = 1\n"


@pytest.mark.parametrize("tail", ["file", "file/run", "x" * 300])
def test_a_path_that_cannot_be_a_directory_is_a_user_error(tail: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(UserError, match=r"--run-dir .*; choose another") as caught:
        RunDirectory(tmp_path / tail, "")
    assert "\n" not in str(caught.value)


def test_summary_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path, "")
    run.write_summary({"status": "completed", "iterations": 3})
    summary = tmp_path / "summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["iterations"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml", "lock", "summary.json"]

    def killed(_source: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    summary.unlink()
    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_summary({"status": "completed"})
    assert not os.path.exists(summary)


def test_table_is_aligned() -> None:
    assert format_table([("a", "1"), ("long name", "2")]) == "a          1\nlong name  2"


def test_logger_is_the_packages() -> None:
    assert log is logging.getLogger("prunex_mpi")
