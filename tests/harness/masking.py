"""Masks drawn at random, and networks with zeros where they say."""

import numpy as np
import torch
from torch import nn

from prunex_mpi.pruning.coupling import Coupling


def draw(coupling: Coupling) -> np.ndarray:
    """Remove about half of the groups, but not all of a set."""
    removed = np.random.default_rng(0).random(coupling.total) < 0.5
    for s in coupling.sets:
        if removed[s.start : s.start + s.count].all():
            removed[s.start] = False
    return removed


@torch.no_grad()
def mask_(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> None:
    """Set all slices of the removed groups to zero, gamma and beta included."""
    for name, p in model.named_parameters():
        for dim, ids in coupling.slices(name):
            gone = np.flatnonzero((ids >= 0) & removed[ids])
            p.index_fill_(dim, torch.from_numpy(gone), 0)
