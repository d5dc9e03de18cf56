"""What changes over a run: learning rate, keep ratio, and the moment the masks freeze."""

import math
from dataclasses import dataclass

from prunex_mpi.core.position import Position
from prunex_mpi.settings.fields import Settings

# Each milestone divides the rate of the `step` schedule by ten.
STEP_MILESTONES = (0.5, 0.75)
# What each return to a checkpoint after a divergence does to all rates that follow.
ROLLBACK_FACTOR = 0.5


def learning_rate(
    step: int, total: int, *, base: float, schedule: str, warmup: float, final: float
) -> float:
    """Return the rate of local step `step` (from 0) of a course of `total`.

    `warmup` is the share of it with a linear rise, `final` the cosine's end as a share of `base`.
    """
    warmup_steps = round(warmup * total)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    if schedule == "step":
        return base * 0.1 ** sum(step >= m * total for m in STEP_MILESTONES)
    progress = min(1.0, (step - warmup_steps) / max(1, total - warmup_steps))
    return base * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def quadratic_interval(rate: float, alpha: float, least: int, left: int) -> int:
    """Return the local steps until the next exchange, of the `left` ones of the run.

    max(least, floor((alpha / rate)^2)), the Quadratic Synchronization Rule (Gu et al. 2024).
    """
    ratio = alpha / rate if rate > 0 else math.inf
    wanted = ratio * ratio
    return left if wanted >= left else min(left, max(least, int(wanted)))


def strictness(iteration: int, warmup: int, ramp: int) -> float:
    """Return how far keep ratios have moved from 1 (dense) to their target in `iteration` (from 1).

    Zero during `warmup` iterations, then cubic to one over the next `ramp`: a keep ratio r at
    strictness s is 1 - s (1 - r).
    """
    past = iteration - warmup
    if past <= 0:
        return 0.0
    if past >= max(1, ramp):
        return 1.0
    return 1.0 - (1.0 - past / ramp) ** 3


def settled(drifts: list[float], threshold: float, window: int) -> bool:
    """Say whether the last `window` mask drifts are all at most `threshold` (negative: never)."""
    return (
        threshold >= 0 and len(drifts) >= window and all(d <= threshold for d in drifts[-window:])
    )


@dataclass(frozen=True)
class Stage:
    """What becomes of the masks in one outer iteration.

    Keep ratios are `strict` of the way to their target. Where there is a mask to `choose`, the
    leaders agree on it by `vote`, or else by union; `freeze` makes it the last one. Residuals are
    `measured` or not.
    """

    strict: float
    choose: bool
    vote: bool
    freeze: bool
    measured: bool

    @property
    def union(self) -> bool:
        return self.choose and not self.vote


def find_stage(
    k: int, settings: Settings, frozen: bool, position: Position, measured: bool
) -> Stage:
    """Return the stage of outer iteration `k` of a run whose masks are `frozen`, or not yet."""
    strict = strictness(k, settings.warmup_iterations, settings.keep_ramp_iterations)
    freeze = not frozen and (position.freeze_next or k == settings.freeze_iteration)
    # The delivered z must satisfy the constraint: its masks are voted even after a union.
    last = k == settings.outer_iterations
    vote = settings.mask_agreement == "vote" or freeze or position.vote_next or last
    # Before the keep ratio falls, and after the freeze, there is no mask to agree on.
    return Stage(strict, strict > 0 and not frozen, vote, freeze, measured)


def may_stop(stage: Stage, settings: Settings, frozen: bool) -> bool:
    """Say whether a run may end on its residuals: not before its masks are what it delivers.

    That is once the keep ratio is reached and the masks are frozen, where they ever are to be.
    """
    freezes = settings.freeze_iteration > 0 or settings.freeze_drift >= 0
    return stage.strict == 1.0 and (frozen or not freezes)


def note_drift_(position: Position, stage: Stage, settings: Settings, drift: float) -> None:
    """Count a mask drift, once the keep ratio is reached; say when masks have settled."""
    if stage.strict == 1.0:
        threshold, window = settings.freeze_drift, settings.freeze_window
        position.drifts = [*position.drifts, drift][-window:]
        position.freeze_next = settled(position.drifts, threshold, window)
