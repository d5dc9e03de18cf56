"""Judge the MPI library: its threads, and algorithms that send more than they need.

What the environment has set is not told again. Figures were measured with Open MPI 5.0.11.
"""

from collections.abc import Sequence

from prunex_mpi.base.errors import listed
from prunex_mpi.base.units import number
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
SOCKETS = "OMPI_MCA_btl_tcp_links"
LAYERS, WAYS = "OMPI_MCA_pml", "OMPI_MCA_btl"
# What a rank tells of its environment.
SETTINGS = (
    MPI4PY_THREADS,
    OPEN_MPI_THREADS,
    OPEN_MPI_COMPONENTS,
    REDUCTIONS,
    HAN_SEGMENTS,
    HAN_PRIORITY,
    SOCKETS,
    LAYERS,
    WAYS,
)
# A ring, and Rabenseifner's algorithm; else 0 chooses, and chooses a binomial tree below 4 ranks.
GOOD_REDUCTIONS = ("1", "ring", "3", "rabenseifner")
LEAST_RING = 4
HAN_SEGMENT_BYTES = 64 * 2**10
GOOD_SEGMENT_BYTES = 512 * 2**10
# Of coll/tuned, which is chosen where HAN's is lower.
TUNED_PRIORITY = 30


def check_library(facts: Sequence[RankFacts], staged: bool) -> list[Finding]:
    """Do every check of the MPI library; `staged` says that CUDA tensors go through host memory."""
    return [
        *check_thread_level(facts),
        *check_agreement(facts),
        *check_reductions(facts, staged),
        *check_segments(facts),
        *check_sockets(facts),
    ]


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


def check_reductions(facts: Sequence[RankFacts], staged: bool) -> list[Finding]:
    """Find sums between machines that Open MPI does by a binomial tree, one way and then back.

    That is Iallreduce in place with any number of ranks: tensors of GPUs that go through host
    memory. With separate buffers it is that of fewer than 4 ranks: the gradients of `dense`.
    """
    if not _library(facts).startswith("Open MPI v5.") or len(by_host(facts)) == 1:
        return []
    if all(rank.mpi_settings.get(REDUCTIONS) in GOOD_REDUCTIONS for rank in facts):
        return []
    tree = "Open MPI sums by a binomial tree"
    if staged:
        reason = (
            f"{tree} what GPUs exchange through host memory: with 2 leaders twice the time, one of "
            "8 sends 3 times the tensor in place of 1.75 times"
        )
    elif len(facts) < LEAST_RING:
        reason = (
            f"{tree} the gradients that {len(facts)} ranks exchange at each step (--method dense "
            "--aggregation flat): twice the time, or more"
        )
    else:
        return []
    remedy = f"set {REDUCTIONS}=1 (a ring) on every rank"
    return [Finding("warning" if staged else "note", "MPI sums", reason, remedy)]


def check_segments(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find sums that Open MPI cuts into small segments: those of several ranks per machine."""
    name = _library(facts)
    hosts = by_host(facts)
    shared = max(len(ranks) for ranks in hosts.values()) > 1
    if not name.startswith("Open MPI v5.0.") or len(hosts) == 1 or not shared:
        return []
    if all(_without_han(r) or _number(r, HAN_SEGMENTS) > HAN_SEGMENT_BYTES for r in facts):
        return []
    leaders = [len({rank.node for rank in ranks}) for ranks in hosts.values()]
    what = "over the leaders, several per machine," if max(leaders) > 1 else "over all ranks"
    flat = "" if max(leaders) > 1 else " (--aggregation flat)"
    reason = (
        f"Open MPI 5.0 sums {what}{flat} in segments of 64 KiB (HAN): 2.5 times as long as in "
        "512 KiB at 1 Gbit/s"
    )
    severity = "warning" if max(leaders) > 1 else "note"
    remedy = f"set {HAN_SEGMENTS}={GOOD_SEGMENT_BYTES} on every rank"
    return [Finding(severity, "MPI segments", reason, remedy)]


def check_sockets(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find a TCP of Open MPI with one connection for each pair of ranks.

    What a rank answers, before the other one may go on sending, waits there behind its own data: so
    exchanges in both directions, one after the other, take turns.
    """
    if not _library(facts).startswith("Open MPI") or len(by_host(facts)) == 1:
        return []
    if all(_without_tcp(rank) or _number(rank, SOCKETS) > 1 for rank in facts):
        return []
    reason = (
        "where Open MPI goes over TCP, it has one connection for each pair of ranks: messages "
        "in both directions take up to 1.75 times as long as with two"
    )
    return [Finding("note", "MPI sockets", reason, f"set {SOCKETS}=2 on every rank")]


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


def _without_han(rank: RankFacts) -> bool:
    """Return whether this rank's environment keeps Open MPI from taking HAN."""
    if _leaves_out(rank.mpi_settings.get(OPEN_MPI_COMPONENTS, ""), "han"):
        return True
    return _number(rank, HAN_PRIORITY, TUNED_PRIORITY) < TUNED_PRIORITY


def _leaves_out(components: str, name: str) -> bool:
    """Return whether a list of components, or of those not to take (^), is one without `name`."""
    listed_there = name in components.lstrip("^").split(",")
    return bool(components) and components.startswith("^") == listed_there


def _without_tcp(rank: RankFacts) -> bool:
    """Return whether this rank's environment keeps Open MPI from sending over TCP itself."""
    if rank.mpi_settings.get(LAYERS, "") in ("ucx", "cm"):
        return True
    return _leaves_out(rank.mpi_settings.get(WAYS, ""), "tcp")


def _number(rank: RankFacts, variable: str, other: int = 0) -> int:
    return number(rank.mpi_settings.get(variable), other)
