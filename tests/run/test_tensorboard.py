"""The metrics of a run as TensorBoard reads them."""

import importlib.util
import json
from pathlib import Path

import pytest

from prunex_mpi import train
from prunex_mpi.run.directory import Tensorboard, scalars

SMALL = [
    *("--model", "odd_models:small", "--dataset", "synthetic", "--image-size", "8"),
    *("--train-samples", "64", "--test-samples", "16", "--batch-size", "8"),
    *("--outer-iterations", "4", "--local-steps", "2", "--progress", "off"),
]


def shown(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each scalar."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_numbers_have_the_names_of_their_places() -> None:
    record = {
        "iteration": 3,
        "seconds": {"local": 1.5, "total": 2},
        "frozen": True,
        "test_loss": None,
        "residuals": {"intra_dual": None},
        "lr": 0.25,
    }
    assert dict(scalars(record)) == {
        "seconds/local": 1.5,
        "seconds/total": 2.0,
        "frozen": 1.0,
        "lr": 0.25,
    }


def test_what_is_done_again_replaces_what_was(tmp_path: Path) -> None:
    board = Tensorboard(tmp_path, 1)
    for iteration in (1, 2, 3):
        board.add({"iteration": iteration, "lr": 1.0})
    board.rewind(2)
    board.add({"iteration": 2, "lr": 0.5})
    board.close()
    assert shown(tmp_path) == {"lr": [(1, 1.0), (2, 0.5)]}


def test_a_run_shows_its_metrics(tmp_path: Path) -> None:
    assert train.main([*SMALL, "--run-dir", str(tmp_path / "run"), "--tensorboard"]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    wanted: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, lines):
        for name, value in scalars(record):
            wanted.setdefault(name, []).append((record["iteration"], value))
    found = shown(tmp_path / "run")
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        # In float32.
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6)


def test_without_the_package_it_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "tensorboard" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert train.main([*SMALL, "--run-dir", str(tmp_path / "run"), "--tensorboard"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert 'needs tensorboard: pip install "prunex_mpi[report]"' in errors[0]
    assert not (tmp_path / "run").exists()
