"""Find out together what is in the class folders or the tar files of a data set."""

import json
from dataclasses import asdict

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, together_while
from prunex_mpi.data.sources import CONTENTS, Known, read_share


def share_contents(world: MPI.Comm, name: str, data_dir: str, heartbeat: Heartbeat) -> Known:
    """Return what lies in all class folders or tar files of a data set; each rank reads a share.

    {} for a data set of another kind. Raises UserError (UNREADABLE) everywhere for what one can't
    read. Collective on `world`.
    """
    if name not in CONTENTS:
        return {}
    mine = together_while(
        world,
        lambda going: read_share(name, data_dir, world.rank, world.size, going),
        heartbeat.go_on,
    )
    text = json.dumps({path: asdict(contents) for path, contents in mine.items()})
    found = {}
    for root in range(world.size):
        share = json.loads(broadcast_text(world, text, root))
        found |= {path: CONTENTS[name](**told) for path, told in share.items()}
        heartbeat.go_on()
    return found
