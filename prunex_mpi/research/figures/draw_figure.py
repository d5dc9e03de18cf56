"""Read the runs, draw the figure that is asked for, write it."""

from collections.abc import Sequence

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.tables import format_table
from prunex_mpi.research.figures import details, ratios, scaling
from prunex_mpi.research.figures import run_figures as costs
from prunex_mpi.research.figures.beside import Drawn, table_of, write_below
from prunex_mpi.research.figures.figure_options import FIGURES, Options
from prunex_mpi.tools.drawing import MOST_CURVES, save, styled
from prunex_mpi.tools.report.read_runs import Run, shown
from prunex_mpi.tools.report.write_report import read_runs

# Of one run each.
ALONE = ("10", "11", "13")


def figure(options: Options) -> None:
    """Write the figure and print the values beside the paper's; raise UserError."""
    require_packages("bench figure", "report", "matplotlib")
    if options.number in ALONE and len(options.runs) > 1:
        raise UserError(f"figure {options.number} is of one run; give one")
    if len(options.runs) > MOST_CURVES and options.number not in ("9", "12"):
        raise UserError(f"at most {MOST_CURVES} runs can be told apart; give fewer")
    runs = read_runs(options.runs)
    with styled():
        drawn = draw(options, runs)
        write_below(drawn)
        save(drawn.figure, options.output, "--output")
    print(format_table(table_of(options.number, FIGURES[options.number], drawn)))
    print(f"written to {shown(options.output)}", flush=True)


def draw(options: Options, runs: Sequence[Run]) -> Drawn:
    """Return the figure of a number; raise UserError where the runs lack what it needs."""
    match options.number:
        case "5":
            return costs.accuracy(runs)
        case "6a":
            return costs.payload(runs)
        case "6b":
            return costs.volume(runs)
        case "7":
            return costs.waiting(runs)
        case "8":
            return costs.split(runs)
        case "9":
            return scaling.scaling(runs, options.link_gbit, options.latency_us, options.copy_gbs)
        case "10":
            return details.of_ranks(runs[0])
        case "11":
            return details.of_layers(runs[0])
        case "12":
            return ratios.ratios(runs)
        case _:
            return details.patterns(runs[0], options.layers)
