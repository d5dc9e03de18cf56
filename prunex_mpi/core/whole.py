"""The network before anything is taken out of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout
from prunex_mpi.models.standalone import Sizes
from prunex_mpi.pruning.groups import Groups
from prunex_mpi.pruning.shrink import smaller_sizes
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Whole:
    """What shares and savings are relative to.

    `stats` is the number of BatchNorm statistics, `buffers` holds names and shapes, `sizes` what
    makes a smaller network whole again, where anything may be taken out of it.
    """

    layout: Layout
    stats: int
    buffers: tuple[tuple[str, torch.Size], ...]
    sizes: Sizes


def describe_whole(model: nn.Module, layout: Layout, groups: Groups, settings: Settings) -> Whole:
    """Describe `model`, of which nothing has been taken out."""
    sizes: Sizes = {}
    if settings.method.removes or settings.remove_dropped:
        sizes = smaller_sizes(model, groups.coupling, np.zeros(groups.total, dtype=bool))
    buffers = tuple((name, b.shape) for name, b in model.named_buffers())
    return Whole(layout, batchnorm.numel(batchnorm.find(model)), buffers, sizes)
