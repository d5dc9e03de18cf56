"""Keep copies out of a checkpoint: what a rank holds bit for bit as its node's leader does.

With gradients averaged at every step all ranks of a node hold the same parameters, momentum and
duals. A rank's numbers name the tensors that stand in the file of its leader alone.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunex_mpi.base.errors import DamagedCheckpoint
from prunex_mpi.base.files import FileRecord
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.run.checkpoint_files import leaders_in, read_rank_file

AS_LEADER = "as_leader"


def without_copies(
    topology: Topology, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what this rank has to write of its tensors, CPU, and numbers that name the rest.

    Collective on `node`.
    """
    digests: dict[str, str] = {}
    if topology.node_size > 1:
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    leaders = json.loads(broadcast_text(topology.node, json.dumps(digests)))
    if topology.is_leader:
        return tensors, numbers
    copies = [name for name, digest in digests.items() if leaders.get(name) == digest]
    mine = {name: tensor for name, tensor in tensors.items() if name not in copies}
    return mine, {**numbers, AS_LEADER: copies}


def read_with_copies(
    run: Path, name: str, manifest: dict[str, Any], rank: int
) -> tuple[dict[str, Tensor], Any]:
    """Return all that `rank` held; raise DamagedCheckpoint unless every bit is as written."""
    tensors, numbers = read_rank_file(run, name, rank, FileRecord(*manifest["ranks"][rank]))
    copies = numbers.pop(AS_LEADER, []) if isinstance(numbers, dict) else []
    if copies == []:
        return tensors, numbers
    leader = leaders_in(manifest)[rank]
    named = isinstance(copies, list) and all(isinstance(copy, str) for copy in copies)
    if rank == leader or not named:
        raise DamagedCheckpoint(f"rank {rank}: {AS_LEADER} is not what was written")
    record = FileRecord(*manifest["ranks"][leader])
    shared, _ = read_rank_file(run, name, leader, record, copies)
    return tensors | shared, numbers


def _digest(tensor: Tensor) -> str:
    """Return what differs when the values, shape or type of a tensor do."""
    digest = hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
