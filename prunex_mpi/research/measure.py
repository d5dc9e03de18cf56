"""Measure what the driver is made of: phases 2 to 5 in memory, in training, and its collectives.

Kernels, and the codes that phase 4 may send, are timed on one rank against copying the same bytes;
the share of phases 2 to 5 is that of a run of one rank; collectives take several. Steps of `dense`
are timed in turns with those of torch's DistributedDataParallel, over NCCL where each rank has a
GPU of its own, which NCCL asks for, and else over gloo.
"""

import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text, gather_text, run_collectively
from prunex_mpi.comm.collectives import Transport, allreduce_, allreduce_then_bcast_, bcast_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.compress.quantise import (
    BLOCK,
    PAYLOADS,
    add_decoded_,
    decode_,
    encode_,
    record_bytes,
)
from prunex_mpi.config.resolve import make, with_overrides
from prunex_mpi.core.admm import find_residuals, update_duals
from prunex_mpi.core.loop import averaging
from prunex_mpi.core.mask_choice import make_groups, project_locally, try_groups
from prunex_mpi.core.state import State, adopt_mask, build_state, comms_of, next_iteration
from prunex_mpi.data.request import Request
from prunex_mpi.diagnosis.devices import gpu_identity
from prunex_mpi.methods import hsadmm, per_step
from prunex_mpi.methods.exchange import Dense
from prunex_mpi.models.inputs import Images, inputs_from
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.masks import make_mask, pack_, unpack_
from prunex_mpi.run.problem import build_problem, load_dataset, make_model
from prunex_mpi.run.start import set_up
from prunex_mpi.run.supervision import learn, outer_iterations
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.export_proof import Action, wall_times

# Large enough for the ImageNet stem, and for every torchvision classifier; what is trained on.
IMAGES, SMALL = Images(224, 10), Images(32, 10)
# On the CPU several passes go over a tile in the cache, and are few more than a copy.
AIM, CODE_AIM, GPU_AIM = 3.0, 4.0, 1.5
WITH_AIM = ("projection", "pack", "unpack", "dual update")
# Of training, in percent; a quarter of an epoch of CIFAR-10's 50,000 images on 4 ranks at batch 32;
# outer iterations measured before and after the freeze.
OVERHEAD_AIM, FULL_STEPS, MEASURED = 5.0, 98, 2
SMALL_BYTES = 16 * MIB

# Beside torch both leave buffers alone: what a rank's BatchNorm has seen is no part of a gradient.
DDP_AIM, PLAIN = 1.0, {"broadcast_buffers": False}
# What its documentation names for speed: gradients live in the buckets, the graph never changes.
LEAN = {**PLAIN, "gradient_as_bucket_view": True, "static_graph": True}
GROUP_TIMEOUT = timedelta(seconds=60)

# A payload, its bits per value and the steps of its code.
Steps = tuple[str, float, dict[str, Callable[[], object]]]
Turn = Callable[[], None]


@dataclass(frozen=True)
class Bench:
    """Where something is measured, and in how many turns.

    `models` are those that are trained; a turn of training has so many `steps`.
    """

    topology: Topology
    settings: Settings
    transport: Transport
    device: torch.device
    heartbeat: Heartbeat
    models: Sequence[str] = ()
    steps: int = 1
    repeat: int = 1

    def best(self, actions: dict[str, Action]) -> dict[str, float]:
        """Return the shortest time of each action on this rank, in seconds. No communication."""
        times = wall_times(actions, self.repeat, self.device, self.heartbeat)
        return {name: float(taken.min()) for name, taken in times.items()}

    def aim(self, on_cpu: float) -> float:
        """Return how many times a copy a kernel may take."""
        return on_cpu if self.device.type == "cpu" else GPU_AIM


def check_models(bench: Bench, sections: Sequence[str]) -> None:
    """Raise UserError unless the networks can be built and divided that `sections` take."""
    given = bench.settings
    trained = [(with_overrides(given, model=name), SMALL) for name in bench.models]
    # A few sections take the same networks.
    measured = [(given, IMAGES)] if {"kernels", "collectives"} & {*sections} else []
    for settings, inputs in [*measured, *(trained if {"overhead", "ddp"} & {*sections} else [])]:
        bench.heartbeat.go_on()
        try:
            network = make_model(settings, inputs)
            try_groups(settings, network, build_layout(network), inputs)
        except UserError as error:
            raise UserError(f"model {settings.model}: {error}", error.exit_code) from None


def make_state(settings: Settings, device: torch.device) -> State:
    """Build the model of `settings` with 10 classes and its H-SADMM variables on `device`.

    The variables hold noise, so that no page is shared and no two groups tie.
    """
    model = make_model(settings, IMAGES)
    layout = build_layout(model)
    groups = make_groups(settings, model, layout, IMAGES)
    state = build_state(model.to(device), layout, groups, settings)
    for flat in (state.u, state.v, state.grad, state.scratch, state.message.buffer):
        flat.normal_(std=1e-3)
    return state


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


def kernels(bench: Bench) -> list[Table]:
    """Return the tables of steps, and of codes of as many values as the model has.

    In a job of one rank, where no step waits for a network.
    """
    state = make_state(bench.settings, bench.device)
    adopt_mask(state, project_alone(state))
    steps, values = _steps(bench, state), state.layout.numel // BLOCK * BLOCK
    del state
    return [steps, block_codes(bench, values)]


def project_alone(state: State) -> np.ndarray:
    """Project `scratch` as a leader does in phase 3, without MPI, and return the mask."""
    mask = project_locally(state.scratch, state, 1.0)
    make_mask(state.layout, state.groups, mask, state.theta).apply_(state.scratch)
    return mask


def _steps(bench: Bench, state: State) -> Table:
    settings, theta, whole = bench.settings, state.theta, state.message.fragment()
    payload, _ = state.message.values(whole)
    target = torch.empty_like(theta)
    node = comms_of(bench.topology, state, bench.transport).node

    def candidate() -> None:
        torch.add(theta, state.u, out=state.scratch)

    def fill_payload() -> None:
        pack_(theta, whole.plan, payload)

    def unpack() -> None:
        unpack_(payload, whole.plan, state.scratch)

    def duals() -> object:
        moved = np.zeros(len(state.layout.segments))
        norms = update_duals(state, moved, moved)
        return find_residuals(bench.topology.world, state, settings, norms, 0.0)

    def copy(sources: Sequence[Tensor]) -> None:
        for source in sources:
            target[: source.numel()].copy_(source)

    model, both = ("the model", (theta,)), ("both duals", (state.u, state.v))
    intra = partial(hsadmm.intra_node_consensus, node, state, settings)
    steps: list[tuple[str, str, tuple[Tensor, ...], Action]] = [
        ("intra candidate", *model, Action(intra)),
        ("projection", *model, Action(lambda: project_alone(state), candidate)),
        ("pack", "the payload", (payload,), Action(fill_payload)),
        ("unpack", *model, Action(unpack, fill_payload)),
        ("dual update", *both, Action(lambda: update_duals(state, None, None))),
        ("dual update + norms", *both, Action(duals)),
    ]
    actions = {}
    for name, _, sources, action in steps:
        actions |= {f"copy for {name}": Action(partial(copy, sources)), name: action}
    best = bench.best(actions)
    rows = []
    for name, what, sources, _ in steps:
        copied = best[f"copy for {name}"]
        size = sum(s.numel() * s.element_size() for s in sources) / MIB
        aim = bench.aim(AIM) if name in WITH_AIM else None
        rows.append((name, what, size, 1e3 * copied, 1e3 * best[name], best[name] / copied, aim))
    kept = whole.plan.numel / state.layout.numel
    return Table(
        f"Kernels on one rank: {settings.model}, {state.layout.numel:,} parameters, "
        f"{'+'.join(settings.groups)} groups, payload {100 * kept:.1f} % of the model",
        ("step", "bytes copied", "MiB", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {bench.repeat} turns; each step takes turns with an out-of-place copy_ "
            "of the bytes named",
            "projection: group energies, selection, factors and masking, as on a leader",
            "dual update + norms: all of phase 5 on one rank, with seven norms per layer",
        ),
    )


def block_codes(bench: Bench, values: int) -> Table:
    """Return the table of encoding and decoding so many float32 `values`, a multiple of 128."""
    source = torch.randn(values, device=bench.device)
    vector, target = torch.empty_like(source), torch.empty_like(source)
    rows = []
    for name, size, steps in (coding_steps(payload, vector, target) for payload in PAYLOADS):
        # What encoding leaves in the vector is smaller each time: it starts from the source.
        actions = {k: Action(run, lambda: vector.copy_(source)) for k, run in steps.items()}
        best = bench.best({"copy": Action(lambda: target.copy_(source)), **actions})
        first = best.pop("copy")
        for step, seconds in best.items():
            times = 1e3 * first, 1e3 * seconds, seconds / first
            rows.append((name, step, size, *times, bench.aim(CODE_AIM)))
    return Table(
        f"Codes by blocks of {BLOCK}: {values:,} float32 values, {values * 4 / MIB:.2f} MiB",
        ("payload", "step", "bits per value", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {bench.repeat} turns; the steps of a payload take turns with an "
            "out-of-place copy_ of the vector",
            "encode leaves the quantisation error in the vector; add: decode and add",
        ),
    )


def coding_steps(payload: str, vector: Tensor, target: Tensor) -> Steps:
    """Return payload, bits per value, and what codes `vector` and decodes that to `target`."""
    blocks = vector.numel() // BLOCK
    records = vector.new_empty(blocks, record_bytes(payload), dtype=torch.uint8)
    steps = {
        "encode": lambda: encode_(vector, records, payload),
        "decode": lambda: decode_(records, target, payload),
        "add": lambda: add_decoded_(records, target, payload),
    }
    return payload, 8 * record_bytes(payload) / BLOCK, steps


# --------------------------------------------------------------------------------------------------
# Training on one rank
# --------------------------------------------------------------------------------------------------


def overhead(bench: Bench) -> list[Table]:
    """Train each of the models for a few outer iterations; return the share of phases 2 to 5.

    In a job of one rank. Phase 1 takes `bench.steps` local steps, and its time is scaled to
    FULL_STEPS.
    """
    rows = []
    for name in bench.models:
        records = train(bench, name)
        # The first iteration warms up; the one that freezes does the work of both kinds.
        stages = {"before": records[1 : 1 + MEASURED], "after": records[2 + MEASURED :]}
        for stage, measured in stages.items():
            local, *consensus = (
                min(record["seconds"][phase] for record in measured)
                for phase in ("local", *CONSENSUS_PHASES)
            )
            local *= FULL_STEPS / bench.steps
            share = 100 * sum(consensus) / (local + sum(consensus))
            rows.append((name, stage, local, *(1e3 * s for s in consensus), share, OVERHEAD_AIM))
    milliseconds = [f"{phase} ms" for phase in CONSENSUS_PHASES]
    table = Table(
        f"Share of phases 2 to 5 in training: 32x32 images, batch {bench.settings.batch_size}, "
        f"T = {FULL_STEPS} local steps, {'+'.join(bench.settings.groups)} groups",
        ("model", "freeze", "local s", *milliseconds, "share %", "aim %"),
        tuple(rows),
        (
            f"the driver on one rank; minimum of {MEASURED} outer iterations each",
            f"phase 1 measured over {bench.steps} steps and scaled linearly to {FULL_STEPS} "
            f"(a quarter epoch of CIFAR-10 on 4 ranks at batch 32)",
        ),
    )
    return [table]


def train(bench: Bench, model_name: str) -> list[dict[str, Any]]:
    """Run the driver on synthetic images; return its metrics, one record per outer iteration."""
    settings = with_overrides(
        bench.settings,
        # No test of accuracy: a small rate keeps any model finite.
        lr=1e-3,
        model=model_name,
        dataset="synthetic",
        image_size=32,
        train_samples=bench.steps * bench.settings.batch_size,
        test_samples=bench.settings.batch_size,
        outer_iterations=2 + 2 * MEASURED,
        local_steps=bench.steps,
        # Steps as small as these would meet the stopping test.
        eps_abs=0.0,
        eps_rel=0.0,
        warmup_iterations=0,
        keep_ramp_iterations=0,
        freeze_iteration=2 + MEASURED,
        evaluate_every=2 + 2 * MEASURED,
    )
    context = set_up(bench.topology, settings, bench.device, bench.transport, bench.heartbeat)
    return list(outer_iterations(bench.topology, context))


# --------------------------------------------------------------------------------------------------
# Collectives
# --------------------------------------------------------------------------------------------------


def collectives(bench: Bench) -> list[Table]:
    """Return the table of collectives, the same on every rank.

    Collective on `world`, `node` and `leader`: every rank walks the same list in the same order.
    Whether an entry is left out depends only on the node sizes, which all ranks know.
    """
    state = make_state(bench.settings, bench.device)
    topology, transport = bench.topology, bench.transport
    world, node, leader = topology.world, topology.node, topology.leader
    comms = {"world": world}
    if max(topology.node_sizes) > 1:
        comms["node"] = node
    if topology.num_nodes > 1:
        comms["leader"] = leader

    def slowest(comm: MPI.Comm, run: Callable[..., object], *args: object) -> float:
        """Return the shortest time of `run` on the members of `comm`, on the slowest rank."""
        action = Action(partial(run, *args) if comm != MPI.COMM_NULL else lambda: None)
        return float(
            wall_times({"": action}, bench.repeat, bench.device, bench.heartbeat, world)[""].min()
        )

    rows = []
    for count in (SMALL_BYTES // state.theta.element_size(), state.layout.numel):
        flat = torch.zeros(count, dtype=state.theta.dtype, device=bench.device)
        other, size = torch.zeros_like(flat), flat.numel() * flat.element_size()
        found = [("copy", "none", slowest(world, other.copy_, flat))]
        for name, call in (("Allreduce", allreduce_), ("Bcast", bcast_)):
            for where, comm in comms.items():
                found.append((name, where, slowest(comm, call, comm, flat, transport)))
        if len(comms) == 3:
            both = slowest(world, allreduce_then_bcast_, leader, node, flat, transport)
            found.append(("Allreduce, Bcast", "leader, node", both))
        rows += [
            (*what, size / MIB, 1e3 * s, size / s / 1e6, s / found[0][2]) for *what, s in found
        ]
    buffers = "staged in host memory" if transport.staging is not None else "handed to MPI as is"
    layout = f"{topology.num_nodes} nodes of {'+'.join(map(str, topology.node_sizes))} ranks"
    table = Table(
        f"Collectives: {layout}, float32 SUM, buckets of {transport.bucket_bytes / MIB:g} MiB, "
        f"tensors {buffers}",
        ("operation", "communicator", "MiB", "ms", "MB/s", "times copy"),
        tuple(rows),
        (
            f"until the last rank has finished, minimum of {bench.repeat}; MB/s: operand over time",
            "times copy: against all ranks copying the operand in their own memory at once",
        ),
    )
    return [table]


# --------------------------------------------------------------------------------------------------
# Beside torch
# --------------------------------------------------------------------------------------------------


def compare_with_ddp(bench: Bench) -> list[Table]:
    """Return the table of seconds per step, the same on every rank. Collective on `world`."""
    rows, settings = [], bench.settings
    backend = choose_backend(bench)
    for name in bench.models:
        taken, difference = in_turns(bench, name, backend)
        ratios = [float(np.median(taken["dense"] / taken[rival])) for rival in ("DDP", "lean DDP")]
        milliseconds = [1e3 * float(np.median(times)) for times in taken.values()]
        rows.append((name, *milliseconds, *ratios, DDP_AIM, difference))
    times = [f"{name} ms" for name in ("dense", "DDP", "lean DDP", "no exchange")]
    table = Table(
        f"One step of dense (flat) beside DistributedDataParallel over {backend}: "
        f"{bench.topology.world_size} ranks, {SMALL.side}x{SMALL.side} images, "
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


def in_turns(bench: Bench, model_name: str, backend: str) -> tuple[dict[str, np.ndarray], float]:
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
        image_size=SMALL.side,
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
    dataset = load_dataset(topology, Request.of(settings), heartbeat)
    model = make_model(settings, inputs_from(dataset.sizes()))
    layout = build_layout(model)
    around = device, bench.transport, heartbeat
    problem = build_problem(topology, settings, dataset, model, *around)
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
