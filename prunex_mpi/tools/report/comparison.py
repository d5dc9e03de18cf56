"""The page of comparisons of methods: the tables and the figure of each."""

from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.base.tables import Table
from prunex_mpi.tools.compare.figure import curves_of, draw_bytes, draw_seconds
from prunex_mpi.tools.compare.outcomes import Comparison, read_comparison
from prunex_mpi.tools.compare.tables import ranks_of, tables_of
from prunex_mpi.tools.drawing import legend_above, new_figure
from prunex_mpi.tools.report.page import Page, Picture, Section
from prunex_mpi.tools.report.reading import shown
from prunex_mpi.tools.report.words import listed


def page_of(paths: Sequence[Path]) -> Page:
    """Return the page of the comparisons in these files; raise UserError."""
    sections, words, notices = [], [], []
    for number, path in enumerate(paths, 1):
        found = read_comparison("", str(path))
        name = shown(path.name)
        about = lead(found)
        words.append(f"{name}: {about}" if len(paths) > 1 else about)
        notices += [
            f"{name}: {run.row}, seed {run.seed}, diverged: {run.problem}"
            for run in found.outcomes
            if run.measured is None
        ]
        pictures = pictures_of(found, number)
        tables = tables_of(found)
        machine = Table("Machine", (), tuple(found.machine.items()))
        sections.append(Section(name if len(paths) > 1 else "Results", pictures, tables[:1]))
        sections.append(Section("", (), [*tables[1:], machine]))
    title = "Comparison of methods" if len(paths) == 1 else "Comparisons of methods"
    return Page(title, " · ".join(map(shown, paths)), words, sections, notices)


def pictures_of(found: Comparison, number: int) -> list[Picture]:
    """Return accuracy over bytes and over time, nothing where no run was evaluated."""
    curves = curves_of(found.outcomes)
    if not curves:
        return []
    over_bytes, over_seconds = new_figure(4.2), new_figure(4.2)
    draw_bytes(over_bytes.subplots(), curves)
    draw_seconds(over_seconds.subplots(), curves, {c.row: c.train_s for c in curves})
    for figure in (over_bytes, over_seconds):
        figure.axes[0].set_ylabel("test accuracy %")
        legend_above(figure.axes[0], 3)
    return [
        Picture(f"bytes-{number}", "Accuracy against bytes", over_bytes, SPREAD),
        Picture(f"seconds-{number}", "Accuracy against time", over_seconds, SPREAD),
    ]


SPREAD = (
    "The mark is the end of a row, hollow where a smaller network is left, its bar the standard "
    "deviation over the seeds; the curve is the mean of its seeds. Of many rows the ends alone are "
    "drawn, and a line joins those that no other surpasses for less."
)


def lead(found: Comparison) -> str:
    """Say in words what was compared and what came of it."""
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    text = f"{len(found.rows)} rows were trained with {seeds} each."
    places = ranks_of(found)
    if not places:
        return f"{text} None of them trained in all its seeds."
    best = [row for row, place in places.items() if place == 1]
    text += f" Most accurate on average was {listed(best)}."
    left = [row for row in found.rows if row not in places]
    if left:
        text += f" No place has {listed(left)}, which diverged or did no better than guessing."
    return text
