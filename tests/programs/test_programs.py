"""What all programs have in common: they are named, and answer at once."""

import subprocess
import sys
from pathlib import Path

import pytest

import prunex_mpi
from prunex_mpi import __version__
from prunex_mpi.__main__ import PROGRAMS
from prunex_mpi.base.errors import USAGE

FOLDER = Path(prunex_mpi.__file__).parent
WORDS = {
    "train": "--keep-ratio",
    "doctor": "--mpi-buffers",
    "bench": "kernels, memory, collectives, overhead, checkpoint, ddp, model or all",
    "export": "--torch-export",
    "report": "--csv",
}
NOTHING_LOADED = "sys.exit(3 if {'torch', 'mpi4py', 'numpy'} & set(sys.modules) else 0)"


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


def test_the_package_names_its_programs() -> None:
    done = python("-m", "prunex_mpi")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(PROGRAMS) == {path.stem for path in FOLDER.glob("[!_]*.py")}
    named = [line.split()[2] for line in done.stdout.splitlines() if "python -m" in line]
    assert named == [f"prunex_mpi.{name}" for name in PROGRAMS]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_tell_of_themselves_without_torch_and_mpi(name: str) -> None:
    for flag, word in (("--help", WORDS[name]), ("--version", __version__)):
        main = f"from prunex_mpi.{name} import main"
        call = f"try:\n    main(['{flag}'])\nexcept SystemExit as left:\n    assert not left.code"
        done = python("-c", f"import sys\n{main}\n{call}\n{NOTHING_LOADED}")
        assert done.returncode == 0, done.stderr
        assert word in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrong_flag_is_one_line(name: str) -> None:
    folder = ["run"] if name in ("export", "report") else []
    done = python("-m", f"prunex_mpi.{name}", *folder, "--vresion")
    assert done.returncode == USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"prunex_mpi.{name}: error: ")
    assert "unknown flag --vresion; did you mean --version?" in line
