"""Find out together what is in the tar files of a data set."""

import json
from dataclasses import asdict

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, together_while
from prunex_mpi.data.sources import WITH_HEADERS, read_share
from prunex_mpi.data.tars import Headers


def share_headers(
    world: MPI.Comm, name: str, data_dir: str, heartbeat: Heartbeat
) -> dict[str, Headers]:
    """Return the headers of all tar files of a data set by path, of which each rank reads a share.

    Raises UserError (UNREADABLE) everywhere for what one can't read. Collective on `world`.
    """
    if name not in WITH_HEADERS:
        return {}
    mine = together_while(
        world,
        lambda going: read_share(data_dir, world.rank, world.size, going),
        heartbeat.go_on,
    )
    text = json.dumps({path: asdict(headers) for path, headers in mine.items()})
    found: dict[str, Headers] = {}
    for root in range(world.size):
        share = json.loads(broadcast_text(world, text, root))
        found |= {path: Headers(**told) for path, told in share.items()}
        heartbeat.go_on()
    return found
