"""Many outer iterations leave memory, communicators, requests and file handles as they were.

The suite runs a short one; `--soak-iterations 1000` is the long one.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from jobs import NoisyNet, run_directory
from nodes import WORLD, nodes_of

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.comm.preemption import stop_agreement
from prunex_mpi.config.resolve import make
from prunex_mpi.core.mask_choice import make_groups
from prunex_mpi.core.state import RunContext, build_state
from prunex_mpi.data.request import Request
from prunex_mpi.methods import hsadmm
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.run.problem import build_problem, load_dataset
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
    settings = make(
        preset,
        dataset="synthetic",
        train_samples=32,
        test_samples=8,
        image_size=8,
        batch_size=4,
        outer_iterations=iterations,
        local_steps=1,
        warmup_iterations=WARM // 2,
        keep_ramp_iterations=WARM // 5,
        # Balanced penalties grow for as long as a run goes on.
        penalty="fixed",
        # Masks go on being agreed on, in the longest stage there is.
        freeze_iteration=0 if preset == "paper" else WARM - 5,
        freeze_drift=-1.0,
        eps_abs=0.0,
        eps_rel=0.0,
        progress="off",
    )
    samples: list[tuple[int, tuple[int, int, int]]] = []
    real = hsadmm.outer_iterations

    def watched(*arguments: object) -> Iterator[dict]:
        for record in real(*arguments):
            if record["iteration"] in (WARM, iterations):
                samples.append((resident_bytes(), held()))
            yield record

    monkeypatch.setattr(hsadmm, "outer_iterations", watched)
    with nodes_of(2) as nodes, run_directory() as files:
        topology = replace(nodes, world=WatchedComm(nodes.world), node=WatchedComm(nodes.node))
        model = NoisyNet()
        layout = build_layout(model)
        transport = build_transport(torch.device("cpu"), 2**-10, "host")
        dataset = load_dataset(topology, Request.of(settings))
        heartbeat, device = Heartbeat(), torch.device("cpu")
        problem = build_problem(topology, settings, dataset, model, device, transport, heartbeat)
        groups = make_groups(settings, model, layout, Images(dataset.image_size))
        state = build_state(model, layout, groups, settings)
        received = ReceivedSignal()
        with stop_agreement(topology.world, received, None) as stop:
            context = RunContext(state, problem, settings, transport, heartbeat, stop)
            checkpoints = Checkpoints(topology, files, "10", received)
            with closing(progress_of(topology, context)) as progress:
                status = iterate(topology, files, context, checkpoints, progress, None)
    assert status == "completed"
    (early, held_early), (late, held_late) = samples
    assert held_late == held_early
    assert in_flight() == 0
    assert late < GROWTH * early, f"{early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB"
    print(f"rank {WORLD.rank}: {early / 2**20:.1f} MiB after {WARM}, {late / 2**20:.1f} at the end")
