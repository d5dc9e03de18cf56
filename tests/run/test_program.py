"""The way a program ends, of one process or several ranks."""

import pytest
from launch import run_job

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.run.program import run_single_process

# The rank that the flag names raises, the others wait for it.
PROGRAM = """
import sys
from prunex_mpi.base.errors import DamagedCheckpoint, UserError
from prunex_mpi.run import program

program.ALIKE_S = 1.0

def run(world, rank):
    if rank in ("all", str(world.rank)):
        raise UserError("the disk is gone; take another", 3)
    if rank == "damaged" and world.rank == 1:
        raise DamagedCheckpoint("rank-00001.safetensors is missing")
    world.Barrier()

sys.exit(program.run_program("program", lambda argv: argv[0], run, None))
"""


@pytest.mark.jobs
@pytest.mark.parametrize(("rank", "code"), [("all", 3), ("0", 1), ("1", 1)])
def test_an_error_of_one_rank_alone_ends_all_with_its_line(tmp_path, rank, code):
    """The others would wait for it until --timeout, and its line be lost."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_job(2, ["program.py", rank], tmp_path)
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("program: error: ")]
    assert line.endswith("the disk is gone; take another")
    assert ("rank 1 on " in line) == (rank == "1")
    assert "Traceback" not in done.stderr


@pytest.mark.jobs
def test_a_checkpoint_that_one_rank_can_not_read_again_ends_all_with_a_line(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_job(2, ["program.py", "damaged"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank-00001.safetensors is missing" in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_an_error_is_one_line_whatever_names_are_in_it(capsys):
    def context(_: object) -> None:
        raise UserError("class 'a\x1b[2Jb\nc' is not there", UNREADABLE)

    assert run_single_process("prunex_mpi.x", list, context, []) == UNREADABLE
    assert capsys.readouterr().err == ("prunex_mpi.x: error: class 'a\\x1b[2Jb c' is not there\n")
