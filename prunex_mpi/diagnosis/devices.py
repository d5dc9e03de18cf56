"""What a rank is on, decided once: its device, the kind of its MPI buffers; and facts of it."""

import ctypes
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

import mpi4py
from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.limits import cores_of, cpu_limit
from prunex_mpi.base.units import number
from prunex_mpi.comm.agreement import broadcast_text, gather_text
from prunex_mpi.comm.topology import Topology, library_name
from prunex_mpi.diagnosis.findings import SETTINGS, THREAD_LEVELS, RankFacts, describe_launcher
from prunex_mpi.diagnosis.machine import package_versions
from prunex_mpi.diagnosis.probe import PASSED, TRIALS
from prunex_mpi.diagnosis.ranks import MUST_AGREE, device_buffers_on_cpu, device_buffers_refused

DEFAULT_RUN_DIR = "runs"
# How the environment sets the allocator of torch.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PROBE_TIMEOUT_S, PROBE_RANKS = 60, 2
# Of glibc's malloc.h, in bytes: what may be free at the end of the heap before it is given back,
# and the size from which memory is mapped on its own in place of lying on the heap.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
OLDER_GLIBC_MOST = 2**25
# What a launcher leaves in the environment of its ranks; a probe started with it would believe to
# be one of them.
LAUNCHER_PREFIXES = (
    "PMI",
    "MV2_COMM_WORLD",
    "SLURM",
    "HYDRA",
    "HYDI",
    "MPI_LOCAL",
    "OMPI_COMM_WORLD",
    "OMPI_MCA_ess",
    # Of Open MPI 4, whose mpiexec refuses to start where it finds the first.
    "OMPI_UNIVERSE_SIZE",
    "OMPI_MCA_orte",
    "PRTE_LAUNCHED",
)


def choose_device(requested: str, host_rank: int) -> torch.device:
    """Return the device of the rank that is number `host_rank` on its machine.

    Several ranks may share one GPU. From now on this thread computes on a stream of its own: what
    MPI copies on streams that wait for the default one would else wait for all that is queued.
    Raises UserError when CUDA is asked for and absent.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU on this machine; use --device cpu")
    device = torch.device("cuda", host_rank % torch.cuda.device_count())
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors have freed for those that follow; say whether it does.

    Each training step frees and takes the same tens of MiB. Given back to the system in between,
    every page of them is mapped and zeroed anew: up to a fifth of a step of a small network on the
    CPU. What the user has set of the allocator (MALLOC_... or GLIBC_TUNABLES) wins; other libraries
    than glibc are left alone.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    library = ctypes.CDLL(None)
    if own or "malloc" in os.environ.get("GLIBC_TUNABLES", "") or not hasattr(library, "mallopt"):
        return False
    on_heap = any(library.mallopt(M_MMAP_THRESHOLD, size) for size in (2**30, OLDER_GLIBC_MOST))
    return on_heap and bool(library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def claimed_cuda_support() -> bool | None:
    """Return what the MPI library says of CUDA buffers, None when it does not say."""
    for variable in ("MPICH_GPU_SUPPORT_ENABLED", "I_MPI_OFFLOAD", "MV2_USE_CUDA"):
        if variable in os.environ:
            return os.environ[variable] not in ("", "0")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        # The sixth field is the path, which may hold spaces.
        paths = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libmpi" in line}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            # Replaced on disk since it was loaded: it cannot be asked.
            continue
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):
            supported = ctypes.c_int(0)
            library.MPIX_GPU_query_support(0, ctypes.byref(supported))
            return bool(supported.value)
    return None


def probe(device: str, operation: str = "", timeout_s: float = math.inf) -> str:
    """Try an operation of `probe.py`, or all, on `device` (cuda | cpu) in a job of its own.

    Returns "" when all is right, else what went wrong. A library that cannot take device memory
    ends with a segmentation fault, hence a separate job, of two ranks on this host: what lies
    between nodes is not tried. One rank exchanges nothing, so without an mpiexec nothing is right.
    Nobody makes progress meanwhile, which this job is ended for after `timeout_s`.
    """
    launcher = shutil.which("mpiexec")
    if launcher is None:
        return "there is no mpiexec on PATH to try it with"
    words = [device, *([operation] if operation else TRIALS)]
    # A job of its own even from inside a job.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    program = [sys.executable, "-m", "prunex_mpi.diagnosis.probe", *words]
    try:
        result = subprocess.run(
            [launcher, "-n", str(PROBE_RANKS), *program],
            env=environment,
            timeout=min(PROBE_TIMEOUT_S, timeout_s / 2),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the probe did not end: {type(error).__name__}"
    if result.returncode == 0 and PASSED.format(PROBE_RANKS) in result.stdout:
        return ""
    if result.returncode == 0:
        return f"{launcher} starts no job of {PROBE_RANKS} ranks: it is of another MPI"
    # Launchers frame in dashes or stars what they say, and say something after a rank has.
    output = [x for x in (result.stdout + result.stderr).splitlines() if any(map(str.isalnum, x))]
    output = [line for line in output if "Error:" in line] or output
    return f"the probe ended with code {result.returncode}: {(output or ['no output'])[-1].strip()}"


def resolve_mpi_buffers(
    topology: Topology, requested: str, device: torch.device, timeout_s: float = math.inf
) -> tuple[str, str]:
    """Return ("host" | "device", reason) alike on every rank. Collective on `topology.world`.

    `auto` asks the library and then probes; `device` is the user's word against the probe, which
    knows nothing of the path between nodes, and refused with a UserError where the library itself
    says no.
    """
    if device.type == "cpu":
        if requested == "device":
            raise UserError(device_buffers_on_cpu().line())
        return "host", "tensors are in host memory"
    if requested == "host":
        return "host", "asked for"
    reason = ""
    if topology.world.rank == 0:
        if claimed_cuda_support() is False:
            reason = "the MPI library says that it takes no CUDA buffers"
        elif requested == "auto":
            reason = probe("cuda", timeout_s=timeout_s)
    reason = broadcast_text(topology.world, reason)
    if not reason and requested == "device":
        return "device", "asked for, not tried"
    if not reason:
        return "device", "the MPI library passed the probe on CUDA buffers, on one host"
    if requested == "device":
        raise UserError(device_buffers_refused(reason).line())
    return "host", reason


# --------------------------------------------------------------------------------------------------
# What it tells the others: the facts that findings are made of
# --------------------------------------------------------------------------------------------------


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
