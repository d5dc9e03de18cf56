"""Name what this rank runs on: packages and processor. No MPI is started."""

import platform

import torch

from prunex_mpi import __version__
from prunex_mpi.base.limits import usable_cores


def package_versions() -> dict[str, str]:
    """Return the versions of this package, torch and Python."""
    return {
        "prunex_mpi": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def describe_machine(device: torch.device) -> str:
    """Return processor, cores, device, threads and versions of this rank in one line."""
    where = [
        processor_name(),
        f"{usable_cores()} usable cores",
        f"{torch.get_num_threads()} threads per rank",
    ]
    if device.type == "cuda":
        where.append(torch.cuda.get_device_name(device))
    versions = package_versions()
    return ", ".join([*where, f"torch {versions['torch']}", f"Python {versions['python']}"])


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
