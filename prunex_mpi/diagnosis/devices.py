"""Device, threads and MPI buffer kind of one rank, each decided once and stated in the log."""

import ctypes
import os
import shutil
import subprocess
import sys

import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.diagnosis.probe import PASSED, TRIALS
from prunex_mpi.diagnosis.ranks import device_buffers_on_cpu, device_buffers_refused

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


def probe(device: str, operation: str = "") -> str:
    """Try an operation of `probe.py`, or all, on `device` (cuda | cpu) in a job of its own.

    Returns "" when all is right, else what went wrong. A library that cannot take device memory
    ends with a segmentation fault, hence a separate job, of two ranks on this host: what lies
    between nodes is not tried. One rank exchanges nothing, so without an mpiexec nothing is right.
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
            timeout=PROBE_TIMEOUT_S,
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
    topology: Topology, requested: str, device: torch.device
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
            reason = probe("cuda")
    reason = broadcast_text(topology.world, reason)
    if not reason and requested == "device":
        return "device", "asked for, not tried"
    if not reason:
        return "device", "the MPI library passed the probe on CUDA buffers, on one host"
    if requested == "device":
        raise UserError(device_buffers_refused(reason).line())
    return "host", reason
