"""Time steps of `dense` beside those of torch's DistributedDataParallel, in turns.

It goes over NCCL where each rank has a GPU of its own, which NCCL asks for, and else over gloo.
"""

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpi4py import MPI

from prunex_mpi.base.tables import Table
from prunex_mpi.comm.agreement import broadcast_text, gather_text, run_collectively
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import Problem, comms_of, next_iteration
from prunex_mpi.core.steps import averaging
from prunex_mpi.data.request import Request
from prunex_mpi.diagnosis.facts import gpu_identity
from prunex_mpi.methods import per_step
from prunex_mpi.methods.exchange import Dense
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.measure import Bench
from prunex_mpi.run.problem import build_problem, load_dataset, make_model
from prunex_mpi.run.start import set_up
from prunex_mpi.run.supervision import learn
from prunex_mpi.tools.timing import Action, wall_times

IMAGE_SIZE = 32
# Both leave buffers alone: what a rank's BatchNorm has seen is no part of a gradient.
PLAIN = {"broadcast_buffers": False}
# What its documentation names for speed: gradients live in the buckets, the graph never changes.
LEAN = {**PLAIN, "gradient_as_bucket_view": True, "static_graph": True}
AIM = 1.0
GROUP_TIMEOUT = timedelta(seconds=60)
Turn = Callable[[], None]


def compare_with_ddp(bench: Bench) -> list[Table]:
    """Return the table of seconds per step, the same on every rank. Collective on `world`."""
    rows, settings = [], bench.settings
    backend = choose_backend(bench)
    for name in bench.models:
        taken, difference = measure(bench, name, backend)
        ratios = [float(np.median(taken["dense"] / taken[rival])) for rival in ("DDP", "lean DDP")]
        milliseconds = [1e3 * float(np.median(times)) for times in taken.values()]
        rows.append((name, *milliseconds, *ratios, AIM, difference))
    times = [f"{name} ms" for name in ("dense", "DDP", "lean DDP", "no exchange")]
    table = Table(
        f"One step of dense (flat) beside DistributedDataParallel over {backend}: "
        f"{bench.topology.world_size} ranks, {IMAGE_SIZE}x{IMAGE_SIZE} images, "
        f"batch {settings.batch_size} per rank, amp {settings.amp}"
        f"{', compiled' if settings.compile else ''}",
        ("model", *times, "dense / DDP", "dense / lean DDP", "aim", "|difference|"),
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
    return [table]


def choose_backend(bench: Bench) -> str:
    """Return nccl where each rank has a GPU of its own, else gloo, alike on all. Collective."""
    gpu = gpu_identity(bench.device) if bench.device.type == "cuda" else ""
    gpus = gather_text(bench.topology.world, gpu)
    apart = all(gpus) and len({*gpus}) == len(gpus)
    return "nccl" if broadcast_text(bench.topology.world, "apart" if apart else "") else "gloo"


def measure(bench: Bench, model_name: str, backend: str) -> tuple[dict[str, np.ndarray], float]:
    """Return seconds per step [turns] of each program, and how far dense and DDP end up apart.

    All train the same weights on the same batches. Collective on `world`.
    """
    training = steps_of(bench, model_name)
    with ExitStack() as exits:
        ours, weights = dense_turn(training, exits, exchanges=True)
        alone, _ = dense_turn(training, exits, exchanges=False)
        exits.enter_context(process_group(bench.topology.world, backend))
        plain, _ = ddp_turn(training, PLAIN)
        lean, theirs = ddp_turn(training, LEAN)
        turns = {"dense": ours, "DDP": plain, "lean DDP": lean, "no exchange": alone}
        actions = {name: Action(turn) for name, turn in turns.items()}
        where = bench.device, bench.heartbeat, bench.topology.world
        times = wall_times(actions, bench.repeat, *where, alternate=True)
        difference = float((weights() - theirs()).abs().max())
    return {name: taken / bench.steps for name, taken in times.items()}, difference


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
        amp=bench.settings.amp,
        compile=bench.settings.compile,
        # No test of accuracy: a small rate keeps any model finite and rounding errors small.
        lr=1e-3,
        lr_schedule="constant",
        warmup_ratio=0.0,
    )
    return replace(bench, settings=settings)


def dense_turn(
    bench: Bench, exits: ExitStack, exchanges: bool
) -> tuple[Turn, Callable[[], torch.Tensor]]:
    """Return what takes the driver's steps of one outer iteration, and what returns the weights.

    Until `exits` close. Collective on `world`, as the first of them is, unless there is no
    `exchanges`.
    """
    context = set_up(bench.topology, bench.settings, bench.device, bench.transport, bench.heartbeat)
    comms = comms_of(bench.topology, context.state, bench.transport, flat=True)
    averager = exits.enter_context(averaging(comms.workers if exchanges else None, context))
    exchange = Dense(comms, context)

    def turn() -> None:
        rounds, loss = per_step.train_steps(exchange, averager), None
        try:
            while True:
                loss = learn(context, rounds.send(loss))
        except StopIteration as ended:
            next_iteration(context.state.position, ended.value)

    return turn, lambda: context.state.theta


def ddp_turn(bench: Bench, options: dict[str, bool]) -> tuple[Turn, Callable[[], torch.Tensor]]:
    """Return the same for DistributedDataParallel in the process group there is. Collective."""
    topology, settings, device = bench.topology, bench.settings, bench.device
    heartbeat = bench.heartbeat
    dataset = load_dataset(topology, Request.of(settings), heartbeat, device)
    model = make_model(settings, inputs_from(dataset.sizes()))
    layout = build_layout(model)
    problem: Problem = build_problem(
        topology, settings, dataset, model, device, bench.transport, heartbeat
    )
    with warnings.catch_warnings():
        # Newer versions have another name for broadcast_buffers as well; all know this one.
        warnings.simplefilter("ignore", FutureWarning)
        ddp = DistributedDataParallel(problem.forward, **options)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def turn() -> None:
        losses = torch.zeros((), dtype=torch.float64, device=device)
        model.train()
        for step in range(settings.local_steps):
            heartbeat.beat(step)
            images, labels = problem.train.next()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.amp == "bf16"):
                loss = problem.loss(ddp(images), labels)
            loss.backward()
            optimizer.step()
            losses += loss.detach()
        # As the driver does for its mean loss.
        losses.item()

    def weights() -> torch.Tensor:
        values = dict(model.named_parameters())
        return torch.cat([values[s.name].detach().reshape(-1) for s in layout.segments])

    return turn, weights


@contextmanager
def process_group(world: MPI.Comm, backend: str) -> Iterator[None]:
    """Let torch.distributed have the same ranks for the time of the block. Collective on `world`.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose its interface.
    """

    def place() -> str:
        if world.rank:
            return ""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"

    where = {"init_method": broadcast_text(world, place()), "timeout": GROUP_TIMEOUT}
    ranks = {"rank": world.rank, "world_size": world.size}
    run_collectively(world, lambda: dist.init_process_group(backend, **where, **ranks))
    yield
    dist.destroy_process_group()
