"""Cores that a job may use on this machine: by affinity, Slurm and cgroups."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prunex_mpi.base.units import number


def cores_of(cpus: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the cores whose hardware threads these CPUs are, each by the first of its CPUs.

    Where the system does not tell, each CPU is a core. `root` holds sys.
    """
    folder = root / "sys/devices/system/cpu"
    threads = {cpu: _read(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
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
    for folder in _cgroup_folders(root):
        pair = _read(folder / "cpu.max").split() or [
            _read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period")
        ]
        quota, period = map(number, pair)
        if quota and period:
            yield -(-quota // period)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup of either version, and of those around it.

    Of version 1 those of CPUs; `root` holds proc and sys.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        kind = "cpu" if "cpu" in controllers.split(",") else controllers
        if kind not in ("", "cpu"):
            continue
        for mount in _mounts(root, kind):
            # In a container the path may be one of the host, of which only the end is seen.
            for folder in (mount / own.lstrip("/"), *(mount / own.lstrip("/")).parents):
                if not folder.is_relative_to(mount):
                    break
                yield folder


def _mounts(root: Path, kind: str) -> list[Path]:
    """Return where the hierarchy of a kind may be; version 2 lies elsewhere beside version 1."""
    base = root / "sys/fs/cgroup"
    return [base / kind] if kind else [base, base / "unified"]


def _read(path: Path) -> str:
    """Return the text of a file without the space around it, "" where it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
