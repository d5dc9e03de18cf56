"""Device, threads and buffer kind: what is chosen, and what is refused."""

import ctypes
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpi4py import MPI

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.comm.topology import build_topology, free_topology
from prunex_mpi.diagnosis import devices
from prunex_mpi.run.start import check_launched_together

pytestmark = pytest.mark.jobs

WORLD = MPI.COMM_WORLD
ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def _as_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe find this package and the launcher that lies beside python."""
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([beside, os.environ.get("PATH", "")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Let torch see `count` GPUs; return the list of devices that are made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "set_stream", chosen.append)
    return chosen


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    for requested in ("auto", "cpu"):
        assert devices.choose_device(requested, 3) == torch.device("cpu")
    with pytest.raises(UserError, match=r"--device cuda.*--device cpu") as caught:
        devices.choose_device("cuda", 0)
    assert caught.value.exit_code == USAGE


def test_ranks_of_a_machine_share_its_gpus_in_turn(monkeypatch):
    current = pretend_gpus(monkeypatch, 2)
    for requested in ("auto", "cuda"):
        found = [devices.choose_device(requested, rank).index for rank in range(5)]
        assert found == [0, 1, 0, 1, 0]
    assert [d.index for d in current] == [0, 1, 0, 1, 0] * 2
    assert devices.choose_device("cpu", 1) == torch.device("cpu")


TAKE_AND_FREE = """
import ctypes, resource
from prunex_mpi.diagnosis.devices import keep_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
library.free.argtypes = (ctypes.c_void_p,)
def take_and_free():
    memory = library.malloc(2**26)
    library.memset(memory, 1, 2**26)
    library.free(memory)
for keep in (False, True):
    print(keep and keep_freed_memory())
    take_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        take_and_free()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.any_mpi
@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this is not glibc")
def test_memory_that_was_freed_is_not_mapped_anew():
    """How many pages the system maps for 64 MiB that are taken and freed 10 times."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", TAKE_AND_FREE],
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, usual, after, kept = run.stdout.split()
    pages = 2**26 // resource.getpagesize()
    assert (before, after) == ("False", "True")
    assert int(usual) >= 10 * pages > pages > int(kept)


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")],
)
def test_what_the_user_has_set_of_the_allocator_wins(name, value, monkeypatch):
    set_to: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: set_to.append(given) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv(name, value)
    assert not devices.keep_freed_memory()
    assert not set_to


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
@pytest.mark.parametrize("name", ["MPICH_GPU_SUPPORT_ENABLED", "I_MPI_OFFLOAD", "MV2_USE_CUDA"])
def test_variables_of_the_vendors_say_whether_mpi_takes_cuda(name, value, expected, monkeypatch):
    monkeypatch.setenv(name, value)
    assert devices.claimed_cuda_support() is expected


@pytest.mark.usefixtures("_as_in_the_environment")
def test_probe_passes_on_host_memory_in_a_job_of_its_own():
    assert devices.probe("cpu") == ""


def test_probe_without_a_launcher_passes_nothing(monkeypatch):
    """One rank alone would exchange nothing."""
    monkeypatch.setattr(devices.shutil, "which", lambda _: None)
    assert "no mpiexec" in devices.probe("cpu")


@pytest.mark.mpi(min_size=2)
@pytest.mark.two_ranks
@pytest.mark.usefixtures("_as_in_the_environment")
def test_probe_passes_from_inside_a_job():
    if WORLD.size > 2:
        pytest.skip("two ranks show it; more would only share the cores with the probe")
    reason = devices.probe("cpu") if WORLD.rank == 0 else ""
    request = WORLD.Ibarrier()
    # Waiting inside MPI would take the cores from the probe.
    while not request.Test():
        time.sleep(0.05)
    assert reason == ""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a launcher in place of the MPI's that starts one process as it is."""
    path = tmp_path / "mpiexec"
    path.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(devices.shutil, "which", lambda _: str(path))
    return path


@pytest.mark.usefixtures("launcher")
def test_probe_of_ranks_that_do_not_find_each_other_passes_nothing():
    assert "starts no job of 2 ranks: it is of another MPI" in devices.probe("cpu", "bcast")


def test_probe_reports_a_crash_a_hang_and_a_missing_program(launcher, monkeypatch):
    assert "code 1: " in devices.probe("no-such-device")
    this_python = sys.executable
    monkeypatch.setattr(devices.sys, "executable", "/bin/false")
    assert "code 1: no output" in devices.probe("cuda")
    monkeypatch.setattr(devices.sys, "executable", this_python)
    # Before the watchdog takes the wait for a hang.
    assert "TimeoutExpired" in devices.probe("cpu", timeout_s=0.02)
    monkeypatch.setattr(devices, "PROBE_TIMEOUT_S", 0.01)
    assert "TimeoutExpired" in devices.probe("cpu")
    launcher.unlink()
    assert "FileNotFoundError" in devices.probe("cuda")


def test_probe_is_not_started_as_a_rank_of_this_job(monkeypatch):
    seen: dict[str, str] = {}

    def run(_command: list[str], env: dict[str, str], **_: object) -> None:
        seen.update(env)
        raise OSError("not started")

    # mpiexec of Open MPI 4 refuses to start where it sees the size of a universe.
    of_a_rank = ("PMI_RANK", "PMIX_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK")
    of_a_rank += ("OMPI_UNIVERSE_SIZE", "OMPI_MCA_orte_hnp_uri")
    for name in (*of_a_rank, "HOME_OF_PMI"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(devices.subprocess, "run", run)
    assert "OSError" in devices.probe("cpu")
    assert "HOME_OF_PMI" in seen
    assert not set(of_a_rank) & set(seen)


def test_what_a_launcher_frames_in_stars_is_told(monkeypatch):
    said = "****\n\nmpiexec does not support recursive calls\n\n****\n"
    ended = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(devices.shutil, "which", lambda _: "mpiexec")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: ended)
    assert devices.probe("cuda").endswith("code 1: mpiexec does not support recursive calls")


@pytest.mark.mpi
def test_tensors_on_the_cpu_are_handed_over_as_they_are():
    topology = build_topology(WORLD)
    for requested in ("auto", "host"):
        kind, _ = devices.resolve_mpi_buffers(topology, requested, torch.device("cpu"))
        assert kind == "host"
    with pytest.raises(UserError, match=r"--mpi-buffers device: .*--device cuda"):
        devices.resolve_mpi_buffers(topology, "device", torch.device("cpu"))
    free_topology(topology)


@pytest.mark.mpi
@pytest.mark.parametrize("claim", [None, False, True])
@pytest.mark.parametrize("probed", ["", "the probe ended with code 139: no output"])
def test_cuda_buffers_are_used_only_if_rank_zero_saw_them_work(claim, probed, monkeypatch):
    probes: list[str] = []

    def probe(device: str, timeout_s: float) -> str:
        assert (WORLD.rank, timeout_s) == (0, 60.0)
        probes.append(device)
        return probed

    monkeypatch.setattr(devices, "claimed_cuda_support", lambda: claim)
    monkeypatch.setattr(devices, "probe", probe)
    topology = build_topology(WORLD)
    contexts = claim is not False and not probed
    kind, reason = devices.resolve_mpi_buffers(topology, "auto", CUDA, 60.0)
    assert kind == ("device" if contexts else "host")
    if claim is not False:
        # The user's word counts, since the probe knows nothing of the path between nodes.
        kind, why = devices.resolve_mpi_buffers(topology, "device", CUDA)
        assert (kind, why) == ("device", "asked for, not tried")
    else:
        with pytest.raises(UserError, match="--mpi-buffers device") as caught:
            devices.resolve_mpi_buffers(topology, "device", CUDA)
        assert reason in str(caught.value)
    # A library that says no is not probed; one that was told to stage is not even asked.
    asked = 0 if claim is False or WORLD.rank else 1
    assert probes == ["cuda"] * asked
    assert devices.resolve_mpi_buffers(topology, "host", CUDA)[0] == "host"
    assert len(probes) == asked
    free_topology(topology)


@pytest.mark.parametrize(
    ("variables", "lone"),
    [
        ({}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, True),
        # One step of one task inside a larger allocation is what was asked for.
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, False),
        # Inside an allocation, but started without srun.
        ({"SLURM_NTASKS": "4"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": ""}, False),
    ],
)
def test_slurm_tasks_that_do_not_find_each_other_are_noticed(variables, lone, monkeypatch):
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # As typed into a shell that srun --pty started as one of its tasks.
    monkeypatch.setattr(os, "isatty", lambda _: True)
    check_launched_together(MPI.COMM_SELF)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    refused = pytest.raises(UserError, match=r"4 tasks.*--mpi=") if lone else nullcontext()
    with refused:
        check_launched_together(MPI.COMM_SELF)
