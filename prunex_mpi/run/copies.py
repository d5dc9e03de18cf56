"""Keep copies out of a checkpoint: what a rank holds bit for bit as its node's leader does.

With gradients averaged at every step all ranks of a node hold the same parameters, momentum and
duals. A rank's numbers name the tensors that stand in the file of its leader alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import DamagedCheckpoint
from prunex_mpi.base.files import FileRecord
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.run.checkpoint_files import leaders_in, read_rank_file
from prunex_mpi.run.tensor_file import bytes_of

AS_LEADER = "as_leader"
# Many and small, and most of them each rank's own.
NOT_COMPARED = ("buffer.", "generator.")
# What is compared at a time stays in the cache of a core.
CHUNK = MIB


def without_copies(
    topology: Topology,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    going: Callable[[], None],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what this rank has to write of its tensors, CPU, and numbers that name the rest.

    The leader's values travel to its node, where each rank compares them with its own: that takes
    a fraction of the time of writing them. `going` is called as they travel. Collective on `node`.
    """
    if topology.node_size == 1:
        return tensors, numbers
    kinds = {
        name: [tensor.nbytes, str(tensor.dtype), *tensor.shape]
        for name, tensor in tensors.items()
        if not name.startswith(NOT_COMPARED)
    }
    leaders = json.loads(broadcast_text(topology.node, json.dumps(kinds)))
    copies = []
    for name, kind in leaders.items():
        mine = bytes_of(tensors[name]) if kinds.get(name) == kind else None
        if _is_leaders(topology.node, mine, kind[0], going):
            copies.append(name)
    if topology.is_leader:
        return tensors, numbers
    mine = {name: tensor for name, tensor in tensors.items() if name not in copies}
    return mine, {**numbers, AS_LEADER: copies}


def _is_leaders(
    node: MPI.Comm, mine: np.ndarray | None, length: int, going: Callable[[], None]
) -> bool:
    """Say whether the bytes of this rank are the leader's, which has so many. Collective."""
    same, room = mine is not None, np.empty(min(CHUNK, length), dtype=np.uint8)
    for start in range(0, length, CHUNK):
        part = slice(start, min(start + CHUNK, length))
        theirs = mine[part] if node.rank == 0 else room[: part.stop - start]
        node.Bcast(theirs, root=0)
        going()
        same = same and np.array_equal(mine[part], theirs)
        if start == 0:
            alike = np.array([same and node.rank > 0], dtype=np.int32)
            node.Allreduce(MPI.IN_PLACE, alike, op=MPI.MAX)
            if not alike[0]:
                return False
    return same


def read_with_copies(
    run: Path, name: str, manifest: dict[str, Any], rank: int, going: Callable[[], None]
) -> tuple[dict[str, Tensor], Any]:
    """Return all that `rank` held; raise DamagedCheckpoint unless every bit is as written.

    `going` is called as reading goes on.
    """
    record = FileRecord(*manifest["ranks"][rank])
    tensors, numbers = read_rank_file(run, name, rank, record, going=going)
    copies = numbers.pop(AS_LEADER, []) if isinstance(numbers, dict) else []
    if copies == []:
        return tensors, numbers
    leader = leaders_in(manifest)[rank]
    named = isinstance(copies, list) and all(isinstance(copy, str) for copy in copies)
    if rank == leader or not named:
        raise DamagedCheckpoint(f"rank {rank}: {AS_LEADER} is not what was written")
    record = FileRecord(*manifest["ranks"][leader])
    shared, _ = read_rank_file(run, name, leader, record, copies, going)
    return tensors | shared, numbers
