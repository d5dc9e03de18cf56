"""Judge how the job was started by what its launcher left in the environment."""

from collections.abc import Mapping

from prunex_mpi.base.units import number
from prunex_mpi.diagnosis.findings import Finding

# The step that is the shell of an allocation (salloc where use_interactive_step is set).
INTERACTIVE_STEP = "4294967290"


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
        remedy = "start it as the job is to be started, with mpirun or srun, to judge that job"
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
