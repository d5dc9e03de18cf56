"""Train, and write what the kernel counts on this host's link during each exchange.

That is each phase 4, of messages in fragments each fragment, or of methods that exchange at each
step the average of each step's gradient.

    mpirun -n 4 python count_phase4.py FILE [flags of prunex_mpi.train]

Each leader writes FILE-NODE, a JSON list: what `eth0` has sent in each of them. With LINK_OF in the
environment of a rank, a process and an interface of its network (123:link), that is what went over
this one, both ways.
"""

import json
import os
import sys
from pathlib import Path

from mpi4py import MPI

from prunex_mpi import train
from prunex_mpi.core import exchange
from prunex_mpi.methods import hsadmm, per_step

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
sent: list[int] = []
nodes: list[int] = []


def reading() -> int:
    """Return the bytes that the kernel has counted so far."""
    if "LINK_OF" not in os.environ:
        return int(COUNTER.read_text())
    process, _, name = os.environ["LINK_OF"].partition(":")
    _, _, row = Path(f"/proc/{process}/net/dev").read_text().partition(f"{name}:")
    fields = row.split()
    return int(fields[0]) + int(fields[8])


def counted(real):
    """Return `real`, of communicators or an exchange, between two readings of a quiet link."""

    def function(*arguments, **named):
        MPI.COMM_WORLD.Barrier()
        before = reading()
        # Nobody sends before all have read.
        MPI.COMM_WORLD.Barrier()
        result = real(*arguments, **named)
        MPI.COMM_WORLD.Barrier()
        sent.append(reading() - before)
        workers = getattr(arguments[0], "comms", arguments[0]).workers
        nodes[:] = [workers.comm.rank] if workers.is_member else []
        return result

    return function


hsadmm.inter_node_consensus = counted(hsadmm.inter_node_consensus)
exchange.send_fragment_ = counted(exchange.send_fragment_)
per_step.average_gradient_ = counted(per_step.average_gradient_)
status = train.main(sys.argv[2:])
for node in nodes:
    Path(f"{sys.argv[1]}-{node}").write_text(json.dumps(sent))
sys.exit(status)
