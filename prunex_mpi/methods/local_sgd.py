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

from prunex_mpi.comm.agreement import mean_over_ranks
from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.wire import find_wires
from prunex_mpi.core.evaluation import estimate_statistics, refuse_divergence
from prunex_mpi.core.outer_step import outer_step_
from prunex_mpi.core.rounds import finish_round, goes_behind, phase, rounds, split_local
from prunex_mpi.core.schedule import Stage
from prunex_mpi.core.state import Work, freeze
from prunex_mpi.core.steps import averaging
from prunex_mpi.methods.hsadmm import (
    inter_node_consensus,
    intra_node_consensus,
    local_computation,
    project,
)
from prunex_mpi.settings.methods import PRUNING_ONCE


def outer_iterations(topology: Topology, work: Work) -> Iterator[dict[str, Any]]:
    """Train from `position` on; yield each outer iteration's metrics (metrics.jsonl).

    As `hsadmm.outer_iterations`; `dual` counts diloco's outer step, unless it waits for an exchange
    that goes on behind local steps. Collective on `topology.world`. Raises Diverged on every rank.
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
            with phase(work, this, "inter"):
                behind = goes_behind(work, this, stage)
                inter_node_consensus(wires, work, stage, behind)
                loss = mean_over_ranks(topology.world, loss)
            with phase(work, this, "dual"):
                if not behind:
                    outer_step_(state, settings)

            if prune and settings.bn == "recalibrate":
                with phase(work, this, "evaluate"):
                    estimate_statistics(topology, work)
            yield finish_round(topology, work, this, loss)
