"""The examples of loops of one's own run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from launch import run_job

pytestmark = [pytest.mark.jobs]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The least accuracy, or the most of a loss at the end.
DIGITS = r"5226 of 19658 parameters, accuracy (0\.\d+), \d\.\d\d MiB left a node"
LLAMA = r"(\d+) of 106816 parameters, loss \d\.\d\d -> (\d\.\d\d)"
TRAINER = r"6 exchanges, loss (\d\.\d\d), \d\.\d\d MiB sent"


def output_of(name: str, *arguments: str) -> str:
    """Return what an example prints on two ranks."""
    found = run_job(2, [str(EXAMPLES / f"{name}.py"), *arguments], EXAMPLES)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.any_mpi
def test_digits_become_known_by_a_smaller_network(tmp_path: Path) -> None:
    text = output_of("digits", str(tmp_path))
    found = re.search(DIGITS, text)
    assert found and float(found[1]) > 0.9
    small = torch.load(tmp_path / "small.pt", weights_only=False)
    assert sum(p.numel() for p in small.parameters()) == 5226


@pytest.mark.any_mpi
def test_a_model_of_transformers_becomes_smaller_by_its_own_loss() -> None:
    found = re.search(LLAMA, output_of("transformers_loss"))
    assert found and int(found[1]) < 40000 and float(found[2]) < 1.5


@pytest.mark.any_mpi
@pytest.mark.long
def test_trainer_steps_by_the_replica() -> None:
    found = re.search(TRAINER, output_of("transformers_trainer"))
    assert found and float(found[1]) < 2.5
