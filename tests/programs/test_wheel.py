"""What is installed from a wheel is whole: it trains in another folder, without the checkout."""

import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from launch import run_python, train

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi]

CHECKOUT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("prunex_mpi", "tests", "batch", ".ci")
# An editable installation would lend what the wheel lacks.
ONLY_THE_WHEEL = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
"""


def run(arguments: list[str], cwd: Path, **extra: str) -> str:
    result = run_python(arguments, cwd, **extra)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the sources, since building leaves files beside them."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copy(CHECKOUT / name, tree)
    caches = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(CHECKOUT / name, tree / name, ignore=caches)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Build a wheel."""
    run(["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "made", "."], tree)
    (made,) = (tree / "made").glob("*.whl")
    return made


def test_the_wheel_holds_every_file_of_the_package(wheel):
    sources = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "prunex_mpi").rglob("*.*")
        if path.is_file() and path.suffix not in (".pyc", ".md", ".png", ".json")
    }
    read = {"prunex_mpi/config/presets/paper.toml", "prunex_mpi/tools/report/page.html"}
    assert {"prunex_mpi/train.py", *read} <= sources
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("prunex_mpi/")} == sources


def test_the_source_distribution_holds_all_that_its_tests_need(tree):
    build = "from setuptools.build_meta import build_sdist as build; build('made')"
    wanted = {
        str(path.relative_to(tree))
        for name in FOLDERS
        for path in (tree / name).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    run(["-c", build], tree)
    (made,) = (tree / "made").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/harness/launch.py", "tests/conftest.py", "batch/test.sh"} <= wanted
    assert wanted | {*SOURCES} <= held


@pytest.mark.long
def test_the_installed_wheel_trains_from_another_folder(wheel, tmp_path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    run(["-m", "pip", "install", "--no-deps", "--target", str(installed), str(wheel)], tmp_path)
    (installed / "sitecustomize.py").write_text(ONLY_THE_WHEEL)
    elsewhere.mkdir()
    where = {"PYTHONPATH": str(installed)}
    found = run(["-c", "import prunex_mpi; print(prunex_mpi.__file__)"], elsewhere, **where)
    assert Path(found.strip()) == installed / "prunex_mpi/__init__.py"
    assert "usage:" in run(["-m", "prunex_mpi.doctor", "--help"], elsewhere, **where)

    flags = ["--dataset", "digits", "--model", "resnet8", "--run-dir", "run"]
    flags += ["--outer-iterations", "2", "--local-steps", "2"]
    trained = train(1, flags, elsewhere, **where)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((elsewhere / "run/summary.json").read_text())["status"] == "completed"
