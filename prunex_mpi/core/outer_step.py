"""DiLoCo's step between nodes (Douillard et al. 2023): SGD with Nesterov momentum on z."""

import torch
from torch import Tensor

from prunex_mpi.core.ema import add_z_
from prunex_mpi.core.message import take_over_
from prunex_mpi.core.state import SHARED, State
from prunex_mpi.settings.fields import Settings

VELOCITY = f"{SHARED}outer_momentum"


def outer_memory(theta: Tensor) -> dict[str, Tensor]:
    """Allocate the velocity of `outer_step_`."""
    return {VELOCITY: torch.zeros_like(theta)}


def outer_step_(state: State, settings: Settings) -> None:
    """Step from the last z, which is in `scratch`, towards z, the mean of the ranks.

    b = momentum b + (old_z - z), z = old_z - lr (old_z - z + momentum b). Written so that lr 1
    without momentum is the mean, bit for bit. The mask is kept: old_z, z and b vanish outside of
    it. Does nothing where the method has no velocity.
    """
    if VELOCITY not in state.memory:
        return
    lr, momentum = settings.options.outer_lr, settings.options.outer_momentum
    step = state.scratch.sub_(state.z)
    velocity = state.memory[VELOCITY].mul_(momentum).add_(step)
    state.z.add_(step, alpha=1 - lr).add_(velocity, alpha=-lr * momentum)


def arrive_(state: State, settings: Settings, way: str, behind: bool = False) -> None:
    """Make z what was exchanged for it while training may have gone on `behind` it.

    As `take_over_`, with what follows from a new z.
    """
    take_over_(state, way, behind=behind)
    outer_step_(state, settings)
    add_z_(state, settings)
