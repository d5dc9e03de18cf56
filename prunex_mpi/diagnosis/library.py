"""Check the MPI library: its threads, and whether all ranks have the same algorithms."""

from collections.abc import Sequence

from prunex_mpi.base.errors import listed
from prunex_mpi.diagnosis.findings import Finding, RankFacts, by_host, differences

# From the least on, as MPI names them.
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
MPI4PY_THREADS = "MPI4PY_RC_THREAD_LEVEL"
OPEN_MPI_THREADS = "OMPI_MPI_THREAD_LEVEL"
CRAY_THREADS = "MPICH_MAX_THREAD_SAFETY"
OPEN_MPI_COMPONENTS = "OMPI_MCA_coll"
REDUCTIONS = "OMPI_MCA_coll_libnbc_iallreduce_algorithm"
HAN_SEGMENTS = "OMPI_MCA_coll_han_allreduce_segsize"
HAN_PRIORITY = "OMPI_MCA_coll_han_priority"
# What a rank tells of its environment.
SETTINGS = (
    MPI4PY_THREADS,
    OPEN_MPI_THREADS,
    OPEN_MPI_COMPONENTS,
    REDUCTIONS,
    HAN_SEGMENTS,
    HAN_PRIORITY,
)


def check_thread_level(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find an MPI that several threads may not call at once."""
    least = min(facts, key=lambda rank: THREAD_LEVELS.index(rank.thread_level))
    name = f"MPI_THREAD_{least.thread_level.upper()}"
    if least.thread_level == THREAD_LEVELS[-1]:
        return [Finding("ok", "MPI threads", name)]
    hosts = listed([rank.host for rank in facts if rank.thread_level == least.thread_level])
    reason = (
        f"MPI gives no more than {name} on {hosts}: --overlap-steps is refused, whose exchange "
        "has a thread of its own"
    )
    return [Finding("warning", "MPI threads", reason, _more_threads(least))]


def check_agreement(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find ranks that would take part in one collective by different algorithms."""
    if not _library(facts).startswith("Open MPI"):
        return []
    findings = []
    # HAN is for several machines.
    of_han = (HAN_SEGMENTS, HAN_PRIORITY) if len(by_host(facts)) > 1 else ()
    for variable in (OPEN_MPI_COMPONENTS, REDUCTIONS, *of_han):
        where = differences(facts, lambda rank, name=variable: rank.mpi_settings.get(name, "unset"))
        if where:
            reason = (
                f"{variable} is {where}: ranks with different algorithms wait for ever, or sum "
                "wrongly"
            )
            remedy = f"give every rank the same, with mpirun -x {variable}"
            findings.append(Finding("error", "MPI settings", reason, remedy))
    return findings


def _library(facts: Sequence[RankFacts]) -> str:
    return facts[0].versions.get("mpi", "")


def _more_threads(rank: RankFacts) -> str:
    """Return how this rank's library would give MPI_THREAD_MULTIPLE."""
    for variable in (MPI4PY_THREADS, OPEN_MPI_THREADS):
        if variable in rank.mpi_settings:
            return f"unset {variable}, which asks for {rank.mpi_settings[variable]}"
    if "CRAY" in rank.versions.get("mpi", "").upper():
        return f"set {CRAY_THREADS}=multiple"
    return "take an MPI that gives MPI_THREAD_MULTIPLE, as Open MPI and MPICH do by default"
