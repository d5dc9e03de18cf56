"""Measure writing and reading a checkpoint against dd with the same bytes on the same disk."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text, together
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.optimizer import momentum_of
from prunex_mpi.run import checkpoint, checkpoint_files
from prunex_mpi.run.assembly import set_up
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import with_overrides
from prunex_mpi.tools.timing import Action, min_seconds

AIM_TIMES_DD = 1.5
IMAGE_SIZE = 8


def checkpoints(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    repeat: int,
    folder: str,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Write and read checkpoints of a fresh run in `folder`. Collective on `world`."""
    world = topology.world
    made = together(world, lambda: "" if world.rank else make_folder(folder))
    path = Path(broadcast_text(world, made))
    files = RunDirectory(path, "bench") if world.rank == 0 else None
    settings = with_overrides(
        settings,
        dataset="synthetic",
        image_size=IMAGE_SIZE,
        train_samples=settings.batch_size * world.size,
        test_samples=world.size,
    )
    work = set_up(topology, settings, device, transport, heartbeat)
    state = work.state
    # No disk shall gain from zeros; ranks of a node hold the same, as they do with node-sync step.
    torch.manual_seed(topology.node_index)
    for flat in (state.u, state.v, momentum_of(state.optimizer, state.theta)):
        flat.normal_()

    def save() -> None:
        checkpoint.save(topology, files, work)

    def read() -> None:
        checkpoint.restore(topology, files, work)

    def settle() -> None:
        if files is not None:
            files.finish_removals()
        world.Barrier()

    def copy_with_dd() -> None:
        # Each rank its own file, as in a checkpoint, from memory through to the disk.
        command = ["dd", f"if={source}", f"of={copy}", "bs=1M", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        world.Barrier()

    def forget_copy() -> None:
        copy.unlink(missing_ok=True)
        settle()

    save()
    size = np.zeros(1, dtype=np.int64)
    newest = broadcast_text(world, checkpoint_files.valid_names(path)[0] if files else "")
    written = checkpoint_files.rank_file(path / "checkpoints" / newest, world.rank)
    # Checkpoints come and go; what dd reads stays, in the page cache.
    source, copy = (path / f"{word}-{world.rank}" for word in ("source", "copy"))
    shutil.copyfile(written, source)
    world.Allreduce(np.array([source.stat().st_size]), size, op=MPI.SUM)
    # Reading apart: in turns of three, dd alone would follow an action that has just freed as many
    # pages as it takes, which a virtual machine takes again at a third of the cost of others.
    writing = {"write": Action(save, settle), "dd": Action(copy_with_dd, forget_copy)}
    seconds = min_seconds(writing, repeat, device, heartbeat)
    seconds |= min_seconds({"read": Action(read, settle)}, repeat, device, heartbeat)
    world.Barrier()
    if files is not None:
        files.close()
        shutil.rmtree(path)
    row = (
        settings.model,
        size[0] / MIB,
        1e3 * seconds["write"],
        1e3 * seconds["dd"],
        seconds["write"] / seconds["dd"],
        AIM_TIMES_DD,
        1e3 * seconds["read"],
    )
    return [
        Table(
            f"Checkpoints of {world.size} ranks on {topology.num_nodes} nodes, before the freeze",
            ("model", "MiB in all", "write ms", "dd ms", "times dd", "aim", "read ms"),
            (row,),
            (
                f"minimum of {repeat}; dd copies the same bytes with conv=fsync, one per rank",
                "a thread removes old checkpoints while training goes on: not in these times",
            ),
        )
    ]


def make_folder(folder: str) -> str:
    """Return a new folder in `folder`; raise UserError where there can't be one."""
    try:
        return tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder)
    except OSError as error:
        raise UserError(f"--dir {folder}: {error.strerror}; choose another") from None
