"""Programs of one process: they end with a line and an exit code."""

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.single_process import run_single_process


def test_an_error_is_one_line_whatever_names_are_in_it(capsys):
    def context(_: object) -> None:
        raise UserError("class 'a\x1b[2Jb\nc' is not there", UNREADABLE)

    assert run_single_process("prunex_mpi.x", list, context, []) == UNREADABLE
    assert capsys.readouterr().err == ("prunex_mpi.x: error: class 'a\\x1b[2Jb c' is not there\n")
