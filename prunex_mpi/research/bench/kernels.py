"""Time what phases 2 to 5 do to memory on one rank, against copying the same bytes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.mask_agreement import project_locally
from prunex_mpi.core.norms import find_residuals
from prunex_mpi.core.problem import make_groups, make_model
from prunex_mpi.core.schedule import Stage
from prunex_mpi.core.state import State, Work, adopt_mask, build_state, freeze, wires_of
from prunex_mpi.methods import hsadmm
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.compaction import build_plan, pack_, unpack_
from prunex_mpi.pruning.masks import apply_factors_, build_factors
from prunex_mpi.pruning.projection import group_energies, select
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action, min_seconds

AIM, AIM_IN_ALL = 3.0, 10.0
WITH_AIM = ("projection", "pack", "unpack", "dual update")
PHASES = ("2 intra", "3 project", "4 inter", "5 dual")
# Before the freeze: how far the keep ratio has moved from 1 to its target.
STAGES = {"dense warm-up": 0.0, "ramp, half way": 0.5, "ramp, at its end": 1.0}
NUM_CLASSES = 10
# Large enough for the ImageNet stem, and for every torchvision classifier.
IMAGE_SIZE = 224


def make_state(settings: Settings, device: torch.device) -> State:
    """Build the model of `settings` with 10 classes and its H-SADMM variables on `device`.

    The variables hold noise, so that no page is shared and no two groups tie.
    """
    model = make_model(settings, NUM_CLASSES, IMAGE_SIZE)
    layout = build_layout(model)
    groups = make_groups(settings, model, layout, IMAGE_SIZE)
    state = build_state(model.to(device), layout, groups, settings)
    for flat in (state.u, state.v, state.grad, state.scratch, state.payload):
        flat.normal_(std=1e-3)
    return state


def kernels(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    repeat: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Return the tables of steps, of the parts of the projection and of whole phases.

    `alone` is the topology of a job of one rank, on which no phase waits for a network.
    """
    state = make_state(settings, device)
    adopt_mask(state, project_alone(state, settings))
    return [
        _steps(alone, state, settings, transport, repeat, heartbeat),
        _projection_parts(state, settings, repeat, heartbeat),
        _stages(alone, state, settings, transport, repeat, heartbeat),
    ]


def project_alone(state: State, settings: Settings) -> np.ndarray:
    """Project `scratch` as a leader does in phase 3, without MPI, and return the mask."""
    mask = project_locally(state.scratch, state, 1.0, settings.round_to)
    factors = build_factors(mask, state.groups, state.theta.device, state.theta.dtype)
    apply_factors_(state.scratch, state.layout, state.groups, factors)
    return mask


def _steps(
    alone: Topology,
    state: State,
    settings: Settings,
    transport: Transport,
    repeat: int,
    heartbeat: Heartbeat,
) -> Table:
    theta, payload = state.theta, state.payload[: state.plan.numel]
    target = torch.empty_like(theta)

    def candidate() -> None:
        torch.add(state.theta, state.u, out=state.scratch)

    def fill_payload() -> None:
        pack_(state.theta, state.plan, state.message)

    node = wires_of(alone, state, transport).node

    def duals() -> object:
        moved = np.zeros(len(state.layout.segments))
        norms = hsadmm.update_duals(state, moved, moved)
        return find_residuals(alone.world, state, settings, norms, 0.0)

    steps: list[tuple[str, str, tuple[Tensor, ...], Action]] = [
        (
            "intra candidate",
            "the model",
            (theta,),
            Action(lambda: hsadmm.intra_node_consensus(node, state, settings)),
        ),
        (
            "projection",
            "the model",
            (theta,),
            Action(lambda: project_alone(state, settings), candidate),
        ),
        (
            "pack",
            "the payload",
            (payload,),
            Action(lambda: pack_(state.theta, state.plan, state.message)),
        ),
        (
            "unpack",
            "the model",
            (theta,),
            Action(lambda: unpack_(state.message, state.plan, state.scratch), fill_payload),
        ),
        (
            "dual update",
            "both duals",
            (state.u, state.v),
            Action(lambda: hsadmm.update_duals(state, None, None)),
        ),
        ("dual update + norms", "both duals", (state.u, state.v), Action(duals)),
    ]
    actions = {}
    for name, _, sources, action in steps:
        actions[f"copy for {name}"] = Action(lambda sources=sources: _copy(sources, target))
        actions[name] = action
    best = min_seconds(actions, repeat, theta.device, heartbeat)
    rows = []
    for name, what, sources, _ in steps:
        copy = best[f"copy for {name}"]
        size = sum(s.numel() * s.element_size() for s in sources) / MIB
        aim = AIM if name in WITH_AIM else None
        rows.append((name, what, size, 1e3 * copy, 1e3 * best[name], best[name] / copy, aim))
    kept = state.plan.numel / state.layout.numel
    return Table(
        f"Kernels on one rank: {settings.model}, {state.layout.numel:,} parameters, "
        f"{'+'.join(settings.groups)} groups, payload {100 * kept:.1f} % of the model",
        ("step", "bytes copied", "MiB", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {repeat} turns; each step takes turns with an out-of-place copy_ of the "
            "bytes named",
            "projection: group energies, selection, factors and masking, as on a leader",
            "dual update + norms: all of phase 5 on one rank, with seven norms per layer",
        ),
    )


def _copy(sources: tuple[Tensor, ...], target: Tensor) -> None:
    for source in sources:
        target[: source.numel()].copy_(source)


def _stages(
    alone: Topology,
    state: State,
    settings: Settings,
    transport: Transport,
    repeat: int,
    heartbeat: Heartbeat,
) -> Table:
    """Time phases 2 to 5 as the driver runs them at each stage of a run; ends frozen."""
    everything = np.ones_like(state.mask)
    rows = []
    for name, strict in STAGES.items():
        for measured in (False, True):
            adopt_mask(state, everything)
            stage = Stage(strict, choose=strict > 0, vote=True, freeze=False, measured=measured)
            times = _phases(alone, state, settings, transport, stage, repeat, heartbeat)
            rows.append((name, *times))
    freeze(state, True)
    stage = Stage(1.0, choose=False, vote=True, freeze=False, measured=False)
    times = _phases(alone, state, settings, transport, stage, repeat, heartbeat)
    rows.append(("consensus SGD after the freeze", *times))
    return Table(
        "Phases 2 to 5 as the driver runs them on one rank: times a copy of the model",
        ("stage", "residuals", "copy ms", *PHASES, "2 to 5 in all", "aim"),
        tuple(rows),
        (
            f"minimum of {repeat} outer iterations, each with an out-of-place copy_ of theta",
            "ramp: a mask is voted at each of them",
            "residuals: whether this outer iteration measures them",
        ),
    )


def _phases(
    alone: Topology,
    state: State,
    settings: Settings,
    transport: Transport,
    stage: Stage,
    repeat: int,
    heartbeat: Heartbeat,
) -> tuple[str, float, float, float, float, float, float, float]:
    """Return whether residuals are measured, a copy's ms, the phases in copies, the aim."""
    target = torch.empty_like(state.theta)
    wires = wires_of(alone, state, transport)
    leader, node = wires.workers, wires.node
    # Phase 4 looks at no data.
    work = Work(state, None, settings, transport, heartbeat)
    seen: dict[str, Any] = {}

    def intra() -> None:
        seen["z_tilde"] = hsadmm.intra_node_consensus(node, state, settings)

    def project() -> None:
        z_tilde = seen["z_tilde"]
        seen["node"] = hsadmm.project(leader, node, state, settings, z_tilde, stage)

    def inter() -> None:
        seen["z"] = hsadmm.inter_node_consensus(wires, work, stage, behind=False)

    def dual() -> None:
        norms = None
        if not state.consensus_sgd:
            norms = hsadmm.update_duals(state, seen["node"], seen["z"])
        find_residuals(alone.world, state, settings, norms, 0.0)

    # In the order of the driver: each phase prepares what the next one reads.
    actions = (intra, project, inter, dual)
    best = min_seconds(
        {
            "copy": Action(lambda: target.copy_(state.theta)),
            **{name: Action(run) for name, run in zip(PHASES, actions, strict=True)},
        },
        repeat,
        state.theta.device,
        heartbeat,
    )
    copy = best.pop("copy")
    times = [seconds / copy for seconds in best.values()]
    return "measured" if stage.measured else "-", 1e3 * copy, *times, sum(times), AIM_IN_ALL


def _projection_parts(state: State, settings: Settings, repeat: int, heartbeat: Heartbeat) -> Table:
    device, dtype = state.theta.device, state.theta.dtype
    groups, layout = state.groups, state.layout
    flat = state.scratch
    energies = [group_energies(flat, layout, groups, kind).numpy() for kind in groups.kinds]
    target = torch.empty_like(state.theta)

    def choose() -> None:
        for values, kind in zip(energies, groups.kinds, strict=True):
            select(values, kind, 1.0, settings.round_to)

    best = min_seconds(
        {
            "copy": Action(lambda: target.copy_(state.theta)),
            "group energies": Action(
                lambda: [group_energies(flat, layout, groups, kind) for kind in groups.kinds]
            ),
            "selection": Action(choose),
            "factors": Action(lambda: build_factors(state.mask, groups, device, dtype)),
            "masking": Action(lambda: apply_factors_(state.scratch, layout, groups, state.factors)),
            "index sets (phase 3)": Action(lambda: build_plan(layout, groups, state.mask, device)),
        },
        repeat,
        device,
        heartbeat,
    )
    copy = best.pop("copy")
    return Table(
        "Parts of the projection",
        ("part", "ms", "times copy of the model"),
        tuple((name, 1e3 * seconds, seconds / copy) for name, seconds in best.items()),
    )
