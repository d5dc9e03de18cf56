"""Try whether all nodes share the folder that a run would write to."""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from prunex_mpi.comm.agreement import broadcast_text, gather_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.diagnosis.facts import existing_folder

# A network file system may show a new file late.
LIMIT_S = 5.0
PAUSE_S = 0.1


def try_folder(topology: Topology, run_dir: str) -> dict[str, str]:
    """Return on rank 0 what is wrong with the folder, by host; {} elsewhere and when all is right.

    Rank 0 leaves a token in it, or in the nearest folder above that exists, and every node leader
    must find it there. Collective on `topology.world`.
    """
    world = topology.world
    sent = {"run_dir": os.path.abspath(run_dir), "path": "", "token": secrets.token_hex(16)}
    problem = ""
    if world.rank == 0:
        sent["path"] = str(existing_folder(run_dir) / f".prunex-doctor-{sent['token'][:8]}")
        problem = leave_token(sent["path"], sent["token"])
    try:
        received = json.loads(broadcast_text(world, json.dumps({**sent, "problem": problem})))
        if not received["problem"] and topology.is_leader:
            problem = find_token(sent["run_dir"], received)
        answers = gather_text(world, json.dumps([socket.gethostname(), problem]))
    finally:
        if world.rank == 0:
            # Where nothing was written some systems say more than that nothing is there.
            with suppress(OSError):
                Path(sent["path"]).unlink()
    return {host: problem for host, problem in map(json.loads, answers) if problem}


def leave_token(path: str, token: str) -> str:
    """Write `token` to a new file; return why that failed, or ""."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(token)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        return f"{os.path.dirname(path)} can't be written ({error.strerror})"
    return ""


def find_token(run_dir: str, left: dict[str, str], limit_s: float = LIMIT_S) -> str:
    """Return why this host does not see, or can't write, what rank 0 has `left`; "" if it can."""
    if run_dir != left["run_dir"]:
        return f"--run-dir means {run_dir} here but {left['run_dir']} on rank 0"
    limit = time.monotonic() + limit_s
    while True:
        try:
            # Every rank writes its part of a checkpoint.
            with open(left["path"], "r+", encoding="utf-8") as file:
                if file.read() == left["token"]:
                    return ""
            problem = "another file is there"
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if time.monotonic() > limit:
            folder = os.path.dirname(left["path"])
            return f"what rank 0 wrote to {folder} can't be opened ({problem})"
        time.sleep(PAUSE_S)
