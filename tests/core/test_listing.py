"""Class folders and tar files: each is read by one rank, and all know what is in all of them."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job_here
from nodes import WORLD, nodes_of
from picture_files import damage, write_folder, write_tars

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.core.listing import share_contents
from prunex_mpi.core.problem import load_dataset
from prunex_mpi.data import folders, tars
from prunex_mpi.settings.resolve import make

READERS = {"imagefolder": (folders, "read_names"), "webdataset": (tars, "read_headers")}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Return a folder of class folders and one of tar files, the same ones on all ranks."""
    root = Path(broadcast_text(WORLD, str(tmp_path)))
    if WORLD.rank == 0:
        write_tars(root / "tars", write_folder(root / "pictures", train=6, test=2))
    WORLD.Barrier()
    return {"imagefolder": root / "pictures", "webdataset": root / "tars"}


def told_by_all(mine: list[str]) -> list[str]:
    """Return what all ranks have noted, sorted."""
    texts = [broadcast_text(WORLD, json.dumps(mine), root) for root in range(WORLD.size)]
    return sorted(line for text in texts for line in json.loads(text))


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("name", READERS)
def test_each_folder_and_each_tar_file_is_read_by_one_rank(
    name: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, reader = READERS[name]
    real, mine = getattr(module, reader), []

    def noted(path: str, going: Callable[[], None]) -> folders.Names | tars.Headers:
        mine.append(path)
        return real(path, going)

    monkeypatch.setattr(module, reader, noted)
    found = share_contents(WORLD, name, str(places[name]), Heartbeat())
    paths = sorted(map(str, places[name].glob("*/*")))
    assert found == {path: real(path, lambda: None) for path in paths}
    assert told_by_all(mine) == paths
    assert share_contents(WORLD, "digits", str(places[name]), Heartbeat()) == {}


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_no_class_folder_is_read_twice_by_the_ranks_of_a_job_or_of_a_dry_run(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, mine = str(places["imagefolder"]), os.scandir, []

    def noted(path: str) -> Any:
        mine.append(str(path))
        return real(path)

    expected = sorted(map(str, places["imagefolder"].glob("*/*")))
    for dry in (False, True):
        settings = make(model="resnet8", dataset="imagefolder", data_dir=folder, dry_run=dry)
        mine.clear()
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", noted)
            if dry:
                run_job_here(settings)
            else:
                with nodes_of(1) as topology:
                    load_dataset(topology, settings).close()
        every = told_by_all(mine)
        assert [path for path in every if path in expected] == expected, dry


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_what_one_rank_cannot_read_ends_all(places: dict[str, Path]) -> None:
    path = places["webdataset"] / "train/0007.tar"
    if WORLD.rank == 0:
        damage(path)
    WORLD.Barrier()
    with pytest.raises(UserError, match=f"cannot read tar file {path}") as caught:
        share_contents(WORLD, "webdataset", str(places["webdataset"]), Heartbeat())
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_class_folder_that_one_rank_cannot_read_ends_all(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.scandir, str(places["imagefolder"] / "test/bee")

    def scandir(path: str) -> Any:
        if str(path) == refused:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=f"cannot read folder {refused}: Permission") as caught:
        share_contents(WORLD, "imagefolder", str(places["imagefolder"]), Heartbeat())
    assert caught.value.exit_code == UNREADABLE
