"""The totals of a run's records, and the table that ends a run. Neither torch nor MPI is needed."""

from pathlib import Path
from typing import Any

from prunex_mpi.base.record_keys import SPEED, measure_of, reached
from prunex_mpi.base.tables import format_lines
from prunex_mpi.base.units import MIB
from prunex_mpi.config.resolve import BY_NAME

NAMES = {"test": "test", "val": "held-out"}


def add_up(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the seconds and the bytes of all records together, by phase and by kind."""
    return {
        key: {name: sum(r[key][name] for r in records) for name in records[-1][key]}
        for key in ("seconds", "bytes")
    }


def mean_speed(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tokens per second of all records together, where they have them."""
    if SPEED not in records[-1]:
        return {}
    taken = [r["seconds"]["total"] - r["seconds"]["evaluate"] for r in records]
    trained = sum(r[SPEED] * s for r, s in zip(records, taken, strict=True))
    return {SPEED: trained / max(sum(taken), 1e-9)}


def _in_all(summary: dict[str, Any]) -> str:
    """Return how long a run took; earlier jobs are counted by their outer iterations alone."""
    last = f"{summary['seconds_total']:.1f}"
    if not summary.get("resumed"):
        return last
    trained = f"{summary['seconds']['total']:.1f} in the outer iterations of all jobs"
    return f"{trained}; {last} in the last job, its start and end included"


def closing_table(summary: dict[str, Any], run_dir: Path) -> str:
    """Return the table that ends a run."""
    return format_lines([*closing_rows(summary), ("results", str(run_dir))])


def closing_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what stands in the table that ends a run: names and values."""
    judged, measure = reached(summary, "test"), measure_of(summary)
    sent, seconds = summary["bytes"], summary["seconds"]
    each_step = BY_NAME[summary["method"]].per_step
    whole = f"{sent['dense'] / MIB:.2f} MiB, once per {'step' if each_step else 'outer iteration'}"
    share = f"{100 * sent['payload'] / sent['dense']:.1f} % of that"
    # Of all its jobs: the last one alone may have had one node.
    if not sent["sent"]:
        share += "; one node: none of it leaves the machine"
    pruned = [("parameters", f"{summary['parameters']:,}")]
    if summary["prunable"]:
        kept = f"{summary['prunable_kept']:,} of {summary['prunable']:,}"
        pruned = [
            ("parameters", f"{pruned[0][1]} before, {summary['parameters_kept']:,} after pruning"),
            ("prunable weights kept", f"{kept} (density {summary['density']:.3f})"),
        ]
    phases = ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if k != "total")
    before = []
    if initial := summary.get("initial"):
        which = "test" if reached(initial, "test") else "val"
        name = f"{NAMES[which]} {measure.label} before training"
        before.append((name, reached(initial, which)))
    if best := summary.get("validation"):
        value = f"{measure.text(best[measure.key])}, of outer iteration {best['iteration']}"
        before.append((f"{NAMES['val']} {measure.label}", value))
    speed = [("tokens per second", f"{summary[SPEED]:,.0f}")] if SPEED in summary else []
    once = f"{seconds['setup']:.2f} s, {sent['setup'] / MIB:.2f} MiB"
    setup = [("set-up of the method", once)] if seconds["setup"] else []
    return [
        ("status", f"{summary['status']} after {summary['iterations']} outer iterations"),
        *before,
        (
            f"test {measure.label} of the {'pruned ' if summary['prunable'] else ''}model",
            judged or "not evaluated",
        ),
        *pruned,
        ("payload of a leader, whole network", whole),
        ("payload of a leader", f"{sent['payload'] / MIB:.2f} MiB ({share})"),
        ("  mask agreement", f"{sent['mask'] / MIB:.2f} MiB"),
        ("  loss, norms, digests", f"{sent['control'] / MIB:.2f} MiB"),
        ("  evaluation", f"{sent['evaluate'] / MIB:.2f} MiB"),
        *setup,
        ("sent by a node, by ring algorithms", f"{sent['sent'] / MIB:.2f} MiB"),
        *([("  to other racks", f"{sent['racks'] / MIB:.2f} MiB")] if sent.get("racks") else []),
        ("inside a node, per leader", f"{sent['intra'] / MIB:.2f} MiB"),
        ("seconds per phase", phases),
        *speed,
        ("seconds in all", _in_all(summary)),
    ]
