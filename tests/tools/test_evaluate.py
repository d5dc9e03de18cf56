"""Loss and accuracy of networks that are on disk, of each class by its name."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from image_folders import CLASSES, damage, write_folder
from jobs import run_folder, run_job_here
from nodes import WORLD
from small_runs import COMMON, PRUNING

from prunex_mpi import export as options
from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.resolve import make
from prunex_mpi.data import datasets, image_files
from prunex_mpi.data.decoding import decoding_threads
from prunex_mpi.models.standalone import PLAN
from prunex_mpi.run import finished_run
from prunex_mpi.tools import evaluate_network
from prunex_mpi.tools import export_run as export
from prunex_mpi.tools.evaluate_network import describe, evaluate, outcome, read_network
from prunex_mpi.tools.evaluate_options import Options, parse

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]


def make_images(folder: Path) -> Path:
    """Write 8 images to train on and 3 to test on of each class, of one less of the first."""
    write_folder(folder, train=8, test=3)
    (folder / "test/ant/002.png").unlink()
    return folder


MODEL = ("--model", "odd_models:small")


def found_by(network: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """Return what the program writes."""
    argv = [str(network), "--json", str(folder / "found.json"), *MODEL, *flags]
    assert evaluate(WORLD, parse(argv), Heartbeat()) == 0
    WORLD.Barrier()
    return json.loads((folder / "found.json").read_text())


@pytest.mark.mpi
def test_a_run_and_its_export_reach_what_the_run_did_and_name_its_classes():
    with run_folder() as folder:
        if WORLD.rank == 0:
            make_images(folder / "data")
            (make_images(folder / "other") / "test/bee").rename(folder / "other/test/bug")
        WORLD.Barrier()
        settings = make(
            **PRUNING,
            run_dir=str(folder / "run"),
            data_dir=str(folder / "data"),
            dataset="imagefolder",
            model="resnet8-w4",
            groups=("coupled",),
            outer_iterations=3,
            local_steps=2,
            batch_size=4,
            progress="off",
        )
        assert run_job_here(settings) == 0
        if WORLD.rank == 0:
            export.export(options.parse([str(folder / "run"), "--repeat", "0"]))
            plan = json.loads((folder / "run/model" / PLAN).read_text())
            assert plan["classes"] == list(CLASSES)
        WORLD.Barrier()
        summary = json.loads((folder / "run/summary.json").read_text())
        of_run = found_by(folder / "run", folder)
        assert of_run["loss"] == pytest.approx(summary["test_loss"], rel=1e-4)
        assert of_run["accuracy"] == pytest.approx(summary["test_accuracy"])
        assert of_run["images"] == 8
        counts = [(c["class"], c["images"]) for c in of_run["classes"]]
        assert counts == [("ant", 2), ("bee", 3), ("cat", 3)]
        mean = sum(c["accuracy"] * c["images"] for c in of_run["classes"]) / 8
        assert mean == pytest.approx(of_run["accuracy"])

        flags = "--dataset", "imagefolder", "--data-dir"
        # To test it is to need nothing to train on.
        if WORLD.rank == 0:
            shutil.rmtree(folder / "data/train")
            export.export(options.parse([str(folder / "run"), "--repeat", "0"]))
        WORLD.Barrier()
        of_export = found_by(folder / "run/model", folder, *flags, str(folder / "data"))
        assert of_export["loss"] == pytest.approx(of_run["loss"], rel=1e-3)
        assert of_export["classes"][2]["class"] == "cat"
        fewer = found_by(folder / "run", folder, "--test-samples", "4", "--batch-size", "3")
        assert fewer["images"] == 4

        with pytest.raises(UserError, match=r"class 'bug' of .* is none that the network knows"):
            found_by(folder / "run", folder, "--data-dir", str(folder / "other"))
        with pytest.raises(UserError, match=r"10 classes and the network 3; .*give those"):
            found_by(folder / "run", folder, "--dataset", "digits")
        with pytest.raises(UserError, match="give --dataset"):
            found_by(folder / "run/model", folder)


@pytest.mark.mpi
def test_none_of_the_images_to_train_on_is_decoded(monkeypatch):
    spy = Mock(side_effect=image_files.as_uint8)

    def decoded() -> set[str]:
        """Return what of the data was decoded since the last call."""
        found = {str(call.args[0]).partition("/data/")[2] for call in spy.call_args_list}
        spy.reset_mock()
        return found

    with run_folder() as folder:
        if WORLD.rank == 0:
            make_images(folder / "data")
        WORLD.Barrier()
        run, where = folder / "run", str(folder / "data")
        whole = {"dataset": "imagefolder", "test_samples": 0, "train_samples": 0, "image_size": 0}
        settings = make(
            **{**COMMON, **PRUNING, **whole},
            run_dir=str(run),
            data_dir=where,
            workers=1,
            groups=("coupled",),
            progress="off",
        )
        assert run_job_here(settings) == 0
        summary = json.loads((run / "summary.json").read_text())
        monkeypatch.setattr(datasets, "MOST_IN_MEMORY", 0)
        monkeypatch.setattr(image_files, "as_uint8", spy)
        threads = Mock(side_effect=decoding_threads)
        for program in (evaluate_network, finished_run):
            monkeypatch.setattr(program, "decoding_threads", threads)
        found = found_by(run, folder)
        assert [call.args[1] for call in threads.call_args_list] == [1]
        assert found["images"] == 8
        assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-4)
        assert {name.partition("/")[0] for name in decoded()} == {"test"}

        if WORLD.rank == 0:
            export.export(options.parse([str(run), "--repeat", "0", "--images", "4", *MODEL]))
            assert [call.args[1] for call in threads.call_args_list] == [1, 1]
            seen = decoded()
            assert len(seen) == 4 and {name.partition("/")[0] for name in seen} == {"test"}
            damage(folder / "data/test/bee/000.png")
            (run / "model/old").write_text("old")
            with pytest.raises(UserError, match="cannot read image"):
                export.export(options.parse([str(run), "--repeat", "0", *MODEL]))
            assert (run / "model/old").exists()
        WORLD.Barrier()
        flags = "--dataset", "imagefolder", "--data-dir", where
        for network in (run / "model", run):
            with pytest.raises(UserError, match=r"cannot read image .*bee/000\.png") as caught:
                found_by(network, folder, *flags)
            assert caught.value.exit_code == UNREADABLE


def test_classes_without_an_image_have_no_accuracy_and_the_lowest_are_shown(monkeypatch):
    sums = np.array([[4.0, 0.0, 2.0], [1.0, 0.0, 2.0], [2.0, 0.0, 0.5]])
    found = outcome(sums, ("a", "b", "c"))
    assert (found["images"], found["accuracy"]) == (6, 0.5)
    assert found["loss"] == pytest.approx(2.5 / 6)
    assert found["classes"][1] == {"class": "b", "images": 0, "accuracy": None, "loss": None}
    assert "Classes, by accuracy" in describe(found, parse(["runs/a"]))
    monkeypatch.setattr("prunex_mpi.tools.evaluate_network.CLASSES", 1)
    text = describe(found, parse(["runs/a"]))
    assert "Lowest 1 of 2, by accuracy" in text and "25.00" in text and " c " not in text
    assert outcome(sums, ())["classes"][2]["class"] == "2"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "--dataset", "digit"], r"did you mean 'digits'.*, package.module:factory\)"),
        (["run", "--test-samples", "x"], "--test-samples must be a whole number"),
        (["run", "--batch-size", "0"], "--batch-size must be from 1"),
        (["run", "--device", "tpu"], "--device: unknown value 'tpu'"),
        ([], "required: RUN"),
    ],
)
def test_wrong_flags_are_named(words, why):
    with pytest.raises(UserError, match=why):
        parse(words)


def test_what_is_no_network_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no run in"):
        read_network(tmp_path / "none")
    (tmp_path / PLAN).write_text('{"format": 1}')
    with pytest.raises(UserError, match=r"exported network in .* can't be loaded"):
        read_network(tmp_path)
    assert isinstance(parse(["run"]), Options)
    assert parse(["run", "--dataset", "own_data:tensors"]).dataset == "own_data:tensors"
