"""What a job trains, put together from its settings: data, model, groups, problem, state."""

import random

import numpy as np
import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, require_same, together
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import memory_of_best, memory_of_ema
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.problem import build_problem, choose_rules, make_groups, make_model
from prunex_mpi.core.scores import memory_of_scores
from prunex_mpi.core.state import Work, build_state
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.methods.exchanges import memory_of
from prunex_mpi.models.build import build_model, probe
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.trial import rules_of
from prunex_mpi.run.beginning import begin_from_
from prunex_mpi.run.teaching import find_teacher, taught
from prunex_mpi.run.tuning import is_left_to_measure, trial_of, tuned
from prunex_mpi.settings.fields import Settings

# Of the largest output of a network, where it is computed twice.
SAME_WITHIN = 1e-4


def set_up(
    topology: Topology,
    settings: Settings,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
) -> Work:
    """Load the data, build the model, find what can be pruned. Collective on `world`."""
    heartbeat.enter("data")
    dataset = load_dataset(topology, settings, heartbeat, device)
    return assemble(topology, settings, dataset, device, transport, heartbeat)


def assemble(
    topology: Topology,
    settings: Settings,
    dataset: Dataset,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
    reads: bool = True,
) -> Work:
    """Do the rest of `set_up` with data that is loaded already. Collective on `world`.

    What the settings leave to be measured is measured first, by a trial; the result's have it. Only
    if it `reads` are the weights those of `--init-from`: a checkpoint has its own.
    """
    if is_left_to_measure(settings):
        settings = try_out(topology, settings, dataset, device, transport, heartbeat)
    heartbeat.enter("model")
    sizes = dataset.num_classes, dataset.image_size
    model = together(topology.world, lambda: make_model(settings, *sizes))
    return assemble_around(topology, settings, dataset, model, device, transport, heartbeat, reads)


def try_out(
    topology: Topology,
    settings: Settings,
    dataset: Dataset,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
) -> Settings:
    """Return the settings with what they leave to be measured; nothing of the trial is left.

    Its images on the device, above all. Collective on `world`.
    """
    trial = assemble(topology, trial_of(settings), dataset, device, transport, heartbeat)
    heartbeat.enter("trial")
    return tuned(topology, trial, settings)


def assemble_around(
    topology: Topology,
    settings: Settings,
    dataset: Dataset,
    model: torch.nn.Module,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
    reads: bool = False,
) -> Work:
    """Do the rest of `assemble` with a model, which is on the CPU. Collective on `world`."""
    world, side, first = topology.world, dataset.image_size, topology.world.rank == 0
    together(world, lambda: refuse_odd_state(model))
    if ":" in settings.model:
        sizes = dataset.num_classes, side
        together(world, lambda: refuse_drawn(settings, model, *sizes) if first else None)
    layout = together(world, lambda: build_layout(model))
    tensors = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()]
    require_same(world, "the parameters of the model", repr((layout, tensors)))
    # One rank tries what the others then go by.
    tried = together(world, lambda: choose_rules(settings, model, side).text() if first else "")
    rules = rules_of(broadcast_text(world, tried))
    if settings.init_from and reads:
        settings = begin_from_(world, settings, model, side, dataset.class_names, heartbeat.go_on)
    teacher = None
    if settings.teacher:
        settings, *teacher = find_teacher(world, settings, model, dataset, heartbeat.go_on)
    groups = together(world, lambda: make_groups(settings, model, layout, side, rules))
    problem = build_problem(topology, settings, dataset, model, device, transport, heartbeat)
    if teacher is not None:
        problem = taught(topology, settings, problem, teacher, transport)
    heartbeat.beat(1)
    state = build_state(model, layout, groups, settings)
    state.memory |= memory_of(settings, layout, state.theta)
    state.memory |= memory_of_best(settings, state) | memory_of_ema(settings, state)
    state.memory |= memory_of_scores(settings, state)
    heartbeat.beat(2)
    return Work(state, problem, settings, transport, heartbeat)


def refuse_odd_state(model: torch.nn.Module) -> None:
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


def refuse_drawn(settings: Settings, model: torch.nn.Module, classes: int, image_size: int) -> None:
    """Raise UserError where a model of the user's computes with numbers that no file keeps.

    It is built once more, by other random numbers, and given the same state.
    """
    draws = random.getstate(), np.random.get_state(), torch.get_rng_state()
    other = build_model(settings.model, num_classes=classes, image_size=image_size)
    random.setstate(draws[0])
    np.random.set_state(draws[1])
    torch.set_rng_state(draws[2])
    try:
        other.load_state_dict(model.state_dict())
        pair = [torch.tensor(probe(m, image_size), dtype=torch.float64) for m in (model, other)]
        least = SAME_WITHIN * float(pair[0].abs().max())
        same = torch.allclose(*pair, rtol=0, atol=least, equal_nan=True)
    except RuntimeError:
        same = False
    if not same:
        raise UserError(
            f"model {settings.model} is another one each time that it is built, with the same "
            "state_dict: keep what it draws in a buffer, or draw it by a seed of its own"
        )
