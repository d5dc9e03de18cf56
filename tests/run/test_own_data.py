"""Runs on data sets of the user's: what built-in ones train, and ranks that find other data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import write_folder
from jobs import run_folder, run_job_here
from launch import repeatable_metrics
from nodes import WORLD
from safetensors.torch import load_file
from small_runs import PRUNING

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.cli import parse as resume
from prunex_mpi.config.resolve import make
from prunex_mpi.tools.evaluate_network import evaluate
from prunex_mpi.tools.evaluate_options import parse

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]
SMALL: dict[str, Any] = {
    **PRUNING,
    "model": "odd_models:small",
    "outer_iterations": 3,
    "local_steps": 3,
    "batch_size": 4,
    "progress": "off",
}


def run(folder: Path, name: str, **changes: Any) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Return the metrics and the weights of a run."""
    assert run_job_here(make(**SMALL, run_dir=str(folder / name), **changes)) == 0
    WORLD.Barrier()
    return repeatable_metrics(folder / name), load_file(folder / name / "state.safetensors")


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.mpi
def test_own_files_train_what_their_folder_trains_and_are_evaluated():
    with run_folder() as folder:
        if WORLD.rank == 0:
            write_folder(folder / "data")
        WORLD.Barrier()
        where = {"data_dir": str(folder / "data"), "image_size": 6, "data_mode": "stream"}
        plain = run(folder, "plain", dataset="imagefolder", **where)
        assert_same(plain, run(folder, "own", dataset="own_data:from_files", **where))

        def found(*flags: str) -> dict[str, Any]:
            argv = ["--json", str(folder / "found.json"), "--model", "odd_models:small", *flags]
            assert evaluate(WORLD, parse(argv), Heartbeat()) == 0
            WORLD.Barrier()
            return json.loads((folder / "found.json").read_text())

        of_folder = found(str(folder / "plain"))
        assert of_folder == found(str(folder / "own"), "--dataset", "own_data:from_files")
        assert of_folder == found(str(folder / "plain"), "--dataset", "own_data:from_files")


@pytest.mark.mpi
def test_a_run_goes_on_with_the_images_it_began_with_alone():
    with run_folder() as folder:
        if WORLD.rank == 0:
            write_folder(folder / "data")
        WORLD.Barrier()
        where = {"data_dir": str(folder / "data"), "image_size": 6, "dataset": "imagefolder"}
        run(folder, "run", **where, checkpoint_every="2")
        again = resume(["--resume", "--run-dir", str(folder / "run")])
        if WORLD.rank == 0:
            (folder / "run/summary.json").unlink()
            first = folder / "data/train/ant/000.png"
            first.rename(first.with_name("020.png"))
        WORLD.Barrier()
        with pytest.raises(UserError, match="the data were others then"):
            run_job_here(again)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raising_on_rank_1", UNREADABLE, "raising_on_rank_1 failed with"),
        ("shorter_on_rank_1", USAGE, "of own_data:shorter_on_rank_1 differ between ranks"),
        ("other_labels_on_rank_1", USAGE, "of own_data:other_labels_on_rank_1 differ between"),
    ],
)
def test_what_one_rank_finds_ends_all(name, code, words):
    with run_folder() as folder, pytest.raises(UserError) as caught:
        run(folder, "run", dataset=f"own_data:{name}", train_samples=4)
    assert words in str(caught.value)
    assert caught.value.exit_code == code
