"""The best z so far by images that are held out of the training set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from prunex_mpi.core.ema import ema_of
from prunex_mpi.core.metrics import density
from prunex_mpi.core.schedule import strictness
from prunex_mpi.core.state import SHARED, State, Work, in_place_of_z
from prunex_mpi.models import batchnorm
from prunex_mpi.settings.fields import Settings

# In the memory of a run: that z, the BatchNorm means and variances that go with it, and its mask.
BEST, BEST_STATS = f"{SHARED}best_z", f"{SHARED}best_statistics"
BEST_MASK = f"{SHARED}best_mask"
# Densities that differ by less are the same: coupled groups need not all be of one size.
SAME_DENSITY = 1e-3


class Judged(NamedTuple):
    """What a network reached in an outer iteration, by the images that are held out.

    `stage` says how far pruning had come, `density` how much was left of what can be pruned.
    """

    iteration: int
    stage: float
    density: float
    accuracy: float
    loss: float


def memory_of_best(settings: Settings, state: State) -> dict[str, Tensor]:
    """Allocate the best z so far, where images are held out to tell which it is."""
    if not settings.val_share:
        return {}
    return {
        BEST: torch.zeros_like(state.z),
        BEST_STATS: torch.zeros_like(state.stats),
        BEST_MASK: torch.ones(state.mask.size, dtype=torch.bool),
    }


def keep_best_(work: Work, loss: float, accuracy: float) -> None:
    """Keep z and its statistics in the memory where they are the best of the run so far.

    Every rank decides alike.
    """
    state, settings, k = work.state, work.settings, work.state.position.iteration
    here = Judged(k, stage_of(settings, k, state.frozen), density(state), accuracy, loss)
    best = Judged(*state.position.best) if state.position.best else None
    if best is None or is_better(here, best, by_size=not votes(settings)):
        state.position.best = list(here)
        state.memory[BEST].copy_(state.z)
        batchnorm.read_plain_(state.bn_modules, state.memory[BEST_STATS])
        state.memory[BEST_MASK].copy_(torch.from_numpy(state.mask))


def stage_of(settings: Settings, k: int, frozen: bool) -> float:
    """Return how far pruning has come in outer iteration `k`: 2 where masks are `frozen`."""
    if not settings.method.consensus:
        return 0.0
    return strictness(k, settings.warmup_iterations, settings.keep_ramp_iterations) + frozen


def votes(settings: Settings) -> bool:
    """Say whether each mask keeps as much as it may, and none is a union of several."""
    method = settings.method
    return method.consensus and (settings.mask_agreement == "vote" or method.flat)


def is_better(here: Judged, best: Judged, by_size: bool) -> bool:
    """Say whether a network is better than the best one so far.

    That is one at a later stage of pruning; of the same stage the smaller one, where `by_size` says
    that sizes differ for another reason than which groups are kept; then the higher accuracy
    counts, then the lower loss.
    """
    if here.stage != best.stage:
        return here.stage > best.stage
    if by_size and here.density < best.density * (1 - SAME_DENSITY):
        return True
    if by_size and here.density > best.density * (1 + SAME_DENSITY):
        return False
    return (here.accuracy, -here.loss) > (best.accuracy, -best.loss)


@contextmanager
def best_of(work: Work) -> Iterator[None]:
    """Have the best z that was kept, its statistics and mask in place of the last for the block.

    Without one nothing changes.
    """
    state = work.state
    if not _is_kept(state):
        yield
        return
    last, state.mask = state.mask, state.memory[BEST_MASK].numpy()
    try:
        with in_place_of_z(state, state.memory[BEST], state.memory[BEST_STATS]):
            yield
    finally:
        state.mask = last


@contextmanager
def delivered(work: Work) -> Iterator[None]:
    """Have what is delivered in place of z: the best that was kept, else the average, else z."""
    with best_of(work) if _is_kept(work.state) else ema_of(work.state):
        yield


def _is_kept(state: State) -> bool:
    return BEST in state.memory and bool(state.position.best)
