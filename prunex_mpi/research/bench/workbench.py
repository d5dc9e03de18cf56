"""What the sections of the benchmark share: where they measure, and what they measure with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.grouping import make_groups
from prunex_mpi.core.state import State, build_state
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.run.problem import make_model
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action, wall_times

# Large enough for the ImageNet stem, and for every torchvision classifier.
IMAGES = Images(224, 10)


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
    models: tuple[str, ...] = ()
    steps: int = 1
    repeat: int = 1

    def best(self, actions: dict[str, Action]) -> dict[str, float]:
        """Return the shortest time of each action on this rank, in seconds. No communication."""
        times = wall_times(actions, self.repeat, self.device, self.heartbeat)
        return {name: float(taken.min()) for name, taken in times.items()}

    def slowest(
        self, run: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> float:
        """Return the shortest time of `run` on the slowest rank. Collective on `world`."""
        where = self.device, self.heartbeat, self.topology.world
        return float(wall_times({"": Action(run, prepare)}, self.repeat, *where)[""].min())


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
