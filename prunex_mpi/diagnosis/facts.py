"""Gather the facts that findings are made of."""

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

import mpi4py
from mpi4py import MPI

from prunex_mpi.base.limits import cores_of, cpu_limit
from prunex_mpi.base.units import number
from prunex_mpi.comm.agreement import gather_text
from prunex_mpi.comm.topology import Topology, library_name
from prunex_mpi.diagnosis.findings import SETTINGS, THREAD_LEVELS, RankFacts, describe_launcher
from prunex_mpi.diagnosis.machine import package_versions
from prunex_mpi.diagnosis.ranks import MUST_AGREE

DEFAULT_RUN_DIR = "runs"
# How the environment sets the allocator of torch.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def software_versions() -> dict[str, str]:
    """Return the versions of everything that ranks have to agree on, and of mpi4py."""
    return {**package_versions(), "mpi4py": mpi4py.__version__, "mpi": library_name()}


def recorded_versions() -> dict[str, str]:
    """Return the versions that the config.toml of a run names: those that ranks agree on."""
    versions = software_versions()
    return {name: versions[name] for name in MUST_AGREE}


def gather_facts(
    topology: Topology, device: torch.device, run_dir: str, device_problem: str = ""
) -> list[RankFacts]:
    """Return the facts of all ranks on rank 0, an empty list elsewhere.

    Collective on `topology.world`: a barrier and a gather. The rank's threads must be set by now.
    """
    on_gpu = device.type == "cuda"
    environment = os.environ
    versions = software_versions()
    free_bytes = bytes_free(run_dir)
    cores = cores_of(os.sched_getaffinity(0))
    topology.world.Barrier()
    mine = RankFacts(
        rank=topology.world.rank,
        clock=time.time(),
        host=socket.gethostname(),
        node=topology.node_index,
        host_rank=topology.host_rank,
        cores=cores,
        job_cores=max(len(cores), cores_of_the_job(environment)),
        cpu_limit=cpu_limit(),
        threads=torch.get_num_threads(),
        versions=versions,
        device=str(device),
        device_problem=device_problem,
        gpu=torch.cuda.get_device_name(device) if on_gpu else "",
        gpu_id=gpu_identity(device) if on_gpu else "",
        gpus=torch.cuda.device_count(),
        allocator=", ".join(f"{x}={environment[x]}" for x in ALLOCATOR if environment.get(x)),
        launcher=describe_launcher(environment),
        thread_level=thread_level(),
        mpi_settings={name: environment[name] for name in SETTINGS if name in environment},
        free_bytes=free_bytes,
    )
    gathered = gather_text(topology.world, json.dumps(asdict(mine)))
    return [from_json(text, mine) for text in gathered]


def from_json(text: str, own: RankFacts) -> RankFacts:
    """Return the facts that another rank sent as text, whatever its version of the package is.

    What that one does not know is taken from this rank's `own` facts.
    """
    received = json.loads(text)
    known = {name: received[name] for name in vars(own) if name in received}
    return replace(own, **{**known, "cores": tuple(received["cores"])})


def cores_of_the_job(environment: Mapping[str, str]) -> int:
    """Return how many cores the job may use on this machine, before ranks are bound to some.

    What started this process is not bound; where it can't be asked, the cores of the rank count.
    """
    try:
        cpus = os.sched_getaffinity(os.getppid())
    except OSError:
        return 1
    cores = len(cores_of(cpus))
    # Slurm counts hardware threads, where a core has several.
    allocated = number(environment.get("SLURM_CPUS_ON_NODE")) or len(cpus)
    return min(cores, -(-allocated * cores // len(cpus)))


def thread_level() -> str:
    """Return how many threads may call MPI, one of THREAD_LEVELS."""
    levels = MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE
    return THREAD_LEVELS[levels.index(MPI.Query_thread())]


def gpu_identity(device: torch.device) -> str:
    """Return what the GPU is known by on all machines, as its number is not."""
    if uuid := getattr(torch.cuda.get_device_properties(device), "uuid", ""):
        return str(uuid)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{MPI.Get_processor_name()}/{visible}/{device.index}"


def existing_folder(path: str) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    folder = Path(os.path.abspath(path))
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def bytes_free(run_dir: str) -> int:
    """Return the free space of the file system of the run directory, -1 when it can't be told."""
    try:
        return shutil.disk_usage(existing_folder(run_dir or DEFAULT_RUN_DIR)).free
    except OSError:
        return -1
