"""Jobs of one's own loops that do not end as they should: all ranks end, and one line says why."""

import time
from pathlib import Path

import pytest
from launch import run_job
from nodes import WORLD

from prunex_mpi.replica.ending import Lockstep

LOOP = """
import sys
import torch
import prunex_mpi
from mpi4py import MPI

world = MPI.COMM_WORLD
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = prunex_mpi.replicate(
    world, model, optimizer, method=METHOD, outer_iterations=10, local_steps=2, ranks_per_node=1
)
last = world.rank == world.size - 1
for step in range(20):
    if WHO and step == 5:
        THEN
    model(torch.randn(8, 4)).square().mean().backward()
    replica.step()
    if replica.done:
        break
print("rank", world.rank, "is done")
"""
EARLY = "left its loop after 5 steps"
# What others wait in, an exchange in each step or a later one, is the same for all ways to leave.
CASES = {
    "one leaves early": ("dense", "break", EARLY),
    "one exits": ("local-sgd", "sys.exit()", EARLY),
    "one raises": ("dense", "raise ValueError('a bad batch')", "ValueError: a bad batch"),
    "one closes early": ("local-sgd", "replica.close(); break", EARLY),
}


def run(folder: Path, method: str, then: str, ranks: int, who: str = "last") -> tuple[int, str]:
    """Return exit code and output of a job of which some ranks do something before their step 5."""
    text = LOOP.replace("METHOD", repr(method)).replace("WHO", who).replace("THEN", then)
    (folder / "loop.py").write_text(text)
    found = run_job(ranks, ["loop.py"], folder)
    return found.returncode, found.stdout + found.stderr


# One that exits comes to the end of its program as one that leaves early does.
RARELY = pytest.param("one exits", marks=pytest.mark.long)


@pytest.mark.jobs
@pytest.mark.parametrize("case", [RARELY, *(case for case in CASES if case != "one exits")])
def test_all_end_where_one_does(case: str, tmp_path: Path) -> None:
    method, then, reason = CASES[case]
    # One of three has a neighbour that the last one does not tell.
    code, output = run(tmp_path, method, then, 3 if case == "one leaves early" else 2)
    assert code != 0 and reason in output, output
    assert "is done" not in output or case != "one raises"


@pytest.mark.jobs
def test_all_may_leave_early_together(tmp_path: Path) -> None:
    code, output = run(tmp_path, "dense", "break", 2, who="True")
    assert code == 0 and output.count("is done") == 2, output


@pytest.mark.jobs
@pytest.mark.long
def test_a_mistake_of_all_is_told_once_without_an_abort(tmp_path: Path) -> None:
    code, output = run(tmp_path, "no-such-method", "pass", 2)
    assert code != 0
    assert output.count("UserError: method") == 1 and "MPI_ABORT" not in output, output


@pytest.mark.jobs
def test_a_loss_of_all_that_is_not_finite_is_told_once_without_an_abort(tmp_path: Path) -> None:
    code, output = run(tmp_path, "dense", "model.bias.data.fill_(torch.nan)", 2, who="True")
    assert code != 0 and "MPI_ABORT" not in output, output
    assert output.count("lower the learning rate or check the data") == 1, output


@pytest.mark.mpi(min_size=2)
@pytest.mark.any_mpi
def test_who_leaves_after_the_same_step_is_no_reason_to_end() -> None:
    """The late rank finds its neighbour gone before it has begun the last step."""
    lockstep = Lockstep(WORLD)
    lockstep.enter()
    ends = time.monotonic() + 10
    while WORLD.rank == WORLD.size - 1 and not lockstep.gone:
        assert time.monotonic() < ends
        lockstep._listen()
    lockstep.enter()
    lockstep.leave()
    assert lockstep.theirs == lockstep.step == 2
    lockstep.close()
