"""Runs that begin with trained weights: the same everywhere, and without the file later."""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beats import PAUSE_S, Noted, count_closely
from jobs import metrics_of, run_directory, run_folder, run_job_here
from nodes import WORLD, nodes_of
from safetensors.torch import load_file, save_file
from small_runs import COMMON, DRIVERS, small_run

from mpi4py import MPI

from prunex_mpi.base import files
from prunex_mpi.base.errors import UserError, log
from prunex_mpi.base.files import tomllib
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import flat_values, make, resumed, with_overrides
from prunex_mpi.models import batchnorm
from prunex_mpi.models import trained as weights_read
from prunex_mpi.models.build import build_model, describe, fresh
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.standalone import FORMAT, PLAN
from prunex_mpi.run import pretrained
from prunex_mpi.run.pretrained import INITIAL, evaluate_initial

LOOK = {"mean": [0.5] * 3, "std": [0.2] * 3}
# What each summary says of the network.
DELIVERED = {**LOOK, "bytes": 1, "crc32": 0}

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]
MODEL = "resnet8-w4"


def trained(classes: int = 10) -> torch.nn.Module:
    torch.manual_seed(11)
    model = build_model(MODEL, Images(8, classes))
    model.train()
    model(torch.randn(8, 3, 8, 8))
    return model.eval()


def save(folder: Path) -> str:
    save_file(trained().state_dict(), folder / "weights.pt")
    return str(folder / "weights.pt")


@contextmanager
def read_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no other rank read the weights."""
    real = pretrained.read_tensors

    def read(path: Path) -> dict[str, torch.Tensor]:
        assert WORLD.rank == 0
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "read_tensors", read)
        yield


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", DRIVERS)
def test_every_rank_and_every_variable_begins_with_the_weights(scenario, monkeypatch):
    model = trained()
    wanted = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    with run_directory() as files, nodes_of(2) as topology, read_by_rank_0(monkeypatch):
        path = WORLD.bcast(save(files.path) if files else None)
        with small_run(topology, scenario, model=MODEL, init_from=path) as context:
            state = context.state
            for flat in (state.theta, state.z, state.z_node):
                assert torch.equal(flat, wanted)
            assert not state.u.any() and not state.v.any()
            stats = torch.empty_like(state.stats)
            batchnorm.read_plain_(batchnorm.find(model), stats)
            assert torch.equal(state.stats, stats)
            counters = [b for n, b in context.problem.model.named_buffers() if "num_batches" in n]
            assert counters and all(int(b) == 1 for b in counters)
            assert len(context.settings.init_digest) == 64
            evaluate_initial(topology, files, context)
            if files is not None:
                found = json.loads((files.path / INITIAL).read_text())
                assert found["sha256"] == context.settings.init_digest
                assert 0 <= found["test_accuracy"] <= 1


@pytest.mark.mpi
@pytest.mark.parametrize(("flag", "kind"), [("init_from", "file"), ("teacher", "run")])
def test_weights_that_are_read_slowly_are_no_standstill(flag, kind, monkeypatch):
    """Rank 0 reads them; all go on meanwhile."""
    heartbeat = Noted()
    count_closely(monkeypatch)

    class Slowly:
        def __init__(self) -> None:
            self.real = hashlib.sha256()
            self.hexdigest = self.real.hexdigest

        def update(self, piece: bytes) -> None:
            time.sleep(PAUSE_S)
            self.real.update(piece)

    def slow_sum(*given: Any) -> int:
        time.sleep(PAUSE_S)
        return zlib.crc32(*given)

    with run_folder() as folder, nodes_of(2) as topology:
        path = WORLD.bcast(save(folder) if WORLD.rank == 0 else None)
        if kind == "run":
            settings = {**COMMON, "model": MODEL, "progress": "off", "method": "dense"}
            path = str(folder / "run")
            run_job_here(make(**settings, run_dir=path))
        for module in (files, weights_read):
            monkeypatch.setattr(module, "CHUNK_BYTES", 1024)
        monkeypatch.setattr(weights_read, "hashlib", SimpleNamespace(sha256=Slowly))
        monkeypatch.setattr(files, "zlib", SimpleNamespace(crc32=slow_sum))

        def begin() -> None:
            with small_run(topology, "dense", heartbeat, model=MODEL, **{flag: path}):
                pass

        heartbeat.check(begin)


@pytest.mark.mpi
def test_a_run_goes_on_without_its_file_and_another_begins_where_it_ended():
    with run_folder() as folder:
        path = WORLD.bcast(save(folder) if WORLD.rank == 0 else None)
        common = {**COMMON, "model": MODEL, "run_dir": str(folder / "run"), "progress": "off"}
        first = {"init_from": path, "image_mean": (0.3,) * 3, "image_std": (0.4,) * 3}
        settings = make(**common, **first, checkpoint_every="2", method="dense")
        assert run_job_here(settings) == 0
        lines = metrics_of(folder / "run/metrics.jsonl")
        weights = load_file(folder / "run/state.safetensors")
        config = tomllib.loads((folder / "run/config.toml").read_text())
        assert config["init-from"] == path and len(config["init-digest"]) == 64
        WORLD.Barrier()

        # As a job that broke off behind its checkpoint.
        if WORLD.rank == 0:
            Path(path).unlink()
            (folder / "run/summary.json").unlink()
        WORLD.Barrier()
        assert run_job_here(parse(["--resume", "--run-dir", str(folder / "run")])) == 0
        assert metrics_of(folder / "run/metrics.jsonl") == lines
        summary = json.loads((folder / "run/summary.json").read_text())
        assert summary["initial"]["from"] == path

        # Another run begins with what this one delivered, and sees images as it did.
        model = build_model(MODEL, Images(8, 10))
        settings = make(model=MODEL, init_from=str(folder / "run"))
        found = pretrained.load_initial_(WORLD, settings, model, Images(8), (), Heartbeat())
        assert found.image_mean == pytest.approx((0.3,) * 3)
        assert found.image_std == pytest.approx((0.4,) * 3)
        taken = [torch.equal(t, weights[k]) for k, t in model.state_dict().items()]
        assert all(taken) == (WORLD.rank == 0)


def test_the_classes_of_another_run_are_compared_by_name(tmp_path, caplog):
    model = build_model(MODEL, Images(8, 2))
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    delivered = {**DELIVERED, "classes": ["ant", "bee"]}
    summary = {"status": "completed", "delivered": delivered}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    settings = make(init_from=str(tmp_path), model=MODEL)
    caplog.set_level(logging.INFO, log.name)
    for names, anew in (((), 0), (("ant", "bee"), 0), (("bee", "ant"), 1)):
        caplog.clear()
        given = MPI.COMM_SELF, settings, model, Images(8), names
        pretrained.load_initial_(*given, Heartbeat())
        assert caplog.text.count("has other classes than the data: layer") == anew


def test_a_run_that_made_its_network_smaller_says_so(tmp_path):
    model = build_model("resnet8-w4", Images(8, 10))
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    delivered = {**DELIVERED, "layers": {"conv1": {"weight": [4, 3, 3, 3]}}}
    summary = {"status": "completed", "delivered": delivered}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name, word in (("resnet8", "became smaller"), ("resnet8-w4", "")):
        model = build_model(name, Images(8, 10))
        settings = make(init_from=str(tmp_path), model=name)
        given = MPI.COMM_SELF, settings, model, Images(8), ()
        with pytest.raises(UserError, match=word) if word else nullcontext():
            pretrained.load_initial_(*given, Heartbeat())


def test_what_became_smaller_is_trained_on_by_the_way_that_the_refusals_name(tmp_path):
    layers = {"layer3.0.conv1": {"weight": [5, 32, 3, 3]}}
    layers |= {"layer3.0.bn1": {"weight": [5], "bias": [5]}}
    layers |= {"layer3.0.conv2": {"weight": [64, 5, 3, 3]}}
    description = describe("resnet8", Images(8, 10), "")
    (tmp_path / "model").mkdir()
    plan = {"format": FORMAT, "model": description, "layers": layers, "normalisation": LOOK}
    (tmp_path / "model" / PLAN).write_text(json.dumps(plan))
    network = fresh(tmp_path / "model", num_classes=10, image_size=8)
    for name in ("state", "model/model"):
        save_file(network.state_dict(), tmp_path / f"{name}.safetensors")
    delivered = {**DELIVERED, "layers": layers}
    summary = {"status": "completed", "delivered": delivered}
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    def initial(source: Path, model: torch.nn.Module) -> None:
        settings = make(init_from=str(source), model="resnet8")
        pretrained.load_initial_(MPI.COMM_SELF, settings, model, Images(8), (), Heartbeat())

    for source in (tmp_path, tmp_path / "model"):
        with pytest.raises(
            UserError, match=r"model\.safetensors with a --model by fresh of .*\.py"
        ):
            initial(source, build_model("resnet8", Images(8, 10)))
    model = fresh(tmp_path / "model", num_classes=10, image_size=8)
    initial(tmp_path / "model/model.safetensors", model)
    assert all(torch.equal(t, network.state_dict()[k]) for k, t in model.state_dict().items())


def test_what_the_run_filled_in_is_no_difference_and_all_else_is():
    asked = make(init_from="a.pt")
    saved = flat_values(
        replace(asked, init_digest="ab", image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
    )
    repeated = {"init_from": "a.pt", "init_digest": "", "image_mean": (), "image_std": ()}
    assert resumed(saved, repeated, flat_values(asked)).init_digest == "ab"
    for other in ({"init_from": "b.pt"}, {"init_digest": "cd"}, {"image_mean": (0.1,) * 3}):
        with pytest.raises(UserError, match=r"differs from the run's|three of each"):
            resumed(saved, other, flat_values(asked))
    for bad in ({"init_digest": "ab"}, {"image_mean": (0.5,) * 3}, {"image_std": (1.0, 1.0)}):
        with pytest.raises(UserError, match=r"init-digest means|give three of each"):
            with_overrides(make(), **bad)
