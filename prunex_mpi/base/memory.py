"""How much memory the processes of a job may use together on this machine, and who says so."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prunex_mpi.base.cgroups import cgroup_folders, read
from prunex_mpi.base.units import MIB, number

CGROUP_FILES = ("memory.max", "memory.limit_in_bytes")  # of version 2, of version 1


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
        times = number(environment.get(each)) if each else 1
        limit = number(environment.get(variable)) * times * MIB
        if limit:
            yield limit, f"Slurm gives the job here ({variable})"


def _of_cgroups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the limits of this process's cgroup of either version, and of those around it."""
    for folder in cgroup_folders("memory", root):
        for name in CGROUP_FILES:
            if limit := number(read(folder / name)):
                yield limit, f"the job's cgroup may use (/{folder.relative_to(root)})"
