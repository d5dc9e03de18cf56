"""Which cores this process may use, and how many CPUs all that a job runs on this machine."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prunex_mpi.base.cgroups import cgroup_folders, read
from prunex_mpi.base.units import number


def cores_of(cpus: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the cores whose hardware threads these CPUs are, each by the first of its CPUs.

    Where the system does not tell, each CPU is a core. `root` holds sys.
    """
    folder = root / "sys/devices/system/cpu"
    threads = {cpu: read(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return tuple(sorted({int(re.split("[,-]", threads[cpu] or str(cpu))[0]) for cpu in threads}))


def cpu_limit(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return how many CPUs the ranks on this machine may keep busy together, whichever they are.

    Slurm and the quotas of cgroups say so, which need not show in the affinity; `root` holds proc
    and sys.
    """
    machine = os.sysconf("SC_NPROCESSORS_CONF")
    given = number(environment.get("SLURM_CPUS_ON_NODE")) or machine
    return min([machine, given, *_quotas(root)])


def usable_cores() -> int:
    """Return how many cores this rank may keep busy where it is alone."""
    return min(len(cores_of(os.sched_getaffinity(0))), cpu_limit())


def _quotas(root: Path) -> Iterator[int]:
    """Yield what this process's cgroups of either version, and those around it, give in CPUs."""
    for folder in cgroup_folders("cpu", root):
        pair = read(folder / "cpu.max").split() or [
            read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period")
        ]
        quota, period = map(number, pair)
        if quota and period:
            yield -(-quota // period)
