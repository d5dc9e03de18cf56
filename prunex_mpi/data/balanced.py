"""As many images of each class, or the same share of each."""

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Return how many images of each class a shard holds, int64 [classes]."""
    return torch.bincount(labels, minlength=classes)


def hold_out(order: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return which images of `order` are kept and which are held out: `share` of each class.

    `order` is int64 [n], indices into `labels`; the first of a class are held out, and at least one
    image of it stays. What rounding leaves over of a class, half an image at most, counts for the
    next one. Both parts are in the order they were in. Raises UserError where nothing would be held
    out.
    """
    of_class = labels[order]
    held = torch.zeros(len(order), dtype=torch.bool)
    by_class = torch.argsort(of_class, stable=True)
    due, first = 0.0, 0
    for size in torch.bincount(of_class).tolist():
        if size == 0:
            continue
        due += size * share
        count = min(round(due), size - 1)
        held[by_class[first : first + count]] = True
        first += size
        # What a small class may not give is not taken from a large one.
        due = max(-0.5, min(0.5, due - count))
    if not held.any():
        raise UserError(
            f"val-share {share}: no class has enough of the {len(order)} training images; raise it"
        )
    return order[~held], order[held]


def places_in_draws(labels: Tensor, before: Tensor, each: int, draws: int) -> tuple[Tensor, Tensor]:
    """Return which images of a shard are drawn, and where they stand among all that are.

    A draw holds `each` images of every class, class by class; the first ones of a class, in the
    order of the ranks and their shards, make the first draw, the next ones the second. `before`,
    int64 [classes], are the images of each class on the ranks before. Returns int64 indices into
    the shard, and as many places.
    """
    classes = before.numel()
    counts = class_counts(labels, classes)
    order = torch.argsort(labels, stable=True)
    of_class = labels[order]
    first = torch.cumsum(counts, 0) - counts
    number = before[of_class] + torch.arange(labels.numel()) - first[of_class]
    drawn = number < each * draws
    of_class, number = of_class[drawn], number[drawn]
    draw = torch.div(number, each, rounding_mode="floor")
    return order[drawn], (draw * classes + of_class) * each + number % each
