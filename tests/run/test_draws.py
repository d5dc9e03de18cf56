"""What --seed promises, and what one rank alone refuses while it trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import train
from safetensors.torch import load_file

from prunex_mpi.train import main

SHORT = "--dataset synthetic --image-size 8 --train-samples 32 --test-samples 8 --batch-size 4"
SHORT += " --outer-iterations 4 --local-steps 2 --lr 0.01 --method dense --progress off"


def weights(folder: Path, model: str, *flags: Any) -> dict[str, torch.Tensor]:
    """Return what a run has delivered."""
    words = [*SHORT.split(), "--model", model, "--run-dir", str(folder), *map(str, flags)]
    assert main(words) == 0
    return load_file(folder / "state.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_seed_is_one_of_all_generators(tmp_path: Path) -> None:
    first, second = (weights(tmp_path / name, "odd_models:drawing") for name in "ab")
    assert same(first, second)
    assert not same(first, weights(tmp_path / "c", "odd_models:drawing", "--seed", 1))


@pytest.mark.jobs
def test_what_one_rank_refuses_in_a_step_ends_all_at_once(tmp_path: Path) -> None:
    """The others wait in a collective, and can't learn of it by another one."""
    words = [*SHORT.split(), "--model", "odd_models:refuses_alone", "--timeout", "600"]
    found = train(2, words, tmp_path)
    assert found.returncode not in (0, 2)
    assert "rank 1" in found.stderr and "the model returns tuple while it trains" in found.stderr
