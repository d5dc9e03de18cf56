"""How many cores there are, by the machine, Slurm and cgroups."""

from pathlib import Path

import pytest

from prunex_mpi.base.limits import cores_of, cpu_limit, usable_cores

V1 = "4:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine of 64 CPUs."""
    monkeypatch.setattr("os.sysconf", {"SC_NPROCESSORS_CONF": 64}.__getitem__)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("siblings", "cores"),
    [
        ({}, (0, 1, 2, 3)),
        ({0: "0", 1: "1", 2: "2", 3: "3"}, (0, 1, 2, 3)),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, (0, 1)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, (0, 2)),
    ],
)
def test_hardware_threads_of_a_core_are_one_core(tmp_path, siblings, cores):
    for cpu, text in siblings.items():
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    assert cores_of({3, 2, 1, 0}, tmp_path) == cores


@pytest.mark.parametrize(
    ("own", "files", "slurm", "cpus"),
    [
        ("0::/", {}, "", 64),
        ("0::/", {}, "many", 64),
        ("0::/", {}, "8", 8),
        # As docker run --cpus=1.5, which sees the end of its path alone.
        ("0::/docker/0123", {"cpu.max": "150000 100000"}, "", 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, "8", 4),
        ("0::/a", {"a/cpu.max": "9900000 100000"}, "", 64),
        (V1, {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, "", 64),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "", 2),
    ],
)
def test_slurm_and_quotas_limit_what_the_affinity_does_not(tmp_path, own, files, slurm, cpus):
    write(tmp_path / "proc/self/cgroup", own)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu_limit({"SLURM_CPUS_ON_NODE": slurm}, tmp_path) == cpus


def test_a_process_uses_its_cores_as_far_as_it_may(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1000, 1001, 1002})
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    assert usable_cores() <= 2
