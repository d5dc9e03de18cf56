"""Search a learning rate: a grid in steps of 2 that grows until its best lies inside."""

import math
from collections.abc import Mapping, Sequence

# What a run reached: accuracy, then how low the loss is. A run that diverged reached nothing.
Score = tuple[float, float]
NOTHING: Score = (-1.0, -math.inf)
STEP = 2.0
# After so many rates the search ends, wherever the best is.
MOST_RATES = 10
# How many standard errors above guessing an accuracy has to be to count.
ERRORS = 3.0


def next_rate(scores: Mapping[float, Score], start: Sequence[float]) -> float | None:
    """Return the rate to try next, None where the best of those tried lies inside, or too many did.

    First all of `start`; then beyond the end where the best is. Where nothing trained, lower ones.
    """
    for rate in start:
        if rate not in scores:
            return rate
    if len(scores) >= MOST_RATES:
        return None
    best = best_rate(scores)
    if best is None or best == min(scores):
        return min(scores) / STEP
    return max(scores) * STEP if best == max(scores) else None


def best_rate(scores: Mapping[float, Score]) -> float | None:
    """Return the rate of the highest score, of equal ones the lowest; None if none trained."""
    trained = {rate: score for rate, score in scores.items() if score > NOTHING}
    return min(trained, key=lambda rate: (tuple(-x for x in trained[rate]), rate), default=None)


def lies_inside(scores: Mapping[float, Score]) -> bool:
    """Say whether rates on either side of the best one were tried."""
    best = best_rate(scores)
    return best is not None and min(scores) < best < max(scores)


def at_chance(accuracy: float, classes: int, images: int) -> bool:
    """Say whether guessing among `classes` may reach `accuracy` on so many images."""
    guess = 1 / classes
    return accuracy <= guess + ERRORS * math.sqrt(guess * (1 - guess) / images)
