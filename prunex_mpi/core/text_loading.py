"""Read a text once per machine, and give each rank its windows of it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import (
    broadcast_text,
    require_same,
    run_collectively,
    run_collectively_while,
)
from prunex_mpi.data.text import Text, TextSet, take_windows, text_of
from prunex_mpi.data.text_files import Prepared, Tokenizer, forget, prepare, prepared_from
from prunex_mpi.settings.fields import Settings

# By which what has been read of a text goes by among what ranks know of a data set.
READ = "text"


def share_text(
    world: MPI.Comm,
    data_dir: str,
    tokenizer: str,
    heartbeat: Heartbeat,
    known: Tokenizer | None = None,
) -> Mapping[str, Any]:
    """Return {READ: the text}, read and cut into tokens by the first rank of each machine alone.

    With chars its vocabulary may be `known`. Raises UserError (UNREADABLE) on every rank where one
    can't read it. Collective on `world`.
    """
    host = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    made: list[Prepared] = []

    def read(going: Callable[[], None]) -> str:
        if host.rank:
            return ""
        made.append(prepare(data_dir, tokenizer, going, known))
        return json.dumps(made[0].as_json())

    try:
        told = run_collectively_while(world, read, heartbeat.go_on)
        prepared = prepared_from(json.loads(broadcast_text(host, told)))
        text = run_collectively(world, lambda: text_of(prepared))
    finally:
        for one in made:
            forget(one.files if one.temporary else ())
        host.Free()
    require_same(world, "the text or the tokenizer", text.digest)
    return {READ: text}


def load_text(world: MPI.Comm, settings: Settings, known: Mapping[str, Any]) -> TextSet:
    """Return this rank's windows of a `known` text; raise alike. Collective on `world`."""
    text: Text = known[READ]
    windows = run_collectively(
        world,
        lambda: take_windows(
            text,
            settings.context,
            samples=(settings.train_samples, settings.test_samples),
            val_split=settings.val_split,
            part=(world.rank, world.size),
        ),
    )
    log.info("%s", text.found)
    return windows
