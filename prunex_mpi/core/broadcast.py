"""Make rank 0's tensors everyone's."""

import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, bcast_


def broadcast_weights_(world: MPI.Comm, model: nn.Module, transport: Transport) -> None:
    """Make rank 0's parameters and buffers everyone's. Collective on `world`."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast_tensor_(world, tensor.detach(), transport)


def broadcast_tensor_(world: MPI.Comm, tensor: Tensor, transport: Transport) -> None:
    """Make rank 0's values of a tensor, of any dtype, everyone's. Collective on `world`."""
    # The memory may be out of order, as in a model that is channels_last itself. Bytes, since
    # counters travel as well.
    flat = tensor.contiguous().view(-1)
    bcast_(world, flat.view(torch.uint8), transport)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
