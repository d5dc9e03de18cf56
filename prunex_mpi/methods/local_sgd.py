"""The driver of the methods that average dense parameters once per outer iteration.

H-SADMM without duals: its phases 1, 2 and 4 are the local steps and the average, with the same
interval, the same `--node-sync` and the same messages (`hsadmm.py` names communicators, operations
and operands).

- `local-sgd`: theta starts each outer iteration from the mean over all ranks.
- `diloco`: that mean is a step of SGD with Nesterov momentum (Douillard et al. 2023).
- `one-shot`: at the end of one outer iteration the groups of largest magnitude are kept, as phase 3
  does, and what follows is training on the fixed support with the payload that has shrunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.agreement import mean_over_ranks
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.wire import find_wires
from prunex_mpi.core.evaluation import estimate_statistics, refuse_divergence
from prunex_mpi.core.rounds import finish_round, phase, rounds, split_local
from prunex_mpi.core.schedule import Stage
from prunex_mpi.core.state import SHARED, State, Work, freeze
from prunex_mpi.core.steps import averaging
from prunex_mpi.methods.hsadmm import (
    inter_node_consensus,
    intra_node_consensus,
    local_computation,
    project,
)
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.methods import PRUNING_ONCE

VELOCITY = f"{SHARED}outer_momentum"


def outer_memory(theta: Tensor) -> dict[str, Tensor]:
    """Allocate the velocity of `outer_step_`."""
    return {VELOCITY: torch.zeros_like(theta)}


def outer_iterations(topology: Topology, work: Work) -> Iterator[dict[str, Any]]:
    """Train from `position` on; yield each outer iteration's metrics (metrics.jsonl).

    As `hsadmm.outer_iterations`; `dual` counts diloco's outer step. Collective on `topology.world`.
    Raises Diverged on every rank.
    """
    state, settings, position = work.state, work.settings, work.state.position
    wires = find_wires(topology, False, work.transport, position.traffic, position.clock)
    leader, node = wires.workers, wires.node
    with averaging(node if settings.node_sync == "step" else None, work) as averager:
        for this in rounds(work):
            prune = settings.method in PRUNING_ONCE and this.k == settings.prune_iteration
            stage = Stage(strict=1.0, choose=prune, vote=True, freeze=prune, measured=False)

            with phase(work, this, "local"):
                loss = local_computation(averager, work)
                if loss is None:
                    return
                refuse_divergence(topology, state, loss)
            split_local(work, this, waiting="intra")
            with phase(work, this, "intra"):
                mean = intra_node_consensus(node, state, settings)
            with phase(work, this, "project"):
                project(leader, node, state, settings, mean, stage)
                if stage.freeze:
                    freeze(state, True)
            # The mean of theta is taken, and its memory free for what z was before.
            old_z = state.theta.copy_(state.z)
            with phase(work, this, "inter"):
                inter_node_consensus(leader, node, state, stage)
                loss = mean_over_ranks(topology.world, loss)
            with phase(work, this, "dual"):
                if VELOCITY in state.memory:
                    outer_step_(state, old_z, settings)

            if prune and settings.bn == "recalibrate":
                with phase(work, this, "evaluate"):
                    estimate_statistics(topology, work)
            yield finish_round(topology, work, this, loss)


def outer_step_(state: State, old_z: Tensor, settings: Settings) -> None:
    """Step from `old_z` along old_z - z, z the mean of the ranks; leave the result in z.

    b = momentum b + (old_z - z), z = old_z - lr (old_z - z + momentum b): DiLoCo's outer optimizer,
    SGD with Nesterov momentum. Written so that lr 1 without momentum is the mean, bit for bit. The
    mask is kept: old_z, z and b vanish outside of it.
    """
    lr, momentum = settings.outer_lr, settings.outer_momentum
    step = torch.sub(old_z, state.z, out=state.scratch)
    velocity = state.memory[VELOCITY].mul_(momentum).add_(step)
    state.z.add_(step, alpha=1 - lr).add_(velocity, alpha=-lr * momentum)
