"""Hosts of a job: which there are, by name, and which of them answer."""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from prunex_mpi.base.errors import UserError, quote

HOST = re.compile(r"([\w.-]+)(?::(\d{1,6}))?")
# How Slurm writes tasks per node: 4(x2),3.
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# For a host to answer.
PROBE_LIMIT_S = 15.0


def read_hosts(text: str) -> dict[str, int]:
    """Return the ranks of each host of a list such as a:4,b:4."""
    found = {}
    for word in text.split(","):
        match = HOST.fullmatch(word.strip())
        if match is None or not int(match[2] or 1):
            raise UserError(f"--hosts: {quote(word)} is no host such as node1 or node1:4")
        if match[1] in found:
            raise UserError(f"--hosts names {match[1]} twice: give all its ranks at once")
        found[match[1]] = int(match[2] or 1)
    return found


def slurm_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the ranks of each host of the Slurm job that this is part of."""
    nodes, tasks = (environment.get(f"SLURM_{x}", "") for x in ("JOB_NODELIST", "TASKS_PER_NODE"))
    if not nodes or not tasks:
        raise UserError("which hosts? give --hosts A:RANKS,B:RANKS, or start it in a Slurm job")
    try:
        names = _scontrol("show", "hostnames", nodes).split()
    except (OSError, subprocess.CalledProcessError) as error:
        text = f"`scontrol show hostnames {nodes}` failed ({error}); give --hosts"
        raise UserError(text) from None
    counts = [int(n) for n, times in TASKS.findall(tasks) for _ in range(int(times or 1))]
    if len(names) != len(counts):
        raise UserError("this step has a part of its Slurm job's hosts; give --hosts A:RANKS,...")
    return dict(zip(names, counts, strict=True))


def lost_to_slurm(environment: Mapping[str, str]) -> set[str]:
    """Return the hosts that Slurm has taken out of the job that this is part of, for good."""
    before, job, array, task = (
        environment.get(f"SLURM_{x}", "")
        for x in ("JOB_NODELIST", "JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID")
    )
    if not before or not job:
        return set()
    # Where Slurm does not tell, nothing is known to be lost.
    with suppress(OSError, subprocess.CalledProcessError):
        text = _scontrol("--oneliner", "show", "job", f"{array}_{task}" if array else job)
        if now := re.search(r"\sNodeList=([^\s(]+)", text):
            then, left = (_scontrol("show", "hostnames", x).split() for x in (before, now[1]))
            return {*then} - {*left}
    return set()


def _scontrol(*words: str) -> str:
    """Return what a command of Slurm says; raise OSError or CalledProcessError."""
    command = ["scontrol", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_here(name: str) -> bool:
    """Return whether a host is this one."""
    return name in ("localhost", socket.gethostname(), socket.gethostname().split(".")[0])


def start_probes(probe: str, names: Sequence[str] | Mapping[str, int]) -> dict[str, Any]:
    """Ask hosts for an answer, all at once."""
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    found = {}
    for name in names:
        if is_here(name):
            continue
        words = [word.replace("{host}", name) for word in shlex.split(probe)]
        try:
            found[name] = subprocess.Popen(words, start_new_session=True, **quiet)
        except OSError as error:
            raise UserError(f"--probe: {quote(words[0])}: {error.strerror}") from None
    return found


def probes_are_over(probes: Mapping[str, subprocess.Popen], began: float) -> bool:
    """Return whether all hosts have answered, or have had the time to."""
    late = time.monotonic() - began > PROBE_LIMIT_S
    return late or all(probe.poll() is not None for probe in probes.values())


def close_probes(probes: Mapping[str, subprocess.Popen]) -> list[str]:
    """Return who has answered; end the probes of the others."""
    found = [name for name, probe in probes.items() if probe.poll() == 0]
    for probe in probes.values():
        if probe.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
    return found
