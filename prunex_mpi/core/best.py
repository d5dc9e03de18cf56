"""The best z so far by images that are held out of the training set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prunex_mpi.core.ema import ema_of
from prunex_mpi.core.metrics import density
from prunex_mpi.core.state import SHARED, State, Work, in_place_of_z
from prunex_mpi.models import batchnorm
from prunex_mpi.settings.fields import Settings

# In the memory of a run: that z, and the BatchNorm means and variances that go with it.
BEST, BEST_STATS = f"{SHARED}best_z", f"{SHARED}best_statistics"
# Densities that differ by less are the same: coupled groups need not all be of one size.
SAME_DENSITY = 1e-3


def memory_of_best(settings: Settings, state: State) -> dict[str, Tensor]:
    """Allocate the best z so far, where images are held out to tell which it is."""
    if not settings.val_share:
        return {}
    return {BEST: torch.zeros_like(state.z), BEST_STATS: torch.zeros_like(state.stats)}


def keep_best_(work: Work, loss: float, accuracy: float) -> None:
    """Keep z and its statistics in the memory where they are the best of the run so far.

    A network that is smaller beats one that is larger; of equal ones the higher accuracy counts,
    then the lower loss. Every rank decides alike.
    """
    state = work.state
    here = [state.position.iteration, density(state), accuracy, loss]
    if is_better(here, state.position.best):
        state.position.best = here
        state.memory[BEST].copy_(state.z)
        batchnorm.read_plain_(state.bn_modules, state.memory[BEST_STATS])


def is_better(here: list[float], best: list[float]) -> bool:
    """Say whether (iteration, density, accuracy, loss) is better than the best so far, or first."""
    if not best or here[1] < best[1] * (1 - SAME_DENSITY):
        return True
    if here[1] > best[1] * (1 + SAME_DENSITY):
        return False
    return (here[2], -here[3]) > (best[2], -best[3])


@contextmanager
def best_of(work: Work) -> Iterator[None]:
    """Have the best z that was kept, and its statistics, in place of the last for the block.

    Without one nothing changes.
    """
    state = work.state
    if not _is_kept(state):
        yield
        return
    with in_place_of_z(state, state.memory[BEST], state.memory[BEST_STATS]):
        yield


@contextmanager
def delivered(work: Work) -> Iterator[None]:
    """Have what is delivered in place of z: the best that was kept, else the average, else z."""
    with best_of(work) if _is_kept(work.state) else ema_of(work.state):
        yield


def _is_kept(state: State) -> bool:
    return BEST in state.memory and bool(state.position.best)
