"""The replica check: whether ranks hold the same bits; where not, all take the first rank's.

MPI does not promise the same bits of a sum to all ranks, nor do devices of two kinds compute them.
Ranks that step on the same gradients would part a little more with every step.
"""

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import log
from prunex_mpi.comm.agreement import DIGEST_BYTES, digests_agree
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.core.memory import ALL
from prunex_mpi.core.state import State, agreeing
from prunex_mpi.models.layout import bits_digest


def replicas_agree(link: CountedComm, state: State, flat: Tensor) -> bool:
    """Return whether `flat` has the same bits on all ranks. Collective on `link.comm`."""
    digest = bits_digest(flat)
    with agreeing(state, "Allreduce of a digest", DIGEST_BYTES):
        return digests_agree(link.comm, digest)


def adopt_first_replica_(link: CountedComm, state: State, where: str) -> None:
    """Go on from the first rank's theta, u, optimizer and shared memory; a line says so.

    Collective on `link.comm`.
    """
    theta, before = state.theta, state.theta.clone()
    shared = [entry.tensor for _, entry in state.memory.items() if entry.owner == ALL]
    for tensor in (theta, state.u, *state.optimizer.tensors().values(), *shared):
        # MPI has no buffers of bool.
        link.broadcast_(tensor.view(-1).view(torch.uint8), kind="control")
    gap = before.sub_(theta).abs_().max().view(1)
    link.reduce_(gap, MPI.MAX, kind="control")
    if link.comm.rank == 0:
        largest = float(torch.linalg.vector_norm(theta, torch.inf))
        log.warning(
            "weights differed between ranks %s, by up to %.1e (largest weight %.1e), after outer "
            "iteration %d: all go on from those of the first rank",
            where,
            float(gap),
            largest,
            state.position.iteration,
        )


def check_replicas_(link: CountedComm, state: State) -> None:
    """Give all ranks the first one's theta where it differs. Collective on `link.comm`."""
    if link.comm.size > 1 and not replicas_agree(link, state, state.theta):
        adopt_first_replica_(link, state, "of the run")
