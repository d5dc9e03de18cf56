"""Consensus of BatchNorm running statistics.

Means and second moments about a reference r that all ranks share are averaged, d = mu - r:

    mu = r + mean(d),   var = mean(var + d^2) - mean(d)^2,

the mean and the variance of the pooled data. With r near the means nothing cancels; about 0 a
variance below 1e-7 of the squared mean would be lost in float32. They are sent behind the compact
parameters in the same payload. After pruning, the statistics of theta do not fit z, so they can be
estimated again on z.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunex_mpi.models.dummy_input import evaluating, keeping_modes


def find(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm modules of `model` that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def numel(modules: list[_BatchNorm]) -> int:
    """Return the length of the flat statistics: a mean and a second moment per channel."""
    return sum(2 * m.num_features for m in modules)


def read_(modules: list[_BatchNorm], flat: Tensor, reference: Tensor) -> None:
    """Write d and var + d^2 of `modules` into `flat` [numel], module after module.

    `reference` [numel] holds means and variances, as of `read_plain_`; its means are r.
    """
    if modules:
        read_plain_(modules, flat)
        (means, variances), (shared, _) = _lists(modules, flat), _lists(modules, reference)
        torch._foreach_sub_(means, shared)
        torch._foreach_add_(variances, torch._foreach_mul(means, means))


def reset_(modules: list[_BatchNorm], flat: Tensor) -> None:
    """Fill `flat` [numel] with mean 0 and variance 1, the statistics of a removed channel."""
    if modules:
        means, variances = _lists(modules, flat)
        torch._foreach_zero_(means + variances)
        torch._foreach_add_(variances, 1)


def _lists(modules: list[_BatchNorm], flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return both statistics of all modules in `flat` [numel], which a GPU takes in few kernels."""
    parts = [part.view(2, -1) for part in flat.split([2 * m.num_features for m in modules])]
    return [mean for mean, _ in parts], [variance for _, variance in parts]


def as_plain_(modules: list[_BatchNorm], flat: Tensor, reference: Tensor) -> None:
    """Make means and variances of what `flat` [numel] holds about the means of `reference`."""
    if modules:
        (means, seconds), (shared, _) = _lists(modules, flat), _lists(modules, reference)
        torch._foreach_sub_(seconds, torch._foreach_mul(means, means))
        # Rounding can push a difference below zero.
        torch._foreach_clamp_min_(seconds, 0.0)
        torch._foreach_add_(means, shared)


def of_reference(modules: list[_BatchNorm], reference: Tensor) -> Tensor:
    """Return what `read_` gives where the statistics are those of the reference: 0 and var."""
    flat = reference.clone()
    if modules:
        torch._foreach_zero_(_lists(modules, flat)[0])
    return flat


def are_fresh(modules: list[_BatchNorm]) -> bool:
    """Return whether all statistics are as torch makes them: means 0 and variances 1."""
    return all(
        bool((m.running_mean == 0).all()) and bool((m.running_var == 1).all()) for m in modules
    )


@contextmanager
def warmed_up(modules: list[_BatchNorm], update: int) -> Iterator[bool]:
    """Let running averages that begin fresh be the plain mean of all batches in early updates.

    For the time of the block, `update` (from 1), the momentum is max(momentum, 1 / update). Says
    whether any differs. Modules of momentum None are such means for ever, those of 0 never move.
    """
    early = [(m, m.momentum) for m in modules if m.momentum and m.momentum * update < 1]
    for m, _ in early:
        m.momentum = 1 / update
    try:
        yield bool(early)
    finally:
        for m, momentum in early:
            m.momentum = momentum


def read_plain_(modules: list[_BatchNorm], flat: Tensor) -> None:
    """Write means and variances of `modules` into `flat` [numel]."""
    if modules:
        torch.cat([b for m in modules for b in (m.running_mean, m.running_var)], out=flat)


def mend_(modules: list[_BatchNorm], last: Tensor) -> None:
    """Replace running statistics that are not finite by those in `last`, of `read_plain_`."""
    now = torch.empty_like(last)
    read_plain_(modules, now)
    write_plain(modules, torch.where(torch.isfinite(now), now, last))


def write_plain(modules: list[_BatchNorm], flat: Tensor) -> None:
    """Set means and variances of `modules` from `flat` [numel], as written by `read_plain_`."""
    if modules:
        means, variances = _lists(modules, flat)
        buffers = [m.running_mean for m in modules] + [m.running_var for m in modules]
        torch._foreach_copy_(buffers, means + variances)


def _moving(model: nn.Module, modules: list[_BatchNorm]) -> list[_BatchNorm]:
    """Return those of `modules` that `model.train()` trains; a user may have frozen others."""
    with keeping_modes(model):
        model.train()
        return [m for m in modules if m.training]


def estimate(model: nn.Module, modules: list[_BatchNorm], batches: Iterable[Tensor]) -> None:
    """Replace the running statistics by their plain average over `batches` of images.

    Only BatchNorm modules run in training mode, so that dropout stays off. Those that are frozen,
    or that no image reaches, keep theirs.
    """
    moving = _moving(model, modules)
    before = [(m.momentum, [b.clone() for b in m.buffers()]) for m in moving]
    with evaluating(model):
        for m in moving:
            m.reset_running_stats()
            m.momentum = None
            m.training = True
        for images in batches:
            model(images)
    for m, (momentum, buffers) in zip(moving, before, strict=True):
        m.momentum = momentum
        if not m.num_batches_tracked:
            for buffer, value in zip(m.buffers(), buffers, strict=True):
                buffer.copy_(value)
