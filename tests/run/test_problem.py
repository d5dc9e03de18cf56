"""Data are read once among the ranks; all train the same weights on their shares of them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_folders import write_folder, write_tars
from jobs import run_job_here
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.collectives import build_transport, mpi_buffer
from prunex_mpi.config.resolve import make
from prunex_mpi.data import image_files, sources
from prunex_mpi.data.request import Request
from prunex_mpi.run.problem import CPU, build_problem, load_dataset, share_contents


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Return a folder of class folders and one of tar files, the same ones on all ranks."""
    root = Path(broadcast_text(WORLD, str(tmp_path)))
    if WORLD.rank == 0:
        write_tars(root / "tars", write_folder(root / "pictures", train=6, test=2))
    WORLD.Barrier()
    return {"imagefolder": root / "pictures", "webdataset": root / "tars"}


def request(name: str, places: dict[str, Path]) -> Request:
    return Request(dataset=name, data_dir=str(places[name]))


def told_by_all(mine: list[str]) -> list[str]:
    """Return what all ranks have noted, sorted."""
    texts = [broadcast_text(WORLD, json.dumps(mine), root) for root in range(WORLD.size)]
    return sorted(line for text in texts for line in json.loads(text))


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("name", image_files.CONTENTS)
def test_each_folder_and_each_tar_file_is_read_by_one_rank(name, places, monkeypatch):
    find, real = image_files.CONTENTS[name]
    mine = []

    def noted(path: str) -> Any:
        mine.append(path)
        return real(path)

    monkeypatch.setitem(image_files.CONTENTS, name, (find, noted))
    found = share_contents(WORLD, request(name, places), Heartbeat())
    paths = sorted(map(str, places[name].glob("*/*")))
    assert found == {path: real(path) for path in paths}
    assert told_by_all(mine) == paths
    assert share_contents(WORLD, Request(dataset="digits"), Heartbeat()) == {}


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_no_class_folder_is_read_twice_by_the_ranks_of_a_job_or_of_a_dry_run(places, monkeypatch):
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
                    load_dataset(topology, Request.of(settings)).close()
        every = told_by_all(mine)
        assert [path for path in every if path in expected] == expected, dry


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_class_folder_that_one_rank_cannot_read_ends_all(places, monkeypatch):
    real, refused = os.scandir, str(places["imagefolder"] / "test/bee")

    def scandir(path: str) -> Any:
        if str(path) == refused:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=f"cannot read folder {refused}: Permission") as caught:
        share_contents(WORLD, request("imagefolder", places), Heartbeat())
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_images_of_one_class_are_refused(monkeypatch):
    monkeypatch.setattr(sources, "SYNTHETIC_CLASSES", 1)
    settings = make("recipe", dataset="synthetic", train_samples=16, test_samples=8, image_size=8)
    with nodes_of(2) as topology, pytest.raises(UserError, match="of one class") as caught:
        load_dataset(topology, Request.of(settings))
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(("overlap", "fits"), [(2, True), (3, False)])
def test_no_exchange_runs_behind_more_steps_than_there_are(overlap, fits):
    """Which epochs alone do not say."""
    ways = {"local_epochs": "1/2", "overlap_steps": overlap, "evaluate_every": 4}
    size = {"dataset": "synthetic", "train_samples": 8 * WORLD.size, "image_size": 8}
    settings = make(method="local-sgd", batch_size=2, test_samples=8, **size, **ways)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    transport = build_transport(CPU, 1.0, "host")
    with nodes_of(1) as topology:
        dataset = load_dataset(topology, Request.of(settings))
        given = topology, settings, dataset, model, CPU, transport, Heartbeat()
        if fits:
            assert build_problem(*given).steps == 2
        else:
            with pytest.raises(UserError, match="overlap-steps 3 is more than the 2 local steps"):
                build_problem(*given)


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_all_ranks_begin_with_the_weights_of_rank_0():
    size = {"dataset": "synthetic", "train_samples": 16, "test_samples": 8, "image_size": 8}
    settings = make("recipe", **size)
    torch.manual_seed(WORLD.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    model[1].running_mean[2] = float(WORLD.rank == 0)
    before = [t.clone() for t in model.state_dict().values()]
    transport = build_transport(CPU, 1.0, "host")
    with nodes_of(2) as topology:
        dataset = load_dataset(topology, Request.of(settings))
        build_problem(topology, settings, dataset, model, CPU, transport, Heartbeat())
    for tensor in model.state_dict().values():
        flat = tensor.reshape(-1).clone()
        first = flat.clone()
        WORLD.Bcast(mpi_buffer(first), root=0)
        assert np.array_equal(first.numpy(), flat.numpy())
    if WORLD.rank == 0:
        after = model.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
