"""What --seed promises, and what one rank alone refuses while it trains."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from launch import train
from own_data import Own
from safetensors.torch import load_file

from prunex_mpi.data.request import Part, Request
from prunex_mpi.run.finished_run import load_alike
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


def test_what_the_function_of_a_data_set_draws_is_the_same_each_time(monkeypatch) -> None:
    def make(data_dir: str, train: bool) -> Own:
        images = np.random.randint(0, 256, (20, 3, 4, 4), dtype=np.uint8)
        order = torch.randperm(20).tolist()
        random.shuffle(order)
        return Own(images[order], [0, 1] * 10)

    monkeypatch.setattr(own_data, "drawn", make, raising=False)
    request, whole = Request(dataset="own_data:drawn", data_dir="x"), Part(0, 1)
    first, before = load_alike(request, whole), random.getstate()
    assert random.getstate() == before
    random.random(), np.random.rand(), torch.rand(1)
    assert torch.equal(load_alike(request, whole).train.images[:], first.train.images[:])


@pytest.mark.jobs
def test_what_one_rank_refuses_in_a_step_ends_all_at_once(tmp_path: Path) -> None:
    """The others wait in a collective, and can't learn of it by another one."""
    words = [*SHORT.split(), "--model", "odd_models:refuses_alone", "--timeout", "600"]
    found = train(2, words, tmp_path)
    assert found.returncode not in (0, 2)
    assert "rank 1" in found.stderr and "the model returns tuple while it trains" in found.stderr
