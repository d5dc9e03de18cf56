"""Runs that become longer than they were to be."""

import json
from pathlib import Path

import pytest
from jobs import metrics_of, run_folder, run_job_here
from nodes import WORLD
from small_runs import COMMON, PRUNING

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import tomllib
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make, to_toml
from prunex_mpi.run import supervision
from prunex_mpi.run.directory import RunDirectory, same_run
from prunex_mpi.run.start import other_length
from prunex_mpi.settings.fields import Settings

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]


def settings_of(folder: Path, name: str, **changes: object) -> Settings:
    run = {"run_dir": str(folder / name), "progress": "off"}
    return make(**{**COMMON, **run, **changes})


def longer(folder: Path, name: str, length: int) -> Settings:
    flags = ["--resume", "--run-dir", str(folder / name), "--outer-iterations", str(length)]
    return parse(flags)


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
def test_a_complete_run_becomes_the_one_that_was_longer_from_the_start(capfd):
    with run_folder() as folder:
        assert run_job_here(settings_of(folder, "whole", method="dense", outer_iterations=4)) == 0
        assert run_job_here(settings_of(folder, "run", method="dense", outer_iterations=2)) == 0
        before = capfd.readouterr().out
        assert run_job_here(longer(folder, "run", 4)) == 0
        if WORLD.rank == 0:
            # The last job knows the others' outer iterations alone.
            records = (folder / "run/metrics.jsonl").read_text().splitlines()
            seconds = sum(json.loads(line)["seconds"]["total"] for line in records)
            words = f"{seconds:.1f} in the outer iterations of all jobs; "
            assert words in capfd.readouterr().out and "of all jobs" not in before
        assert metrics_of(folder / "run/metrics.jsonl") == metrics_of(
            folder / "whole/metrics.jsonl"
        )
        states = [(folder / name / "state.safetensors").read_bytes() for name in ("run", "whole")]
        assert states[0] == states[1]
        config = tomllib.loads((folder / "run/config.toml").read_text())
        assert config["outer-iterations"] == 4
        # The length is the run's now, and nothing is left to do.
        assert run_job_here(parse(["--resume", "--run-dir", str(folder / "run")])) == 0
        assert len(metrics_of(folder / "run/metrics.jsonl")) == 4
        WORLD.Barrier()


@pytest.mark.mpi
def test_the_rest_has_the_learning_rate_of_the_longer_run_and_masks_stay():
    with run_folder() as folder:
        changes = {**PRUNING, "lr_schedule": "cosine", "warmup_ratio": 0.0}
        assert run_job_here(settings_of(folder, "run", **changes)) == 0
        assert run_job_here(longer(folder, "run", 6)) == 0
        whole = settings_of(folder, "whole", **changes, outer_iterations=6)
        assert run_job_here(whole) == 0
        read = [
            [
                json.loads(line)
                for line in (folder / name / "metrics.jsonl").read_text().splitlines()
            ]
            for name in ("run", "whole")
        ]
        rates = [[record["lr"] for record in records] for records in read]
        assert rates[0][3:] == rates[1][3:] and rates[0][2] < rates[0][3]
        assert all(r["frozen"] for r in read[0][2:])
        assert len({r["density"] for r in read[0][2:]}) == 1
        WORLD.Barrier()


@pytest.mark.mpi
def test_without_a_checkpoint_a_complete_run_stays_as_it_is(monkeypatch):
    with run_folder() as folder:
        settings = settings_of(folder, "run", method="dense", checkpoint_every="off")
        assert run_job_here(settings) == 0
        files = ["config.toml", "metrics.jsonl", "summary.json"]
        before = [(folder / "run" / name).read_text() for name in files]
        with pytest.raises(UserError, match=r"no checkpoint to go on from; .*--init-from"):
            run_job_here(longer(folder, "run", 4))
        assert [(folder / "run" / name).read_text() for name in files] == before

        # One that can't be written costs a complete run nothing, not even room.
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
        WORLD.Barrier()


@pytest.mark.mpi
def test_a_job_that_is_ended_before_its_summary_has_its_last_checkpoint(monkeypatch):
    """Else the run would be complete, and could not become longer from its end."""
    with run_folder() as folder:

        def ended(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "write_summary", ended)
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
        WORLD.Barrier()


def test_checkpoints_of_a_shorter_run_are_its_own_and_no_others():
    short, long = (to_toml(make(outer_iterations=n), {"torch": "2"}) for n in (16, 24))
    # Shares of another length were resolved to other counts.
    assert not same_run(short, long)
    grown = short.replace("outer-iterations = 16", "outer-iterations = 24")
    assert same_run(short, grown) and same_run(short, short)
    assert not same_run(grown, short)
    assert not same_run(short, grown.replace('method = "prunex"', 'method = "dense"'))
    assert not same_run("no TOML", grown)


def test_the_file_changes_once_the_run_has_been_restored(tmp_path):
    text = to_toml(make(outer_iterations=16), {})
    (tmp_path / "config.toml").write_text(text)
    files = RunDirectory(tmp_path, "", resume=True, length=24)
    assert (tmp_path / "config.toml").read_text() == text
    files.keep_length()
    assert "outer-iterations = 24\n" in (tmp_path / "config.toml").read_text()
    files.close()
    assert RunDirectory(tmp_path, "", resume=True, length=24).former_length == 0


def test_a_run_that_has_become_longer_may_be_given_its_shares_again(tmp_path):
    flags = ["--run-dir", str(tmp_path), "--freeze-iteration", "3/4", "--outer-iterations"]
    settings = parse([*flags, "16"])
    (tmp_path / "config.toml").write_text(to_toml(settings, {}))
    again = [*flags, "24", "--resume"]
    first = parse(again)
    files = RunDirectory(tmp_path, "", resume=True, length=24)
    files.keep_length()
    files.close()
    assert parse(again) == first and (first.outer_iterations, first.freeze_iteration) == (24, 12)
    assert same_run(to_toml(settings, {}), (tmp_path / "config.toml").read_text())
