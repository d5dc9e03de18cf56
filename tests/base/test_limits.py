"""How many cores and how much memory there are, by the machine, Slurm and cgroups."""

from pathlib import Path

import pytest

from prunex_mpi.base.limits import cores_of, cpu_limit, memory_limit, usable_cores
from prunex_mpi.base.units import GIB, MIB

V1 = "4:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine of 64 CPUs and 64 GiB."""
    sizes = {"SC_NPROCESSORS_CONF": 64, "SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)


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


def test_the_machine_is_the_limit_where_nobody_sets_a_lower_one(tmp_path):
    assert memory_limit({}, tmp_path) == (64 * GIB, "this machine has")
    more = {"SLURM_MEM_PER_NODE": str(128 * 1024)}
    assert memory_limit(more, tmp_path) == (64 * GIB, "this machine has")
    for odd in ("0", "²", "unlimited"):
        assert memory_limit({"SLURM_MEM_PER_NODE": odd}, tmp_path)[0] == 64 * GIB


@pytest.mark.parametrize(
    ("given", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "8000"}, 8000),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "6"}, 6000),
        ({"SLURM_MEM_PER_GPU": "5000", "SLURM_GPUS_ON_NODE": "2"}, 10000),
    ],
)
def test_slurm_gives_less(tmp_path, given, mib):
    (variable, *_) = given
    expected = f"Slurm gives the job here ({variable})"
    assert memory_limit(given, tmp_path) == (mib * MIB, expected)


def test_cgroups_of_version_2_limit_what_is_in_them(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/slurm/job_7/step_0")
    base = tmp_path / "sys/fs/cgroup"
    for folder, text in (("", "max"), ("slurm", "max"), ("slurm/job_7", str(3 * GIB))):
        write(base / folder / "memory.max", text)
    write(base / "slurm/job_7/step_0/memory.max", str(4 * GIB))
    whose = "the job's cgroup may use (/sys/fs/cgroup/slurm/job_7)"
    assert memory_limit({}, tmp_path) == (3 * GIB, whose)
    assert memory_limit({"SLURM_MEM_PER_NODE": "1024"}, tmp_path)[0] == GIB


def test_cgroups_of_version_1_limit_what_is_in_them(tmp_path):
    write(tmp_path / "proc/self/cgroup", "9:cpu,memory:/job\n1:name=systemd:/x\n0::/")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert memory_limit({}, tmp_path)[0] == 64 * GIB
    write(tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(2 * GIB))
    whose = "the job's cgroup may use (/sys/fs/cgroup/memory/job)"
    assert memory_limit({}, tmp_path) == (2 * GIB, whose)


def test_a_container_sees_the_end_of_its_path_alone(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(GIB))
    assert memory_limit({}, tmp_path)[0] == GIB
