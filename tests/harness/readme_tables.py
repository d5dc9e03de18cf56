"""Write the tables of READMEs that show what a comparison measured, or check them.

    python tests/harness/readme_tables.py [--check]

What `bench compare --json` wrote is kept in `prunex_mpi/methods/results`. Between

    <!-- NAME.json: TABLE --> and <!-- end -->

with the file's path from the README stands a table of it, and between

    <!-- NAME.json: figures --> and <!-- end -->

are sentences whose figures all have to be in one of these tables: every number with a decimal
point; and every whole number with a thousands separator or before MiB, %, s or parameters, which
may be a figure of a table rounded as well. Other whole numbers (4 bits, T = 16) and settings, which
stand in backticks, need not be measured, and what is worked out from figures is written in words
(half, a fifteenth) or outside of the block. `NAME_at_20_Mbit.json` has the same rows over a link of
that rate: a column of the table `steps` of NAME. The table `links` has seconds of whole runs:
computing as measured, and the bytes at the rate of a link. The tables
`equal-samples`, `equal-bytes` and `equal-seconds` are those of `report`.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

from mpi4py import MPI

from prunex_mpi.base.tables import format_cell
from prunex_mpi.base.units import MIB
from prunex_mpi.data.request import Request
from prunex_mpi.data.text_files import read_text_data
from prunex_mpi.run.dry_run import dry_run
from prunex_mpi.run.problem import READ
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.report.comparison import (
    Comparison,
    Measured,
    Outcome,
    ended,
    read_comparison,
)
from prunex_mpi.tools.report.comparison_tables import (
    LINKS,
    equal_tables,
    places_of,
    quality_names,
    seconds_at,
    shown,
)

ROOT = Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"<!--.*?(?:-->|$)", re.DOTALL)
# No comment is inside, so that a block that is not closed ends where the next one begins.
BLOCK = re.compile(r"<!-- (\S+\.json): (\S+) -->\n((?:(?!<!--).)*)<!-- end -->", re.DOTALL)
FIGURE = re.compile(r"\d[\d,]*\.\d+")
CELL = re.compile(r"(?<=\| )\d[\d,]*(?= \|)")
WHOLE = re.compile(
    r"(?<![\d.,/])(?:\d{1,3}(?:,\d{3})+|\d+(?=\s+(?:MiB|%|s|parameters)(?!\w)))(?!\.?\d)"
)
SPAN = re.compile(r"`[^`]*`")
FIGURES = "figures"
RATE = re.compile(r"_at_(\d+)_([MG])bit$")
MBIT = {"M": 1, "G": 1000}


def main() -> int:
    """Rewrite the READMEs, or say which are not what the files say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    check = parser.parse_args().check
    problems = []
    for path in (ROOT / "README.md", *sorted((ROOT / "prunex_mpi").rglob("README.md"))):
        old = path.read_text(encoding="utf-8")
        new, found = renewed(old, path.parent)
        problems += [f"{path.relative_to(ROOT)}: {text}" for text in found]
        if new != old and check:
            problems.append(f"{path.relative_to(ROOT)}: tables differ; run this without --check")
        elif new != old:
            path.write_text(new, encoding="utf-8")
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


def renewed(text: str, folder: Path) -> tuple[str, list[str]]:
    """Return a README in `folder` with tables as its results say, and what is wrong beside them."""
    problems = []

    def replace(match: re.Match[str]) -> str:
        file, kind, body = match.groups()
        path = folder / file
        tables = tables_of(read_comparison(path), times_beside(path))
        if kind == FIGURES:
            wrong = unknown_figures(body, "".join(tables.values()))
            problems.extend(f"{figure} is in no table of {file}" for figure in wrong)
        elif kind in tables:
            body = tables[kind]
        else:
            problems.append(f"{file} has no table {kind}; there are {', '.join(tables)}")
        return f"<!-- {file}: {kind} -->\n{body}<!-- end -->"

    new = BLOCK.sub(replace, text)
    for comment in COMMENT.findall(BLOCK.sub("", text)):
        first = comment.split("\n", 1)[0]
        problems.append(
            f"{first} begins or ends no block: <!-- NAME.json: TABLE --> does, "
            "on a line of its own, and <!-- end --> closes it"
        )
    return new, problems


def unknown_figures(body: str, tables: str) -> list[str]:
    """Return the figures of sentences that no table has, as the rule above says."""
    known = set(FIGURE.findall(tables))
    whole = {number.replace(",", "") for number in CELL.findall(tables)}
    whole |= {f"{float(figure.replace(',', '')):.0f}" for figure in known}
    body = SPAN.sub("", body)
    rest = FIGURE.sub("x", body)
    wrong = [number for number in WHOLE.findall(rest) if number.replace(",", "") not in whole]
    return sorted({*FIGURE.findall(body)} - known) + sorted(set(wrong))


def times_beside(path: Path) -> dict[str, Comparison]:
    """Return the comparisons over links of other rates that lie beside one, slowest first."""
    rates = {}
    for other in path.parent.glob(f"{path.stem}_at_*.json"):
        number, unit = RATE.search(other.stem).groups()
        rates[int(number) * MBIT[unit]] = f"{number} {unit}bit/s", read_comparison(other)
    return dict(rates[rate] for rate in sorted(rates))


def tables_of(found: Comparison, times: Mapping[str, Comparison]) -> dict[str, str]:
    """Return the tables of a comparison, and of its steps in `times`, as Markdown, by name."""
    places = places_of(found)
    runs_of = found.by_row
    rows = [
        (name, str(places.get(name, "-")), *_cells(runs_of[name]), f"{runs_of[name][0].lr:g}")
        for name in sorted(runs_of, key=lambda name: places.get(name, len(runs_of) + 1))
    ]
    what, where = quality_names(found)
    # Files of before are of test images, and say so on their page.
    named = f"{where} {what}" if found.plan else what
    header = ("row", "place", named, "sent MiB", "parameters left", "learning rate")
    tables = {"results": markdown(header, rows)}
    if all(
        m.curve and m.curve[-1].compute_s is not None
        for runs in runs_of.values()
        for m in ended(runs)
    ):
        tables["links"] = links_table(found)
    for table in equal_tables(found):
        # "At equal bytes that leave a node"
        cells = [tuple(map(format_cell, row)) for row in table.rows]
        tables[f"equal-{table.title.split()[2]}"] = markdown(table.columns, cells)
    if times:
        tables["steps"] = steps_table(found, times)
    return tables


def links_table(found: Comparison) -> str:
    """Return the seconds of whole runs at the rates of links, means over the seeds."""
    rows = [
        (
            name,
            *(
                f"{mean(seconds_at(g, m, m.local_s + m.own_s, m.sent_bytes) for m in ran):,.1f}"
                for g in LINKS.values()
            ),
        )
        for name, runs in found.by_row.items()
        if (ran := ended(runs))
    ]
    return markdown(("row", *LINKS), rows)


@dataclass(frozen=True)
class Told:
    """What a dry run tells of a run: parameters, steps, and bytes that a node hands over.

    These are between `least` and `most`: of budgets and warm-ups it tells about how many.
    """

    parameters: int
    steps: int
    local_steps: int
    least: float
    most: float


def told_by_dry_run(settings: Settings) -> Told:
    """Return what the dry run of a command tells, on two nodes of one rank.

    Text in bytes is taken for the embedded one, so that none has to be there.
    """
    settings = replace(settings, data_dir="")
    one_each = {"num_nodes": 2, "node_sizes": (1, 1), "world_size": 2, "world": MPI.COMM_SELF}
    one_each["racks"] = None
    known = {READ: read_text_data(Request.of(settings))}
    text = dry_run(settings, SimpleNamespace(**one_each), known)

    def number(line: str, unit: str = " B") -> int:
        return int(re.search(rf"^{line} +\D*?([\d,]+){unit}", text, re.M)[1].replace(",", ""))

    outer, steps = settings.outer_iterations, settings.local_steps
    if settings.method.per_step:
        nbytes = number("payload per step") * steps + number("statistics per outer iteration")
        nbytes *= outer
    else:
        nbytes = number(f"payload over {outer} outer iterations")
    exact = 1.001
    about = 1.06 if "(about" in text else exact
    parameters = int(re.search(r"^model .*?([\d,]+) parameters", text, re.M)[1].replace(",", ""))
    most = 1.5 if "more in the warm-up" in text else about
    return Told(parameters, outer * steps, steps, nbytes / about, nbytes * most)


def differing(told: Told, ran: Measured) -> list[str]:
    """Return in what a run was not as the dry run of its command tells, which leaves out masks."""
    values = ran.payload_bytes - ran.metadata_bytes
    found = [
        ("parameters", told.parameters == ran.parameters),
        ("steps", told.steps == ran.steps),
        ("local steps", told.local_steps * ran.curve[-1].iteration == ran.steps),
        ("bytes", told.least <= values <= told.most),
    ]
    return [what for what, same in found if not same]


def steps_table(found: Comparison, times: Mapping[str, Comparison]) -> str:
    """Return bytes and seconds of a step late in each run, and how many times faster it is.

    Faster than those of the first row, on the same link.
    """
    rates = {rate: other.by_row for rate, other in times.items()}
    first = found.rows[0]
    rows = []
    for name, runs in found.by_row.items():
        cells = []
        for others in rates.values():
            mine, against = (late_step(others.get(row, ())) for row in (name, first))
            known = mine and against
            cells.append(f"{mine[1]:.2f} ({against[1] / mine[1]:.1f})" if known else "-")
        step = late_step(runs)
        rows.append((name, f"{step[0] / MIB:,.1f}" if step else "-", *cells))
    return markdown(("row", "MiB", *rates), rows)


def late_step(runs: Sequence[Outcome]) -> tuple[float, float] | None:
    """Return what a step between the last two evaluations sent and took, the mean of the runs."""
    found = []
    for done in ended(runs):
        if len(done.curve) < 2:
            return None
        before, after = done.curve[-2:]
        steps = done.steps * (after.iteration - before.iteration) / after.iteration
        found.append(
            [(getattr(after, n) - getattr(before, n)) / steps for n in ("sent_bytes", "train_s")]
        )
    return tuple(map(mean, zip(*found, strict=True))) if found else None


def _cells(runs: Sequence[Outcome]) -> tuple[str, str, str]:
    """Return quality, bytes sent and parameters left of a row, means over the seeds."""
    done = ended(runs)
    if not done:
        return "diverged", "-", "-"
    values, digits = shown(runs), 1 if done[0].accuracy is not None else 3
    spread = f" ± {stdev(values):.{digits}f}" if len(done) > 1 else ""
    return (
        f"{mean(values):.{digits}f}{spread}",
        f"{mean(m.sent_bytes for m in done) / MIB:,.1f}",
        f"{round(mean(m.parameters_left for m in done)):,}",
    )


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown."""

    def lines() -> Iterator[str]:
        for cells in (header, ("---",) * len(header), *rows):
            yield "| " + " | ".join(cells) + " |\n"

    return "".join(lines())


if __name__ == "__main__":
    sys.exit(main())
