"""What is found out about a job before it trains: facts of its ranks, and findings about them.

The modules beside this one judge facts. Each of their checks is a plain function that communicates
nothing and needs neither torch nor MPI. The doctor prints all that is found; train says the
warnings and refuses the errors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from prunex_mpi.base.errors import listed

T = TypeVar("T")

# From the worst on.
SEVERITIES = ("error", "warning", "note", "ok")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how bad it is, why, and what to do about it."""

    severity: str
    subject: str
    reason: str
    remedy: str = ""

    def line(self) -> str:
        """Return the finding, without its severity, on one line."""
        return f"{self.subject}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of itself.

    `cores` are those that it may run on, `job_cores` how many its launcher may use on this machine,
    `cpu_limit` how many CPUs all ranks there may keep busy (Slurm, the quota of a container).
    `clock` is the time of day when all ranks left one barrier. `gpu` and `gpu_id` are empty on the
    CPU; `device_problem` says why there is not the device that was asked for. `thread_level` is
    what MPI gives (single | funneled | serialized | multiple), `mpi_settings` what the environment
    sets of `library.SETTINGS`.
    """

    rank: int
    host: str
    node: int
    host_rank: int
    cores: tuple[int, ...]
    job_cores: int
    cpu_limit: int
    threads: int
    versions: dict[str, str]
    clock: float
    device: str
    device_problem: str
    gpu: str
    gpu_id: str
    gpus: int
    allocator: str
    launcher: str
    thread_level: str
    mpi_settings: dict[str, str]
    free_bytes: int


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return those with which training would fail."""
    return [finding for finding in findings if finding.severity == "error"]


def grouped(
    facts: Iterable[RankFacts], value: Callable[[RankFacts], T]
) -> dict[T, list[RankFacts]]:
    """Sort the ranks by a value of theirs."""
    found: dict[T, list[RankFacts]] = {}
    for rank in facts:
        found.setdefault(value(rank), []).append(rank)
    return found


def by_host(facts: Iterable[RankFacts]) -> dict[str, list[RankFacts]]:
    """Sort the ranks by the machine that they are on."""
    return grouped(facts, lambda rank: rank.host)


def differences(facts: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Return which hosts have which value, "" where all ranks have the same."""
    groups = grouped(facts, value).items()
    text = ", ".join(f"{found} on {listed(r.host for r in ranks)}" for found, ranks in groups)
    return text if len(groups) > 1 else ""


def per_machine(
    facts: Sequence[RankFacts], check: Callable[[Sequence[RankFacts]], list[Finding]]
) -> list[Finding]:
    """Check every machine by itself; say what is the same on several of them once."""
    hosts: dict[Finding, list[str]] = {}
    for host, ranks in by_host(facts).items():
        for finding in check(ranks):
            hosts.setdefault(finding, []).append(host)
    return [replace(f, reason=f"on {listed(names)}: {f.reason}") for f, names in hosts.items()]
