"""Runs that learn from a trained network: the same one on every rank, and as it was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import metrics_of, run_folder, run_job_here
from nodes import WORLD, nodes_of
from safetensors.torch import load_file, save_file
from small_runs import COMMON, DRIVERS, small_run

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make, to_toml
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.run.supervision import forward, next_batch

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]
MODEL = "resnet8-w4"
PAINTED = {"image_mean": (0.3,) * 3, "image_std": (0.4,) * 3}


def save(folder: Path, classes: int = 10, name: str = "teacher.pt") -> str:
    torch.manual_seed(11)
    model = build_model(MODEL, Images(8, classes))
    save_file(model.state_dict(), folder / name)
    return str(folder / name)


def run_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    common = {"model": MODEL, "run_dir": str(folder), "progress": "off", "method": "dense"}
    return {**COMMON, **common, **changes}


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", DRIVERS)
def test_every_rank_learns_from_the_network_of_a_file(scenario):
    with run_folder() as folder:
        path = WORLD.bcast(save(folder) if WORLD.rank == 0 else None)
        wanted = load_file(path)
        common = {"model": MODEL, "teacher": path}
        common |= {"distillation_alpha": 1.0, "distillation_tau": 3.0}
        with nodes_of(2) as topology, small_run(topology, scenario, **common) as context:
            problem = context.problem
            assert len(context.settings.teacher_digest) == 64
            assert (problem.teacher.share, problem.teacher.temperature) == (1.0, 3.0)
            found = problem.teacher.model.state_dict()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
            assert not problem.teacher.model.training
            assert not any(p.requires_grad for p in problem.teacher.model.parameters())
            # A network learns nothing from one that is as itself.
            batch = next_batch(context)
            problem.model.load_state_dict(wanted)
            problem.model.eval()
            assert float(forward(context, *batch).detach()) == pytest.approx(0, abs=1e-5)


@pytest.mark.mpi
def test_a_run_teaches_one_of_another_model_as_it_saw_images():
    with run_folder() as folder:
        assert run_job_here(make(**run_settings(folder / "teacher", **PAINTED))) == 0
        weights = load_file(folder / "teacher/state.safetensors")
        common = {"model": "odd_models:small", "teacher": str(folder / "teacher")}
        with nodes_of(2) as topology, small_run(topology, "recipe", **common) as context:
            problem, teacher = context.problem, context.problem.teacher
            found = teacher.model.state_dict()
            assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
            images = torch.randn(2, 3, 8, 8)
            raw = images * problem.std.view(1, 3, 1, 1) + problem.mean.view(1, 3, 1, 1)
            seen = images * teacher.scale + teacher.shift
            assert torch.allclose(seen, (raw - 0.3) / 0.4, atol=1e-5)


@pytest.mark.mpi
def test_a_taught_run_goes_on_as_if_it_had_not_ended_and_with_its_teacher_alone():
    with run_folder() as folder:
        path = WORLD.bcast(save(folder) if WORLD.rank == 0 else None)
        run = folder / "run"
        assert run_job_here(make(**run_settings(run, teacher=path, checkpoint_every="2"))) == 0
        lines = metrics_of(run / "metrics.jsonl")
        untaught = folder / "untaught"
        assert run_job_here(make(**run_settings(untaught))) == 0
        assert metrics_of(untaught / "metrics.jsonl") != lines
        if WORLD.rank == 0:
            (run / "summary.json").unlink()
        WORLD.Barrier()
        assert run_job_here(parse(["--resume", "--run-dir", str(run)])) == 0
        assert metrics_of(run / "metrics.jsonl") == lines
        WORLD.Barrier()
        if WORLD.rank == 0:
            (run / "summary.json").unlink()
            torch.manual_seed(12)
            other = build_model(MODEL, Images(8, 10))
            save_file(other.state_dict(), path)
        WORLD.Barrier()
        with pytest.raises(UserError, match=r"is not the file of before.*--teacher-digest"):
            run_job_here(parse(["--resume", "--run-dir", str(run)]))


def exported(folder: Path) -> str:
    (folder / "plan.json").write_text("{}")
    return str(folder)


def unfinished(folder: Path) -> str:
    (folder / "config.toml").write_text(to_toml(make(), {}))
    return str(folder)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: str(folder / "none.pt"), "cannot read weights"),
        (lambda folder: save(folder, classes=7), "has 7 classes and the data 10; it must know"),
        (exported, "--teacher .* is an exported network"),
        (unfinished, "did not end well"),
    ],
)
def test_what_can_not_teach_ends_the_job_on_every_rank(prepare, reason):
    with run_folder() as folder:
        path = WORLD.bcast(prepare(folder) if WORLD.rank == 0 else None)
        WORLD.Barrier()
        with (
            nodes_of(2) as topology,
            pytest.raises(UserError, match=reason),
            small_run(topology, "dense", model=MODEL, teacher=path),
        ):
            pass
