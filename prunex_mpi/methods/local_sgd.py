"""The driver of the methods that train locally and exchange once per outer iteration.

H-SADMM without duals: its phases 1, 2 and 4 are the local steps and the average, with the same
interval, the same `--node-sync` and the same messages (`hsadmm.py` names communicators, operations
and operands).

- `local-sgd`: theta starts each outer iteration from the mean over all ranks.
- `qsr`: the same, with an interval that grows as the learning rate falls (Gu et al. 2024).
- `diloco`: that mean is a step of SGD with Nesterov momentum (Douillard et al. 2023).
- `sparseloco`: a few values of what the local steps have changed travel (Sarfi et al. 2025).
- `one-shot`: at the end of one outer iteration the groups of largest magnitude are kept, as phase 3
  does, and what follows is training on the fixed support with the payload that has shrunk.
"""

from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.admm import mean_loss
from prunex_mpi.core.evaluation import LASTING, PASSING, check_divergence
from prunex_mpi.core.loop import finish_round, goes_behind, phase, rounds, split_local
from prunex_mpi.core.schedule import Stage
from prunex_mpi.core.state import RunContext, freeze, wires_of
from prunex_mpi.core.statistics import find_reference_
from prunex_mpi.core.steps import Rounds, averaging
from prunex_mpi.core.streaming import goes_in_parts, send_part_
from prunex_mpi.methods import hsadmm
from prunex_mpi.methods.exchanges import code_of
from prunex_mpi.settings.fields import Settings

# With fewer local steps, momentum that is kept and DiLoCo's outer momentum drive each other.
FEWEST_KEPT = 8
# A rate that suits SGD: AdamW moves every weight by about as much at each step.
HIGH_ADAMW_RATE = 0.02
# Nothing undoes what a step that is too long does to the scale of what layers give.
HIGH_UNSTEADY_RATE = 0.05


def outer_iterations(topology: Topology, context: RunContext) -> Rounds:
    """Train from `position` on; yield as `hsadmm.outer_iterations`. Collective on `world`.

    Raises Diverged on every rank.
    """
    state, settings = context.state, context.settings
    wires = wires_of(topology, state, context.transport)
    leader, node = wires.workers, wires.node
    method = settings.method
    code = code_of(method) if method.own_format else None
    space = code.allocate(topology.num_nodes, context) if code else None
    recalibrates = settings.bn == "recalibrate"
    with averaging(node if settings.node_sync == "step" else None, context) as averager:
        for this in rounds(context):
            prune = method.prunes_once and this.k == settings.options.prune_iteration
            stage = Stage(strict=1.0, choose=prune, vote=True, freeze=prune, measured=False)

            parted = goes_in_parts(context, this, stage)
            with phase(context, this, "local"):
                steps = hsadmm.local_computation(averager, context, wires if parted else None)
                loss = yield from steps
                if loss is None:
                    return
                check_divergence(topology, context, loss)
            split_local(context, this, waiting="intra")
            behind = goes_behind(context, this, stage)
            with phase(context, this, "intra"):
                find_reference_(wires, state)
                mean = None if parted else hsadmm.intra_node_consensus(node, state, settings)
            if parted:
                with phase(context, this, "inter"):
                    send_part_(wires, context, settings.fragments, behind)
                    loss = mean_loss(topology.world, state, loss)
            else:
                with phase(context, this, "project"):
                    hsadmm.project(leader, node, state, settings, mean, stage)
                    if stage.freeze:
                        freeze(state, True)
                with phase(context, this, "inter"):
                    if code is not None:
                        code.exchange_(wires, space, context)
                    else:
                        hsadmm.inter_node_consensus(wires, context, stage, behind)
                    loss = mean_loss(topology.world, state, loss)

            # Nobody was trained with z: its statistics are estimated where it is looked at.
            estimate = ""
            if recalibrates and (prune if method.prunes_once else this.last):
                estimate = LASTING
            elif recalibrates and not method.prunes_once:
                estimate = PASSING
            yield finish_round(topology, context, this, loss, estimate=estimate)


def advice(
    settings: Settings, steps: int, lr_scale: float = 1.0, *, steady: bool = True
) -> list[str]:
    """Return a line for each thing that is known to go wrong with `steps` local steps.

    The network is `steady` if it has BatchNorm, GroupNorm or the like.
    """
    lines = []
    kept = settings.method.outer_step and settings.inner_momentum == "keep" and settings.momentum
    if kept and settings.optimizer == "sgd" and steps < FEWEST_KEPT:
        lines.append(
            f"{settings.method.name} keeps the inner momentum over exchanges that are {steps} "
            f"local steps apart: below {FEWEST_KEPT} that is stable at very small learning rates "
            "alone; give --inner-momentum reset"
        )
    if settings.optimizer != "sgd" and settings.inner_momentum == "reset":
        lines.append(
            "adamw takes its first steps after each exchange far too short where its first moment "
            "begins anew; give --inner-momentum keep"
        )
    rate = settings.lr * lr_scale
    if settings.optimizer != "sgd" and rate > HIGH_ADAMW_RATE:
        lines.append(
            f"lr {rate:g} is high for {settings.optimizer}, which moves every weight by about that "
            "much at each step; 0.001 is usual"
        )
    if not steady and settings.optimizer == "sgd" and rate > HIGH_UNSTEADY_RATE:
        other = "--optimizer adamw, which is usual for transformers, or "
        lines.append(
            f"lr {rate:g} with sgd is for networks with BatchNorm, and this one has none: give "
            f"{other if settings.method.optimizer else ''}a smaller --lr"
        )
    return lines
