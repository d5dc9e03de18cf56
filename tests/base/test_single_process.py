"""Programs of one process: they end with a line and an exit code."""

import subprocess
import sys

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.single_process import run_single_process


def test_an_error_is_one_line_whatever_names_are_in_it(capsys):
    def context(_: object) -> None:
        raise UserError("class 'a\x1b[2Jb\nc' is not there", UNREADABLE)

    assert run_single_process("prunex_mpi.x", list, context, []) == UNREADABLE
    assert capsys.readouterr().err == ("prunex_mpi.x: error: class 'a\\x1b[2Jb c' is not there\n")


def test_programs_that_are_started_inherit_streams_that_were_closed():
    program = """if True:
        import subprocess, sys
        from prunex_mpi.base.single_process import open_closed_streams
        open_closed_streams()
        sys.exit(subprocess.run(["sh", "-c", "cat && echo out && echo error >&2"]).returncode)"""
    closed = ["bash", "-c", 'exec "$@" 0<&- >&- 2>&-', "", sys.executable, "-c", program]
    assert subprocess.run(closed, timeout=60, check=False).returncode == 0
