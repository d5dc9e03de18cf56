"""The course of a run in local steps: how many it has, how many are done, and the rate at each.

What `schedule` says of a share of a run is asked here of the run that is under way.
"""

from prunex_mpi.core.position import Position
from prunex_mpi.core.schedule import ROLLBACK_FACTOR, learning_rate, quadratic_interval
from prunex_mpi.core.state import Work
from prunex_mpi.settings.fields import Settings


def steps_of(settings: Settings, steps_per_epoch: int) -> int:
    """Return the local steps per outer iteration: as given, or by epochs."""
    if settings.local_steps > 0:
        return settings.local_steps
    return max(1, round(settings.local_epochs * steps_per_epoch))


def rate_now(work: Work) -> float:
    """Return the learning rate of the local step that comes next."""
    settings, problem, step = work.settings, work.problem, steps_taken(work)
    total = total_steps(settings, problem.steps)
    return rate_at(settings, step, total, work.state.position.rollbacks) * problem.lr_scale


def pruning_ends(settings: Settings) -> int:
    """Return the outer iteration at whose end the masks become final, where that is known."""
    once = settings.method.prunes_once
    return settings.options.prune_iteration if once else settings.freeze_iteration


def rate_at(settings: Settings, step: int, total: int, rollbacks: int) -> float:
    """Return the learning rate of local step `step` of `total`, after so many rollbacks."""
    return learning_rate(
        step,
        total,
        base=settings.lr * ROLLBACK_FACTOR**rollbacks,
        schedule=settings.lr_schedule,
        warmup=settings.lr_warmup,
        final=settings.lr_final,
    )


def steps_taken(work: Work) -> int:
    """Return how many local steps of the run lie behind."""
    position = work.state.position
    return position.steps_done + position.step


def local_steps(work: Work) -> int:
    """Return the number of local steps of the outer iteration under way."""
    settings, position = work.settings, work.state.position
    if settings.method.quadratic_interval:
        return quadratic_steps(
            settings, work.problem.steps, position.steps_done, position.rollbacks
        )
    frozen = settings.frozen_local_steps if work.state.frozen else 0
    return frozen or work.problem.steps


def quadratic_steps(settings: Settings, least: int, done: int, rollbacks: int = 0) -> int:
    """Return the steps of an outer iteration of qsr that has `done` steps before it.

    By the learning rate at its beginning; while that still warms up, by the one afterwards. The
    last outer iteration ends with the run.
    """
    total = total_steps(settings, least)
    warm = max(done, round(settings.lr_warmup * total))
    rate = rate_at(settings, warm, total, rollbacks)
    return quadratic_interval(rate, settings.options.alpha, least, total - done)


def quadratic_rounds(
    settings: Settings, least: int, done: int = 0, rollbacks: int = 0, most: int = 0
) -> int:
    """Return the outer iterations of a run of qsr that are left after `done` steps.

    Counts up to `most`, where that is given.
    """
    total, count = total_steps(settings, least), 0
    while done < total and (not most or count < most):
        done += quadratic_steps(settings, least, done, rollbacks)
        count += 1
    return count


def rounds_left(work: Work, most: int = 0) -> int:
    """Return the outer iterations that are left, with the one under way.

    Where they have to be counted, that is up to `most`, if it is given.
    """
    settings, position = work.settings, work.state.position
    if settings.method.fixed_interval:
        return settings.outer_iterations + 1 - position.iteration
    places = position.steps_done, position.rollbacks
    return quadratic_rounds(settings, work.problem.steps, *places, most)


def total_steps(settings: Settings, steps: int) -> int:
    """Return the local steps of a run with `steps` per outer iteration until pruning is done."""
    outer, frozen = settings.outer_iterations, settings.frozen_local_steps
    if not frozen:
        return outer * steps
    until = pruning_ends(settings)
    return until * steps + (outer - until) * frozen


def recount_steps_(position: Position, settings: Settings, before: int, now: int) -> None:
    """Let the steps done be the same share of the run when an outer iteration has others.

    Where intervals are epochs, a rank takes `before` steps for one on the old nodes and `now` on
    the new ones; learning rate and length of the run go by the steps. Those after the masks were
    frozen may have a number of their own, which stays.
    """
    done = position.steps_done
    until = pruning_ends(settings) * before if settings.frozen_local_steps else done
    by_epochs = min(done, until)
    position.steps_done = round(by_epochs * now / before) + done - by_epochs


def steps_behind(work: Work) -> int:
    """Return the local steps that an exchange runs behind, the same share of all at any stage.

    Where the interval grows with time, and an exchange takes as long as ever, they are as many.
    """
    if work.settings.method.quadratic_interval:
        return work.settings.overlap_steps
    return -(-work.settings.overlap_steps * local_steps(work) // work.problem.steps)
