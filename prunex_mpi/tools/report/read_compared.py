"""Read what `bench compare --json` wrote: its tables as they were printed, and the rows' curves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.record_keys import ACCURACY, LOSS, Measure
from prunex_mpi.base.tables import Table, with_losses
from prunex_mpi.base.units import MIB
from prunex_mpi.tools.report.read_runs import shown


@dataclass(frozen=True)
class RowCurve:
    """Means of a comparison's row over those of its seeds that ended, where all were evaluated.

    `sent_mib` and `seconds` are where, `values` what its measure shows; `spread` is the standard
    deviation at the end.
    """

    label: str
    sent_mib: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]
    spread: float


@dataclass(frozen=True)
class Compared:
    """What a page shows of a comparison: its curves are of a `measure` on data `judged_on`."""

    path: Path
    machine: Mapping[str, str]
    tables: Sequence[Table]
    measure: Measure
    judged_on: str
    curves: Sequence[RowCurve]
    problems: Sequence[str]


def read_compared(path: Path) -> Compared:
    """Return what `bench compare --json` wrote; raise UserError."""
    where = quote(shown(path), 250)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
            for t in found["tables"]
        ]
        whole = found["comparison"]
        ended = [run["measured"] for run in whole["outcomes"] if run["measured"]]
        # Accuracy where all that ended have one.
        measure = LOSS if any(m["accuracy"] is None for m in ended) else ACCURACY
        if measure is LOSS:
            tables[0] = with_losses(tables[0], "lr", "epochs")
        return Compared(
            path=path,
            machine=dict(whole["machine"]),
            tables=tables,
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


def curves_of(runs: Sequence[Mapping[str, Any]], measure: Measure) -> list[RowCurve]:
    """Return the curve of every row of which a run was evaluated, the best one first.

    `runs` are the outcomes of a comparison as its JSON holds them.
    """
    found, key, scale = [], measure.key, measure.scale
    for row in dict.fromkeys(run["row"] for run in runs):
        every = [run["measured"] for run in runs if run["row"] == row]
        measured = [m for m in every if m and m["curve"]]
        # Where all seeds were evaluated: one may have ended sooner than the others.
        by_iteration = [{point["iteration"]: point for point in m["curve"]} for m in measured]
        shared = sorted(set.intersection(*map(set, by_iteration))) if measured else []
        if not shared:
            continue
        points = [[of[iteration] for of in by_iteration] for iteration in shared]
        ends = [scale * m["curve"][-1][key] for m in measured]
        some = len(measured) < len(every)
        found.append(
            RowCurve(
                f"{row} ({len(measured)} of {len(every)} seeds)" if some else row,
                tuple(mean(p["sent_bytes"] for p in at) / MIB for at in points),
                tuple(mean(p["train_s"] for p in at) for at in points),
                tuple(mean(scale * p[key] for p in at) for at in points),
                stdev(ends) if len(ends) > 1 else 0.0,
            )
        )
    return sorted(found, key=lambda c: c.values[-1], reverse=measure.higher_is_better)
