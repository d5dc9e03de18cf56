"""The files of a run directory: held by one job, grown by lines, never half written."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from prunex_mpi.base import files
from prunex_mpi.base.errors import UserError
from prunex_mpi.run import directory
from prunex_mpi.run.directory import RunDirectory, check_run_dir, new_folder


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    name = str(tmp_path / "runs" / "20260101-000000-resnet20")
    found = [new_folder(name) for _ in range(3)]
    assert found == [name, f"{name}-2", f"{name}-3"]
    for path in found:
        RunDirectory(Path(path), "").close()
    (tmp_path / "file").touch()
    assert new_folder(str(tmp_path / "file" / "run")) == str(tmp_path / "file" / "run")


def test_what_would_be_refused_after_the_data_is_refused_before_and_makes_nothing(tmp_path):
    check_run_dir(tmp_path / "deep" / "run", False)
    check_run_dir(tmp_path, False)
    assert not list(tmp_path.iterdir())
    RunDirectory(tmp_path, "seed = 1\n").close()
    check_run_dir(tmp_path, True)
    for look in (lambda: check_run_dir(tmp_path, False), lambda: RunDirectory(tmp_path, "")):
        with pytest.raises(UserError, match="already holds a run"):
            look()
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == "seed = 1\n"


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    for resume in (False, True):
        RunDirectory(tmp_path, "seed = 1\n", resume).close()
    assert caplog.text.count("there are no locks on the disk of") == 2


def test_records_that_ranks_have_open_are_not_in_the_way_on_nfs(tmp_path, monkeypatch):
    def keep(name: str, *, dir_fd: int) -> None:
        os.rename(name, f".nfs-{name}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    run = RunDirectory(tmp_path, "")
    run.make_folder("heartbeats")
    (tmp_path / "heartbeats" / "rank-00000").touch()
    before = sorted(p.name for p in tmp_path.iterdir())
    with monkeypatch.context() as nfs:
        nfs.setattr(os, "unlink", keep)
        run.make_folder("heartbeats")
    assert not list((tmp_path / "heartbeats").iterdir())
    assert len(list(tmp_path.glob("**/.nfs-rank-00000"))) == 1
    # Once they are closed it is all gone.
    run.make_folder("heartbeats")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_summary_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "run"
    run = RunDirectory(path, "# θ\n")
    assert (path / "config.toml").read_text(encoding="utf-8") == "# θ\n"
    summary = path / "summary.json"
    assert not summary.exists()
    run.write_summary({"status": "completed", "iterations": 3})
    assert json.loads(summary.read_text(encoding="utf-8"))["iterations"] == 3
    assert sorted(p.name for p in path.iterdir()) == ["config.toml", "lock", "summary.json"]

    def killed(_source: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    summary.unlink()
    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_summary({"status": "completed"})
    assert not os.path.exists(summary)


@pytest.mark.parametrize("name", ["lock", "nodes.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_in_the_folder_of_a_run_is_refused(tmp_path, name, kind):
    """Opening a FIFO would wait for ever."""
    path = tmp_path / name
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    assert not directory.is_held(tmp_path)
    with pytest.raises((OSError, UserError), match=r"not a regular file|symbolic links"):
        RunDirectory(tmp_path, "").append(name, [{}])


def test_a_folder_in_place_of_a_file_is_told(tmp_path):
    (tmp_path / "diverged.json").mkdir()
    with pytest.raises(UserError, match=r"diverged.json is in the way: .*; move it away"):
        RunDirectory(tmp_path, "").rewind({})


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.toml"])
def test_a_link_in_a_run_directory_leads_nowhere(tmp_path, name):
    """In a folder that a group shares, anybody may have made it."""
    own, run = tmp_path / "own", tmp_path / "run"
    own.write_text("kept")
    run.mkdir()
    (run / name).symlink_to(own)
    with pytest.raises((OSError, UserError)):
        RunDirectory(run, "config").append("metrics.jsonl", [{"iteration": 1}])
    assert own.read_text() == "kept"


def test_what_is_cut_is_cut_through_no_link(tmp_path):
    (tmp_path / "own").write_text("kept")
    files = RunDirectory(tmp_path / "run", "config")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "own")
    with pytest.raises(UserError, match=r"metrics\.jsonl can't be cut"):
        files.rewind({})
    files.close()
    assert (tmp_path / "own").read_text() == "kept"
