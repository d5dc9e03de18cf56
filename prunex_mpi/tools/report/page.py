"""The page of runs or of comparisons: what stands on it, and how it becomes HTML and PNGs."""

import base64
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunex_mpi import __version__
from prunex_mpi.base.errors import UserError, enumerated, quote
from prunex_mpi.base.files import no_links, tomllib
from prunex_mpi.base.imports import require_packages
from prunex_mpi.base.record_keys import LABELS, LOSS, flat_table
from prunex_mpi.base.tables import Cell, LossCell, Table, format_cell
from prunex_mpi.base.units import KIB, MIB
from prunex_mpi.config.resolve import make, to_toml
from prunex_mpi.run.summary import closing_rows
from prunex_mpi.settings.values import in_words
from prunex_mpi.tools.report import curves
from prunex_mpi.tools.report.comparison import Comparison, read_comparison, together
from prunex_mpi.tools.report.comparison_tables import equal_tables, results_table, tuning_tables
from prunex_mpi.tools.report.curves import DPI, MOST_CURVES, Named, duration_words, styled
from prunex_mpi.tools.report.read_runs import (
    ENDS,
    Run,
    find_stragglers,
    read_changes,
    read_layers,
    read_ranks,
    read_runs,
    shown,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
# Where a run lies and how it was started says nothing of how it was trained.
HIDDEN = ("run-dir", "resume", "dry-run")
# What runs have to share to be compared.
SHARED = ("model", "dataset", "outer-iterations", "batch-size", "train-samples")
# A rank is named from this part of an outer iteration on, so many of a run that is alone.
WORTH, MOST_STRAGGLERS = 0.01, 5
# A table of more columns does not fit beside something else.
FEW_COLUMNS = 6


@dataclass(frozen=True)
class Picture:
    """A figure with its title; `name` is that of its file."""

    name: str
    title: str
    figure: "Figure"

    def png(self) -> bytes:
        """Return the figure as the bytes of a PNG."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI)
        return file.getvalue()


@dataclass(frozen=True)
class Section:
    """Tables and pictures under a heading."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Page:
    """A page: `notices` say what the reader must not overlook."""

    title: str
    source: str
    notices: Sequence[str]
    sections: Sequence[Section]


def write_report(sources: Sequence[Path], output: str, folder: str) -> None:
    """Write the page to `output`, by default beside a run that is alone; raise UserError.

    The pictures go into `folder` as well, unless it is "".
    """
    require_packages("report", "report", "matplotlib", "jinja2")
    files = [source for source in sources if os.path.isfile(source)]
    if files and len(files) < len(sources):
        raise UserError("runs and comparisons don't fit on one page; show them one after the other")
    if len(sources) > MOST_CURVES:
        raise UserError(f"at most {MOST_CURVES} can be told apart on one page; give fewer")
    with styled():
        page = page_of_comparisons(files) if files else page_of_runs(read_runs(sources))
        pictures = [picture for section in page.sections for picture in section.pictures]
        images = {picture.name: picture.png() for picture in pictures}
    text = to_html(page, images).encode("utf-8", "replace")
    alone = len(sources) == 1 and not files
    name = output or str(sources[0] / PAGE if alone else PAGE)
    try:
        # A run may be somebody else's, and its page a link.
        with open(name, "wb", opener=None if output else no_links) as file:
            file.write(text)
    except OSError as error:
        where = quote(shown(name), 250)
        raise UserError(
            f"{where} can't be written: {error.strerror}; choose another --output"
        ) from None
    print(f"written to {shown(name)} ({len(text) / KIB:.0f} KiB)", flush=True)
    if folder:
        write_pngs(images, Path(folder))
        print(f"{len(images)} pictures written to {shown(folder)}", flush=True)


def write_pngs(images: Mapping[str, bytes], folder: Path) -> None:
    """Write each picture as NAME.png into a folder; raise UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in images.items():
            (folder / f"{name}.png").write_bytes(image)
    except OSError as error:
        where = quote(shown(folder), 250)
        raise UserError(f"--png {where}: {error.strerror}; choose another folder") from None


def pictures_of(*found: tuple[str, str, "Figure | None"]) -> list[Picture]:
    """Return those pictures that there are; each is a name, a title and a figure."""
    return [Picture(*parts) for parts in found if parts[2] is not None]


# --------------------------------------------------------------------------------------------------
# Of runs
# --------------------------------------------------------------------------------------------------


def page_of_runs(runs: Sequence[Run]) -> Page:
    """Return the page of one run or of several, having read the rest of their files."""
    alone = len(runs) == 1
    # The number leads to the name, should it not be drawn.
    named = {"" if alone else f"{i}: {run.name}": run for i, run in enumerate(runs, 1)}
    bytes_sent = curves.sent_bytes(runs)
    learning = pictures_of(
        ("learning-iterations", "Learning by iteration", curves.learning(named, "iteration")),
        ("learning-seconds", "Learning by time", curves.learning(named, "seconds")),
        ("learning-bytes", "Learning by bytes", curves.learning(named, bytes_sent)),
    )
    cost = pictures_of(
        ("bytes", "Bytes of each outer iteration", curves.payload(named)),
        ("seconds", "Seconds of an outer iteration of rank 0", curves.durations(named)),
        ("synchronisation", "Synchronisation of rank 0", curves.synchronisation(named)),
    )
    layers = read_layers(runs[0].path, [int(runs[0].iterations[-1])]) if alone else None
    pruning = pictures_of(
        ("density", "Density", curves.density(named)),
        ("drift", "Mask drift", curves.drift(named)),
        ("density-layers", "Density of layers", curves.layer_density(layers) if layers else None),
        ("residuals", "Residuals", curves.residuals(named)),
    )
    return Page(
        title=f"Run {runs[0].name}" if alone else f"{len(runs)} runs",
        source=" · ".join(map(what_of, runs)),
        notices=notices(named),
        sections=[
            Section("Result", [result_table(named)], learning),
            Section("Cost", stragglers_tables(named), cost),
            Section("Pruning", (), pruning),
            Section("Settings", [settings_table(named)]),
        ],
    )


def what_of(run: Run) -> str:
    """Return where the files of a run lie, and what was trained."""
    method, model, dataset = (run.setting(key, "?") for key in ("method", "model", "dataset"))
    return f"{shown(run.path)}: {method}, {model} on {dataset}"


def notices(named: Named) -> list[str]:
    """Return what is wrong with runs, in a line each."""
    found = []
    for name, run in named.items():
        lost = what_losses_cost(read_changes(run.path))
        ended = [] if run.complete else [ending(run)]
        found += [f"{name}: {line}" if name else line for line in (*ended, *run.notes, *lost)]
    return found + unequal(list(named.values()))


def ending(run: Run) -> str:
    """Return how a run ended that is not complete."""
    planned, reason = run.setting("outer-iterations"), f": {run.reason}" if run.reason else ""
    how = ENDS.get(run.status, ENDS["broken off"])
    return f"The run {how} after {len(run.iterations)} of {planned} outer iterations{reason}."


def what_losses_cost(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often nodes were lost and joined, and how long it took to go on."""
    if not changes:
        return []
    ranks = [change.get("ranks", 0) for change in changes]
    more = [False, *(b > a for a, b in pairwise(ranks))]
    joins = sum(bool(c.get("joined")) or grown for c, grown in zip(changes, more, strict=True))
    losses = sum(any(change.get(key) for key in ("lost_ranks", "left")) for change in changes)
    vain = sum(change.get(key, 0.0) for change in changes for key in ("lost_seconds", "seconds"))
    return [
        f"Nodes were lost (times: {losses}) and joined ({joins}): {duration_words(vain)} of "
        "starting again, and of work that was done twice."
    ]


def unequal(runs: Sequence[Run]) -> list[str]:
    """Return a line on what runs differ in that should be alike where they are compared."""
    keys = [key for key in SHARED if len({str(run.setting(key)) for run in runs}) > 1]
    return [f"The runs differ in {enumerated(keys)}."] if keys else []


def result_table(named: Named) -> Table:
    """Return the table that ends a run, or a row for each of several or of one that did not end."""
    (run, *others) = named.values()
    if not others and run.complete:
        try:
            rows = closing_rows({**run.summary, "iterations": len(run.iterations)})
            return Table("", (), tuple((name.strip(), value) for name, value in rows))
        except (AttributeError, KeyError, TypeError, ValueError):
            # A summary that is not this version's: the row below asks for less.
            pass
    measures = {f"{r.measure.label} {r.measure.short}" for r in named.values()}
    columns = ("run", "status", "method", "iterations", " or ".join(sorted(measures)), "of data")
    columns += ("density", "payload MiB", "of dense %", "seconds")
    rows = tuple(result_row(name or r.name, r) for name, r in named.items())
    return Table("", columns, rows, ("Payload: what a leader handed over between nodes.",))


def result_row(name: str, run: Run) -> tuple[Cell, ...]:
    """Return what a run came to, for the table of several."""
    sent, dense = run.total("bytes.payload"), run.total("bytes.dense")
    final, data = run.final
    return (
        *(name, run.status, str(run.setting("method", "")), len(run.iterations)),
        *(known(final, LossCell if run.measure is LOSS else float), data),
        *(known(run.column("density")[-1]), sent / MIB),
        100 * sent / dense if dense else None,
        run.total("seconds.total"),
    )


def known(number: float, kind: type[float] = float) -> float | None:
    """Return a number as a cell, None for NaN."""
    return None if np.isnan(number) else kind(number)


def stragglers_tables(named: Named) -> list[Table]:
    """Return the ranks that the others waited for most, if any: some of one run, one of several."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in named.items():
        whole = run.total("seconds.total") / len(run.iterations)
        found = [s for s in find_stragglers(read_ranks(run.path)) if s.seconds >= WORTH * whole > 0]
        for s in found[: MOST_STRAGGLERS if len(named) == 1 else 1]:
            longer = f"{duration_words(s.seconds)} ({100 * s.seconds / whole:.0f} %)"
            rows.append((name or run.name, s.rank, s.host or None, LABELS[s.phase], longer))
    if not rows:
        return []
    columns = ("run", "rank", "host", "phase", "longer than its peers")
    note = "Work beyond that of the peers in an outer iteration, mean, and the share of it."
    return [Table("Ranks that the others waited for most", columns, tuple(rows), (note,))]


def settings_table(named: Named) -> Table:
    """Return the settings, versions and ranks in which runs differ, or one run from its preset."""
    tables = {name or "value": recorded_settings(run) for name, run in named.items()}
    (run, *others) = named.values()
    title = "Settings, versions and ranks in which they differ"
    if not others:
        preset, method = run.setting("preset", "recipe"), run.setting("method", "prunex")
        title = f"Unlike preset {preset} for method {method}"
        tables["preset"] = usual_settings(run)
    rows = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        cells = [in_words(table[key]) if key in table else "-" for table in tables.values()]
        if key not in HIDDEN and len({*cells}) > 1:
            rows.append((shown(key), *cells))
    return Table(title, ("setting", *tables), tuple(rows), () if rows else ("None.",))


def recorded_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run, the versions of its software and the ranks of its nodes."""
    ranks = ", ".join(map(str, run.summary.get("nodes") or []))
    versions = {f"{name} (version)": str(version) for name, version in run.versions.items()}
    return {**run.config, **versions, **({"ranks of each node": ranks} if ranks else {})}


def usual_settings(run: Run) -> Mapping[str, Any]:
    """Return what the preset says of a run by this method, as config.toml would; {} if unknown.

    Shares are counts, of as many outer iterations as the run was to have.
    """
    config = run.config
    try:
        requested = {"preset": config["preset"], "method": config["method"]}
        own = make(**requested)
        requested["outer_iterations"] = config["outer-iterations"]
        table = tomllib.loads(to_toml(make(**requested), {}))
    except (KeyError, TypeError, UserError):
        return {}
    del table["versions"]
    return {**flat_table(table), "outer-iterations": own.outer_iterations}


# --------------------------------------------------------------------------------------------------
# Of comparisons
# --------------------------------------------------------------------------------------------------


def page_of_comparisons(paths: Sequence[Path]) -> Page:
    """Return the page of the comparisons in these files; raise UserError."""
    found = {path: read_comparison(path) for path in paths}
    merged = together({path.stem: one for path, one in found.items()})
    of_all = len(found) > 1 and merged is not None
    return Page(
        title="Comparison of methods",
        source=" · ".join(map(shown, paths)),
        notices=[
            f"{shown(path.name)}: {run.row}, seed {run.seed}, {run.ending}: {run.problem}"
            for path, one in found.items()
            for run in one.outcomes
            if run.measured is None
        ],
        sections=[
            *([Section("All rows", (), pictures_against(merged, "all"))] if of_all else []),
            *(
                part
                for number, (path, one) in enumerate(found.items(), 1)
                for part in sections_of(one, shown(path.name), number)
            ),
        ],
    )


def sections_of(found: Comparison, name: str, number: int) -> list[Section]:
    """Return the results of a comparison with its pictures, and what else there is of it."""
    machine = Table("Machine", (), tuple(found.machine.items()))
    return [
        Section(name, [results_table(found)], pictures_against(found, str(number))),
        Section(f"{name}: at equal budgets", equal_tables(found)),
        Section(f"More of {name}", [*tuning_tables(found), machine]),
    ]


def pictures_against(found: Comparison, which: str) -> list[Picture]:
    """Draw what rows reach against what it costs; `which` ends the names of the files."""
    measure = found.measure.label.capitalize()
    axes = {"bytes": "sent_bytes", "time": "train_s", "parameters left": "parameters_left"}
    return pictures_of(
        *(
            (f"{axis}-{which}", f"{measure} against {word}", curves.compared(found, axis))
            for word, axis in axes.items()
        )
    )


# --------------------------------------------------------------------------------------------------
# HTML
# --------------------------------------------------------------------------------------------------


def to_html(page: Page, images: Mapping[str, bytes]) -> str:
    """Return the page as one HTML file that holds all it shows; `images` are PNGs by name."""
    from jinja2 import Environment, StrictUndefined

    text = resources.files("prunex_mpi.tools.report").joinpath("page.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    sections = [
        {**vars(section), "tables": list(map(_table, section.tables))}
        for section in page.sections
        if section.tables or section.pictures
    ]
    return environment.from_string(text).render(
        page={**vars(page), "sections": sections},
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
        version=__version__,
    )


def _table(table: Table) -> dict[str, object]:
    # A column of numbers stands on the right, whatever one of its cells lacks.
    numeric = [
        any(isinstance(cell, int | float) for cell in column)
        and not any(isinstance(cell, str) for cell in column)
        for column in zip(*table.rows, strict=True)
    ] or [False] * len(table.columns)

    def cells(texts: Iterable[str]) -> list[tuple[str, bool]]:
        return list(zip(texts, numeric, strict=True))

    return {
        **vars(table),
        "columns": cells(table.columns) if table.columns else [],
        "rows": [cells(map(format_cell, row)) for row in table.rows],
        "wide": len(numeric) > FEW_COLUMNS,
    }
