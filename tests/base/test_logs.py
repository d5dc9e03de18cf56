"""Log records and progress lines."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from prunex_mpi.base.logs import Progress, log, set_up_logging


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


def test_logger_is_the_packages() -> None:
    assert log is logging.getLogger("prunex_mpi")
