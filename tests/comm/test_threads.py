"""How many threads a rank has."""

import os

import pytest
import torch

from prunex_mpi.comm import topology as module


@pytest.mark.parametrize(
    ("cores", "sharers", "limit", "host_size", "threads"),
    [
        *((8, 1, 16, 1, 8), (8, 4, 16, 4, 2), (8, 3, 16, 3, 2), (2, 4, 4, 4, 1), (2, 1, 8, 2, 2)),
        # A quota is for all ranks of the machine, whichever cores are theirs.
        *((64, 1, 2, 1, 2), (64, 4, 8, 4, 2), (64, 4, 2, 4, 1), (4, 1, 4, 2, 2)),
    ],
)
def test_ranks_share_the_cores_they_may_all_use(
    cores, sharers, limit, host_size, threads, monkeypatch
):
    set_to: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # Two hardware threads each.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2 * cores)))
    monkeypatch.setattr(module, "cores_of", lambda cpus: tuple({cpu // 2 for cpu in cpus}))
    monkeypatch.setattr(module, "cpu_limit", lambda: limit)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    module.set_threads(sharers, host_size)
    assert set_to == [threads]


def test_omp_num_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    assert module.set_threads(1, 1) == before == torch.get_num_threads()
