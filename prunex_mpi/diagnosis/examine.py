"""Examine everything that a job needs, in turn, and print what is found."""

import json
import os
import secrets
import socket
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.files import write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table, format_table
from prunex_mpi.comm.agreement import broadcast_json, broadcast_text, gather_text
from prunex_mpi.comm.topology import Topology, nodes_of, set_threads
from prunex_mpi.diagnosis.devices import (
    choose_device,
    claimed_cuda_support,
    existing_folder,
    gather_facts,
    probe,
    software_versions,
)
from prunex_mpi.diagnosis.findings import (
    SEVERITIES,
    Finding,
    RankFacts,
    check_agreement,
    check_launcher,
    check_thread_level,
    describe_launcher,
    errors,
    launcher_rank,
)
from prunex_mpi.diagnosis.probe import TRIALS
from prunex_mpi.diagnosis.ranks import (
    check_between,
    check_mpi_buffers,
    check_ranks,
    check_shared_folder,
)
from prunex_mpi.settings.fields import Settings

# Where one process of a job ends with an error, the launcher may end the others.
SINGLETON_GRACE_S = 5.0
# A network file system may show a new file late.
FILE_LIMIT_S = 5.0
PAUSE_S = 0.1
WIDTH = 100
NAP_S = 0.01


def examine(world: MPI.Comm, options: Namespace, heartbeat: Heartbeat) -> int:
    """Look at everything in turn; only world rank 0 prints. Collective on `world`."""
    findings = check_launcher(world.size, os.environ, terminal=os.isatty(0))
    if errors(findings):
        return report_singleton(findings, options)
    settings = options.settings
    with nodes_of(world, settings.ranks_per_node) as topology:
        heartbeat.enter("ranks")
        device, problem = find_device(settings.device, topology.host_rank)
        set_threads(topology.core_sharers, topology.host_size)
        facts = gather_facts(topology, device, settings.run_dir, problem)
        heartbeat.enter("file system")
        problems = try_folder(topology, settings.run_dir)
        heartbeat.enter("probe")
        claimed, probed = ask_mpi(topology, settings, device, options.quick, heartbeat)
        hosts = list(dict.fromkeys(fact.host for fact in facts))
        wait_asleep(topology.world)
        if world.rank == 0:
            findings = [
                *findings,
                *check_ranks(facts, settings.mpi_buffers, settings.ranks_per_node > 0),
                *check_thread_level(facts),
                *check_agreement(facts),
                *check_shared_folder(settings.run_dir, problems),
                *check_mpi_buffers(settings.mpi_buffers, device.type, claimed, probed),
                *check_between(hosts, probed),
            ]
            print(format_software(), format_topology(facts), sep="\n\n", end="\n\n")
            print(format_findings(findings), flush=True)
            if options.json_file:
                write_json(options.json_file, as_json(facts, findings))
            print(f"\n{verdict(findings)}", flush=True)
        failed = broadcast_text(topology.world, "failed" if errors(findings) else "")
    return FAILURE if failed else 0


def report_singleton(findings: list[Finding], options: Namespace) -> int:
    """Report once that the job fell apart into jobs of one process."""
    if launcher_rank(os.environ):
        time.sleep(SINGLETON_GRACE_S)
        return FAILURE
    print(f"{format_software()}\n\n{format_findings(findings)}\n", flush=True)
    if options.json_file:
        write_json(options.json_file, as_json([], findings))
    print(verdict(findings), flush=True)
    return FAILURE


def find_device(requested: str, host_rank: int) -> tuple[torch.device, str]:
    """Return the device that training would take, or the CPU and why that would fail."""
    try:
        return choose_device(requested, host_rank), ""
    except UserError as error:
        return torch.device("cpu"), str(error)


def ask_mpi(
    topology: Topology, settings: Settings, device: torch.device, quick: bool, heartbeat: Heartbeat
) -> tuple[bool | None, dict[str, str] | None]:
    """Return on rank 0 what the library claims of CUDA buffers and what the probe says.

    The probe is one job for each operation, whose name it is given by. Rank 0 starts them, the
    others leave it the cores. Collective on `topology.world`.
    """
    chosen = device.type == "cuda" and topology.world.rank == 0
    claimed = claimed_cuda_support() if chosen else None
    wanted = chosen and not quick and settings.mpi_buffers != "host" and claimed is not False
    probed: dict[str, str] = {}
    for step, (operation, (name, _)) in enumerate(TRIALS.items()):
        heartbeat.beat(step)
        if wanted:
            probed[name] = probe(device.type, operation, settings.timeout)
        wait_asleep(topology.world)
    return claimed, probed if wanted else None


def try_folder(topology: Topology, run_dir: str) -> dict[str, str]:
    """Return on rank 0 what is wrong with the folder, by host; {} elsewhere and when all is right.

    Rank 0 leaves a token in it, or in the nearest folder above that exists, and every node leader
    must find it there, and a rank of each machine without one. Collective on `topology.world`.
    """
    world = topology.world
    sent = {"run_dir": os.path.abspath(run_dir), "path": "", "token": secrets.token_hex(16)}
    problem = ""
    if world.rank == 0:
        sent["path"] = str(existing_folder(run_dir) / f".prunex-doctor-{sent['token'][:8]}")
        problem = leave_token(sent["path"], sent["token"])
    try:
        received = broadcast_json(world, {**sent, "problem": problem})
        if not received["problem"] and (topology.is_leader or topology.host_rank == 0):
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


def find_token(run_dir: str, left: dict[str, str], limit_s: float = FILE_LIMIT_S) -> str:
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


def wait_asleep(world: MPI.Comm) -> None:
    """Wait for all ranks without keeping a core busy. Collective on `world`."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def format_software() -> str:
    """Return versions, MPI library and launcher."""
    versions = software_versions()
    library = versions.pop("mpi")
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"software     {software}\n"
        f"MPI library  {library}\n"
        f"launcher     {describe_launcher(os.environ)}"
    )


def format_topology(facts: Sequence[RankFacts]) -> str:
    """Return a table with one line per node."""
    rows = []
    for node in sorted({rank.node for rank in facts}):
        ranks = [rank for rank in facts if rank.node == node]
        cores = len({core for rank in ranks for core in rank.cores})
        busy = min(cores, *(rank.cpu_limit for rank in ranks))
        rows.append(
            (
                node,
                "+".join(sorted({rank.host for rank in ranks})),
                len(ranks),
                f"{busy} of {max(rank.job_cores for rank in ranks)}",
                max(rank.threads for rank in ranks),
                "+".join(dict.fromkeys(f"{r.device} {r.gpu}".strip() for r in ranks)),
            )
        )
    columns = ("node", "host", "ranks", "cores", "threads per rank", "device")
    return format_table(Table(f"Topology: {len(facts)} ranks", columns, tuple(rows)))


def format_findings(findings: Sequence[Finding]) -> str:
    """Return a table of the findings, the worst first, each with its remedy below the reason."""
    what = max(len(finding.subject) for finding in findings)
    margin = " " * (2 + 7 + 2 + what + 2)
    lines = ["Findings"]
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        start = f"  {finding.severity:<7}  {finding.subject:<{what}}  "
        lines += textwrap.wrap(
            finding.reason, WIDTH, initial_indent=start, subsequent_indent=margin
        )
        if finding.remedy:
            remedy = f"-> {finding.remedy}"
            lines += textwrap.wrap(
                remedy, WIDTH, initial_indent=margin, subsequent_indent=f"{margin}   "
            )
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    failing = dict.fromkeys(finding.subject for finding in errors(findings))
    return f"training would fail: {', '.join(failing)}" if failing else "ready to train"


def as_json(facts: Sequence[RankFacts], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what --json writes: all that was found, and whether a job would train."""
    return {
        "ready": not errors(findings),
        "findings": [asdict(finding) for finding in findings],
        "ranks": [asdict(rank) for rank in facts],
    }
