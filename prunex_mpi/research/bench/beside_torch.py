"""Time steps of `dense` beside those of torch's DistributedDataParallel over gloo."""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mpi4py import MPI

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.position import next_iteration
from prunex_mpi.core.problem import build_problem, make_model
from prunex_mpi.core.state import Problem, wires_of
from prunex_mpi.core.steps import averaging
from prunex_mpi.methods import per_step
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.bench.gloo import gloo_group
from prunex_mpi.run.assembly import set_up
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import make

IMAGE_SIZE = 32
# Both leave buffers alone: what a rank's BatchNorm has seen is no part of a gradient.
PLAIN = {"broadcast_buffers": False}
# What its documentation names for speed: gradients live in the buckets, the graph never changes.
LEAN = {**PLAIN, "gradient_as_bucket_view": True, "static_graph": True}
AIM = 1.0


def compare_with_ddp(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    models: tuple[str, ...],
    steps: int,
    repeat: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Return the table of seconds per step, the same on every rank. Collective on `world`.

    For the CPU: on a GPU gloo is no rival.
    """
    rows = []
    for name in models:
        what = name, steps, repeat, heartbeat
        taken, difference = measure(topology, settings, transport, device, *what)
        ratios = [float(np.median(taken["dense"] / taken[rival])) for rival in ("DDP", "lean DDP")]
        milliseconds = [1e3 * float(np.median(times)) for times in taken.values()]
        rows.append((name, *milliseconds, *ratios, AIM, difference))
    return [
        Table(
            f"One step of dense (flat) beside DistributedDataParallel over gloo: "
            f"{topology.world_size} ranks, {IMAGE_SIZE}x{IMAGE_SIZE} images, "
            f"batch {settings.batch_size} per rank",
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
                f"medians of {repeat} turns of {steps} steps, one program after the other in "
                "changing order, each until the last rank has finished; one turn before is not "
                "counted",
                "dense / DDP: the median of the ratios within a turn, which a machine that changes "
                "its pace hardly touches",
                "the same images, threads and fused SGD; DDP without broadcast of buffers; lean: "
                "gradient_as_bucket_view and static_graph as well",
                "no exchange: dense without its messages; |difference|: the largest between the "
                "weights of dense and lean DDP in the end",
            ),
        )
    ]


def measure(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    model_name: str,
    steps: int,
    repeat: int,
    heartbeat: Heartbeat,
) -> tuple[dict[str, np.ndarray], float]:
    """Return seconds per step [turns] of each program, and how far dense and DDP end up apart.

    All train the same weights on the same batches. Collective on `topology.world`.
    """
    world = topology.world
    settings = steps_settings(topology, settings, model_name, steps, repeat)
    with ExitStack() as exits:
        where = topology, settings, transport, device, heartbeat
        ours, weights = dense_turn(*where, exits, exchange=True)
        alone, _ = dense_turn(*where, exits, exchange=False)
        exits.enter_context(gloo_group(world))
        plain, _ = ddp_turn(*where, PLAIN)
        lean, theirs = ddp_turn(*where, LEAN)
        turns = {"dense": ours, "DDP": plain, "lean DDP": lean, "no exchange": alone}
        times = slowest_turns(world, turns, repeat)
        difference = float((weights() - theirs()).abs().max())
    return {name: taken / steps for name, taken in times.items()}, difference


def slowest_turns(
    world: MPI.Comm, turns: dict[str, Callable[[], None]], repeat: int
) -> dict[str, np.ndarray]:
    """Return seconds [repeat] of each program until the last rank has finished its turn.

    They take turns in changing order; the first round is not counted. Collective on `world`.
    """
    times = {name: np.empty(repeat + 1) for name in turns}
    for number in range(repeat + 1):
        # Whoever comes after another finds other things in the caches.
        for name in list(turns)[:: 1 if number % 2 else -1]:
            world.Barrier()
            started = time.perf_counter()
            turns[name]()
            times[name][number] = time.perf_counter() - started
    for taken in times.values():
        world.Allreduce(MPI.IN_PLACE, taken, op=MPI.MAX)
    return {name: taken[1:] for name, taken in times.items()}


def steps_settings(
    topology: Topology, settings: Settings, model_name: str, steps: int, repeat: int
) -> Settings:
    """Return the settings of turns of so many steps on images that cost nothing to load."""
    return make(
        method="dense",
        model=model_name,
        dataset="synthetic",
        image_size=IMAGE_SIZE,
        train_samples=steps * settings.batch_size * topology.world_size,
        test_samples=topology.world_size,
        batch_size=settings.batch_size,
        outer_iterations=repeat + 1,
        local_steps=steps,
        # No test of accuracy: a small rate keeps any model finite and rounding errors small.
        lr=1e-3,
        lr_schedule="constant",
        lr_warmup=0.0,
    )


def dense_turn(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    heartbeat: Heartbeat,
    exits: ExitStack,
    exchange: bool,
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """Return what takes the driver's steps of one outer iteration, and what tells the weights.

    Until `exits` close. Collective on `topology.world`, as the first of them is, unless there is no
    `exchange`.
    """
    work = set_up(topology, settings, device, transport, heartbeat)
    wires = wires_of(topology, work.state, transport, flat=True)
    averager = exits.enter_context(averaging(wires.workers if exchange else None, work))

    def turn() -> None:
        loss = per_step.train_steps(wires, averager, {}, work)
        next_iteration(work.state.position, loss)

    return turn, lambda: work.state.theta


def ddp_turn(
    topology: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    heartbeat: Heartbeat,
    options: dict[str, bool] | None,
    fp16: bool = False,
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """Return the same for DistributedDataParallel in the process group there is. Collective.

    With `fp16` gradients travel by its hook for that. Without `options` nothing does, until an
    all_reduce averages the parameters after the last step: local SGD.
    """
    dataset = load_dataset(topology, settings, heartbeat, device)
    model = make_model(settings, dataset.num_classes, dataset.image_size)
    layout = build_layout(model)
    problem: Problem = build_problem(
        topology, settings, dataset, model, device, transport, heartbeat
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
