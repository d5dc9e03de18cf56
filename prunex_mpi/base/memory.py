"""How much memory the processes of a job may use together on this machine, and who says so."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prunex_mpi.base.units import MIB

CGROUP_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # of version 2, of version 1


def memory_limit(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[int, str]:
    """Return the lowest limit in bytes and in words whose it is; `root` holds proc and sys."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([(machine, "this machine has"), *_of_slurm(environment), *_of_cgroups(root)])


def _of_slurm(environment: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield what Slurm gives the job here; it counts in MiB, and 0 is all there is."""
    for variable, each in (
        ("SLURM_MEM_PER_NODE", ""),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        times = _number(environment.get(each)) if each else 1
        limit = _number(environment.get(variable)) * times * MIB
        if limit:
            yield limit, f"Slurm gives the job here ({variable})"


def _of_cgroups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the limits of this process's cgroup of either version, and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in CGROUP_FILES:
            continue
        for mount in _mounts(root, kind):
            # In a container the path may be one of the host, of which only the end is seen.
            for folder in (mount / own.lstrip("/"), *(mount / own.lstrip("/")).parents):
                if not folder.is_relative_to(mount):
                    break
                limit = _number(_read(folder / CGROUP_FILES[kind]))
                if limit:
                    yield limit, f"the job's cgroup may use (/{folder.relative_to(root)})"


def _mounts(root: Path, kind: str) -> list[Path]:
    """Return where the hierarchy of a kind may be; version 2 lies elsewhere beside version 1."""
    base = root / "sys/fs/cgroup"
    return [base / "memory"] if kind else [base, base / "unified"]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str | None) -> int:
    """Return a whole number, 0 for anything else, such as `max`."""
    return int(text) if text and text.isdecimal() else 0
