"""The page of one run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.tables import Cell, Table
from prunex_mpi.run.closing import closing_rows
from prunex_mpi.settings.fields import FIELDS, key_of
from prunex_mpi.settings.resolve import make, to_toml
from prunex_mpi.tools.report import layers_ranks
from prunex_mpi.tools.report import run_pictures as pictures
from prunex_mpi.tools.report.page import Page, Section, pictures_of
from prunex_mpi.tools.report.read_runs import (
    RANKS,
    RESIDUALS,
    Layers,
    Run,
    read_layers,
    read_ranks,
    shown,
    spread_out,
    tomllib,
)
from prunex_mpi.tools.report.stragglers import PHASES, Blame, find_blame
from prunex_mpi.tools.report.thinning import COLUMNS
from prunex_mpi.tools.report.words import (
    PHASE_PLACES,
    duration_words,
    iteration_words,
    lead,
    size_words,
)

# Columns of a picture of all layers.
LAYER_COLUMNS = 240
# Where a run lies and how it was started says nothing of how it was trained.
UNINTERESTING = ("run_dir", "resume", "dry_run", "preset", "method")
BAD = ("diverged", "broken off", "preempted", "running")
NO_RANKS = (
    f"The run has no {RANKS}, in which later versions record every rank's seconds: who held the "
    "others up can't be told."
)


def page_of(run: Run) -> Page:
    """Return the page of a run, having read the rest of its files; raise UserError."""
    layers = read_layers(run.path, wanted_iterations(run))
    per_rank = layers_ranks.RankResiduals()
    blame = find_blame(per_rank.watch(read_ranks(run.path)), run.leaders)
    words = lead(run, blame)
    notices = [*([words[0]] if run.status in BAD or not run.complete else []), *run.notes]
    sections = [
        Section("Did it learn?", learning_pictures(run), [closing(run)]),
        Section("What it cost", cost_pictures(run)),
        slow_section(blame),
        Section("What was pruned", pruning_pictures(run, layers)),
        Section("How far ranks and nodes agree", agreement_pictures(run, layers, per_rank)),
        Section("Settings", (), settings_tables(run, blame)),
    ]
    return Page(f"Run {run.name}", source_line(run), words, sections, notices)


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


def learning_pictures(run: Run) -> list:
    """Return loss and accuracy along iterations, time and bytes."""
    titles = {
        "iterations": "Loss and accuracy against outer iterations",
        "seconds": "Loss and accuracy against time",
        "bytes": "Loss and accuracy against bytes",
    }
    return pictures_of(
        [
            (f"learning-{axis}", title, pictures.learning(run, axis), "")
            for axis, title in titles.items()
        ]
    )


def cost_pictures(run: Run) -> list:
    """Return bytes by kind and seconds by phase."""
    note = ""
    if len(run.iterations) > COLUMNS:
        note = "A long run: each column is the mean of its outer iterations."
    return pictures_of(
        [
            ("bytes", "Bytes of each outer iteration", pictures.traffic(run), note),
            ("seconds", "Seconds of each outer iteration", pictures.duration(run), note),
        ]
    )


def pruning_pictures(run: Run, layers: Layers | None) -> list:
    """Return density, drift and freeze, and the density of each layer."""
    found = [("density", "Density, mask drift, freeze", pictures.pruning(run), "")]
    if layers is not None:
        title = "Density of the layers that were pruned"
        found.append(("density-layers", title, layers_ranks.layer_density(layers), ""))
    return pictures_of(found)


def agreement_pictures(
    run: Run, layers: Layers | None, per_rank: layers_ranks.RankResiduals
) -> list:
    """Return residuals in all, by layer and by rank, and penalties."""
    note = "Primal: how far copies are apart. Dual: how far what they agreed upon moved."
    found = [("residuals", "Residuals", pictures.residuals(run), note)]
    title = "Penalties and learning rate"
    found.append(("penalties", title, pictures.penalties(run), ""))
    if layers is not None:
        figure = layers_ranks.layer_residuals(layers)
        found.append(("residuals-layers", "Residuals of each layer", figure, ""))
    figure = layers_ranks.rank_residuals(per_rank)
    found.append(("residuals-ranks", "Residuals of each rank", figure, ""))
    return pictures_of(found)


def slow_section(blame: Blame | None) -> Section:
    """Return where the ranks' time went, and who held the others up."""
    title = "Who held the others up"
    if blame is None:
        return Section(title, text=NO_RANKS)
    if blame.ranks == 1:
        return Section(title, text="There was one rank, which waited for nobody.")
    some = f"{len(layers_ranks.shown_ranks(blame))} of {blame.ranks} ranks. "
    found = pictures_of(
        [
            (
                "ranks",
                "Where the time of each rank went",
                layers_ranks.rank_seconds(blame),
                ("" if blame.ranks <= layers_ranks.MOST_BARS else some)
                + "Transmitting: the least that any rank spent in the collectives of a phase; what "
                "a rank spent beyond that it waited.",
            ),
            (
                "lost",
                "Time lost to the last rank, in each outer iteration",
                layers_ranks.lost_seconds(blame),
                "Where ranks meet, what the last one came later than they did is charged to it, in "
                "the phases in which it took longer than its likes.",
            ),
        ]
    )
    return Section(title, found, [suspects_table(blame), phases_table(blame)])


def suspects_table(blame: Blame) -> Table:
    """Return who held the others up most."""
    rows: list[tuple[Cell, ...]] = [
        (
            f"{number}.",
            PHASE_PLACES[suspect.phase],
            suspect.rank,
            suspect.host or None,
            duration_words(suspect.seconds),
            duration_words(suspect.seconds / blame.iterations),
            iteration_words(suspect, blame),
        )
        for number, suspect in enumerate(blame.suspects[:5], 1)
    ]
    columns = ("suspect", "phase", "rank", "host", "lost", "per iteration", "in iterations")
    title = f"Suspects, in {blame.iterations:,} recorded outer iterations"
    return Table(title, columns, tuple(rows))


def phases_table(blame: Blame) -> Table:
    """Return the seconds of the phases: means over the ranks."""
    rows: list[tuple[Cell, ...]] = []
    for phase in PHASES:
        parts = (blame.work, blame.waiting, blame.transmitting)
        seconds = [float(np.sum(part.get(phase, 0))) / blame.ranks for part in parts]
        if any(seconds):
            rows.append((PHASE_PLACES[phase], *map(duration_words, seconds)))
    columns = ("phase", "working", "waiting", "transmitting")
    return Table("Seconds of a rank, the mean of all ranks", columns, tuple(rows))


def closing(run: Run) -> Table:
    """Return the table that ends a run, or as much of it as an unfinished one has."""
    if run.complete:
        try:
            rows = closing_rows(completed(run))
            return Table("The closing table", (), tuple((n.strip(), v) for n, v in rows))
        except (AttributeError, KeyError, TypeError, ValueError):
            # A summary of another version: what follows says less and asks for less.
            pass
    rows = [("status", f"{run.status} after {len(run.iterations)} outer iterations")]
    for key, word in (("payload", "sent"), ("dense", "dense"), ("sent", "leaving a node")):
        if run.has(f"bytes.{key}"):
            size = size_words(float(np.nansum(run.column(f"bytes.{key}"))))
            rows.append((f"bytes between nodes, {word}", size))
    for phase in pictures.phases_of(run):
        seconds = duration_words(float(np.nansum(run.column(f"seconds.{phase}"))))
        rows.append((f"seconds, {PHASE_PLACES[phase]}", seconds))
    return Table("So far", (), tuple(rows))


def completed(run: Run) -> dict[str, Any]:
    """Return the summary of a run with what earlier versions did not write."""
    summary = {**run.summary, "iterations": len(run.iterations)}
    for key, names in (("seconds", ("setup",)), ("bytes", ("sent", "mask", "evaluate", "setup"))):
        summary[key] = {**summary[key], **{n: 0 for n in names if n not in summary[key]}}
    summary.setdefault("seconds_total", summary["seconds"]["total"])
    return summary


def settings_tables(run: Run, blame: Blame | None) -> list[Table]:
    """Return the settings that differ from the preset's, versions and topology."""
    tables = [settings_table(run)]
    if run.versions:
        rows = tuple((shown(name), str(version)) for name, version in run.versions.items())
        tables.append(Table("Versions", (), rows))
    return [*tables, topology_table(run, blame)]


def settings_table(run: Run) -> Table:
    """Return the settings that differ from the preset's."""
    preset, method = run.setting("preset", "recipe"), run.setting("method", "prunex")
    title = f"Settings that differ from those of preset {preset} for method {method}"
    usual = usual_settings(run)
    if usual is None:
        note = "This version does not know that preset or method, so all are shown."
        rows = tuple((shown(key), value_words(value), None) for key, value in run.config.items())
        return Table("Settings", ("setting", "value", "preset"), rows, (note,))
    rows = tuple(
        (shown(key), value_words(value), value_words(usual.get(key, "not known today")))
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
        table = tomllib.loads(to_toml(make(**asked), {}))
    except (KeyError, TypeError, UserError):
        return None
    table["outer-iterations"] = own.outer_iterations
    known = {key_of(name) for name in FIELDS if name not in UNINTERESTING}
    hidden = {key: config.get(key) for key in table.keys() - known}
    return {**table, **hidden}


def value_words(value: Any) -> str:
    """Return a value of config.toml as text."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return shown(str(value)) if value != "" else "none"


def topology_table(run: Run, blame: Blame | None) -> Table:
    """Return which ranks lay on which nodes, as far as the files say."""
    if blame is not None:
        rows = []
        for node in sorted(set(blame.node)):
            ranks = [rank for rank, place in enumerate(blame.node) if place == node]
            span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
            rows.append((node, span, blame.hosts[ranks[0]] or None))
        return Table("Topology", ("node", "ranks", "host"), tuple(rows))
    sizes = run.sizes()
    if not sizes:
        virtual = run.setting("ranks-per-node", 0)
        text = f"{virtual} ranks per node" if virtual else "one node per machine"
        return Table("Topology", (), (("as asked for", text),))
    ranks = f"{sum(sizes)} ranks on {len(sizes)} node{'s' if len(sizes) > 1 else ''}"
    return Table("Topology", (), ((ranks, "of " + ", ".join(map(str, sizes)) + " ranks"),))
