"""Start jobs of several ranks from serial tests."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 600


def launcher() -> list[str]:
    """Return the launcher and its flags, as batch/test.sh exports it or as found; else skip."""
    if os.environ.get("PRUNEX_MPIRUN"):
        return shlex.split(os.environ["PRUNEX_MPIRUN"])
    found = mpirun()
    if found is None:
        pytest.skip("no mpirun beside python or on PATH")
    return [found, "--oversubscribe", "--bind-to", "none"] if is_open_mpi(found) else [found]


def mpirun() -> str | None:
    """Return the mpirun beside this Python, or the one on PATH."""
    path = Path(sys.executable).with_name("mpirun")
    return str(path) if path.exists() else shutil.which("mpirun")


def is_open_mpi(program: str = "") -> bool:
    """Return whether a launcher, or that of jobs, is Open MPI's; any other is MPICH's."""
    command = [program or launcher()[0], "--version"]
    return "Open MPI" in subprocess.run(command, capture_output=True, text=True).stdout


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a job: one thread per rank, the package importable."""
    harness = Path(__file__).resolve().parent
    paths = [str(harness.parents[1]), str(harness), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        **extra,
    }


def run(command: list[str], cwd: Path | None = None, **extra: str):
    """Run a command with a time limit; return the ended process and what it has written."""
    given = {"cwd": cwd, "env": environment(**extra), "stdin": subprocess.DEVNULL}
    return subprocess.run(command, **given, timeout=LIMIT_S, capture_output=True, text=True)


def run_python(arguments: list[str], cwd: Path | None = None, **extra: str):
    """Run `python arguments` in one process with a time limit; return it, ended."""
    return run([sys.executable, *arguments], cwd, **extra)


def run_job(ranks: int, arguments: list[str], cwd: Path, **extra: str):
    """Run `python arguments` on `ranks` ranks with a time limit; return the ended process."""
    return run([*launcher(), "-n", str(ranks), sys.executable, *arguments], cwd, **extra)


def start(command: list[str], cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Start a command, with its errors among its output; return it."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=cwd, env=environment(**extra), text=True, **pipes)


def train(ranks: int, arguments: list[str], cwd: Path, **extra: str):
    """Run the training program on `ranks` ranks in `cwd`."""
    return run_job(ranks, ["-m", "prunex_mpi.train", *arguments], cwd, **extra)


def repeatable(record: dict[str, Any]) -> dict[str, Any]:
    """Return what of a record of metrics.jsonl a run that goes on has bit for bit.

    Not times, nor the bytes by which ranks agree to leave and, gone on, on the plan once more.
    """
    kept = {k: v for k, v in record.items() if k not in ("seconds", "data_wait_seconds", "rank")}
    return kept | {"bytes": {k: v for k, v in record["bytes"].items() if k != "control"}}


def repeatable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return `repeatable` of all records of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [repeatable(json.loads(line)) for line in lines]
