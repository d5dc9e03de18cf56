"""Mix the images of a batch with each other: mixup (Zhang 2018) and cutmix (Yun 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Mixing:
    """How batches are mixed: the parameters of both Beta distributions, 0 for not.

    `entropy`, seed and rank, makes a rank's draws its own.
    """

    mixup: float
    cutmix: float
    classes: int
    entropy: Sequence[int]


def mix(images: Tensor, labels: Tensor, mixing: Mixing, step: int) -> tuple[Tensor, Tensor]:
    """Return images [b, 3, H, W] mixed with others of the batch, and class shares [b, classes].

    One draw for the whole batch, which follows from `step` of the run: nothing has to be
    remembered. With both kinds a coin decides. The shares have the images' dtype, float32 at least.
    """
    rng = np.random.default_rng([*mixing.entropy, step])
    cuts = mixing.cutmix > 0 and (mixing.mixup == 0 or rng.random() < 0.5)
    alpha = mixing.cutmix if cuts else mixing.mixup
    share = float(rng.beta(alpha, alpha))
    partners = torch.from_numpy(rng.permutation(len(labels))).to(labels.device, non_blocking=True)
    if cuts:
        height, width = images.shape[-2:]
        rows, columns = _window(rng, share, height), _window(rng, share, width)
        mixed = images.clone()
        mixed[..., slice(*rows), slice(*columns)] = images[partners][
            ..., slice(*rows), slice(*columns)
        ]
        share = 1 - (rows[1] - rows[0]) * (columns[1] - columns[0]) / (height * width)
    else:
        mixed = torch.lerp(images[partners], images, share)
    dtype = torch.promote_types(images.dtype, torch.float32)
    shares = F.one_hot(labels, mixing.classes).to(dtype)
    return mixed, torch.lerp(shares[partners], shares, share)


def _window(rng: np.random.Generator, share: float, side: int) -> tuple[int, int]:
    """Return both ends of the window of the other image along one side, cut off at the border."""
    half = side * (1 - share) ** 0.5 / 2
    centre = rng.integers(side)
    return round(max(0.0, centre - half)), round(min(float(side), centre + half))
