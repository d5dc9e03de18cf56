"""A method is added as methods/README.md says: its file and its diff, applied, train."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import run_job

from prunex_mpi.config.resolve import BY_NAME

PACKAGE = Path(__file__).resolve().parents[2] / "prunex_mpi"
README = PACKAGE / "methods" / "README.md"
DATA = ["--dataset", "synthetic", "--image-size", "8", "--train-samples", "64"]
DATA += ["--test-samples", "16", "--model", "resnet8", "--batch-size", "4"]
LENGTH = ["--outer-iterations", "2", "--local-steps", "2", "--ranks-per-node", "1"]


def block(kind: str) -> str:
    """Return the one block of code of a kind in the README's section."""
    _, _, section = README.read_text("utf-8").partition("\n## Adding a method\n")
    section, _, _ = section.partition("\n## ")
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", section, re.M | re.S)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package with the README's method in it."""
    root = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, root / "prunex_mpi", ignore=ignored)
    (root / "prunex_mpi" / "methods" / "sign.py").write_text(block("python"), encoding="utf-8")
    applied = subprocess.run(
        ["git", "apply", "-"],
        cwd=root,
        input=block("diff"),
        capture_output=True,
        text=True,
    )
    assert applied.returncode == 0, f"mend the diff in {README}: {applied.stderr}"
    return root


def test_a_method_costs_twenty_lines_an_entry_and_its_declaration(tree):
    assert "sign" not in BY_NAME
    assert len(block("python").splitlines()) <= 20
    per_file = {}
    for line in block("diff").splitlines():
        if line.startswith("+++ "):
            added = per_file[line.rpartition("/")[2]] = []
        # It only adds.
        assert not re.match(r"-(?!-{2} )", line)
        if line.startswith("+") and line[1:].strip() and not line.startswith("+++"):
            added.append(line[1:])
    assert {*per_file} == {"declared.py", "exchanges.py"}
    # A line of the table, and its import.
    assert len(per_file["exchanges.py"]) == 2
    assert len(per_file["declared.py"]) <= 5


@pytest.mark.jobs
@pytest.mark.any_mpi
@pytest.mark.long
def test_the_methods_readme_adds_a_method_that_trains(tree):
    flags = ["--method", "sign", "--sign-scale", "0.5", *DATA]
    dry = run_job(1, ["-m", "prunex_mpi.train", "--dry-run", *flags], tree)
    assert dry.returncode == 0, dry.stderr
    assert "signs times their scale: Allreduce SUM over workers, dense" in dry.stdout

    ended = run_job(2, ["-m", "prunex_mpi.train", "--run-dir", "run", *flags, *LENGTH], tree)
    assert ended.returncode == 0, ended.stderr
    lines = (tree / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["iteration"] for record in records] == [1, 2]
    assert records[0]["bytes"]["payload"] == records[0]["bytes"]["dense"] > 0
    assert json.loads((tree / "run" / "summary.json").read_text())["status"] == "completed"

    # Its settings are its own.
    refused = run_job(1, ["-m", "prunex_mpi.train", "--method", "dense", "--sign-scale", "2"], tree)
    assert refused.returncode == 2
    assert "sign.scale means nothing to method dense" in refused.stderr
