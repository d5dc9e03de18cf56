"""Small runs of every kind as the program makes them, for tests of what a run records."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import Transport, build_transport
from prunex_mpi.comm.preemption import stop_agreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import RunContext
from prunex_mpi.data.request import Request
from prunex_mpi.run.problem import load_dataset
from prunex_mpi.run.start import assemble
from prunex_mpi.run.supervision import overlaps_steps

CPU = torch.device("cpu")
# Buckets of 1 KiB: every message is cut.
TRANSPORT = build_transport(CPU, 2**-10, "host")
COMMON = {"model": "odd_models:small", "dataset": "synthetic", "train_samples": 64}
COMMON |= {"test_samples": 16, "image_size": 8, "batch_size": 4, "outer_iterations": 3}
COMMON |= {"local_steps": 2, "lr": 0.01, "lr_schedule": "constant"}
PRUNING = {"warmup_iterations": 0, "keep_ramp_iterations": 0, "freeze_iteration": 3}
BEHIND = {"overlap_steps": 1, "residuals": "off", "evaluate_every": 3}
SCENARIOS = {
    "recipe": {**PRUNING},
    "paper": {"preset": "paper", **PRUNING},
    "int4": {**PRUNING, "payload": "int4"},
    "behind": {**PRUNING, **BEHIND, "payload": "int4"},
    "flat consensus": {**PRUNING, "method": "prunex-flat"},
    "local sgd": {"method": "local-sgd", "node_sync": "outer"},
    "sparseloco": {"method": "sparseloco", "sparseloco_ratio": 0.1},
    "dense": {"method": "dense"},
    "topk": {"method": "topk", "aggregation": "hierarchical"},
    "pactrain": {
        "method": "pactrain",
        "pactrain_prune_iteration": 1,
        "aggregation": "hierarchical",
    },
    "prunetrain": {"method": "prunetrain", "prunetrain_reconfigure_every": 1},
}
# One of each driver.
DRIVERS = ("recipe", "flat consensus", "local sgd", "dense", "prunetrain")


@contextmanager
def small_run(
    topology: Topology,
    scenario: str,
    heartbeat: Heartbeat | None = None,
    place: tuple[torch.device, Transport] = (CPU, TRANSPORT),
    **changes: Any,
) -> Iterator[RunContext]:
    """Have what a rank works on in a run of `scenario`; `place` is its device, and how it sends."""
    settings = make(**{**COMMON, **SCENARIOS[scenario], **changes})
    dataset = load_dataset(topology, Request.of(settings))
    context = assemble(topology, settings, dataset, *place, heartbeat or Heartbeat())
    with (
        stop_agreement(topology.world, ReceivedSignal(), None) as stop,
        exchanging_asynchronously(topology, overlaps_steps(settings), place[1]) as helper,
    ):
        yield replace(context, stop=stop, helper=helper)
