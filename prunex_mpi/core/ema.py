"""The exponential moving average of z, which is evaluated and delivered in its place.

Each z counts once, as it is when all that was exchanged for it has arrived, and with it the
BatchNorm statistics that all ranks agree on. Where the mask changes the average begins anew: one
with weights that have gone would not lie on the mask. Training does not notice.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prunex_mpi.core.state import SHARED, State, in_place_of_z
from prunex_mpi.models import batchnorm
from prunex_mpi.settings.fields import Settings

# In the memory of a run: the average, that of the BatchNorm means and variances, and of how many z
# it is since it has begun; with none of them it says nothing.
EMA, EMA_STATS, EMA_COUNT = f"{SHARED}ema_z", f"{SHARED}ema_statistics", f"{SHARED}ema_count"


def memory_of_ema(settings: Settings, state: State) -> dict[str, Tensor]:
    """Allocate the average of z, of none so far, where `--ema` asks for it."""
    if not settings.ema:
        return {}
    return {
        EMA: torch.zeros_like(state.z),
        EMA_STATS: torch.zeros_like(state.stats),
        EMA_COUNT: torch.zeros(1, dtype=torch.int64),
    }


def begin_anew_(state: State) -> None:
    """Let the average begin with the next z."""
    state.memory[EMA_COUNT].zero_()


def add_z_(state: State, settings: Settings) -> None:
    """Set the average to D average + (1 - D) z, the first to z, and its statistics likewise.

    Those that go with z are in `stats`, the same on all ranks. Does nothing without `--ema`.
    """
    if EMA not in state.memory:
        return
    average, of_statistics = state.memory[EMA], state.memory[EMA_STATS]
    statistics = batchnorm.as_plain(state.bn_modules, state.stats)
    if int(state.memory[EMA_COUNT]):
        average.lerp_(state.z, 1 - settings.ema)
        of_statistics.lerp_(statistics, 1 - settings.ema)
    else:
        average.copy_(state.z)
        of_statistics.copy_(statistics)
    state.memory[EMA_COUNT].add_(1)


def is_mean_of_several(state: State) -> bool:
    """Say whether the average is another network than z."""
    return EMA in state.memory and int(state.memory[EMA_COUNT]) > 1


def keep_statistics_(state: State) -> None:
    """Make the BatchNorm means and variances of the model those of the average."""
    batchnorm.read_plain_(state.bn_modules, state.memory[EMA_STATS])


@contextmanager
def ema_of(state: State) -> Iterator[None]:
    """Have the average, and its statistics, in place of z for the block.

    Nothing changes where there is none, or where it has yet to begin.
    """
    if EMA not in state.memory or not int(state.memory[EMA_COUNT]):
        yield
        return
    with in_place_of_z(state, state.memory[EMA], state.memory[EMA_STATS]):
        yield
