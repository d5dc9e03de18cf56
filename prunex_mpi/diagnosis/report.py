"""Show what the doctor found: tables for a person, JSON for a program."""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prunex_mpi.base.tables import Table, format_table
from prunex_mpi.diagnosis.facts import software_versions
from prunex_mpi.diagnosis.findings import SEVERITIES, Finding, RankFacts, errors
from prunex_mpi.diagnosis.launcher import describe_launcher
from prunex_mpi.diagnosis.links import Link

WIDTH = 100


def head() -> str:
    """Return versions, MPI library and launcher."""
    versions = software_versions()
    library = versions.pop("mpi")
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"software     {software}\n"
        f"MPI library  {library}\n"
        f"launcher     {describe_launcher(os.environ)}"
    )


def format_topology(facts: Sequence[RankFacts]) -> str:
    """Return a table with one line per node."""
    rows = []
    for node in sorted({rank.node for rank in facts}):
        ranks = [rank for rank in facts if rank.node == node]
        cores = len({core for rank in ranks for core in rank.cores})
        rows.append(
            (
                node,
                "+".join(sorted({rank.host for rank in ranks})),
                len(ranks),
                f"{cores} of {max(rank.job_cores for rank in ranks)}",
                max(rank.threads for rank in ranks),
                "+".join(dict.fromkeys(f"{r.device} {r.gpu}".strip() for r in ranks)),
            )
        )
    columns = ("node", "host", "ranks", "cores", "threads per rank", "device")
    return format_table(Table(f"Topology: {len(facts)} ranks", columns, tuple(rows)))


def format_findings(findings: Sequence[Finding]) -> str:
    """Return a table of the findings, the worst first, each with its remedy below the reason."""
    what = max(len(finding.subject) for finding in findings)
    margin = " " * (2 + 7 + 2 + what + 2)
    lines = ["Findings"]
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        start = f"  {finding.severity:<7}  {finding.subject:<{what}}  "
        lines += textwrap.wrap(
            finding.reason, WIDTH, initial_indent=start, subsequent_indent=margin
        )
        if finding.remedy:
            remedy = f"-> {finding.remedy}"
            lines += textwrap.wrap(
                remedy, WIDTH, initial_indent=margin, subsequent_indent=f"{margin}   "
            )
    return "\n".join(lines)


def format_links(links: Sequence[Link], facts: Sequence[RankFacts]) -> str:
    """Return a table of the measured links."""
    rows = [
        (
            link.what,
            link.between,
            link.size_bytes,
            1e6 * link.seconds,
            None if link.what == "latency" else link.size_bytes / link.seconds / 1e6,
        )
        for link in links
    ]
    notes = ["one way, median"]
    if len({rank.node for rank in facts}) > len({rank.host for rank in facts}):
        notes.append("nodes on one machine: between them there is no network")
    columns = ("what", "where", "bytes", "us", "MB/s")
    return format_table(Table("Links", columns, tuple(rows), tuple(notes)))


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    failing = dict.fromkeys(finding.subject for finding in errors(findings))
    return f"training would fail: {', '.join(failing)}" if failing else "ready to train"


def as_json(
    facts: Sequence[RankFacts], findings: Sequence[Finding], links: Sequence[Link]
) -> dict[str, Any]:
    """Return what --json writes: all that was found, and whether a job would train."""
    return {
        "ready": not errors(findings),
        "findings": [asdict(finding) for finding in findings],
        "ranks": [asdict(rank) for rank in facts],
        "links": [asdict(link) for link in links],
    }
