"""Read what is to be shown, make the page, write it."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.units import KIB
from prunex_mpi.tools.drawing import MOST_CURVES, styled
from prunex_mpi.tools.report import comparisons as comparison
from prunex_mpi.tools.report import one_run as single
from prunex_mpi.tools.report import several_runs as several
from prunex_mpi.tools.report.page import Page, to_html, write_pngs
from prunex_mpi.tools.report.read_runs import NothingYet, Run, read_run, shown
from prunex_mpi.tools.report.report_options import PAGE, Options


def report(options: Options) -> None:
    """Write the page, and what else was asked for; raise UserError."""
    require_packages("report", "report", "matplotlib", "jinja2")
    files = [source for source in options.sources if source.is_file()]
    if files and len(files) < len(options.sources):
        raise UserError("runs and comparisons don't fit on one page; show them one after the other")
    if len(options.sources) > MOST_CURVES:
        raise UserError(f"at most {MOST_CURVES} can be told apart on one page; give fewer")
    if files and options.csv:
        raise UserError("--csv is for runs: a comparison's JSON holds no metrics")
    runs = [] if files else read_runs(options.sources)
    output = options.output
    if not output:
        alone = len(options.sources) == 1 and not files
        output = str(options.sources[0] / PAGE if alone else PAGE)
    with styled():
        page = page_of(files, runs)
        text = to_html(page)
        count = write_pngs(page, Path(options.png)) if options.png else 0
    written = text.encode("utf-8", "replace")
    try:
        Path(output).write_bytes(written)
    except OSError as error:
        where = quote(shown(output), 250)
        raise UserError(
            f"{where} can't be written: {error.strerror}; choose another --output"
        ) from None
    print(f"written to {shown(output)} ({len(written) / KIB:.0f} KiB)", flush=True)
    if options.png:
        print(f"{count} pictures written to {shown(options.png)}", flush=True)
    if options.csv:
        write_csv(options.csv, runs)
        print(f"metrics written to {shown(options.csv)}", flush=True)


def page_of(comparisons: Sequence[Path], runs: Sequence[Run]) -> Page:
    """Return the page of comparisons, of one run or of several."""
    if comparisons:
        return comparison.page_of(comparisons)
    return several.page_of(runs) if len(runs) > 1 else single.page_of(runs[0])


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in these folders, each under a name of its own; raise UserError.

    Of several, those that have nothing to show are left out, with a line that says so.
    """
    whole = [path.resolve() for path in paths]
    for i, path in enumerate(whole):
        if path in whole[:i]:
            raise UserError(f"{quote(shown(paths[i]), 250)} is given twice; give it once")
    runs: list[Run] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except NothingYet as error:
            if len(paths) == 1:
                raise
            print(f"left out: {error}", flush=True)
    if not runs:
        raise UserError("none of these runs has a finished outer iteration to show", UNREADABLE)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        # As many folders above as it takes to tell them apart.
        most = max(len(path.parts) for path in whole)
        for depth in range(2, most + 1):
            names = [shown(Path(*run.path.resolve().parts[-depth:])) for run in runs]
            if len(set(names)) == len(names):
                break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def write_csv(path: str, runs: Sequence[Run]) -> None:
    """Write the metrics of runs, a line per outer iteration; empty where there is no number."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    whole = {n for n in names if n in ("iteration", "frozen") or n.startswith("bytes.")}
    several = len(runs) > 1
    try:
        with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(["run"] if several else []), *names])
            for run in runs:
                columns = [run.column(name) for name in names]
                for i in range(len(run.iterations)):
                    cells = [
                        _cell(column[i], name in whole)
                        for name, column in zip(names, columns, strict=True)
                    ]
                    writer.writerow([*([run.name] if several else []), *cells])
    except OSError as error:
        where = quote(path, 250)
        raise UserError(f"--csv {where}: {error.strerror}; choose another", UNREADABLE) from None


def _cell(number: float, whole: bool) -> str:
    if np.isnan(number):
        return ""
    return str(int(number)) if whole and np.isfinite(number) else repr(float(number))
