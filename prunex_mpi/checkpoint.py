"""Save and restore the whole state of a run: every rank writes its part, all agree on the result.

Rank r's file holds theta, u, momentum, the model's buffers, its place in the data and its random
generators; node leaders' files also z_i and v_i, world rank 0's also z, mask and penalties. On the
same nodes a restored run goes on bit for bit (on the CPU). On other nodes it goes on from what the
ranks have in common: z, mask, penalties, the means of momentum and of BatchNorm statistics; theta
and z_i start from z, the duals from 0, so that sum_i P_i v_i = 0, and the data are shuffled anew
from the first step of the outer iteration.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi import batchnorm, checkpoint_files
from prunex_mpi.batches import BatchStream
from prunex_mpi.collectives import Transport, allreduce_, bcast_
from prunex_mpi.comm import Topology, broadcast_text, gather_text, together
from prunex_mpi.errors import UNREADABLE, DamagedCheckpoint, UserError
from prunex_mpi.files import FileRecord, telling_disk_errors
from prunex_mpi.logs import RunDirectory
from prunex_mpi.settings import Settings
from prunex_mpi.state import Position, Problem, State, put_mask_back

Tensors = dict[str, Tensor]
Numbers = dict[str, Any]


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
            place += (
                " on other nodes: z, masks, penalties and mean momentum are kept, duals start at "
                "0, data are shuffled anew"
            )
        return [*(f"refused checkpoint {line}" for line in self.refused), place]


def save(topology: Topology, run: RunDirectory | None, state: State, problem: Problem) -> None:
    """Write a checkpoint of the state as it stands.

    `run` is None on all ranks but world rank 0. Raises UserError on every rank when any of them
    can't write. Collective on `world`.
    """
    world, position = topology.world, state.position

    def begin() -> str:
        if run is None:
            return ""
        run.finish_removals()
        return str(checkpoint_files.begin(run.path, position.iteration, position.step))

    def write() -> FileRecord:
        tensors, numbers = _contents(topology, state, problem)
        return checkpoint_files.write_rank_file(folder, world.rank, tensors, numbers)

    what = "the checkpoint"
    folder = Path(broadcast_text(world, together(world, lambda: telling_disk_errors(what, begin))))
    record = together(world, lambda: telling_disk_errors(what, write))
    records = np.empty((world.size, 2), dtype=np.int64)
    world.Gather(np.array([record.size, record.crc32], dtype=np.int64), records, root=0)

    def publish() -> None:
        if run is not None:
            manifest = {
                "format": checkpoint_files.FORMAT,
                "node_sizes": list(topology.node_sizes),
                "ranks": records.tolist(),
                "config": run.config,
                "model": _model_digest(state, problem),
                "files": run.sizes(),
            }
            run.remove_later(checkpoint_files.publish(folder, manifest))

    together(world, lambda: telling_disk_errors(what, publish))


def restore(
    topology: Topology,
    run: RunDirectory | None,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
) -> Restored:
    """Put the newest usable checkpoint of the run into `state` and `problem`.

    One that is not whole, or is of another model, is refused and the one before it is tried.
    Without any checkpoint nothing changes; raises UserError on every rank when there are some and
    none can be used. Collective on `world`.
    """
    world = topology.world

    def list_names() -> str:
        try:
            return "/".join(checkpoint_files.valid_names(run.path)) if run else ""
        except OSError as error:
            reason = f"{error.filename} can't be read: {error.strerror}"
            raise UserError(reason, UNREADABLE) from None

    def rewind(sizes: dict[str, list[int]], refused: Sequence[str] = ()) -> None:
        if run is not None:
            run.rewind(sizes)
            for line in refused:
                checkpoint_files.set_aside(run.path, line.partition(":")[0])

    listed = together(world, list_names)
    refused: list[str] = []
    for name in filter(None, broadcast_text(world, listed).split("/")):
        path, manifest, reason = _read_manifest(world, run, name, _model_digest(state, problem))
        if not reason:
            other = manifest["node_sizes"] != list(topology.node_sizes)
            parts, mine = [], ""
            try:
                parts = list(_read_parts(topology, path, name, manifest, other, state, problem))
            except DamagedCheckpoint as damage:
                mine = str(damage)
            reason = _first_reason(world, mine)
        if reason:
            refused.append(f"{name}: {reason}")
            continue
        together(world, partial(rewind, manifest["files"], refused))
        if other:
            old_size = sum(manifest["node_sizes"])
            _put_common(topology, parts, old_size, state, problem, settings, transport)
        else:
            _put_all(topology, *parts[0], state, problem, transport)
        return Restored(name, tuple(refused), other)
    if refused:
        raise UserError("no checkpoint can be used: " + "; ".join(refused), UNREADABLE)
    together(world, lambda: rewind({}))
    return Restored("", ())


# --------------------------------------------------------------------------------------------------
# What a rank writes
# --------------------------------------------------------------------------------------------------


def _contents(topology: Topology, state: State, problem: Problem) -> tuple[Tensors, Numbers]:
    """Return copies on the CPU of all that this rank has to write."""
    stream = problem.train
    tensors = {"theta": state.theta, "order": stream.order}
    tensors |= {f"buffer.{name}": buffer for name, buffer in problem.model.named_buffers()}
    tensors |= {"generator.data": stream.generator.get_state()}
    tensors |= {"generator.torch": torch.get_rng_state()}
    if state.theta.device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(state.theta.device)
    momentum = state.optimizer.state[state.theta].get("momentum_buffer")
    if momentum is not None:
        tensors["momentum"] = momentum
    if not state.consensus_sgd:
        tensors["u"] = state.u
        if topology.is_leader:
            tensors["v"] = state.v
    if topology.is_leader:
        tensors["z_node"] = state.z_node
    if topology.world.rank == 0:
        tensors["z"] = state.z
        tensors["mask"] = torch.from_numpy(np.packbits(state.mask))
        tensors["rho1"], tensors["rho2"] = map(torch.from_numpy, (state.rho1, state.rho2))
    numbers = _numbers(state, stream, state.position)
    # Buffers of a model may share memory or lie in another order.
    return {
        k: t.detach().cpu().contiguous().clone() if k.startswith("buffer.") else t.cpu()
        for k, t in tensors.items()
    }, numbers


def _numbers(state: State, stream: BatchStream, position: Position) -> Numbers:
    """Return what goes through JSON."""
    name, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "position": asdict(position),
        "stage": [state.frozen, state.consensus_sgd],
        "data": [stream.epoch, stream.position],
        "scaler": state.scaler.state_dict(),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }


def _model_digest(state: State, problem: Problem) -> str:
    """Return what changes when parameters, buffers or groups have other names, shapes or order."""
    buffers = [(name, buffer.shape) for name, buffer in problem.model.named_buffers()]
    return hashlib.sha256(repr((state.layout, state.groups, buffers)).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# What a rank reads
# --------------------------------------------------------------------------------------------------


def _read_manifest(
    world: MPI.Comm, run: RunDirectory | None, name: str, model: str
) -> tuple[Path, dict[str, Any], str]:
    """Return the run's path, the manifest that rank 0 read, and why it can't be used."""
    text = reason = path = ""
    if run is not None:
        path = str(run.path)
        try:
            manifest = checkpoint_files.read_manifest(run.path, name)
            run.check(manifest["files"])
            if manifest["config"] != run.config:
                raise DamagedCheckpoint("it was written under another config.toml")
            if manifest["model"] != model:
                raise DamagedCheckpoint("the model's parameters were of other names or shapes then")
            text = json.dumps(manifest)
        except DamagedCheckpoint as damage:
            reason = str(damage)
    reason = broadcast_text(world, reason)
    text, path = broadcast_text(world, text), broadcast_text(world, path)
    return Path(path), json.loads(text) if text else {}, reason


def _read_parts(
    topology: Topology,
    run: Path,
    name: str,
    manifest: dict[str, Any],
    other_nodes: bool,
    state: State,
    problem: Problem,
) -> Iterator[tuple[Tensors, Numbers]]:
    """Read this rank's file, or on other nodes its share of all files."""
    world, records = topology.world, manifest["ranks"]
    mine = range(world.rank, len(records), world.size) if other_nodes else [world.rank]
    leaders = np.cumsum([0, *manifest["node_sizes"]])
    for rank in mine:
        size, crc32 = records[rank]
        record = FileRecord(size, crc32)
        tensors, numbers = checkpoint_files.read_rank_file(run, name, rank, record)
        if not _usable(numbers, _numbers(state, problem.train, Position())):
            raise DamagedCheckpoint(f"the numbers of rank {rank} are not what this version writes")
        wanted = _expected(state, problem, rank in leaders, rank == 0, numbers)
        if not other_nodes:
            order, generator = problem.train.order, problem.train.generator.get_state()
            wanted["order"] = (tuple(order.shape), order.dtype)
            wanted["generator.data"] = (tuple(generator.shape), generator.dtype)
            wanted["generator.torch"] = (tuple(torch.get_rng_state().shape), torch.uint8)
        found = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
        for key, kind in wanted.items():
            if found.get(key) != kind:
                raise DamagedCheckpoint(
                    f"{key} of rank {rank} is {found.get(key)}, the model asks for {kind}"
                )
        if not other_nodes and not torch.equal(tensors["order"].sort()[0], order.sort()[0]):
            raise DamagedCheckpoint(f"the order of rank {rank} is not one of its images")
        yield tensors, numbers


def _usable(numbers: Any, template: Numbers) -> bool:
    """Say whether `numbers` are what `_numbers` returns for this run, as it did for `template`."""
    # The spare Gaussian of the generator is a number or None.
    template["python"][2] = None
    if not _alike(template, numbers):
        return False
    return numbers["position"]["iteration"] >= 1 and numbers["position"]["step"] >= 0


def _alike(template: Any, value: Any) -> bool:
    """Say whether `value` has the keys, lengths and types of `template`, all the way down.

    What is None in `template` may be anything, and so may the length of an empty list.
    """
    if template is None:
        return True
    if isinstance(template, dict):
        return (
            isinstance(value, dict)
            and template.keys() == value.keys()
            and all(_alike(template[key], value[key]) for key in template)
        )
    if isinstance(template, list):
        return isinstance(value, list) and (
            not template or (len(template) == len(value) and all(map(_alike, template, value)))
        )
    return type(value) is type(template) or (isinstance(template, float) and type(value) is int)


def _expected(
    state: State, problem: Problem, leader: bool, first: bool, numbers: Numbers
) -> dict[str, tuple]:
    """Return shape and dtype of what a rank's file must hold for this model."""
    flat = (tuple(state.theta.shape), state.theta.dtype)
    keys = ["theta"]
    if "momentum_buffer" in state.optimizer.state[state.theta]:
        keys.append("momentum")
    retired = numbers["stage"][1]
    keys += [] if retired else ["u"]
    if leader:
        keys += ["z_node"] if retired else ["z_node", "v"]
    if first:
        keys.append("z")
    wanted = dict.fromkeys(keys, flat)
    for name, buffer in problem.model.named_buffers():
        wanted[f"buffer.{name}"] = (tuple(buffer.shape), buffer.dtype)
    if first:
        wanted["mask"] = ((-(-state.groups.total // 8),), torch.uint8)
        wanted["rho1"] = wanted["rho2"] = (state.rho1.shape, torch.float64)
    return wanted


def _first_reason(world: MPI.Comm, mine: str) -> str:
    """Return the lowest rank's reason on every rank, "" when none has one. Collective."""
    reasons = [reason for reason in gather_text(world, mine) if reason]
    return broadcast_text(world, reasons[0] if reasons else "")


# --------------------------------------------------------------------------------------------------
# What a rank puts back
# --------------------------------------------------------------------------------------------------


def _put_all(
    topology: Topology,
    tensors: Tensors,
    numbers: Numbers,
    state: State,
    problem: Problem,
    transport: Transport,
) -> None:
    """Restore this rank exactly. Collective on `world` and `node`."""
    frozen, retired = numbers["stage"]
    _put_shared(topology, tensors, frozen, retired, state, transport)
    state.theta.copy_(tensors["theta"])
    for key, flat in (("u", state.u), ("v", state.v), ("z_node", state.z_node)):
        if key in tensors:
            flat.copy_(tensors[key])
    if retired:
        state.u.zero_()
        state.v.zero_()
    else:
        bcast_(topology.node, state.v, transport)
    bcast_(topology.node, state.z_node, transport)
    if "momentum" in tensors:
        state.optimizer.state[state.theta]["momentum_buffer"].copy_(tensors["momentum"])
    for name, buffer in problem.model.named_buffers():
        buffer.copy_(tensors[f"buffer.{name}"])
    _put_position(state, numbers["position"])
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(numbers["scaler"])
    stream = problem.train
    stream.epoch, stream.position = numbers["data"]
    stream.order = tensors["order"]
    stream.generator.set_state(tensors["generator.data"])
    torch.set_rng_state(tensors["generator.torch"])
    if state.theta.device.type == "cuda" and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"], state.theta.device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _put_common(
    topology: Topology,
    parts: list[tuple[Tensors, Numbers]],
    old_size: int,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
) -> None:
    """Restore what ranks on other nodes have in common. Collective on `world` and `node`."""
    world = topology.world
    momentum = state.optimizer.state[state.theta].get("momentum_buffer")
    sums, stats = torch.zeros_like(state.theta), torch.zeros_like(state.stats)
    for tensors, _ in parts:
        for name, buffer in problem.model.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        batchnorm.read_(state.bn_modules, state.stats)
        stats.add_(state.stats)
        if momentum is not None:
            sums.add_(tensors["momentum"].to(sums.device))
    allreduce_(world, sums, transport)
    allreduce_(world, stats, transport)
    first = parts[0] if world.rank == 0 else ({}, {})
    common = json.loads(broadcast_text(world, json.dumps(first[1])))
    frozen, retired = common["stage"]
    _put_shared(topology, first[0], frozen, retired, state, transport)
    state.theta.copy_(state.z)
    state.z_node.copy_(state.z)
    state.u.zero_()
    state.v.zero_()
    if momentum is not None:
        momentum.copy_(sums.div_(old_size))
    if world.rank == 0:
        for name, buffer in problem.model.named_buffers():
            buffer.copy_(first[0][f"buffer.{name}"])
    for buffer in problem.model.buffers():
        # A copy where the memory is not in order; as bytes, since counters travel as well.
        flat = buffer.detach().reshape(-1).clone()
        bcast_(world, flat.view(torch.uint8), transport)
        buffer.copy_(flat.view(buffer.shape))
    batchnorm.write(state.bn_modules, stats.div_(old_size))
    _put_position(state, {**common["position"], **_PHASE_START})
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(common["scaler"])
    problem.train.reshuffle([settings.seed, world.rank, state.position.iteration])
    torch.manual_seed((settings.seed + state.position.iteration) * world.size + world.rank)


_PHASE_START = {
    "step": 0,
    "loss_sum": 0.0,
    "loss_count": 0.0,
    "intra_bytes": 0,
    "local_seconds": 0.0,
}


def _put_shared(
    topology: Topology,
    tensors: Tensors,
    frozen: bool,
    retired: bool,
    state: State,
    transport: Transport,
) -> None:
    """Give every rank z, mask and penalties of world rank 0, which holds them in `tensors`."""
    world = topology.world
    bits = np.packbits(state.mask)
    if world.rank == 0:
        bits[:] = tensors["mask"].numpy()
        state.rho1[:], state.rho2[:] = tensors["rho1"].numpy(), tensors["rho2"].numpy()
        state.z.copy_(tensors["z"])
    for array in (bits, state.rho1, state.rho2):
        world.Bcast(array, root=0)
    put_mask_back(state, np.unpackbits(bits, count=state.mask.size).astype(bool), frozen, retired)
    bcast_(world, state.z, transport)


def _put_position(state: State, values: dict[str, Any]) -> None:
    """Set the position in place: the driver holds on to the object."""
    for name, value in asdict(Position(**values)).items():
        setattr(state.position, name, value)
