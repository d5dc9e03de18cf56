"""Train, and write what the kernel counts on this host's link during each phase 4.

    mpirun -n 4 python count_phase4.py FILE [flags of prunex_mpi.train]

Each leader writes FILE-NODE, a JSON list: what `eth0` has sent in each outer iteration.
"""

import json
import sys
from pathlib import Path

from mpi4py import MPI

from prunex_mpi import train
from prunex_mpi.methods import hsadmm

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
sent: list[int] = []
nodes: list[int] = []
real = hsadmm.inter_node_consensus


def counted(wires, *arguments):
    """Do phase 4 between two readings; nothing else is on the link."""
    MPI.COMM_WORLD.Barrier()
    before = int(COUNTER.read_text())
    moved = real(wires, *arguments)
    MPI.COMM_WORLD.Barrier()
    sent.append(int(COUNTER.read_text()) - before)
    nodes[:] = [wires.workers.comm.rank] if wires.workers.is_member else []
    return moved


hsadmm.inter_node_consensus = counted
status = train.main(sys.argv[2:])
for node in nodes:
    Path(f"{sys.argv[1]}-{node}").write_text(json.dumps(sent))
sys.exit(status)
