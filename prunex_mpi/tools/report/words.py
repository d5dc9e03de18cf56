"""Say in words what happened in a run: the first paragraph of its page."""

import numpy as np

from prunex_mpi.tools.report.read_runs import Run
from prunex_mpi.tools.report.run_pictures import freeze_iteration, phases_of, unit_of_bytes
from prunex_mpi.tools.report.stragglers import Blame, Suspect, ranges

PHASE_PLACES = {
    "local": "the local steps",
    "intra": "the exchange inside nodes",
    "project": "projection and masks",
    "inter": "the exchange between nodes",
    "dual": "corrections and norms",
    "evaluate": "evaluation",
    "setup": "setting up the method",
}
# The part of a run at its end by which it is judged whether it still moves.
END = 5
# What is lost through a rank is worth a word from this part of all seconds on.
WORTH = 0.01
STEADY_POINTS, STEADY_LOSS = 0.5, 0.02


def lead(run: Run, blame: Blame | None) -> list[str]:
    """Return the first paragraph: sentences that answer how the run ended and what it cost."""
    parts = [ending(run), quality(run), cost(run), where_time_went(run), who_was_slow(blame)]
    return [*filter(None, [*parts, what_was_pruned(run)])]


def ending(run: Run) -> str:
    """Say how the run ended."""
    count, asked = len(run.iterations), run.setting("outer-iterations")
    of = f"{count:,} of {asked:,}" if isinstance(asked, int) and asked != count else f"{count:,}"
    because = f" ({run.reason})" if run.reason else ""
    match run.status:
        case "completed":
            return f"The run completed its {count:,} outer iterations."
        case "converged":
            return (
                f"The run converged: it stopped after {of} outer iterations, when all residuals "
                "were small."
            )
        case "preempted":
            return (
                f"The run was preempted after {of} outer iterations{because}: it left a checkpoint "
                "and can go on with --resume."
            )
        case "diverged":
            return f"The run diverged after {of} outer iterations{because}."
        case "running":
            # A job that was killed looks as one that goes on, as long as its last sign is fresh.
            return (
                "The run is still going, or was broken off within the last minute: "
                f"{of} outer iterations are done so far."
            )
        case _:
            return (
                f"The run ended badly: it was broken off after {of} outer iterations, and says "
                "nothing of why (it has no summary.json)."
            )


def quality(run: Run) -> str:
    """Say what loss and accuracy came to, and whether they still moved at the end."""
    text = []
    _, images = run.judged_on
    accuracy = run.accuracy
    known = np.flatnonzero(np.isfinite(accuracy))
    if len(known):
        best = known[np.argmax(accuracy[known])]
        text.append(f"Its {images} accuracy is {100 * accuracy[known[-1]]:.2f} %")
        if accuracy[best] > accuracy[known[-1]]:
            text[-1] += f" (best {100 * accuracy[best]:.2f} % in {int(run.iterations[best])})"
    else:
        text.append("It was never evaluated")
    loss = run.column("train_loss")
    there = np.flatnonzero(np.isfinite(loss))
    if len(there) > 1:
        word = "fell" if loss[there[-1]] < loss[there[0]] else "rose"
        text.append(f"the training loss {word} from {loss[there[0]]:.3g} to {loss[there[-1]]:.3g}")
    return ", ".join(text) + f"{still_moves(accuracy[known], loss[there])}."


def still_moves(accuracy: np.ndarray, loss: np.ndarray) -> str:
    """Say whether the last fifth of a run changed anything, "" where that can't be told."""
    if len(accuracy) >= 2 * END:
        part = len(accuracy) // END
        change = 100 * (accuracy[-part:].mean() - accuracy[-2 * part : -part].mean())
        if abs(change) < STEADY_POINTS:
            return f"; accuracy was steady over the last fifth ({change:+.2f} points)"
        word = "still rising" if change > 0 else "falling"
        return f"; accuracy was {word} at the end ({change:+.2f} points over the last fifth)"
    if len(loss) >= 2 * END:
        part = len(loss) // END
        before = loss[-2 * part : -part].mean()
        change = (loss[-part:].mean() - before) / max(abs(before), 1e-12)
        word = (
            "steady" if abs(change) < STEADY_LOSS else "still falling" if change < 0 else "rising"
        )
        return f"; the loss was {word} over the last fifth ({100 * change:+.1f} %)"
    return ""


def cost(run: Run) -> str:
    """Say what it cost in time and bytes."""
    seconds = np.nansum(run.column("seconds.total"))
    text = f"It took {duration_words(seconds)} in outer iterations"
    dense, payload = (np.nansum(run.column(f"bytes.{k}")) for k in ("dense", "payload"))
    if dense:
        text += (
            f", and each leader handed over {size_words(payload)} between nodes, "
            f"{100 * payload / dense:.1f} % of the {size_words(dense)} of a dense model"
        )
    if len(run.sizes()) == 1:
        text += "; with one node none of it left the machine"
    return text + "."


def where_time_went(run: Run) -> str:
    """Say which phases took the time, the largest first."""
    sums = {phase: np.nansum(run.column(f"seconds.{phase}")) for phase in phases_of(run)}
    whole = sum(sums.values())
    if not whole:
        return ""
    order = sorted(sums, key=lambda phase: -sums[phase])[:3]
    shares = [f"{100 * sums[p] / whole:.0f} % into {PHASE_PLACES[p]}" for p in order]
    return "Of the time of rank 0 went " + listed(shares) + "."


def who_was_slow(blame: Blame | None) -> str:
    """Say which rank held the others up, and in what."""
    if blame is None:
        return "Which rank was slow can't be told: the run has no ranks.jsonl."
    if blame.ranks == 1:
        return "It ran on one rank, which waited for nobody."
    parts = (blame.work, blame.waiting, blame.transmitting)
    whole = sum(float(np.sum(s)) for part in parts for s in part.values()) / blame.ranks
    found = [s for s in blame.suspects[:2] if s.seconds >= WORTH * whole]
    if not found:
        return "No rank held the others up by more than 1 % of the time."
    text = f"The others were held up most by {suspect_words(found[0], blame)}"
    if len(found) > 1:
        text += f", then by {suspect_words(found[1], blame)}"
    return text + "."


def suspect_words(suspect: Suspect, blame: Blame) -> str:
    """Return who held the others up, where and by how much."""
    host = f" on {suspect.host}" if suspect.host else ""
    each = suspect.seconds / blame.iterations
    return (
        f"rank {suspect.rank}{host} in {PHASE_PLACES[suspect.phase]} ("
        f"{duration_words(suspect.seconds)} in {blame.iterations:,} recorded outer iterations, "
        f"{duration_words(each)} in each)"
    )


def iteration_words(suspect: Suspect, blame: Blame) -> str:
    """Return in which outer iterations a suspect held the others up."""
    if len(suspect.iterations) == blame.iterations:
        return "all"
    return f"{len(suspect.iterations):,}: {ranges(suspect.iterations)}"


def what_was_pruned(run: Run) -> str:
    """Say what was pruned and when the masks were fixed."""
    density = run.column("density")
    known = density[np.isfinite(density)]
    if not len(known) or known[-1] >= 1:
        return "Nothing was pruned." if len(known) else ""
    prunable, kept = run.summary.get("prunable"), run.summary.get("prunable_kept")
    if isinstance(prunable, int) and isinstance(kept, int) and prunable:
        text = f"Pruned were {prunable - kept:,} of {prunable:,} prunable weights"
    else:
        text = f"Of the weights that can be pruned {100 * (1 - known[-1]):.1f} % are gone"
    first = freeze_iteration(run)
    if first is None:
        yet = "" if run.complete else " yet"
        return f"{text} (density {known[-1]:.3f}); the masks were not fixed{yet}."
    return f"{text} (density {known[-1]:.3f}); the masks are fixed since iteration {int(first)}."


def duration_words(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 0.1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def size_words(size: float) -> str:
    """Return bytes in the unit that suits them."""
    unit, name = unit_of_bytes(size)
    return f"{size / unit:.2f} {name}" if unit > 1 else f"{size:.0f} {name}"


def listed(words: list[str]) -> str:
    """Return words as an enumeration."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
