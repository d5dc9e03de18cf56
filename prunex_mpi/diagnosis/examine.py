"""Look at everything that a job needs, in turn, and print what is found."""

import os
import time

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.files import prepare_file, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, together
from prunex_mpi.comm.topology import Topology, nodes_of
from prunex_mpi.diagnosis import report
from prunex_mpi.diagnosis.devices import choose_device, claimed_cuda_support, probe, set_threads
from prunex_mpi.diagnosis.facts import gather_facts
from prunex_mpi.diagnosis.findings import Finding, errors
from prunex_mpi.diagnosis.folder import try_folder
from prunex_mpi.diagnosis.gpus import check_mpi_buffers, goes_through_host
from prunex_mpi.diagnosis.launcher import check_launcher, launcher_rank
from prunex_mpi.diagnosis.library import check_library
from prunex_mpi.diagnosis.links import measure_links, wait_asleep
from prunex_mpi.diagnosis.options import Options
from prunex_mpi.diagnosis.ranks import check_ranks, check_shared_folder

# Where one process of a job ends with an error, the launcher may end the others.
SINGLETON_GRACE_S = 5.0
OPERATIONS = {
    "sum": "Allreduce SUM",
    "bcast": "Bcast",
    "bor": "Allreduce BOR",
    "alltoallv": "Alltoallv",
    "allgather": "Allgather",
}


def examine(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> int:
    """Look at everything in turn; only world rank 0 prints. Collective on `world`."""
    findings = check_launcher(world.size, os.environ)
    if errors(findings):
        return report_singleton(findings, options)
    settings = options.settings
    together(world, lambda: prepare_file("json", options.json_file) if world.rank == 0 else None)
    with nodes_of(world, settings.ranks_per_node) as topology:
        heartbeat.enter("ranks")
        device, problem = find_device(settings.device, topology.host_rank)
        set_threads(topology.core_sharers)
        facts = gather_facts(topology, device, settings.run_dir, problem)
        heartbeat.enter("file system")
        problems = try_folder(topology, settings.run_dir)
        heartbeat.enter("probe")
        claimed, probed = ask_mpi(topology, settings.mpi_buffers, device, options.quick, heartbeat)
        if world.rank == 0:
            staged = goes_through_host(settings.mpi_buffers, device.type, claimed, probed)
            findings = [
                *findings,
                *check_ranks(facts, settings.mpi_buffers, settings.ranks_per_node > 0),
                *check_library(facts, staged),
                *check_shared_folder(settings.run_dir, problems),
                *check_mpi_buffers(settings.mpi_buffers, device.type, claimed, probed),
            ]
            print(report.head(), report.format_topology(facts), sep="\n\n", end="\n\n")
            print(report.format_findings(findings), flush=True)
        heartbeat.enter("links")
        links = [] if options.quick else measure_links(topology, beat=lambda: heartbeat.beat(0))
        if world.rank == 0:
            if links:
                print(f"\n{report.format_links(links, facts)}", flush=True)
            if options.json_file:
                write_json(options.json_file, report.as_json(facts, findings, links))
            print(f"\n{report.verdict(findings)}", flush=True)
        failed = broadcast_text(topology.world, "failed" if errors(findings) else "")
    return FAILURE if failed else 0


def report_singleton(findings: list[Finding], options: Options) -> int:
    """Say once that the job fell apart; each process is a job of its own that knows no other."""
    if launcher_rank(os.environ):
        time.sleep(SINGLETON_GRACE_S)
        return FAILURE
    prepare_file("json", options.json_file)
    print(f"{report.head()}\n\n{report.format_findings(findings)}\n", flush=True)
    if options.json_file:
        write_json(options.json_file, report.as_json([], findings, []))
    print(report.verdict(findings), flush=True)
    return FAILURE


def find_device(requested: str, host_rank: int) -> tuple[torch.device, str]:
    """Return the device that training would take, or the CPU and why that would fail."""
    try:
        return choose_device(requested, host_rank), ""
    except UserError as error:
        return torch.device("cpu"), str(error)


def ask_mpi(
    topology: Topology,
    requested: str,
    device: torch.device,
    quick: bool,
    heartbeat: Heartbeat,
) -> tuple[bool | None, dict[str, str] | None]:
    """Return on rank 0 what the library claims of CUDA buffers and what the probe says.

    The probe is one job for each operation, whose name it is given by. Rank 0 starts them, the
    others leave it the cores. Collective on `topology.world`.
    """
    chosen = device.type == "cuda" and topology.world.rank == 0
    claimed = claimed_cuda_support() if chosen else None
    wanted = chosen and not quick and requested != "host" and claimed is not False
    probed: dict[str, str] = {}
    for step, (operation, name) in enumerate(OPERATIONS.items()):
        heartbeat.beat(step)
        if wanted:
            probed[name] = probe(device.type, operation)
        wait_asleep(topology.world)
    return claimed, probed if wanted else None
