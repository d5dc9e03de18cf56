"""Many outer iterations leave memory, communicators, requests and file handles as they were.

The suite runs a short one; `--soak-iterations 1000` is the long one.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import ClassVar

import pytest
from jobs import run_directory
from nodes import WORLD, nodes_of
from small_runs import small_run

from mpi4py import MPI

from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.run import supervision
from prunex_mpi.run.supervision import Checkpoints, iterate, progress_of

WARM = 50
GROWTH = 1.01
PAGE = os.sysconf("SC_PAGE_SIZE")


class WatchedComm(MPI.Intracomm):
    """A communicator that knows which of the requests it made are still under way."""

    requests: ClassVar[list[MPI.Request]] = []

    def Iallreduce(self, *operands: object, **options: object) -> MPI.Request:
        request = super().Iallreduce(*operands, **options)
        self.requests.append(request)
        return request


def in_flight() -> int:
    """Return the number of requests that nobody has completed, and forget the others."""
    WatchedComm.requests[:] = [r for r in WatchedComm.requests if r != MPI.REQUEST_NULL]
    return len(WatchedComm.requests)


def held() -> tuple[int, int, int]:
    """Return the lowest free communicator, requests under way, and the number of open files."""
    comm = WORLD.Dup()
    found = comm.py2f(), in_flight(), len(os.listdir("/proc/self/fd"))
    comm.Free()
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("preset", ["recipe", "paper"])
def test_a_long_run_leaves_nothing_behind(preset, request, monkeypatch):
    iterations = request.config.getoption("--soak-iterations")
    settings = {
        **{"preset": preset, "model": "faulty:noisy", "train_samples": 32},
        **{"test_samples": 8, "outer_iterations": iterations},
        **{"local_steps": 1, "progress": "off", "eps_abs": 0.0, "eps_rel": 0.0},
        **{"warmup_iterations": WARM // 2, "keep_ramp_iterations": WARM // 5},
        # Balanced penalties grow for as long as a run goes on.
        "penalty": "fixed",
        # Masks go on being agreed on, in the longest stage there is.
        "freeze_iteration": 0 if preset == "paper" else WARM - 5,
        "freeze_drift": -1.0,
    }
    samples: list[tuple[int, tuple[int, int, int]]] = []
    real = supervision.outer_iterations

    def watched(*arguments: object) -> Iterator[dict]:
        for record in real(*arguments):
            if record["iteration"] in (WARM, iterations):
                samples.append((resident_bytes(), held()))
            yield record

    monkeypatch.setattr(supervision, "outer_iterations", watched)
    with nodes_of(2) as nodes, run_directory() as files:
        topology = replace(nodes, world=WatchedComm(nodes.world), node=WatchedComm(nodes.node))
        with (
            small_run(topology, "recipe", **settings) as context,
            closing(progress_of(topology, context)) as progress,
        ):
            checkpoints = Checkpoints(topology, files, "10", ReceivedSignal())
            status = iterate(topology, files, context, checkpoints, progress, None)
    assert status == "completed"
    (early, held_early), (late, held_late) = samples
    assert held_late == held_early
    assert in_flight() == 0
    assert late < GROWTH * early, f"{early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB"
    print(f"rank {WORLD.rank}: {early / 2**20:.1f} MiB after {WARM}, {late / 2**20:.1f} at the end")
