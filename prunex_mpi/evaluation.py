"""Evaluate what is delivered, the masked z with the consensus BatchNorm statistics; guard it."""

from itertools import islice

import numpy as np
import torch

from prunex_mpi import batchnorm
from prunex_mpi.collectives import Transport, allreduce_, allreduce_then_bcast_, hierarchical_sum_
from prunex_mpi.comm import Topology, raise_together
from prunex_mpi.errors import FAILURE, UserError
from prunex_mpi.state import Problem, State, Traffic, weights

# Per rank: the statistics of a channel settle within a few thousand activations.
RECALIBRATION_BATCHES = 8
EVALUATION_BATCH = 256


@torch.no_grad()
def evaluate(
    topology: Topology, state: State, problem: Problem, traffic: Traffic
) -> tuple[float, float]:
    """Return (test loss, test accuracy as a fraction) of z over the shares of all ranks.

    Collective on `node` and `leader`; every rank receives the same numbers.
    """
    sums = np.zeros(3)
    problem.model.eval()
    with weights(state, state.z):
        for images, labels in problem.batches(problem.test, batch_size=EVALUATION_BATCH):
            outputs = problem.model(images)
            sums[0] += float(problem.loss(outputs, labels)) * len(labels)
            sums[1] += int((outputs.argmax(dim=1) == labels).sum())
            sums[2] += len(labels)
    hierarchical_sum_(topology.leader, topology.node, sums)
    traffic.evaluate += sums.nbytes
    if not np.isfinite(sums[0]):
        # Every rank holds the same sums, so every rank raises.
        raise UserError("the loss on the test set is not finite; check model and data", FAILURE)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def estimate_statistics(
    topology: Topology, state: State, problem: Problem, transport: Transport, traffic: Traffic
) -> None:
    """Estimate the BatchNorm statistics again on z and average them over all ranks.

    Pruning moves z away from the theta whose statistics were averaged. Each rank runs a few batches
    of its own shard, of equal weight. Collective on `node` and `leader`.
    """
    if not state.bn_modules:
        return
    batches = problem.batches(problem.train_shard, batch_size=problem.train.batch_size)
    # Whole batches only: BatchNorm refuses a single image, and a small batch would weigh too much.
    count = min(RECALIBRATION_BATCHES, problem.train.steps_per_epoch)
    images = (images for images, _ in islice(batches, count))
    with weights(state, state.z):
        batchnorm.estimate(problem.model, state.bn_modules, images)
    batchnorm.read_(state.bn_modules, state.stats)
    allreduce_(topology.node, state.stats, transport)
    state.stats.div_(topology.world_size)
    allreduce_then_bcast_(topology.leader, topology.node, state.stats, transport)
    batchnorm.write(state.bn_modules, state.stats)
    size = state.stats.numel() * state.stats.element_size()
    traffic.evaluate += size
    if topology.node_size > 1:
        traffic.intra += 2 * size


def refuse_non_finite(topology: Topology, state: State, loss: float, iteration: int) -> None:
    """Raise UserError on every rank if any rank's loss or weights are not finite.

    Comes before phase 2, so that nothing non-finite enters a consensus. Collective on `world`.
    """
    finite = np.isfinite(loss) and bool(torch.isfinite(torch.linalg.vector_norm(state.theta)))
    error = UserError(
        f"the loss or the weights are not finite in phase 1 of outer iteration {iteration}; "
        "lower --lr or check the data",
        FAILURE,
    )
    raise_together(topology.world, None if finite else error)
