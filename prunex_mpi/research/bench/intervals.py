"""Time training with an exchange every few steps beside torch's, over gloo: what a thin link costs.

After some local steps this package averages as `local-sgd` and `prunex` do, torch by an all_reduce
of the parameters. DistributedDataParallel exchanges gradients at each step, as float32 and by its
fp16 hook. All programs run in turns in one job, over the same link.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.research.bench.beside_torch import (
    IMAGE_SIZE,
    LEAN,
    ddp_turn,
    dense_turn,
    slowest_turns,
    steps_settings,
)
from prunex_mpi.research.bench.gloo import gloo_group
from prunex_mpi.run.assembly import set_up
from prunex_mpi.run.supervision import driver_of
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import make

# What this package runs, by the name of a row: the network of prunex is pruned from the start.
OURS = {
    "local-sgd": {"method": "local-sgd"},
    "local-sgd int4": {"method": "local-sgd", "payload": "int4"},
    "prunex": {"method": "prunex"},
    "prunex int4": {"method": "prunex", "payload": "int4"},
}
PRUNED = {
    "groups": ("coupled",),
    "warmup_iterations": 0,
    "keep_ramp_iterations": 0,
    "freeze_iteration": 1,
    "residuals": "off",
    "bn": "average",
}


def intervals(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    models: tuple[str, ...],
    steps: int,
    repeat: int,
    heartbeat: Heartbeat,
) -> Table:
    """Return the table of seconds per step, the same on every rank. Collective on `world`."""
    rows: list[tuple[str, str, float, float, float, float]] = []
    for name in models:
        given = steps_settings(topology, settings, name, steps, repeat)
        with ExitStack() as exits:
            where = topology, given, transport, device, heartbeat
            turns = _programs(*where, settings.keep_ratio, exits)
            runs = {program: turn for program, (turn, _) in turns.items()}
            taken = slowest_turns(topology.world, runs, repeat)
            sent = {program: tell() for program, (_, tell) in turns.items()}
        alone, rival = taken["no exchange"], taken["DDP fp16"]
        for program, times in taken.items():
            step_ms = 1e3 * float(np.median(times)) / steps
            exposed = 100 * float(np.median(1 - alone / times))
            faster = float(np.median(rival / times))
            rows.append((name, program, sent[program] / MIB / steps, step_ms, exposed, faster))
    ratios = " ".join(f"{ratio:g}" for ratio in settings.keep_ratio)
    return Table(
        f"A step where nodes exchange every {steps} steps: {topology.num_nodes} nodes, "
        f"{topology.world_size} ranks, {IMAGE_SIZE}x{IMAGE_SIZE} images, batch "
        f"{settings.batch_size} per rank",
        ("model", "program", "MiB a step", "ms a step", "waiting %", "times DDP fp16"),
        tuple(rows),
        (
            f"medians of {repeat} turns of {steps} steps, one program after the other in changing "
            "order, each until the last rank has finished; one turn before is not counted",
            "gloo local SGD: an all_reduce of all parameters after these steps; DDP, fp16 by its "
            "hook: gradients at each step; the others are methods of this package",
            f"prunex: coupled groups, keep {ratios}, masks frozen; MiB: what a leader hands "
            "over, of gloo a rank",
            "waiting: of a turn, what `no exchange` does not take; times: how many times as fast "
            "as DDP with its fp16 hook, the median of the ratios within a turn",
        ),
    )


Turn = tuple[Callable[[], None], Callable[[], float]]


def _programs(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    heartbeat: Heartbeat,
    keep_ratio: tuple[float, ...],
    exits: ExitStack,
) -> dict[str, Turn]:
    """Return what takes one turn of each program, and what tells the bytes it hands over."""
    where = topology, settings, transport, device, heartbeat
    alone, _ = dense_turn(*where, exits, exchange=False)
    turns: dict[str, Turn] = {"no exchange": (alone, lambda: 0.0)}
    for name, changes in OURS.items():
        if changes["method"] == "prunex":
            changes = {**PRUNED, "keep_ratio": keep_ratio, **changes}
        turns[name] = _ours(*where, changes, exits)
    exits.enter_context(gloo_group(topology.world))
    plain, weights = ddp_turn(*where, LEAN)
    halved, _ = ddp_turn(*where, LEAN, fp16=True)
    local, _ = ddp_turn(*where, None)
    nbytes = weights().nbytes
    steps = settings.local_steps
    turns["gloo local SGD"] = local, lambda: float(nbytes)
    turns["DDP"] = plain, lambda: float(steps * nbytes)
    turns["DDP fp16"] = halved, lambda: float(steps * nbytes / 2)
    return turns


def _ours(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    heartbeat: Heartbeat,
    changes: dict[str, Any],
    exits: ExitStack,
) -> Turn:
    """Return what takes one outer iteration of a method that exchanges once in each."""
    # The last one evaluates, and is never reached.
    count = settings.outer_iterations + 1
    given = {
        name: getattr(settings, name)
        for name in ("model", "dataset", "image_size", "train_samples", "test_samples")
    }
    given |= {name: getattr(settings, name) for name in ("batch_size", "local_steps", "lr")}
    given |= {"lr_schedule": "constant", "lr_warmup": 0.0}
    given |= {"outer_iterations": count, "evaluate_every": count}
    mine = make(**given, **changes)
    work = set_up(topology, mine, device, transport, heartbeat)
    iterations = driver_of(mine).outer_iterations(topology, work)
    exits.callback(iterations.close)
    sent = [0.0]

    def turn() -> None:
        sent[0] = float(next(iterations)["bytes"]["payload"])

    return turn, lambda: sent[0]
