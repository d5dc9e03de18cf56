"""What every program of the package does around its work: flags, start of MPI, the way it ends."""

import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prunex_mpi.errors import FAILURE, UserError

if TYPE_CHECKING:
    from mpi4py import MPI

Options = TypeVar("Options")


def run_program(
    name: str,
    parse: Callable[[Sequence[str]], Options],
    start_mpi: Callable[[], "MPI.Comm"],
    work: Callable[["MPI.Comm", Options], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse the flags, start MPI, do `work(world, options)`; return the exit code on every rank.

    MPI starts only after parsing, so that --help needs none; a mistake in the flags is still
    reported through it, by one rank. A UserError must reach this point on every rank alike.
    """
    options, error = None, None
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except UserError as caught:
        error = caught
    world = start_mpi()
    abort_on_exceptions(world)
    from prunex_mpi.comm import raise_together

    try:
        raise_together(world, error)
        return work(world, options)
    except UserError as caught:
        if world.rank == 0:
            print(f"{name}: error: {caught}", file=sys.stderr, flush=True)
        # No rank may leave, and have the launcher end the others, before the line is out.
        world.Barrier()
        return caught.exit_code


def abort_on_exceptions(world: "MPI.Comm") -> None:
    """End the whole job when an exception leaves this rank: the others would wait for it."""

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if issubclass(kind, OSError):
            where = f"rank {world.rank} on {socket.gethostname()}"
            print(f"{where}: {kind.__name__}: {value}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, value, trace)
        sys.stderr.flush()
        world.Abort(FAILURE)

    sys.excepthook = hook
