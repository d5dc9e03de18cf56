"""Scripts of batch/ without what they are for: gpu*.sh without a GPU, _slurm.sh without Slurm."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from image_folders import write_folder
from launch import launcher, run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "batch/gpu.sh"
TORCH = """
__version__ = "2"
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "GPU")
"""

WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("folder", "python", "says"),
    [
        ("file/out", "false", "can't be made: name another one"),
        pytest.param("out", sys.executable, "sees no GPU here; set PYTHON", marks=WITHOUT),
    ],
)
def test_it_says_what_it_lacks(tmp_path, folder, python, says):
    (tmp_path / "file").touch()
    result = run(["bash", str(SCRIPT), str(tmp_path / folder)], PYTHON=python)
    assert result.returncode == 2 and says in result.stderr
    assert not result.stdout


def test_parts_that_were_not_begun_are_no_success(tmp_path):
    """Nor is a part that is none, and what an earlier call has left stays."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "results.json").touch()

    words = ["bash", str(SCRIPT), str(tmp_path)]
    given = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    refused = run(words, **given, PARTS="doctor typo")
    assert refused.returncode == 2 and "PARTS names typo" in refused.stderr
    assert (tmp_path / "results.json").exists() and not (tmp_path / "parts.tsv").exists()

    ended = run(words, **given, LIMIT_S="0")
    assert ended.returncode == 1, ended.stderr
    rows = [line.split("\t") for line in (tmp_path / "parts.tsv").read_text().splitlines()]
    assert {result for _, result, _ in rows} == {"not begun"}
    names = refused.stderr.split("name some of ")[1].split()
    assert sorted(names) == sorted(name for name, _, _ in rows)


def study(piece: object, place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of the study with few steps of tiny networks, on the CPU."""
    given = {"GPU_STUDY_TINY": "1", "PYTHON": sys.executable, "OUT": f"{place}/out", **variables}
    given |= {"IMAGES": f"{place}/images.tar", "TEXT": f"{place}/text.tar", "WORK": f"{place}/work"}
    return run(["bash", str(ROOT / "batch/gpu_study.sh"), str(piece)], **given)


@pytest.mark.parametrize(("piece", "says"), [(7, "1 to 6"), (2, "set IMAGES"), (4, "set TEXT")])
def test_a_piece_of_the_study_says_what_it_lacks(tmp_path, piece, says):
    (tmp_path / "python").write_text("#!/bin/sh")
    (tmp_path / "python").chmod(0o755)
    path = f"{Path(launcher()[0]).parent}:{os.environ['PATH']}"
    refused = study(piece, tmp_path, PYTHON=str(tmp_path / "python"), PATH=path)
    assert refused.returncode == 2 and says in refused.stderr, refused.stderr


@pytest.mark.jobs
@pytest.mark.any_mpi
@pytest.mark.long
@pytest.mark.parametrize("piece", range(1, 7))
def test_a_piece_of_the_study_comes_to_its_end(tmp_path, piece):
    """All commands of a piece; what it trains is tested, and little comes back."""
    words = " ".join(f"{n} and {n * n}," for n in range(2000))
    (tmp_path / "train.txt").write_text(words)
    (tmp_path / "test.txt").write_text(words[:4000])
    write_folder(tmp_path)
    for name, parts in (("images", ("train", "test")), ("text", ("train.txt", "test.txt"))):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for part in parts:
                tar.add(tmp_path / part, part)
    ended = study(piece, tmp_path, PATH=f"{Path(launcher()[0]).parent}:{os.environ['PATH']}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ("on test images" in ended.stdout) == (piece == 1)
    written = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert f"piece_{piece}.tar.gz" in written and len(written) <= 5
    if piece <= 4:
        (file,) = (path for name, path in written.items() if name.endswith(".json"))
        found = json.loads(file.read_text())["comparison"]
        assert found["revealed"] and all(run["test"] for run in found["outcomes"])


def test_a_job_of_slurm_works_where_sbatch_says(tmp_path):
    """Slurm has gone to the folder of the submission already, or to that of --chdir."""
    (tmp_path / "env.sh").touch()
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_JOB_NODELIST": "a", "PRUNEX_HOME": str(ROOT), "PRUNEX_ENV": "env.sh"}
    script = f"source {ROOT}/batch/_slurm.sh >&2; pwd"
    result = run(["bash", "-c", script], tmp_path, **slurm)
    assert result.stdout.strip() == str(tmp_path), result.stderr
