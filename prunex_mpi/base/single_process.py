"""What a program does around its work that starts no MPI: flags, and the way it ends."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from prunex_mpi.base.errors import UserError, printable
from prunex_mpi.base.logs import log

Options = TypeVar("Options")


def run_single_process(
    name: str,
    parse: Callable[[Sequence[str]], Options],
    run: Callable[[Options], None],
    argv: Sequence[str] | None,
) -> int:
    """Parse the flags, do `work(options)`; return the exit code, having said in a line why."""
    open_closed_streams()
    try:
        run(parsed(parse, argv))
    except UserError as error:
        say_error(name, error)
        return error.exit_code
    return 0


def parsed(parse: Callable[[Sequence[str]], Options], argv: Sequence[str] | None) -> Options:
    """Return what `parse` makes of `argv`, or of the command line, whoever reads its help."""
    try:
        try:
            return parse(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Of `--help all | head`: the interpreter flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as under daemons.

    It takes the stream's own number, so that no file gets what is written to that, and programs
    that are started inherit it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def say_error(name: str, error: UserError) -> None:
    """Print in one line, whatever a name of the user's holds, why the program `name` ends."""
    line = " ".join(f"{name}: error: {error}".split())
    print(printable(line), file=sys.stderr, flush=True)


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise UserError unless `packages` are installed, which `what` needs and an extra brings."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f'{what} needs {" and ".join(missing)}: pip install "prunex_mpi[{extra}]"')


def print_result(text: str) -> None:
    """Print what a complete run ends with; a closed pipe or a full disk makes no failure of it."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("the results can't be printed: %s", error.strerror)
        # Python would try once more, and fail, when it ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
