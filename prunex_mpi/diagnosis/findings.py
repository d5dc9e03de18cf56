"""What is found out about a job before it trains: facts of its ranks, and findings about them.

The launcher and the MPI library are checked here, the rest beside. Each check is a plain function
that communicates nothing and needs neither torch nor MPI. The doctor prints all that is found;
train says the warnings and refuses the errors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from prunex_mpi.base.errors import listed
from prunex_mpi.base.units import number

T = TypeVar("T")

# From the worst on.
SEVERITIES = ("error", "warning", "note", "ok")
# The step that is the shell of an allocation (salloc where use_interactive_step is set).
INTERACTIVE_STEP = "4294967290"
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
    sets of `SETTINGS`.
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


# --------------------------------------------------------------------------------------------------
# The launcher, by what it has left in the environment
# --------------------------------------------------------------------------------------------------


def check_launcher(
    ranks: int, environment: Mapping[str, str], *, terminal: bool = False
) -> list[Finding]:
    """Find a job that fell apart into jobs of one rank, by what the launcher left behind.

    `terminal` says that this process reads from one: it was typed into a shell, which may itself be
    a task of Slurm (srun --pty).
    """
    started, by_slurm = _started_ranks(environment)
    if by_slurm and terminal:
        started = 1
    if ranks == 1 and started > 1:
        reason = (
            f"the launcher started {started} ranks but MPI sees a world of 1: the launcher and "
            "the MPI library are of different MPIs"
        )
        remedy = "use the mpirun of the library"
        if by_slurm:
            reason = (
                f"Slurm started {started} tasks but MPI sees a world of 1 rank: srun and the MPI "
                "library speak different PMI"
            )
            remedy = (
                "try srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list names what there is), or the "
                "mpirun of the library"
            )
        return [Finding("error", "launcher", reason, remedy)]
    name = describe_launcher(environment)
    tasks = number(environment.get("SLURM_NTASKS"), 1)
    if name == "none" and tasks > 1:
        reason = f"Slurm gave the job {tasks} tasks, and this is one process without a launcher"
        return [Finding("warning", "launcher", reason, "start it with srun or mpirun")]
    if name == "none":
        remedy = "start it as the job is to be started, with mpirun or srun, to check that job"
        return [Finding("note", "launcher", "this is one process without a launcher", remedy)]
    return [Finding("ok", "launcher", f"{name} started one job of {ranks} ranks")]


def describe_launcher(environment: Mapping[str, str]) -> str:
    """Return who started this rank and the PMI that it offers, "none" for a plain process."""
    if "PMIX_RANK" in environment:
        pmi = "PMIx"
    elif "PMI_RANK" in environment or "PMI_FD" in environment:
        pmi = "PMI-1 or PMI-2"
    else:
        pmi = "no PMI"
    environment = _without_shell(environment)
    # From the inside out: an mpirun may itself have been started by srun.
    for variable, name in (
        ("OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI"),
        ("MV2_COMM_WORLD_SIZE", "mpirun of MVAPICH"),
        ("MPI_LOCALNRANKS", "mpiexec of MPICH or Intel MPI"),
        ("SLURM_STEP_ID", "srun"),
        ("PMI_RANK", "a launcher with PMI"),
        ("PMIX_RANK", "a launcher with PMIx"),
    ):
        if variable in environment:
            return f"{name} ({pmi})"
    return "none"


def launcher_rank(environment: Mapping[str, str]) -> int:
    """Return the number that the launcher gave this process, whatever MPI makes of it."""
    for name in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI", "PMIX"):
        if environment.get(f"{name}_RANK"):
            return number(environment[f"{name}_RANK"], 1)
    return number(environment["SLURM_PROCID"], 1) if environment.get("SLURM_PROCID") else 0


def _started_ranks(environment: Mapping[str, str]) -> tuple[int, bool]:
    """Return how many ranks the launcher started, and whether that was Slurm's srun."""
    # An mpirun knows better than Slurm, which may have started the shell that it was typed into.
    for variable in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if variable in environment:
            return number(environment[variable], 1), False
    pmi, slurm = number(environment.get("PMI_SIZE"), 1), 1
    if "MPI_LOCALNRANKS" in environment:
        return pmi, False
    environment = _without_shell(environment)
    # Only under srun; an interactive shell of an allocation may start one process by itself.
    if "SLURM_STEP_ID" in environment:
        step = "SLURM_STEP_NUM_TASKS"
        slurm = number(environment.get(step) or environment.get("SLURM_NTASKS"), 1)
    # Where they differ, mpiexec had srun start its helpers, one per node.
    if slurm > 1 and pmi in (1, slurm):
        return slurm, True
    return pmi, False


def _without_shell(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of what was started from the shell of an allocation as of no step."""
    if environment.get("SLURM_STEP_ID") != INTERACTIVE_STEP:
        return environment
    return {name: value for name, value in environment.items() if name != "SLURM_STEP_ID"}


# --------------------------------------------------------------------------------------------------
# The MPI library: its threads, and whether all ranks have the same algorithms
# --------------------------------------------------------------------------------------------------


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
    if not facts[0].versions.get("mpi", "").startswith("Open MPI"):
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


def _more_threads(rank: RankFacts) -> str:
    """Return how this rank's library would give MPI_THREAD_MULTIPLE."""
    for variable in (MPI4PY_THREADS, OPEN_MPI_THREADS):
        if variable in rank.mpi_settings:
            return f"unset {variable}, which asks for {rank.mpi_settings[variable]}"
    if "CRAY" in rank.versions.get("mpi", "").upper():
        return f"set {CRAY_THREADS}=multiple"
    return "take an MPI that gives MPI_THREAD_MULTIPLE, as Open MPI and MPICH do by default"
