"""The start of a job: the nodes that its ranks make, and what each of them computes and sends with.

Training, the benchmark and the comparison start alike, in this order: refuse_lone_singleton,
take_places, heed_findings where a run is to be written, find_transport.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.logs import log
from prunex_mpi.checks.findings import errors
from prunex_mpi.checks.ranks import check_ranks
from prunex_mpi.comm.agreement import broadcast_text, raise_together, require_same, together
from prunex_mpi.comm.collectives import Transport, build_transport
from prunex_mpi.comm.topology import Topology, describe, library_name, nodes_of
from prunex_mpi.core.metrics import prunable_and_kept
from prunex_mpi.core.schedule import total_steps
from prunex_mpi.core.state import Work
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.methods.local_sgd import advice
from prunex_mpi.pruning.find_groups import out_of_reach
from prunex_mpi.run.devices import (
    choose_device,
    keep_freed_memory,
    lone_singleton,
    resolve_mpi_buffers,
    set_threads,
)
from prunex_mpi.run.facts import gather_facts
from prunex_mpi.run.machine import describe_machine
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.methods import EVERY_RANK_ALONE, QUADRATIC

# Layers behind which weights of any size do, and learning rates of ResNets with them.
STEADYING = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Place:
    """Where a rank works; `layout` describes all ranks in one line, on world rank 0 alone."""

    topology: Topology
    device: torch.device
    threads: int
    layout: str

    def describe(self) -> dict[str, str]:
        """Return what tables name, since figures mean nothing without."""
        return {
            "machine": describe_machine(self.device),
            "mpi": library_name(),
            "ranks": self.layout,
        }


def refuse_lone_singleton(world: MPI.Comm) -> None:
    """Raise UserError where a job of several ranks fell apart. Collective on `world`."""
    singleton = lone_singleton(world)
    raise_together(world, UserError(singleton) if singleton else None)


@contextmanager
def take_places(
    world: MPI.Comm, ranks_per_node: int, device: str, threads: int = 0, lanes: int = 1
) -> Iterator[Place]:
    """Divide `world` into nodes for the time of the block; give each rank its device and threads.

    `device` and `ranks_per_node` are settings, `lanes` is --leaders-per-node; `threads` 0 are a
    fair share. Collective on `world`.
    """
    with nodes_of(world, ranks_per_node, lanes) as topology:
        chosen = together(world, lambda: choose_device(device, topology.host_rank))
        require_same(world, "the kinds of device (some ranks found no GPU)", chosen.type)
        if chosen.type == "cpu":
            keep_freed_memory()
        if threads:
            torch.set_num_threads(threads)
        else:
            threads = set_threads(topology.core_sharers)
        yield Place(topology, chosen, threads, describe(topology, f"{chosen}, {threads} threads"))


def heed_findings(place: Place, settings: Settings) -> None:
    """Log what the doctor would warn of and refuse what can't work. Collective on `world`."""
    world = place.topology.world
    facts = gather_facts(place.topology, place.device, settings.run_dir)
    virtual = settings.ranks_per_node > 0 or settings.method in EVERY_RANK_ALONE
    refused = ""
    if facts:
        findings = check_ranks(facts, settings.mpi_buffers, virtual)
        for finding in findings:
            if finding.severity == "warning":
                log.warning("%s", finding.line())
        refused = "; ".join(finding.line() for finding in errors(findings))
    refused = broadcast_text(world, refused)
    if refused:
        raise UserError(refused)


def find_transport(place: Place, settings: Settings) -> Transport:
    """Decide how tensors reach MPI, and log it. Collective on `world`."""
    buffers, reason = resolve_mpi_buffers(place.topology, settings.mpi_buffers, place.device)
    if place.device.type == "cuda":
        log.info("MPI buffers: %s (%s)", buffers, reason)
    return build_transport(place.device, settings.bucket_mib, buffers, settings.piece_kib)


def describe_training(work: Work, dataset: Dataset, ranks: int) -> str:
    """Say in one line on what, for how long and what is trained, and what of it can be pruned."""
    settings, problem = work.settings, work.problem
    steps = f"{problem.steps:,} steps"
    if settings.method in QUADRATIC:
        steps += " or more"
    steps += " per outer iteration"
    if settings.frozen_local_steps:
        steps += f" ({settings.frozen_local_steps:,} once frozen)"
    held_out = f"{dataset.val_total:,} held out, " if dataset.val_total else ""
    return "; ".join(
        (
            f"{dataset.train_total:,} images to train on, {held_out}{dataset.test_total:,} to test "
            f"on, {dataset.num_classes:,} classes",
            f"{problem.train.batch_size * ranks:,} images per step, {steps}, "
            f"{total_steps(settings, problem.steps):,} in all",
            f"{work.state.layout.numel:,} parameters, {_prunable(work)}",
        )
    )


def tell_beforehand(world: MPI.Comm, work: Work) -> None:
    """Say on rank 0 what is not pruned, and warn of what the settings do that was hardly meant."""
    if world.rank:
        return
    for excluded in work.state.groups.excluded:
        log.info("not pruned: %s", excluded)
    if line := out_of_reach(work.state.groups, work.state.layout.numel):
        log.warning("%s", line)
    problem = work.problem
    steady = any(isinstance(module, STEADYING) for module in problem.model.modules())
    for line in advice(work.settings, problem.steps, problem.lr_scale, steady=steady):
        log.warning("%s", line)
    _warn_of_smaller_batches(work)


def _warn_of_smaller_batches(work: Work) -> None:
    """Say that steps have fewer images than was asked for, since a rank has no more."""
    wanted, images = work.settings.batch_size, work.problem.train.batch_size
    if images < wanted:
        log.warning(
            "batch-size %d: a rank has %d images, and so many are in a step; lower it, start fewer "
            "ranks or give more images",
            wanted,
            images,
        )


def _prunable(work: Work) -> str:
    weights, groups = prunable_and_kept(work.state)[0], work.state.groups
    if not weights:
        return "none of which are pruned"
    if not groups.total:
        return f"of which {weights:,} weights can be pruned one by one"
    sizes = Counter[str]()
    for kind in groups.kinds:
        for selection in kind:
            sizes[selection.kind] += selection.stop - selection.start
    kinds = " and ".join(f"{count:,} {kind}" for kind, count in sizes.items())
    return f"of which {weights:,} weights can be pruned in {kinds} groups"
