"""Schedules of a run: local steps, learning rate, keep ratio, and when the masks freeze."""

import math
from dataclasses import dataclass

from prunex_mpi.core.state import Position, RunContext
from prunex_mpi.settings.fields import Settings, freezes

# Each milestone divides the rate of the `step` schedule by ten.
STEP_MILESTONES = (0.5, 0.75)
# Outer iterations that must be quiet before masks freeze by themselves: one may be chance.
FREEZE_WINDOW = 3


def rate_at(settings: Settings, step: int, total: int) -> float:
    """Return the learning rate of local step `step` (from 0) of `total`."""
    base, final = settings.lr, settings.min_lr_ratio
    warmup_steps = round(settings.warmup_ratio * total)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if settings.lr_schedule == "constant":
        return base
    if settings.lr_schedule == "step":
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


def schedule_progress(iteration: int, warmup: int, ramp: int) -> float:
    """Return how far keep ratios have moved from 1 (dense) to their target in `iteration` (from 1).

    Zero during `warmup` iterations, then cubic to one: a keep ratio r at s is 1 - s (1 - r).
    """
    past = iteration - warmup
    if past <= 0:
        return 0.0
    if past >= max(1, ramp):
        return 1.0
    return 1.0 - (1.0 - past / ramp) ** 3


def settled(drifts: list[float], threshold: float) -> bool:
    """Return whether the last drifts are at most `threshold` (negative: never)."""
    last = drifts[-FREEZE_WINDOW:]
    return threshold >= 0 and len(last) == FREEZE_WINDOW and max(last) <= threshold


@dataclass(frozen=True)
class Stage:
    """What becomes of the masks in one outer iteration, and whether residuals are `measured`.

    Keep ratios are `strict` of the way to their target. Where there is a mask to `choose`, the
    leaders agree on it by `vote`, or else by union; `freeze` makes it the last one.
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
    if not settings.method.consensus:
        prune = settings.method.prunes_once and k == settings.options.prune_iteration
        return Stage(strict=1.0, choose=prune, vote=True, freeze=prune, measured=False)
    strict = schedule_progress(k, settings.warmup_iterations, settings.keep_ramp_iterations)
    freeze = not frozen and (position.freeze_next or k == settings.freeze_iteration)
    # The delivered z must satisfy the constraint: its masks are voted even after a union.
    last = k == settings.outer_iterations
    vote = settings.mask_agreement == "vote" or freeze or position.vote_next or last
    # Before the keep ratio falls, and after the freeze, there is no mask to agree on.
    return Stage(strict, strict > 0 and not frozen, vote, freeze, measured)


def may_stop(stage: Stage, settings: Settings, frozen: bool) -> bool:
    """Return whether a run may end on its residuals: not before its masks are what it delivers."""
    return stage.strict == 1.0 and (frozen or not freezes(settings))


def note_drift_(position: Position, stage: Stage, settings: Settings, drift: float) -> None:
    """Count a mask drift, once the keep ratio is reached; say when masks have settled."""
    if stage.strict == 1.0:
        position.drifts = [*position.drifts, drift][-FREEZE_WINDOW:]
        position.freeze_next = settled(position.drifts, settings.freeze_drift)


def steps_of(settings: Settings, steps_per_epoch: int) -> int:
    """Return the local steps per outer iteration: as given, or by epochs."""
    if settings.local_steps > 0:
        return settings.local_steps
    return max(1, round(settings.local_epochs * steps_per_epoch))


def steps_with(settings: Settings, samples: int) -> int:
    """Return the local steps per outer iteration of ranks that have so many samples each."""
    batch = min(settings.batch_size, max(1, samples))
    return steps_of(settings, max(1, samples // batch))


def rate_now(context: RunContext) -> float:
    """Return the learning rate of the local step that comes next."""
    settings = context.settings
    total = total_steps(settings, context.problem.steps)
    return rate_at(settings, steps_taken(context), total)


def steps_taken(context: RunContext) -> int:
    """Return how many local steps of the run lie behind."""
    position = context.state.position
    return position.steps_done + position.step


def local_steps(context: RunContext) -> int:
    """Return the number of local steps of the outer iteration under way.

    Of qsr by the rate as they began, where its schedule is not known.
    """
    settings, position, least = context.settings, context.state.position, context.problem.steps
    if not settings.method.quadratic_interval:
        return least
    if context.problem.rate is None:
        return quadratic_steps(settings, least, position.steps_done)
    if position.step == 0:
        left = total_steps(settings, least) - position.steps_done
        rate, alpha = context.problem.rate(), settings.options.alpha
        position.interval = quadratic_interval(rate, alpha, least, left)
    return position.interval


def quadratic_steps(settings: Settings, least: int, done: int) -> int:
    """Return the steps of an outer iteration of qsr that has `done` steps before it.

    By the learning rate at its beginning; while that still warms up, by the one afterwards.
    """
    total = total_steps(settings, least)
    warm = max(done, round(settings.warmup_ratio * total))
    rate = rate_at(settings, warm, total)
    return quadratic_interval(rate, settings.options.alpha, least, total - done)


def quadratic_rounds(settings: Settings, least: int, done: int = 0, most: int = 0) -> int:
    """Return the outer iterations of a run of qsr that are left after `done` steps, or `most`."""
    total, count = total_steps(settings, least), 0
    while done < total and (not most or count < most):
        done += quadratic_steps(settings, least, done)
        count += 1
    return count


def rounds_left(context: RunContext, most: int = 0) -> int:
    """Return the outer iterations that are left, with the one under way; of qsr up to `most`."""
    settings, position = context.settings, context.state.position
    if not settings.method.quadratic_interval:
        return settings.outer_iterations + 1 - position.iteration
    if context.problem.rate is not None:
        left = total_steps(settings, context.problem.steps) - position.steps_done
        # Only whether one is the last is asked.
        return 0 if left <= 0 else 1 if local_steps(context) >= left else 2
    return quadratic_rounds(settings, context.problem.steps, position.steps_done, most)


def total_steps(settings: Settings, steps: int) -> int:
    """Return the local steps of a run with `steps` per outer iteration."""
    return settings.outer_iterations * steps


def asynchronous_steps(context: RunContext) -> int:
    """Return the local steps that an exchange runs behind: a share of all, of qsr a number."""
    if context.settings.method.quadratic_interval:
        return context.settings.overlap_steps
    return -(-context.settings.overlap_steps * local_steps(context) // context.problem.steps)
