"""The page of comparisons of methods: the tables and the curves of what `bench compare` wrote.

Of the JSON the tables are read as they were printed, and of the runs what the curves need.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from prunex_mpi.base.errors import UNREADABLE, UserError, enumerated, quote
from prunex_mpi.base.record_keys import ACCURACY, LOSS, Measure
from prunex_mpi.base.tables import Table, with_losses
from prunex_mpi.base.units import MIB
from prunex_mpi.tools.drawing import legend_above, look_of, marker_of, new_panel, plain
from prunex_mpi.tools.report.page import Page, Picture, Section
from prunex_mpi.tools.report.read_runs import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Curves of more rows can't be told apart: their ends alone are drawn.
MOST_CURVES_DRAWN = 8
# From so many decades on, ticks at their ends are enough.
WIDE_DECADES = 2.0
# Some weights of a whole network may happen to be 0; budgets are spent to a few weights.
SAME_SIZE = 0.95


@dataclass(frozen=True)
class Curve:
    """Means of a row's seeds, as a measure shows them, over MiB and over seconds of training.

    Of `seeds` those that `ended`; `spread` is the standard deviation at the end.
    """

    row: str
    sent_mib: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]
    spread: float
    parameters_left: float
    ended: int
    seeds: int

    @property
    def label(self) -> str:
        """What the row is called: a mean of some of its seeds alone says so."""
        whole = self.ended == self.seeds
        return self.row if whole else f"{self.row} ({self.ended} of {self.seeds} seeds)"


@dataclass(frozen=True)
class Compared:
    """What a page shows of a comparison; `places` are those of the rows that have one.

    Its curves are of a `measure` on data `judged_on`.
    """

    machine: Mapping[str, str]
    tables: Sequence[Table]
    rows: Sequence[str]
    seeds: int
    places: Mapping[str, int]
    measure: Measure
    judged_on: str
    curves: Sequence[Curve]
    problems: Sequence[str]


def read_compared(path: Path) -> Compared:
    """Return what `bench compare --json` wrote; raise UserError."""
    where = quote(str(path), 250)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
            for t in found["tables"]
        ]
        place = tables[0].columns.index("place")
        whole = found["comparison"]
        measure = shared_measure(whole["outcomes"])
        if measure is LOSS:
            tables[0] = with_losses(tables[0], "lr", "epochs")
        return Compared(
            machine=dict(whole["machine"]),
            tables=tables,
            rows=tuple(whole["rows"]),
            seeds=len(whole["seeds"]),
            places={row[0]: row[place] for row in tables[0].rows if row[place] is not None},
            measure=measure,
            # Files of a former protocol, which have no plan, are of test data.
            judged_on="validation" if whole.get("plan") else "test",
            curves=curves_of(whole["outcomes"], measure),
            problems=[problem_of(run) for run in whole["outcomes"] if run["measured"] is None],
        )
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}", UNREADABLE) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise UserError(f"{where} is not what --json of a comparison writes", UNREADABLE) from None


def problem_of(run: Mapping[str, Any]) -> str:
    """Return in a line how a run of a comparison's JSON ended that measured nothing."""
    how = "failed" if run.get("failed") else "diverged"
    why = str(run["problem"]).removeprefix("failed: ")
    return f"{run['row']}, seed {run['seed']}, {how}: {why}"


def shared_measure(runs: Sequence[Mapping[str, Any]]) -> Measure:
    """Return what the runs of a comparison are judged by: accuracy where all that ended have one.

    `runs` are its outcomes as its JSON holds them.
    """
    ended = [run["measured"] for run in runs if run["measured"]]
    return ACCURACY if all(m["accuracy"] is not None for m in ended) else LOSS


def curves_of(runs: Sequence[Mapping[str, Any]], measure: Measure) -> list[Curve]:
    """Return the curve of every row of which a run was evaluated, the best one first.

    `runs` are the outcomes of a comparison as its JSON holds them.
    """
    found, key, scale = [], measure.key, measure.scale
    for row in dict.fromkeys(run["row"] for run in runs):
        every = [run["measured"] for run in runs if run["row"] == row]
        measured = [m for m in every if m and m["curve"]]
        if not measured:
            continue
        # Where all seeds were evaluated: one may have ended sooner than the others.
        by_iteration = [{point["iteration"]: point for point in m["curve"]} for m in measured]
        shared = sorted(set.intersection(*map(set, by_iteration)))
        if not shared:
            continue
        points = [[of[iteration] for of in by_iteration] for iteration in shared]
        ends = [scale * m["curve"][-1][key] for m in measured]
        found.append(
            Curve(
                row,
                tuple(mean(p["sent_bytes"] for p in at) / MIB for at in points),
                tuple(mean(p["train_s"] for p in at) for at in points),
                tuple(mean(scale * p[key] for p in at) for at in points),
                stdev(ends) if len(ends) > 1 else 0.0,
                mean(m["parameters_left"] for m in measured),
                len(measured),
                len(every),
            )
        )
    return sorted(found, key=lambda c: c.values[-1], reverse=measure.higher_is_better)


def page_of(paths: Sequence[Path]) -> Page:
    """Return the page of the comparisons in these files; raise UserError."""
    sections, words, notices = [], [], []
    for number, path in enumerate(paths, 1):
        found = read_compared(path)
        name = shown(path.name)
        words.append(f"{name}: {lead(found)}" if len(paths) > 1 else lead(found))
        notices += [f"{name}: {line}" for line in found.problems]
        machine = Table("Machine", (), tuple(found.machine.items()))
        title = name if len(paths) > 1 else "Results"
        sections.append(Section(title, pictures_of(found, number), found.tables[:1]))
        sections.append(Section("", (), [*found.tables[1:], machine]))
    title = "Comparison of methods" if len(paths) == 1 else "Comparisons of methods"
    return Page(title, " · ".join(map(shown, paths)), words, sections, notices)


def pictures_of(compared: Compared, number: int) -> list[Picture]:
    """Return the measure over bytes and over time, nothing where no run was evaluated."""
    curves, measure = compared.curves, compared.measure
    if not curves:
        return []
    found = []
    for name, what, label, places in (
        ("bytes", "bytes", "MiB that left a node", [c.sent_mib for c in curves]),
        ("seconds", "time", "seconds, this machine", [c.seconds for c in curves]),
    ):
        figure, panel = new_panel(4.2)
        draw(panel, curves, places, measure)
        panel.set_xlabel(label)
        panel.set_ylabel(f"{compared.judged_on} {measure.label}, {measure.unit}")
        legend_above(panel, 3)
        found.append(
            Picture(
                f"{name}-{number}", f"{measure.label.capitalize()} against {what}", figure, SPREAD
            )
        )
    return found


SPREAD = (
    "The mark is the end of a row, hollow where a smaller network is left, its bar the standard "
    "deviation over the seeds; the curve is the mean of its seeds. Of many rows the ends alone are "
    "drawn, and a line joins those, of which all seeds ended, that no other surpasses for less."
)


def lead(found: Compared) -> str:
    """Return in words what was compared and what came of it."""
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    text = f"{len(found.rows)} rows were trained with {seeds} each."
    if not found.places:
        return f"{text} None of them trained in all its seeds."
    best = [row for row, place in found.places.items() if place == 1]
    text += f" The best by mean {found.measure.label} is {enumerated(best)}."
    left = [row for row in found.rows if row not in found.places]
    if left:
        text += (
            f" No place has {enumerated(left)}, which diverged, failed or did no better than "
            "guessing."
        )
    return text


def _spread_out(panel: "Axes") -> None:
    """Make the horizontal axis logarithmic, with plain numbers at a few ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    low, high = panel.get_xlim()
    decades = math.log10(high / low)
    ticks = (1.0, 2.0, 5.0) if decades < WIDE_DECADES else (1.0,)
    panel.xaxis.set_major_locator(LogLocator(subs=ticks))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def draw(
    panel: "Axes", curves: Sequence[Curve], places: Sequence[Sequence[float]], measure: Measure
) -> None:
    """Draw each row over its places on the horizontal axis; the spread of the seeds at its end.

    Hollow ends are those of networks that are smaller than the largest one. Many rows are their
    ends alone, numbered, and a line joins those that no other surpasses for less.
    """
    many = len(curves) > MOST_CURVES_DRAWN
    whole = max(curve.parameters_left for curve in curves)
    for number, (curve, x) in enumerate(zip(curves, places, strict=True)):
        look = look_of(number)
        if not many:
            panel.plot(x, curve.values, linewidth=1.2, alpha=0.6, **look)
        panel.errorbar(
            x[-1:],
            curve.values[-1:],
            yerr=[curve.spread],
            fmt=marker_of(number),
            color=look["color"],
            markerfacecolor=look["color"] if curve.parameters_left > SAME_SIZE * whole else "white",
            markersize=6,
            capsize=3,
            label=plain(f"{number + 1}  {curve.label}" if many else curve.label),
        )
        if many:
            where = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
            panel.annotate(str(number + 1), (x[-1], curve.values[-1]), **where)
    if many:
        # A mean of the seeds that ended alone is of the better ones.
        pairs = [
            pair for pair in zip(curves, places, strict=True) if pair[0].ended == pair[0].seeds
        ]
        best = np.array(front([(x[-1], c.values[-1]) for c, x in pairs], measure)).reshape(-1, 2)
        panel.plot(best[:, 0], best[:, 1], color="#999999", linewidth=1, zorder=1)
    _spread_out(panel)


def front(ends: Sequence[tuple[float, float]], measure: Measure) -> list[tuple[float, float]]:
    """Return those (cost, value) that no other surpasses at the same cost or less."""
    found: list[tuple[float, float]] = []
    sign = -1 if measure.higher_is_better else 1
    for cost, value in sorted(ends, key=lambda end: (end[0], sign * end[1])):
        if not found or measure.better(value, found[-1][1]):
            found.append((cost, value))
    return found
