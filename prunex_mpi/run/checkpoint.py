"""Save and restore the whole state of a run: every rank its part, all agree on it.

The tensors that training hands on are those of `core/lasting.py`. To them comes each rank's place
in its data and its random generators; on other nodes the data are shuffled anew from the first step
of the outer iteration.

With gradients averaged at every step all ranks of a node hold the same parameters, momentum and
duals. A rank's numbers name the tensors that are in the file of its leader alone.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, DamagedCheckpoint, UserError, log
from prunex_mpi.base.files import FORMAT, FileRecord, telling_disk_errors
from prunex_mpi.comm.agreement import (
    broadcast_json,
    broadcast_text,
    gather_counts,
    gather_text,
    run_collectively,
    run_collectively_while,
    run_on_root,
)
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core import lasting
from prunex_mpi.core.lasting import MASK, Numbers, Parts, Tensors, fit_network, left_of
from prunex_mpi.core.schedule import steps_with
from prunex_mpi.core.state import Problem, RunContext, State
from prunex_mpi.data.batches import BatchStream
from prunex_mpi.data.text import WindowStream
from prunex_mpi.models.dummy_input import seed_all
from prunex_mpi.run import checkpoint_files
from prunex_mpi.run.checkpoint_files import leaders_in, read_rank_file
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.settings.fields import Settings

AS_LEADER = "as_leader"
GENERATORS = ("generator.data", "generator.torch")
# Many and small, and most of them each rank's own.
NOT_COMPARED = ("buffer.", "generator.")


@dataclass(frozen=True)
class Restored:
    """Which checkpoint a run goes on from, "" for none, and which were refused, with reasons."""

    name: str
    refused: tuple[str, ...]
    other_nodes: bool = False

    def describe(self) -> list[str]:
        """Return lines that say where the run goes on from, and what was refused."""
        place = f"going on from checkpoint {self.name}"
        if not self.name:
            place = "there is no checkpoint: the run begins"
        elif self.other_nodes:
            place += " on other nodes: z, masks and mean momentum are kept, data are shuffled anew"
        return [*(f"refused checkpoint {line}" for line in self.refused), place]


def save(topology: Topology, run: RunDirectory | None, context: RunContext) -> None:
    """Write a checkpoint of the state as it stands.

    `run` is None on all ranks but world rank 0. Raises UserError on every rank when any of them
    can't write. Collective on `world`.
    """
    world, state, position = topology.world, context.state, context.state.position

    @telling_disk_errors("the checkpoint")
    def begin() -> str:
        if run is None:
            return ""
        return str(checkpoint_files.begin(run.path, position.iteration, position.step))

    @telling_disk_errors("the checkpoint")
    def write() -> FileRecord:
        return checkpoint_files.write_rank_file(folder, world.rank, *mine)

    heartbeat = context.heartbeat
    # On a slow file system that takes longer than a rank may stand still, on one for all to wait.
    folder = Path(broadcast_text(world, run_collectively_while(world, begin, heartbeat)))
    mine = without_copies(topology, *contents(topology, state, context.problem))
    record = run_collectively_while(world, write, heartbeat)
    records = np.empty((world.size, 3), dtype=np.int64)
    row = record.size, record.crc32, topology.node_index
    world.Gather(np.array(row, dtype=np.int64), records, root=0)

    @telling_disk_errors("the checkpoint")
    def publish() -> None:
        manifest = {
            "format": FORMAT,
            "node_sizes": list(topology.node_sizes),
            # Nodes need not be made of consecutive ranks.
            "nodes": records[:, 2].tolist(),
            "ranks": records[:, :2].tolist(),
            "config": run.config,
            "model": model_digest(state),
            "data": context.problem.digest,
            "left": left_of(state),
            "files": run.sizes(),
        }
        checkpoint_files.publish(folder, manifest)

    run_on_root(world, publish)


def has_checkpoint(world: MPI.Comm, settings: Settings) -> bool:
    """Return whether a run goes on from a checkpoint, with all weights. Collective on `world`."""
    found = False
    if world.rank == 0 and settings.resume:
        # What can't be read is told where the run is restored.
        with contextlib.suppress(OSError):
            found = bool(checkpoint_files.valid_names(Path(settings.run_dir)))
    return broadcast_json(world, found)


def resume(
    topology: Topology, run: RunDirectory | None, context: RunContext, versions: dict[str, str]
) -> None:
    """Restore the run as `restore` does and log from where it goes on. Collective on `world`."""
    for line in restore(topology, run, context).describe():
        log.info("%s", line)
    if run is not None and run.versions() != versions:
        log.info("the versions of the software are not those in %s/config.toml", run.path)


def restore(topology: Topology, run: RunDirectory | None, context: RunContext) -> Restored:
    """Put the newest usable checkpoint of the run into the state and the problem.

    One that is not whole, or is of another model, is refused and the one before it is tried.
    Without any checkpoint nothing changes; raises UserError on every rank when there are some and
    none can be used. Collective on `world`.
    """
    world, state = topology.world, context.state

    def list_names() -> list[str]:
        try:
            return checkpoint_files.valid_names(run.path)
        except OSError as error:
            reason = f"{error.filename} can't be read: {error.strerror}"
            raise UserError(reason, UNREADABLE) from None

    def rewind(sizes: dict[str, list[int]], refused: Sequence[str] = ()) -> None:
        run.rewind(sizes)
        for line in refused:
            checkpoint_files.set_aside(run.path, line.partition(":")[0])

    nodes = gather_counts(world, topology.node_index)
    refused: list[str] = []
    for name in broadcast_json(world, run_on_root(world, list_names)):
        digests = {"model": model_digest(state), "data": context.problem.digest}
        path, manifest, reason = _read_manifest(world, run, name, digests)
        if not reason:
            reason = run_collectively(world, partial(fit_network, manifest["left"], context))
        if not reason:
            other = manifest["nodes"] != nodes
            parts = partial(_read_parts, topology, path, name, manifest, other, context)
            look = partial(_last_part, parts)
            part, mine = run_collectively_while(world, look, context.heartbeat)
            reason = _first_reason(world, mine)
        if reason:
            refused.append(f"{name}: {reason}")
            continue
        run_on_root(world, partial(rewind, manifest["files"], refused))
        if other:
            put_common(topology, parts, sum(manifest["node_sizes"]), context)
        else:
            put_all(topology, *part, context)
        return Restored(name, tuple(refused), other)
    if refused:
        raise UserError("no checkpoint can be used: " + "; ".join(refused), UNREADABLE)
    run_on_root(world, lambda: rewind({}))
    return Restored("", ())


def _read_manifest(
    world: MPI.Comm, run: RunDirectory | None, name: str, digests: dict[str, str]
) -> tuple[Path, dict[str, Any], str]:
    """Return the run's path, the manifest that rank 0 read, and why it can't be used."""
    path, manifest, reason = "", {}, ""
    if run is not None:
        path = str(run.path)
        try:
            manifest = checkpoint_files.read_manifest(run.path, name)
            run.check(manifest["files"])
            if manifest["config"] != run.config:
                raise DamagedCheckpoint("it was written under another config.toml")
            if manifest["model"] != digests["model"]:
                raise DamagedCheckpoint("the model's parameters were of other names or shapes then")
            if manifest["data"] != digests["data"]:
                raise DamagedCheckpoint(
                    "the data were others then, in names, labels, classes or text"
                )
        except DamagedCheckpoint as damage:
            reason = str(damage)
    path, manifest, reason = broadcast_json(world, [path, manifest, reason])
    return Path(path), manifest, reason


def _read_parts(
    topology: Topology,
    run: Path,
    name: str,
    manifest: dict[str, Any],
    other_nodes: bool,
    context: RunContext,
) -> Iterator[tuple[Tensors, Numbers]]:
    """Read this rank's file, or on other nodes its share of all files."""
    world = topology.world
    mine = range(world.rank, len(manifest["ranks"]), world.size) if other_nodes else [world.rank]
    leaders = leaders_in(manifest)
    for rank in mine:
        tensors, numbers = read_with_copies(run, name, manifest, rank)
        reason = misfit(
            tensors,
            numbers,
            context.state,
            context.problem,
            leader=rank == leaders[rank],
            first=rank == 0,
            same_nodes=not other_nodes,
        )
        if reason:
            raise DamagedCheckpoint(f"rank {rank}: {reason}")
        yield tensors, numbers


def _last_part(parts: Parts) -> tuple[tuple[Tensors, Numbers] | None, str]:
    """Return the last of the parts, and why one of them can't be used, "" where all can."""
    part = None
    try:
        # Of several, none stays in memory: they are read once more.
        for part in parts():  # noqa: B007
            pass
    except DamagedCheckpoint as damage:
        return None, str(damage)
    return part, ""


def _first_reason(world: MPI.Comm, mine: str) -> str:
    """Return the lowest rank's reason on every rank, "" when none has one. Collective."""
    reasons = [reason for reason in gather_text(world, mine) if reason]
    return broadcast_text(world, reasons[0] if reasons else "")


def without_copies(
    topology: Topology, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what this rank has to write of its tensors, CPU, and numbers that name the rest.

    The rest are bit for bit those of its leader. Collective on `node`.
    """
    if topology.node_size == 1:
        return tensors, numbers
    mine = {n: _digest(t) for n, t in tensors.items() if not n.startswith(NOT_COMPARED)}
    leaders = broadcast_json(topology.node, mine)
    if topology.is_leader:
        return tensors, numbers
    copies = [name for name, digest in leaders.items() if mine.get(name) == digest]
    rest = {name: tensor for name, tensor in tensors.items() if name not in copies}
    return rest, {**numbers, AS_LEADER: copies}


def _digest(tensor: Tensor) -> str:
    """Return what changes with type, shape or any bit of a tensor."""
    # Bytes, since NumPy knows no bfloat16.
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data).hexdigest()}"


def read_with_copies(
    run: Path, name: str, manifest: dict[str, Any], rank: int
) -> tuple[dict[str, Tensor], Any]:
    """Return all that `rank` held; raise DamagedCheckpoint unless every bit is as written."""
    record = FileRecord(*manifest["ranks"][rank])
    tensors, numbers = read_rank_file(run, name, rank, record)
    copies = numbers.pop(AS_LEADER, [])
    if not copies:
        return tensors, numbers
    leader = leaders_in(manifest)[rank]
    record = FileRecord(*manifest["ranks"][leader])
    shared, _ = read_rank_file(run, name, leader, record, copies)
    return tensors | shared, numbers


# --------------------------------------------------------------------------------------------------
# What a rank holds
# --------------------------------------------------------------------------------------------------


def contents(topology: Topology, state: State, problem: Problem) -> tuple[Tensors, Numbers]:
    """Return all that this rank has to write, on the CPU; copies of what is the model's own."""
    tensors, numbers = lasting.contents(topology, state, problem.model)
    tensors |= _generators(problem.train)
    if state.theta.device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(state.theta.device)
    return tensors, numbers | _draws(problem.train)


def common_contents(state: State, problem: Problem, complete: bool) -> tuple[Tensors, Numbers]:
    """Return what `put_common` needs of a rank of which nothing else may be left, no copies.

    What was in flight between the nodes may not be `complete`.
    """
    tensors, numbers = lasting.common_contents(state, problem.model, complete)
    return tensors | {"order": problem.train.order}, numbers | _draws(problem.train)


def _generators(stream: BatchStream | WindowStream) -> Tensors:
    """Return order and generators of a rank's data, and torch's generator."""
    states = (stream.generator.get_state(), torch.get_rng_state())
    return {"order": stream.order, **dict(zip(GENERATORS, states, strict=True))}


def _draws(stream: BatchStream | WindowStream) -> Numbers:
    """Return a rank's place in the data, and the generators that go through JSON."""
    name, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "data": [stream.epoch, stream.position],
        "samples": len(stream.order),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }


def model_digest(state: State) -> str:
    """Return what changes when parameters, buffers or groups have other names, shapes or order.

    Of the network as it was before anything was taken out of it.
    """
    whole = state.whole
    return hashlib.sha256(
        repr((whole.layout, state.groups, list(whole.buffers))).encode()
    ).hexdigest()


# --------------------------------------------------------------------------------------------------
# Whether it fits
# --------------------------------------------------------------------------------------------------


def misfit(
    tensors: Tensors,
    numbers: Numbers,
    state: State,
    problem: Problem,
    *,
    leader: bool,
    first: bool,
    same_nodes: bool,
) -> str:
    """Return what of one rank's file does not fit this run's network or data, or "".

    The rank was a `leader`, or the `first` of all; its data are the same on the `same_nodes`.
    Checksums, format and configuration are as they were written.
    """
    in_flight = bool(numbers["position"]["in_flight"])
    stage = {"retired": numbers["stage"][1], "in_flight": in_flight}
    table = lasting.lasting(state, problem.model, **stage)
    wanted = {n: e.tensor for n, e in table.items() if e.is_written(leader, first)}
    if wanted.pop("message", None) is not None and (
        "message" not in tensors or tensors["message"].dtype != state.theta.dtype
    ):
        return "what was in flight between the nodes is missing"
    if first:
        wanted[MASK] = torch.from_numpy(np.packbits(state.mask.bits))
    wanted |= _generators(problem.train) if same_nodes else {}
    for key, tensor in wanted.items():
        kind = tuple(tensor.shape), tensor.dtype
        found = (tuple(tensors[key].shape), tensors[key].dtype) if key in tensors else None
        if found != kind:
            return f"{key} is {found}, the model asks for {kind}"
    if not same_nodes:
        return ""
    if not torch.equal(tensors["order"].sort()[0], problem.train.order.sort()[0]):
        return "its order is not one of this rank's images"
    return ""


# --------------------------------------------------------------------------------------------------
# What a rank puts back
# --------------------------------------------------------------------------------------------------


def put_all(topology: Topology, tensors: Tensors, numbers: Numbers, context: RunContext) -> None:
    """Restore this rank exactly. Collective on `world` and `node`."""
    stream, device = context.problem.train, context.state.theta.device
    lasting.put_exact(topology, tensors, numbers, context)
    stream.epoch, stream.position = numbers["data"]
    stream.order = tensors["order"]
    stream.generator.set_state(tensors["generator.data"])
    torch.set_rng_state(tensors["generator.torch"])
    if device.type == "cuda" and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"], device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def put_common(topology: Topology, parts: Parts, ranks: int, context: RunContext) -> None:
    """Restore what ranks on other nodes have in common.

    There were as many `ranks` before, of which `parts` are there. Collective on `world` and `node`.
    """
    world, settings, problem = topology.world, context.settings, context.problem
    position = context.state.position
    numbers = lasting.put_elsewhere(topology, parts, context)
    samples = problem.train.samples_among(ranks, numbers["samples"])
    # The same share of the run, whose outer iterations may have other steps on other nodes.
    done = position.steps_done * problem.steps
    position.steps_done = round(done / steps_with(settings, samples))
    problem.train.reshuffle([settings.seed, world.rank, position.iteration])
    seed_all((settings.seed + position.iteration) * world.size + world.rank)
