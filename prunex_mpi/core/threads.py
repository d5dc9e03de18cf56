"""How many threads of torch a rank has."""

import os

import torch

from prunex_mpi.base.limits import cores_of, cpu_limit


def set_threads(core_sharers: int, host_size: int) -> int:
    """Share the cores this rank may use among the ranks that may use the same; return threads.

    All `host_size` ranks of the machine share what it may keep busy. OMP_NUM_THREADS wins.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(cores_of(os.sched_getaffinity(0)))
        torch.set_num_threads(max(1, min(cores // core_sharers, cpu_limit() // host_size)))
    return torch.get_num_threads()
