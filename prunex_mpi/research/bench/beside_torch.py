"""Time training beside torch's over gloo, on the same ranks and the same link.

First steps of `dense` beside those of DistributedDataParallel; then training with an exchange every
few steps: this package averages as `local-sgd` and `prunex` do, torch by an all_reduce of the
parameters, and DistributedDataParallel exchanges gradients at each step, as float32 and by its fp16
hook. All programs run in turns in one job.
"""

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mpi4py import MPI

from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text, run_collectively
from prunex_mpi.config.resolve import make
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.problem import build_problem, make_model
from prunex_mpi.core.state import Problem, next_iteration, wires_of
from prunex_mpi.core.steps import averaging
from prunex_mpi.methods import per_step
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.bench.workbench import Bench
from prunex_mpi.run.start import set_up
from prunex_mpi.run.supervision import driver_of
from prunex_mpi.tools.timing import Action, wall_times

IMAGE_SIZE = 32
# Both leave buffers alone: what a rank's BatchNorm has seen is no part of a gradient.
PLAIN = {"broadcast_buffers": False}
# What its documentation names for speed: gradients live in the buckets, the graph never changes.
LEAN = {**PLAIN, "gradient_as_bucket_view": True, "static_graph": True}
AIM = 1.0
GLOO_TIMEOUT_S = 60
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


Turn = Callable[[], None]


def compare_with_ddp(bench: Bench) -> list[Table]:
    """Return the table of seconds per step, the same on every rank. Collective on `world`.

    For the CPU: on a GPU gloo is no rival.
    """
    rows = []
    for name in bench.models:
        taken, difference = measure(bench, name)
        ratios = [float(np.median(taken["dense"] / taken[rival])) for rival in ("DDP", "lean DDP")]
        milliseconds = [1e3 * float(np.median(times)) for times in taken.values()]
        rows.append((name, *milliseconds, *ratios, AIM, difference))
    return [
        Table(
            f"One step of dense (flat) beside DistributedDataParallel over gloo: "
            f"{bench.topology.world_size} ranks, {IMAGE_SIZE}x{IMAGE_SIZE} images, "
            f"batch {bench.settings.batch_size} per rank",
            (
                "model",
                "dense ms",
                "DDP ms",
                "lean DDP ms",
                "no exchange ms",
                "dense / DDP",
                "dense / lean DDP",
                "aim",
                "|difference|",
            ),
            tuple(rows),
            (
                f"medians of {bench.repeat} turns of {bench.steps} steps, in turns and in changing "
                "order, each until the last rank has finished; the first turn is not counted",
                "dense / DDP: the median of the ratios within a turn, which a machine that changes "
                "its pace hardly touches",
                "the same images, threads and fused SGD; DDP without broadcast of buffers; lean: "
                "gradient_as_bucket_view and static_graph as well",
                "no exchange: dense without its messages; |difference|: the largest between the "
                "weights of dense and lean DDP in the end",
            ),
        )
    ]


def measure(bench: Bench, model_name: str) -> tuple[dict[str, np.ndarray], float]:
    """Return seconds per step [turns] of each program, and how far dense and DDP end up apart.

    All train the same weights on the same batches. Collective on `world`.
    """
    training = steps_of(bench, model_name)
    with ExitStack() as exits:
        ours, weights = dense_turn(training, exits, exchange=True)
        alone, _ = dense_turn(training, exits, exchange=False)
        exits.enter_context(gloo_group(bench.topology.world))
        plain, _ = ddp_turn(training, PLAIN)
        lean, theirs = ddp_turn(training, LEAN)
        turns = {"dense": ours, "DDP": plain, "lean DDP": lean, "no exchange": alone}
        times = slowest_turns(bench, turns)
        difference = float((weights() - theirs()).abs().max())
    return {name: taken / bench.steps for name, taken in times.items()}, difference


def slowest_turns(bench: Bench, turns: dict[str, Turn]) -> dict[str, np.ndarray]:
    """Return seconds [turns] of each program on the slowest rank. Collective on `world`."""
    actions = {name: Action(turn) for name, turn in turns.items()}
    where = bench.device, bench.heartbeat, bench.topology.world
    return wall_times(actions, bench.repeat, *where, alternate=True)


def steps_of(bench: Bench, model_name: str) -> Bench:
    """Return the same with settings of turns of training on images that cost nothing to load."""
    settings = make(
        method="dense",
        model=model_name,
        dataset="synthetic",
        image_size=IMAGE_SIZE,
        train_samples=bench.steps * bench.settings.batch_size * bench.topology.world_size,
        test_samples=bench.topology.world_size,
        batch_size=bench.settings.batch_size,
        outer_iterations=bench.repeat + 1,
        local_steps=bench.steps,
        # No test of accuracy: a small rate keeps any model finite and rounding errors small.
        lr=1e-3,
        lr_schedule="constant",
        warmup_ratio=0.0,
    )
    return replace(bench, settings=settings)


def dense_turn(
    bench: Bench, exits: ExitStack, exchange: bool
) -> tuple[Turn, Callable[[], torch.Tensor]]:
    """Return what takes the driver's steps of one outer iteration, and what returns the weights.

    Until `exits` close. Collective on `world`, as the first of them is, unless there is no
    `exchange`.
    """
    context = set_up(bench.topology, bench.settings, bench.device, bench.transport, bench.heartbeat)
    wires = wires_of(bench.topology, context.state, bench.transport, flat=True)
    averager = exits.enter_context(averaging(wires.workers if exchange else None, context))

    def turn() -> None:
        loss = per_step.train_steps(wires, averager, {}, context)
        next_iteration(context.state.position, loss)

    return turn, lambda: context.state.theta


def ddp_turn(
    bench: Bench, options: dict[str, bool] | None, fp16: bool = False
) -> tuple[Turn, Callable[[], torch.Tensor]]:
    """Return the same for DistributedDataParallel in the process group there is. Collective.

    With `fp16` gradients travel by its hook for that. Without `options` nothing does, until an
    all_reduce averages the parameters after the last step: local SGD.
    """
    topology, settings, device = bench.topology, bench.settings, bench.device
    heartbeat = bench.heartbeat
    dataset = load_dataset(topology, settings, heartbeat, device)
    model = make_model(settings, dataset.num_classes, dataset.image_size)
    layout = build_layout(model)
    problem: Problem = build_problem(
        topology, settings, dataset, model, device, bench.transport, heartbeat
    )
    ddp = model
    if options is not None:
        with warnings.catch_warnings():
            # Newer versions have another name for broadcast_buffers as well; all know this one.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(model, **options)
    if fp16:
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def turn() -> None:
        losses = torch.zeros((), dtype=torch.float64)
        model.train()
        for step in range(settings.local_steps):
            heartbeat.beat(step)
            images, labels = problem.train.next()
            optimizer.zero_grad()
            loss = problem.loss(ddp(images), labels)
            loss.backward()
            optimizer.step()
            losses += loss.detach()
        if options is None:
            average_parameters_(model)
        # As the driver does for its mean loss.
        losses.item()

    def weights() -> torch.Tensor:
        values = dict(model.named_parameters())
        return torch.cat([values[s.name].detach().reshape(-1) for s in layout.segments])

    return turn, weights


def average_parameters_(model: torch.nn.Module) -> None:
    """Average the parameters over the process group by one all_reduce. Collective on the group."""
    parameters = [p.detach() for p in model.parameters()]
    flat = torch.cat([p.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for own, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        own.copy_(mean.view_as(own))


def intervals(bench: Bench) -> Table:
    """Return the table of seconds per step, the same on every rank. Collective on `world`."""
    topology, settings, steps = bench.topology, bench.settings, bench.steps
    rows: list[tuple[str, str, float, float, float, float]] = []
    for name in bench.models:
        with ExitStack() as exits:
            turns = _programs(steps_of(bench, name), settings.keep_ratio, exits)
            taken = slowest_turns(bench, {program: turn for program, (turn, _) in turns.items()})
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
            f"medians of {bench.repeat} turns of {steps} steps, one program after the other in "
            "changing order, each until the last rank has finished; one turn before is not counted",
            "gloo local SGD: an all_reduce of all parameters after these steps; DDP, fp16 by its "
            "hook: gradients at each step; the others are methods of this package",
            f"prunex: coupled groups, keep {ratios}, masks frozen; MiB: what a leader hands "
            "over, of gloo a rank",
            "waiting: of a turn, what `no exchange` does not take; times: how many times as fast "
            "as DDP with its fp16 hook, the median of the ratios within a turn",
        ),
    )


# What takes a turn, and what returns the bytes that it has handed over.
Counted = tuple[Turn, Callable[[], float]]


def _programs(bench: Bench, keep_ratio: tuple[float, ...], exits: ExitStack) -> dict[str, Counted]:
    """Return what takes one turn of each program, and what tells the bytes it hands over."""
    alone, _ = dense_turn(bench, exits, exchange=False)
    turns: dict[str, Counted] = {"no exchange": (alone, lambda: 0.0)}
    for name, changes in OURS.items():
        if changes["method"] == "prunex":
            changes = {**PRUNED, "keep_ratio": keep_ratio, **changes}
        turns[name] = _ours(bench, changes, exits)
    exits.enter_context(gloo_group(bench.topology.world))
    plain, weights = ddp_turn(bench, LEAN)
    halved, _ = ddp_turn(bench, LEAN, fp16=True)
    local, _ = ddp_turn(bench, None)
    nbytes = weights().nbytes
    steps = bench.settings.local_steps
    turns["gloo local SGD"] = local, lambda: float(nbytes)
    turns["DDP"] = plain, lambda: float(steps * nbytes)
    turns["DDP fp16"] = halved, lambda: float(steps * nbytes / 2)
    return turns


def _ours(bench: Bench, changes: dict[str, Any], exits: ExitStack) -> Counted:
    """Return what takes one outer iteration of a method that exchanges once in each."""
    settings = bench.settings
    # The last one evaluates, and is never reached.
    count = settings.outer_iterations + 1
    names = ("model", "dataset", "image_size", "train_samples", "test_samples")
    names += ("batch_size", "local_steps", "lr", "lr_schedule", "warmup_ratio")
    given = {name: getattr(settings, name) for name in names}
    mine = make(**given, outer_iterations=count, evaluate_every=count, **changes)
    context = set_up(bench.topology, mine, bench.device, bench.transport, bench.heartbeat)
    iterations = driver_of(mine).outer_iterations(bench.topology, context)
    exits.callback(iterations.close)
    sent = [0.0]

    def turn() -> None:
        sent[0] = float(next(iterations)["bytes"]["payload"])

    return turn, lambda: sent[0]


@contextmanager
def gloo_group(world: MPI.Comm) -> Iterator[None]:
    """Let torch.distributed have the same ranks for the time of the block. Collective on `world`.

    GLOO_SOCKET_IFNAME chooses its interface.
    """

    def place() -> str:
        if world.rank:
            return ""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"

    where = broadcast_text(world, place())
    run_collectively(
        world,
        lambda: dist.init_process_group(
            "gloo",
            init_method=where,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=GLOO_TIMEOUT_S),
        ),
    )
    yield
    dist.destroy_process_group()
