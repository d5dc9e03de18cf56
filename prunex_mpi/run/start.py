"""The start of a job: nodes, devices and transport, then data, model, groups, problem and state.

Training, the benchmark and the comparison start alike, in this order: check_launched_together,
take_places, apply_findings where a run is to be written, find_transport, set_up or assemble.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, log, one_line
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import (
    broadcast_text,
    raise_together,
    require_same,
    run_collectively,
    run_collectively_while,
    run_on_root,
)
from prunex_mpi.comm.collectives import BUCKET_MIB, Transport, build_transport
from prunex_mpi.comm.topology import Topology, describe, library_name, nodes_of, set_threads
from prunex_mpi.config.checks import advice
from prunex_mpi.config.resolve import to_toml
from prunex_mpi.core.evaluation import memory_of_evaluation, prunable_and_kept
from prunex_mpi.core.mask_choice import log_unpruned, make_groups, try_removal
from prunex_mpi.core.optimizer import describe_muon
from prunex_mpi.core.schedule import total_steps
from prunex_mpi.core.state import RunContext, build_state
from prunex_mpi.core.task import find_losses
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.request import Known, Request
from prunex_mpi.data.text import TextSet
from prunex_mpi.diagnosis.devices import (
    choose_device,
    gather_facts,
    keep_freed_memory,
    recorded_versions,
    resolve_mpi_buffers,
)
from prunex_mpi.diagnosis.findings import check_agreement, check_launcher, errors
from prunex_mpi.diagnosis.machine import describe_machine
from prunex_mpi.diagnosis.ranks import check_ranks
from prunex_mpi.methods.exchanges import memory_of
from prunex_mpi.models.build import CIFAR_STEM_MAX_SIDE, build_model
from prunex_mpi.models.build import describe as describe_model
from prunex_mpi.models.dummy_input import keeping_draws, moved_in_training, probe, reads_ahead
from prunex_mpi.models.inputs import Images, Inputs, Tokens, inputs_from
from prunex_mpi.models.layout import build_layout, tensors_text
from prunex_mpi.run.pretrained import find_teacher, load_initial_, with_teacher
from prunex_mpi.run.problem import CPU, build_problem, find_inputs, load_dataset, make_model
from prunex_mpi.run.tuning import is_left_to_measure, trial_of, tuned
from prunex_mpi.settings.fields import Settings

# Of the largest output of a network, where it is computed twice.
SAME_WITHIN = 1e-4
# Of the epochs that a run is asked for, where whole steps make more or fewer.
OTHER_LENGTH = 0.1


@dataclass(frozen=True)
class Place:
    """Where a rank works; `layout` describes all ranks in one line, on world rank 0 alone."""

    topology: Topology
    device: torch.device
    threads: int
    layout: str

    def describe(self) -> dict[str, str]:
        """Return what tables name, since figures mean nothing without."""
        return {
            "machine": describe_machine(self.device),
            "mpi": library_name(),
            "ranks": self.layout,
        }


def check_launched_together(world: MPI.Comm) -> None:
    """Raise UserError where a job of several ranks fell apart. Collective on `world`."""
    (found,) = check_launcher(world.size, os.environ, terminal=os.isatty(0))
    if found.severity == "warning":
        log.warning("%s", found.line())
    raise_together(world, UserError(found.line()) if found.severity == "error" else None)


def check_alike(world: MPI.Comm, settings: Settings) -> dict[str, str]:
    """Return the versions of the software, the same on every rank, as the settings are.

    Raises UserError on every rank where they differ. Collective on `world`.
    """
    versions = recorded_versions()
    asked = to_toml(settings, versions)
    require_same(world, "the settings or the versions of the software", asked)
    return versions


@contextmanager
def take_places(
    world: MPI.Comm,
    ranks_per_node: int,
    device: str,
    threads: int = 0,
    made: list[MPI.Comm] | None = None,
    rack_of: str = "",
) -> Iterator[Place]:
    """Divide `world` into nodes for the time of the block; give each rank its device and threads.

    `device`, `ranks_per_node` and `rack_of` are settings; `threads` 0 are a fair share.
    Communicators are put into `made`. Collective on `world`.
    """
    with nodes_of(world, ranks_per_node, made, rack_of) as topology:
        chosen = run_collectively(world, lambda: choose_device(device, topology.host_rank))
        require_same(world, "the kinds of device (some ranks found no GPU)", chosen.type)
        if chosen.type == "cpu":
            keep_freed_memory()
        if threads:
            torch.set_num_threads(threads)
        else:
            threads = set_threads(topology.core_sharers, topology.host_size)
        yield Place(topology, chosen, threads, describe(topology, f"{chosen}, {threads} threads"))


def apply_findings(place: Place, settings: Settings) -> None:
    """Log what the doctor would warn of and refuse what can't work. Collective on `world`."""
    world = place.topology.world
    facts = gather_facts(place.topology, place.device, settings.run_dir)
    virtual = settings.ranks_per_node > 0 or settings.method.flat
    refused = ""
    if facts:
        findings = [*check_ranks(facts, settings.mpi_buffers, virtual), *check_agreement(facts)]
        for finding in findings:
            if finding.severity == "warning":
                log.warning("%s", finding.line())
        refused = "; ".join(finding.line() for finding in errors(findings))
    refused = broadcast_text(world, refused)
    if refused:
        raise UserError(refused)


def find_transport(place: Place, settings: Settings) -> Transport:
    """Decide how tensors reach MPI, and log it. Collective on `world`."""
    asked = settings.mpi_buffers, place.device, settings.timeout
    buffers, reason = resolve_mpi_buffers(place.topology, *asked)
    if place.device.type == "cuda":
        log.info("MPI buffers: %s (%s)", buffers, reason)
    return build_transport(place.device, BUCKET_MIB, buffers, settings.piece_kib)


def describe_training(context: RunContext, dataset: Dataset | TextSet, ranks: int) -> str:
    """Return one line: the data, the steps, the parameters and what of them can be pruned."""
    settings, problem, task = context.settings, context.problem, context.problem.task
    steps = f"{problem.steps:,} steps"
    if settings.method.quadratic_interval:
        steps += " or more"
    steps += " per outer iteration"
    return "; ".join(
        (
            dataset.describe(),
            f"{problem.train.batch_size * task.row * ranks:,} {task.unit} per step, {steps}, "
            f"{total_steps(settings, problem.steps):,} in all",
            f"{context.state.layout.numel:,} parameters, {_prunable(context)}",
        )
    )


def other_length(settings: Settings, steps: int, steps_per_epoch: int) -> str:
    """Return a warning if whole steps make far more or fewer epochs than asked for, or ""."""
    wanted = settings.outer_iterations * settings.local_epochs
    found = settings.outer_iterations * steps / steps_per_epoch
    apart = settings.method.quadratic_interval
    if settings.local_steps > 0 or apart or abs(found - wanted) <= OTHER_LENGTH * wanted:
        return ""
    return (
        f"local-epochs {settings.local_epochs}: with {steps_per_epoch:,} steps to an epoch that is "
        f"{steps:,}, so that the run has {found:.3g} epochs and not {float(wanted):.3g}; give "
        "local-steps and outer-iterations"
    )


def log_warnings(world: MPI.Comm, context: RunContext) -> None:
    """Log on rank 0 what is not pruned, and warn of settings that are likely mistakes."""
    if world.rank:
        return
    log_unpruned(context.settings, context.state.groups, context.state.layout.numel)
    if context.settings.optimizer == "muon":
        method = context.settings.method
        taker = "muon" if method.steps_on_gradient else method.name
        log.info("%s", describe_muon(context.state.layout, taker))
    problem = context.problem
    for line in advice(context.settings, problem.steps):
        log.warning("%s", line)
    wanted, images = context.settings.batch_size, problem.train.batch_size
    if images < wanted:
        log.warning(
            "batch-size %d: a rank has %d images, which make a step; lower it, start fewer "
            "ranks or give more images",
            wanted,
            images,
        )
    if line := other_length(context.settings, problem.steps, problem.train.steps_per_epoch):
        log.warning("%s", line)


def _prunable(context: RunContext) -> str:
    weights, groups = prunable_and_kept(context.state)[0], context.state.groups
    if not weights:
        return "none of which are pruned"
    if not groups.total:
        return f"of which {weights:,} weights can be pruned one by one"
    sizes = Counter[str]()
    for kind in groups.kinds:
        for selection in kind:
            sizes[selection.kind] += selection.stop - selection.start
    kinds = " and ".join(f"{count:,} {kind}" for kind, count in sizes.items())
    return f"of which {weights:,} weights can be pruned in {kinds} groups"


def look_at_model(world: MPI.Comm, settings: Settings, known: Known, heartbeat: Heartbeat) -> None:
    """Raise UserError on every rank where model or loss can't be used, before data are loaded.

    World rank 0 builds the model once. Sizes of a data set of the user's own are not known yet: of
    its model the factory is imported alone. `known` is what ranks have read of the data set.
    Collective on `world`.
    """

    def look() -> None:
        if world.rank:
            return
        with keeping_draws():
            if ":" in settings.dataset:
                side = settings.image_size or CIFAR_STEM_MAX_SIDE
                describe_model(settings.model, Images(side), settings.stem)
                return
            inputs = find_inputs(Request.of(settings), known)
            make_model(settings, inputs)
            find_losses(settings, inputs.classes, CPU)

    run_collectively_while(world, look, heartbeat)


def set_up(
    topology: Topology,
    settings: Settings,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
) -> RunContext:
    """Load the data, build the model, find what can be pruned. Collective on `world`."""
    heartbeat.enter("data")
    dataset = load_dataset(topology, Request.of(settings), heartbeat)
    return assemble(topology, settings, dataset, device, transport, heartbeat)


def assemble(
    topology: Topology,
    settings: Settings,
    dataset: Dataset | TextSet,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
    reads: bool = True,
) -> RunContext:
    """Do the rest of `set_up` with data that is loaded already. Collective on `world`.

    What the settings leave to be measured is measured first, by a trial; the result's have it. Only
    if it `reads` are the weights those of `--init-from`: a checkpoint has its own.
    """

    def try_out() -> Settings:
        # Nothing is left of the trial: of its images on the device, above all.
        trial = assemble(topology, trial_of(settings), dataset, device, transport, heartbeat)
        heartbeat.enter("trial")
        return tuned(topology, trial, settings)

    if is_left_to_measure(settings):
        settings = try_out()
    heartbeat.enter("model")
    inputs = inputs_from(dataset.sizes())
    model = run_collectively(topology.world, lambda: make_model(settings, inputs))
    world = topology.world
    run_collectively(world, lambda: check_state_dict(model))
    run_on_root(world, lambda: check_model(settings, model, inputs))
    layout = run_collectively(world, lambda: build_layout(model))
    require_same(world, "the parameters of the model", tensors_text(model))
    run_on_root(world, lambda: try_removal(settings, model, inputs))
    if settings.init_from and reads:
        settings = load_initial_(world, settings, model, inputs, dataset.class_names, heartbeat)
    teacher = None
    if settings.teacher:
        settings, *teacher = find_teacher(world, settings, model, dataset, heartbeat)
    groups = run_collectively(world, lambda: make_groups(settings, model, layout, inputs))
    problem = build_problem(topology, settings, dataset, model, device, transport, heartbeat)
    # Ranks of a job that goes on would measure others, on other images.
    look = {"image_mean": tuple(problem.mean.tolist()), "image_std": tuple(problem.std.tolist())}
    settings = replace(settings, **look)
    if teacher is not None:
        problem = with_teacher(topology, settings, problem, teacher, transport)
    heartbeat.beat(1)
    state = build_state(model, layout, groups, settings)
    state.alone = world.size == 1
    for memory in (memory_of, memory_of_evaluation):
        state.memory.declare(memory(settings, state))
    heartbeat.beat(2)
    return RunContext(state, problem, settings, transport, heartbeat)


def check_state_dict(model: torch.nn.Module) -> None:
    """Raise UserError where a model keeps what no file of a run can hold."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"the model's state_dict() holds {name}, a {type(value).__name__}; it may hold "
                "tensors alone: leave get_extra_state away"
            )
        if value.layout != torch.strided or value.device.type != "cpu":
            kind = value.device.type if value.layout == torch.strided else value.layout
            raise UserError(
                f"{name} of the model is {kind}; build it of dense tensors on the CPU, with values"
            )


def check_model(settings: Settings, model: torch.nn.Module, inputs: Inputs) -> None:
    """Raise UserError where a model of the user's does what a run can't average or keep."""
    if name := moved_in_training(model, inputs):
        if model.get_buffer(name).is_floating_point():
            raise UserError(
                f"training moves buffer {name} of the model, and of buffers only BatchNorm's "
                "statistics are averaged over the ranks; use BatchNorm, or leave it as it is"
            )
        raise UserError(
            f"training moves {name} of the model, a buffer that is not persistent, which no file "
            "of a run holds: register it with persistent=True"
        )
    if ":" not in settings.model:
        return
    check_repeatable(settings, model, inputs)
    if isinstance(inputs, Tokens) and reads_ahead(model, inputs, SAME_WITHIN):
        raise UserError(
            f"model {settings.model} reads ahead: the output at a position depends on later "
            "tokens, which it is to predict; give it a causal mask"
        )


def check_repeatable(settings: Settings, model: torch.nn.Module, inputs: Inputs) -> None:
    """Raise UserError where a model of the user's computes with numbers that no file keeps.

    It is looked at twice; and built once more, by other random numbers, and given the same state.
    """

    def outputs(network: torch.nn.Module) -> torch.Tensor:
        return torch.tensor(probe(network, inputs), dtype=torch.float64)

    def same(first: torch.Tensor, second: torch.Tensor) -> bool:
        least = SAME_WITHIN * float(first.abs().max())
        return torch.allclose(first, second, rtol=0, atol=least, equal_nan=True)

    with keeping_draws():
        first = outputs(model)
        if not same(first, outputs(model)):
            raise UserError(
                f"model {settings.model} computes something else each time, in evaluation too: "
                "draw, or change what it holds, only while self.training"
            )
        other = build_model(settings.model, inputs)
        try:
            other.load_state_dict(model.state_dict())
        except RuntimeError as error:
            raise UserError(
                f"model {settings.model} can't load its own state_dict ({one_line(error)}): give "
                "each buffer memory of its own, by clone() after expand()"
            ) from None
        if not same(first, outputs(other)):
            raise UserError(
                f"model {settings.model} is another one each time that it is built, with the same "
                "state_dict: keep what it draws in a buffer, or draw it by a seed of its own"
            )
