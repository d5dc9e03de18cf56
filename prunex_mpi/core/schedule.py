"""What changes over a run: learning rate, keep ratio, and the moment the masks freeze."""

import math

# Each milestone divides the rate of the `step` schedule by ten.
STEP_MILESTONES = (0.5, 0.75)
# What each return to a checkpoint after a divergence does to all rates that follow.
ROLLBACK_FACTOR = 0.5


def learning_rate(
    step: int, total: int, *, base: float, schedule: str, warmup: float, final: float
) -> float:
    """Return the rate of local step `step` (from 0) of `total`.

    `warmup` is the share of the run with a linear rise, `final` the cosine's end as a share of
    `base`.
    """
    warmup_steps = round(warmup * total)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    if schedule == "step":
        return base * 0.1 ** sum(step >= m * total for m in STEP_MILESTONES)
    progress = (step - warmup_steps) / max(1, total - warmup_steps)
    return base * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


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
