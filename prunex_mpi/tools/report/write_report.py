"""Read what is to be shown, make the page, write it."""

import os
from collections.abc import Sequence
from pathlib import Path

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.base.files import no_links
from prunex_mpi.base.single_process import require_packages
from prunex_mpi.base.units import KIB
from prunex_mpi.tools.drawing import MOST_CURVES, styled
from prunex_mpi.tools.report import comparisons, one_run, several_runs
from prunex_mpi.tools.report.page import Page, to_html, write_pngs
from prunex_mpi.tools.report.read_runs import Run, read_runs, shown
from prunex_mpi.tools.report.report_options import PAGE, Options


def write_report(options: Options) -> None:
    """Write the page, and what else was asked for; raise UserError."""
    require_packages("report", "report", "matplotlib", "jinja2")
    files = [source for source in options.sources if os.path.isfile(source)]
    if files and len(files) < len(options.sources):
        raise UserError("runs and comparisons don't fit on one page; show them one after the other")
    if len(options.sources) > MOST_CURVES:
        raise UserError(f"at most {MOST_CURVES} can be told apart on one page; give fewer")
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
        # A run may be somebody else's, and its page a link.
        with open(output, "wb", opener=None if options.output else no_links) as file:
            file.write(written)
    except OSError as error:
        where = quote(shown(output), 250)
        raise UserError(
            f"{where} can't be written: {error.strerror}; choose another --output"
        ) from None
    print(f"written to {shown(output)} ({len(written) / KIB:.0f} KiB)", flush=True)
    if options.png:
        print(f"{count} pictures written to {shown(options.png)}", flush=True)


def page_of(files: Sequence[Path], runs: Sequence[Run]) -> Page:
    """Return the page of comparisons, of one run or of several_runs."""
    if files:
        return comparisons.page_of(files)
    return several_runs.page_of(runs) if len(runs) > 1 else one_run.page_of(runs[0])
