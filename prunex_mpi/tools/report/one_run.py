"""The page of one run, and what its first paragraph says in words."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from prunex_mpi.base.errors import UserError, enumerated
from prunex_mpi.base.files import RANKS, tomllib
from prunex_mpi.base.record_keys import ACCURACY, IN_SENTENCES, RANK_PHASES, RESIDUALS, flat_table
from prunex_mpi.base.tables import Cell, Table
from prunex_mpi.config.resolve import FIELDS, make, to_toml, toml_key
from prunex_mpi.run.summary import closing_rows
from prunex_mpi.settings.values import in_words
from prunex_mpi.tools.report import run_pictures
from prunex_mpi.tools.report.page import Page, Picture, Section, pictures_of
from prunex_mpi.tools.report.read_runs import (
    COLUMNS,
    Run,
    read_changes,
    read_layers,
    read_ranks,
    shown,
    spread_out,
)
from prunex_mpi.tools.report.run_pictures import freeze_iteration, phases_of, unit_of_bytes
from prunex_mpi.tools.report.stragglers import RankTimes, Straggler, find_stragglers, ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of a picture of all layers.
LAYER_COLUMNS = 240
# Where a run lies and how it was started says nothing of how it was trained.
UNINTERESTING = ("run_dir", "resume", "dry_run", "preset", "method")
BAD = ("diverged", "broken off", "preempted", "running")
NO_RANKS = (
    f"The run has no {RANKS}, in which the seconds of every rank are recorded: which ranks the "
    "others waited for can't be told."
)
ENDINGS = {
    "completed": "The run completed its {count} outer iterations.",
    "converged": "The run converged: it stopped after {of} outer iterations, when all residuals "
    "were small.",
    "preempted": "The run was preempted after {of} outer iterations{because}: it left a checkpoint "
    "and can go on with --resume.",
    "diverged": "The run diverged after {of} outer iterations{because}.",
    # A job that was killed looks as one that goes on, as long as its last sign is fresh.
    "running": "The run is still going, or was broken off within the last minute: {of} outer "
    "iterations are done so far.",
    "broken off": "The run ended badly: it was broken off after {of} outer iterations, and says "
    "nothing of why (it has no summary.json).",
}
# The part of a run at its end by which it is judged whether it still moves.
END = 5
# What is lost through a rank is worth a word from this part of all seconds on.
WORTH = 0.01
STEADY_POINTS, STEADY_LOSS = 0.5, 0.02


def page_of(run: Run) -> Page:
    """Return the page of a run, having read the rest of its files; raise UserError."""
    layers = read_layers(run.path, wanted_iterations(run))
    per_rank = run_pictures.RankResiduals()
    times = find_stragglers(per_rank.watch(read_ranks(run.path)))
    words = lead(run, times)
    notices = [*([words[0]] if run.status in BAD or not run.complete else []), *run.notes]
    mean = ""
    if len(run.iterations) > COLUMNS:
        mean = "A long run: each column is the mean of its outer iterations."
    how = "Primal: how far copies are apart. Dual: how far what they agreed upon moved."
    density = run_pictures.layer_density(layers) if layers else None
    of_layers = run_pictures.layer_residuals(layers) if layers else None
    of_ranks = run_pictures.rank_residuals(per_rank)
    learning = learning_pictures(lambda axis: run_pictures.learning(run, axis))
    cost = pictures_of(
        ("bytes", "Bytes of each outer iteration", run_pictures.traffic(run), mean),
        ("seconds", "Seconds of each outer iteration", run_pictures.duration(run), mean),
    )
    pruning = pictures_of(
        ("density", "Density, mask drift, freeze", run_pictures.pruning(run), ""),
        ("density-layers", "Density of the layers that were pruned", density, ""),
    )
    agreement = pictures_of(
        ("residuals", "Residuals", run_pictures.residuals(run), how),
        ("penalties", "Penalties and learning rate", run_pictures.penalties(run), ""),
        ("residuals-layers", "Residuals of each layer", of_layers, ""),
        ("residuals-ranks", "Residuals of each rank", of_ranks, ""),
    )
    sections = [
        Section("Did it learn?", learning, [closing(run)]),
        Section("What it cost", cost),
        slow_section(times),
        Section("What was pruned", pruning),
        Section("How far ranks and nodes agree", agreement),
        Section("Settings", (), settings_tables(run, times)),
    ]
    return Page(f"Run {run.name}", source_line(run), words, sections, notices)


def learning_pictures(draw: Callable[[str], "Figure | None"]) -> list[Picture]:
    """Return loss and accuracy along iterations, time and bytes."""
    axes = {"iterations": "outer iterations", "seconds": "time", "bytes": "bytes"}
    return pictures_of(
        *(
            (f"learning-{axis}", f"Learning against {words}", draw(axis), "")
            for axis, words in axes.items()
        )
    )


def source_line(run: Run) -> str:
    """Return what was trained, and where its files lie."""
    what = [str(run.setting(key, "")) for key in ("method", "model", "dataset", "preset")]
    text = "{}, {} on {}, preset {}".format(*what)
    return f"{text} · {shown(run.path)}"


def wanted_iterations(run: Run) -> list[int]:
    """Return which outer iterations of layers.jsonl to read: some of all, some with residuals."""
    computed = np.zeros(len(run.iterations), dtype=bool)
    for name in RESIDUALS:
        computed |= np.isfinite(run.column(f"residuals.{name}"))
    chosen = {*spread_out(run.iterations, LAYER_COLUMNS)}
    if computed.any():
        chosen |= {*spread_out(run.iterations[computed], LAYER_COLUMNS)}
    return sorted(chosen)


def slow_section(times: RankTimes | None) -> Section:
    """Return where the ranks' time went, and which ranks the others waited for."""
    title = "Which ranks the others waited for"
    if times is None:
        return Section(title, text=NO_RANKS)
    if times.ranks == 1:
        return Section(title, text="There was one rank, which waited for nobody.")
    sent = (
        "Transmitting: the least that any rank spent in the collectives of a phase; what a rank "
        "spent beyond that it waited."
    )
    count, most = len(times.places), run_pictures.MOST_BARS
    if count > most:
        sent = f"{most} of {count} ranks on their hosts. {sent}"
    late = (
        "Where ranks meet, what the last one came later than they did counts as its delay, in the "
        "phases in which it took longer than its likes."
    )
    went, lost = run_pictures.rank_seconds(times), run_pictures.lost_seconds(times)
    found = pictures_of(
        ("ranks", "Where the time of each rank went", went, sent),
        ("lost", "Time lost to the last rank, in each outer iteration", lost, late),
    )
    return Section(title, found, [stragglers_table(times), phases_table(times)])


def stragglers_table(times: RankTimes) -> Table:
    """Return the ranks that the others waited for most."""
    rows: list[tuple[Cell, ...]] = []
    for number, s in enumerate(times.stragglers[:5], 1):
        lost = duration_words(s.seconds), duration_words(s.seconds / times.iterations)
        where = IN_SENTENCES[s.phase], s.rank, s.host or None
        when = "all"
        if len(s.iterations) < times.iterations:
            when = f"{len(s.iterations):,}: {ranges(s.iterations)}"
        rows.append((f"{number}.", *where, *lost, when))
    columns = ("straggler", "phase", "rank", "host", "lost", "per iteration", "in iterations")
    title = f"Stragglers, in {times.iterations:,} recorded outer iterations"
    return Table(title, columns, tuple(rows))


def phases_table(times: RankTimes) -> Table:
    """Return the seconds of the phases: means over the ranks."""
    rows: list[tuple[Cell, ...]] = []
    for phase in RANK_PHASES:
        parts = (times.work, times.waiting, times.transmitting)
        seconds = [float(np.sum(part.get(phase, 0))) / times.ranks for part in parts]
        if any(seconds):
            rows.append((IN_SENTENCES[phase], *map(duration_words, seconds)))
    columns = ("phase", "working", "waiting", "transmitting")
    return Table("Seconds of a rank, the mean of all ranks", columns, tuple(rows))


def closing(run: Run) -> Table:
    """Return the table that ends a run, or as much of it as an unfinished one has."""
    if run.complete:
        try:
            rows = closing_rows({**run.summary, "iterations": len(run.iterations)})
            return Table("The closing table", (), tuple((n.strip(), v) for n, v in rows))
        except (AttributeError, KeyError, TypeError, ValueError):
            # A summary that is not this version's: what follows asks for less.
            pass
    rows = [("status", f"{run.status} after {len(run.iterations)} outer iterations")]
    for key, word in (("payload", "sent"), ("dense", "dense"), ("sent", "leaving a node")):
        if run.has(f"bytes.{key}"):
            size = size_words(run.total(f"bytes.{key}"))
            rows.append((f"bytes between nodes, {word}", size))
    for phase in phases_of(run):
        seconds = duration_words(run.total(f"seconds.{phase}"))
        rows.append((f"seconds, {IN_SENTENCES[phase]}", seconds))
    return Table("So far", (), tuple(rows))


def settings_tables(run: Run, times: RankTimes | None) -> list[Table]:
    """Return the settings that differ from the preset's, versions and topology."""
    rows = tuple((shown(name), str(version)) for name, version in run.versions.items())
    versions = [Table("Versions", (), rows)] if rows else []
    return [settings_table(run), *versions, topology_table(run, times)]


def settings_table(run: Run) -> Table:
    """Return the settings that differ from the preset's."""
    preset, method = run.setting("preset", "recipe"), run.setting("method", "prunex")
    title = f"Settings that differ from those of preset {preset} for method {method}"
    usual = usual_settings(run)
    if usual is None:
        note = "This version does not know that preset or method, so all are shown."
        rows = tuple((shown(key), in_words(value), None) for key, value in run.config.items())
        return Table("Settings", ("setting", "value", "preset"), rows, (note,))
    rows = tuple(
        (shown(key), in_words(value), in_words(usual.get(key, "not known today")))
        for key, value in run.config.items()
        if value != usual.get(key)
    )
    notes = () if rows else ("None.",)
    return Table(title, ("setting", "value", "preset"), rows, notes)


def usual_settings(run: Run) -> Mapping[str, Any] | None:
    """Return what the preset says of a run by this method, as config.toml would; None if unknown.

    Shares are counts, of as many outer iterations as the run was to have.
    """
    config = run.config
    try:
        asked = {"preset": config["preset"], "method": config["method"]}
        own = make(**asked)
        asked["outer_iterations"] = config["outer-iterations"]
        table = flat_table(tomllib.loads(to_toml(make(**asked), {})))
    except (KeyError, TypeError, UserError):
        return None
    del table["versions.format"]
    table["outer-iterations"] = own.outer_iterations
    known = {toml_key(name) for name in FIELDS if name not in UNINTERESTING}
    hidden = {key: config.get(key) for key in table.keys() - known}
    return {**table, **hidden}


def topology_table(run: Run, times: RankTimes | None) -> Table:
    """Return which ranks lay on which nodes, as far as the files say."""
    if times is not None:
        rows = []
        for node in sorted(set(times.node)):
            ranks = [rank for rank, place in enumerate(times.node) if place == node]
            span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
            rows.append((node, span, times.hosts[ranks[0]] or None))
        return Table("Topology", ("node", "ranks", "host"), tuple(rows))
    sizes = run.sizes()
    if not sizes:
        virtual = run.setting("ranks-per-node", 0)
        text = f"{virtual} ranks per node" if virtual else "one node per machine"
        return Table("Topology", (), (("as asked for", text),))
    ranks = f"{sum(sizes)} ranks on {len(sizes)} node{'s' if len(sizes) > 1 else ''}"
    return Table("Topology", (), ((ranks, "of " + ", ".join(map(str, sizes)) + " ranks"),))


# --------------------------------------------------------------------------------------------------
# The first paragraph
# --------------------------------------------------------------------------------------------------


def lead(run: Run, times: RankTimes | None) -> list[str]:
    """Return the first paragraph: sentences that answer how the run ended and what it cost."""
    parts = [ending(run), quality(run), cost(run), where_time_went(run), who_was_slow(times)]
    parts.append(what_losses_cost(run, read_changes(run.path)))
    return [*filter(None, [*parts, what_was_pruned(run)])]


def what_losses_cost(run: Run, changes: Sequence[Mapping[str, Any]]) -> str:
    """Return who was lost and joined, and the goodput: the share of time that was not in vain.

    In vain are the steps that were done again, and the time until the run went on.
    """
    if not changes:
        return ""
    ranks = [change.get("ranks", 0) for change in changes]
    more = [False, *(b > a for a, b in pairwise(ranks))]
    joins = sum(bool(c.get("joined")) or grown for c, grown in zip(changes, more, strict=True))
    losses = sum(any(change.get(key) for key in ("lost_ranks", "left")) for change in changes)
    vain = sum(change.get(key, 0.0) for change in changes for key in ("lost_seconds", "seconds"))
    useful = run.total("seconds.total")
    share = useful / (useful + vain) if useful else 0.0
    return (
        f"Nodes were lost {times_words(losses)} and joined {times_words(joins)}; "
        f"{duration_words(vain)} went into going on and into what was done again: the goodput is "
        f"{100 * share:.1f} %."
    )


def times_words(count: int) -> str:
    """Return how often something was."""
    return f"{count} time{'' if count == 1 else 's'}"


def ending(run: Run) -> str:
    """Return how the run ended."""
    count, asked = len(run.iterations), run.setting("outer-iterations")
    of = f"{count:,} of {asked:,}" if isinstance(asked, int) and asked != count else f"{count:,}"
    because = f" ({run.reason})" if run.reason else ""
    text = ENDINGS.get(run.status, ENDINGS["broken off"])
    return text.format(count=f"{count:,}", of=of, because=because)


def quality(run: Run) -> str:
    """Return what losses and accuracy came to, and whether they still moved at the end."""
    text = []
    _, images = run.judged_on
    measure, judged = run.measure, run.judged
    known = np.flatnonzero(np.isfinite(judged))
    if len(known):
        best, last = known[measure.best(judged[known])], known[-1]
        text.append(f"Its {images} {measure.label} is {measure.shown(judged[last])}")
        if measure.better(judged[best], judged[last]):
            text[-1] += f" (best {measure.shown(judged[best])} in {int(run.iterations[best])})"
    else:
        text.append("It was never evaluated")
    loss = run.column("train_loss")
    there = np.flatnonzero(np.isfinite(loss))
    if len(there) > 1:
        word = "fell" if loss[there[-1]] < loss[there[0]] else "rose"
        text.append(f"the training loss {word} from {loss[there[0]]:.3g} to {loss[there[-1]]:.3g}")
    accuracy = judged[known] if measure is ACCURACY else judged[:0]
    return ", ".join(text) + f"{still_moves(accuracy, loss[there])}."


def still_moves(accuracy: np.ndarray, loss: np.ndarray) -> str:
    """Return whether the last fifth of a run changed anything, "" where that can't be told.

    By the accuracy in per cent, where there is one, else by the loss.
    """
    if len(accuracy) >= 2 * END:
        part = len(accuracy) // END
        change = accuracy[-part:].mean() - accuracy[-2 * part : -part].mean()
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
    """Return what it cost in time and bytes."""
    seconds = run.total("seconds.total")
    text = f"It took {duration_words(seconds)} in outer iterations"
    dense, payload = (run.total(f"bytes.{k}") for k in ("dense", "payload"))
    if dense:
        text += (
            f", and each leader handed over {size_words(payload)} between nodes, "
            f"{100 * payload / dense:.1f} % of the {size_words(dense)} of a dense model"
        )
    if run.has("bytes.sent") and not run.total("bytes.sent"):
        text += "; with one node none of it left the machine"
    return text + "."


def where_time_went(run: Run) -> str:
    """Return which phases took the time, the largest first."""
    sums = {phase: run.total(f"seconds.{phase}") for phase in phases_of(run)}
    whole = sum(sums.values())
    if not whole:
        return ""
    order = sorted(sums, key=lambda phase: -sums[phase])[:3]
    shares = [f"{100 * sums[p] / whole:.0f} % into {IN_SENTENCES[p]}" for p in order]
    return "Of the time of rank 0 went " + enumerated(shares) + "."


def who_was_slow(times: RankTimes | None) -> str:
    """Return which rank the others waited for, and in what."""
    if times is None:
        return "Which rank was slow can't be told: the run has no ranks.jsonl."
    if times.ranks == 1:
        return "It ran on one rank, which waited for nobody."
    parts = (times.work, times.waiting, times.transmitting)
    whole = sum(float(np.sum(s)) for part in parts for s in part.values()) / times.ranks
    found = [s for s in times.stragglers[:2] if s.seconds >= WORTH * whole]
    if not found:
        return "For no rank did the others wait for more than 1 % of the time."
    words = ", then for ".join(straggler_words(straggler, times) for straggler in found)
    return f"The others waited most for {words}."


def straggler_words(straggler: Straggler, times: RankTimes) -> str:
    """Return which rank the others waited for, where and how long."""
    host = f" on {straggler.host}" if straggler.host else ""
    each = straggler.seconds / times.iterations
    return (
        f"rank {straggler.rank}{host} in {IN_SENTENCES[straggler.phase]} ("
        f"{duration_words(straggler.seconds)} in {times.iterations:,} recorded outer iterations, "
        f"{duration_words(each)} in each)"
    )


def what_was_pruned(run: Run) -> str:
    """Return what was pruned and when the masks were fixed."""
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
