"""Runs whose images are decoded while training: the same results, and no rank left waiting."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from driving import comms_of
from image_folders import damage, write_folder
from launch import repeatable_metrics
from nodes import WORLD, nodes_of
from safetensors.torch import load_file
from small_runs import small_run

from prunex_mpi import train
from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.files import tomllib
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.core.evaluation import estimate_statistics
from prunex_mpi.methods import pactrain
from prunex_mpi.methods.pactrain import batches_to_score
from prunex_mpi.run import problem, supervision
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [
    *(pytest.mark.any_mpi, pytest.mark.two_ranks),
    pytest.mark.usefixtures("failing_instead_of_aborting"),
]
FILES = ["--dataset", "imagefolder"]
MODEL = ("--model", "odd_models:small")
SMALL = [
    *(*MODEL, "--batch-size", "8", "--outer-iterations", "6"),
    *("--local-steps", "2", "--evaluate-every", "2"),
    *("--checkpoint-every", "2"),
]
# With these given no image is looked at before training.
COLOURS = (*("--image-mean", "0.5", "0.5", "0.5"), *("--image-std", "0.25", "0.25", "0.25"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures")


@pytest.fixture
def run(tmp_path: Path, pictures: Path) -> Callable[..., int]:
    def start(name: str, *flags: str) -> int:
        where = ["--data-dir", str(pictures), "--run-dir", str(tmp_path / name)]
        return train.main([*SMALL, *FILES, *where, *flags])

    return start


def results(path: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    return repeatable_metrics(path), load_file(path / "state.safetensors")


def assert_same(first: Path, second: Path) -> None:
    (records, state), (others, other) = results(first), results(second)
    assert records == others
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.usefixtures("leaving_early")
def test_a_stream_that_was_left_goes_on_exactly(tmp_path, run, monkeypatch):
    """With the colours it began with: other ranks would measure others, on other images."""
    assert run("whole", "--data-mode", "memory") == 0
    assert run("run", "--data-mode", "stream", "--workers", "3", "--time-limit", "1") == 75
    table = tomllib.loads((tmp_path / "run/config.toml").read_text())
    mean, std = table["image-mean"], table["image-std"]
    monkeypatch.setattr(problem, "measure_colours", Mock(side_effect=AssertionError))
    again = ["--resume", "--run-dir", str(tmp_path / "run"), *MODEL, "--time-limit", "0"]
    # With another number of threads, too.
    assert train.main([*again, "--workers", "1"]) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")
    delivered = json.loads((tmp_path / "run/summary.json").read_text())["delivered"]
    assert (delivered["mean"], delivered["std"]) == (mean, std)
    assert len(mean) == len(std) == 3
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    waited = [json.loads(line)["data_wait_seconds"] for line in lines]
    local = [json.loads(line)["seconds"]["local"] for line in lines]
    assert waited[0] > 0
    assert all(0 <= wait < whole for wait, whole in zip(waited, local, strict=True))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_damaged_image_ends_the_run_in_one_line_and_what_was_reached_counts(
    tmp_path, pictures, run, capfd, split
):
    path = sorted((pictures / split / "bee").iterdir())[2]
    content = path.read_bytes()
    victim = damage(path)
    capfd.readouterr()
    assert run("run", "--data-mode", "stream", *COLOURS) == UNREADABLE
    said = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1 and f"cannot read image {victim}" in said[0]
    assert not (tmp_path / "run/summary.json").exists()
    path.write_bytes(content)
    again = ["--resume", "--run-dir", str(tmp_path / "run"), *MODEL]
    assert train.main(again) == 0
    assert run("other", "--data-mode", "memory", *COLOURS) == 0
    assert_same(tmp_path / "run", tmp_path / "other")


def test_a_damaged_test_image_is_found_where_test_images_were_kept_back(
    tmp_path, pictures, run, capfd
):
    """Nobody looks at test images before the end then."""
    victim = damage(sorted((pictures / "test/bee").iterdir())[2])
    flags = ("--data-mode", "stream", *COLOURS, "--val-split", "0.2")
    assert run("run", *flags) == UNREADABLE
    assert f"cannot read image {victim}" in capfd.readouterr().err
    assert not (tmp_path / "run/summary.json").exists()


# --------------------------------------------------------------------------------------------------
# Several ranks
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Have the settings of a stream of one image folder that all ranks see."""
    path = broadcast_text(WORLD, str(write_folder(tmp_path / "p")) if WORLD.rank == 0 else "")
    files = {"dataset": "imagefolder", "data_dir": path, "data_mode": "stream"}
    yield files | {"train_samples": 0, "test_samples": 0, "image_size": 0}
    WORLD.Barrier()


GREY = {"image_mean": (0.5,) * 3, "image_std": (0.25,) * 3, "evaluate_every": 3}


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", ["recipe", "local sgd", "flat consensus", "dense", "behind"])
def test_an_image_that_one_rank_cannot_read_ends_all(files, scenario):
    each = 1 if scenario == "flat consensus" else 2
    with (
        nodes_of(each) as topology,
        pytest.raises(UserError) as caught,
        small_run(topology, scenario, **files, **GREY) as context,
    ):
        images = context.problem.train_shard.images
        if WORLD.rank == WORLD.size - 1:
            # Of its second batch, in the middle of an outer iteration.
            place = int(images.places[context.problem.train.order[5]])
            damage(Path(images.files.name(place)))
        list(outer_iterations(topology, context))
    assert caught.value.exit_code == UNREADABLE
    assert "cannot read image" in str(caught.value)
    assert context.state.position.iteration == 1


@pytest.mark.mpi
def test_ranks_do_not_wait_for_the_end_of_a_long_phase(files, monkeypatch):
    with (
        nodes_of(2) as topology,
        small_run(topology, "recipe", local_steps=10**6, **files) as context,
    ):
        real = supervision.forward

        def forward(context: Any, *batch: Any) -> torch.Tensor:
            if WORLD.rank == 0 and context.state.position.step == 3:
                context.problem.reader.error = UserError("an image", UNREADABLE)
            return real(context, *batch)

        monkeypatch.setattr(supervision, "forward", forward)
        assert list(outer_iterations(topology, context)) == []
        assert context.stop.reason == "an error on some rank"


@pytest.mark.mpi
def test_statistics_of_damaged_images_are_refused_by_all_ranks(files):
    files |= {"model": "resnet8-w4"}
    with nodes_of(2) as topology, small_run(topology, "recipe", **files) as context:
        images = context.problem.train_shard.images
        if WORLD.rank == WORLD.size - 1:
            damage(Path(images.files.name(int(images.places[1]))))
        with pytest.raises(UserError, match="cannot read image") as caught:
            estimate_statistics(topology, context)
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.mpi
def test_a_stream_is_scored_as_memory_is_and_never_by_damaged_images(files, monkeypatch):
    monkeypatch.setattr(pactrain, "SAMPLES", 2)
    found = []
    for mode in ("memory", "stream"):
        changes = {**files, **GREY, "data_mode": mode}
        changes |= {"pactrain_score": "grasp", "keep_ratio": (0.1,)}
        with nodes_of(2) as topology, small_run(topology, "pactrain", **changes) as context:
            list(outer_iterations(topology, context))
            found.append(context.state.z.clone())
    assert torch.equal(*found)
    with nodes_of(2) as topology, small_run(topology, "pactrain", **changes) as context:
        images = context.problem.train_shard.images
        if WORLD.rank == 0:
            # In the first batch, and the first of its class.
            for place in {int(context.problem.train.order[0]), 0}:
                damage(Path(images.files.name(int(images.places[place]))))
        with pytest.raises(UserError, match="cannot read image") as caught:
            batches_to_score(comms_of(topology).everyone, context)
    assert caught.value.exit_code == UNREADABLE
