"""The global random generators: Python's, NumPy's and torch's, all of them or none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all of them: a model, a loss or a transform of somebody's own may draw from any."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


@contextmanager
def keeping_draws(device: torch.device | None = None) -> Iterator[None]:
    """Have them afterwards as they were before the block, also torch's of `device`."""
    draws = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = device is not None and device.type == "cuda"
    on_device = torch.cuda.get_rng_state(device) if on_gpu else None
    try:
        yield
    finally:
        random.setstate(draws[0])
        np.random.set_state(draws[1])
        torch.set_rng_state(draws[2])
        if on_gpu:
            torch.cuda.set_rng_state(on_device, device)
