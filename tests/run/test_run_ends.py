"""How a run ends: the length it has, its last checkpoint and its summary."""

import json
from pathlib import Path

import pytest
from jobs import metrics_of, run_folder, run_job_here
from nodes import WORLD
from small_runs import COMMON

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make
from prunex_mpi.run import directory, supervision
from prunex_mpi.run.start import other_length
from prunex_mpi.settings.fields import Settings

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]


def settings_of(folder: Path, name: str, **changes: object) -> Settings:
    run = {"run_dir": str(folder / name), "progress": "off"}
    return make(**{**COMMON, **run, **changes})


@pytest.mark.parametrize(
    ("changes", "steps", "per_epoch", "says"),
    [
        ({}, 3, 11, ""),
        ({}, 1, 5, "the run has 12.8 epochs and not 16"),
        ({}, 1, 1, "the run has 64 epochs and not 16"),
        ({"local_steps": 3}, 3, 1, ""),
        ({"method": "qsr"}, 1, 1, ""),
    ],
)
def test_whole_steps_that_make_another_length_are_told(changes, steps, per_epoch, says):
    line = other_length(make(dataset="synthetic", **changes), steps, per_epoch)
    assert says in line and bool(line) == bool(says)


@pytest.mark.mpi
def test_a_last_checkpoint_that_cannot_be_written_costs_a_complete_run_nothing(monkeypatch):
    with run_folder() as folder:

        def full(*_: object) -> None:
            assert (folder / "other/state.safetensors").exists()
            assert not (folder / "other/summary.json").exists()
            (folder / "other/checkpoints/1.partial").mkdir(parents=True, exist_ok=True)
            WORLD.Barrier()
            raise UserError("no room")

        monkeypatch.setattr(supervision.checkpoint, "save", full)
        settings = settings_of(folder, "other", method="dense", outer_iterations=1)
        assert run_job_here(settings) == 0
        WORLD.Barrier()
        assert not any((folder / "other/checkpoints").iterdir())
        totals = json.loads((folder / "other/summary.json").read_text())
        assert (totals["status"], totals["checkpoints"]["count"]) == ("completed", 0)


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_between_ranks_end_all():
    with run_folder() as folder:
        settings = settings_of(folder, "run", model="odd_models:differs_between_ranks")
        with pytest.raises(UserError, match="differ between ranks") as caught:
            run_job_here(settings)
        assert caught.value.exit_code == USAGE
        assert not (folder / "run/summary.json").exists()


@pytest.mark.mpi
def test_a_job_that_is_ended_before_its_summary_has_its_last_checkpoint(monkeypatch):
    """The next one goes on from it to the results."""
    with run_folder() as folder:

        def ended(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(directory, "write_json_durably", ended)
            with pytest.raises(UserError, match=r"summary.json can't be written: No space"):
                ways = {"method": "dense", "outer_iterations": 2, "checkpoint_every": "9"}
                run_job_here(settings_of(folder, "run", **ways))
        names = [path.name for path in (folder / "run/checkpoints").iterdir()]
        assert names == ["000001-iteration-3-step-0"]
        assert not (folder / "run/summary.json").exists()
        WORLD.Barrier()
        assert run_job_here(parse(["--resume", "--run-dir", str(folder / "run")])) == 0
        assert len(metrics_of(folder / "run/metrics.jsonl")) == 2
        totals = json.loads((folder / "run/summary.json").read_text())
        assert (totals["status"], totals["checkpoints"]["count"]) == ("completed", 1)
