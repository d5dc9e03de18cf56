"""Tell whether and how well a job would train: `python -m prunex_mpi.doctor`, also under mpirun.

Start it as training is to be started. Nothing that starts MPI or loads torch is imported before
the flags are parsed.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.checks.findings import Finding, errors
from prunex_mpi.checks.launcher import check_launcher, launcher_rank
from prunex_mpi.run.program import abort_on_exceptions, end_job, run_program
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.cli import Parser
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import make

if TYPE_CHECKING:
    import torch

    from mpi4py import MPI

    from prunex_mpi.comm.topology import Topology

# A probe of one operation may take a minute.
TIMEOUT_S = 120.0
# Where one process of a job ends with an error, the launcher may end the others.
SINGLETON_GRACE_S = 5.0
OPERATIONS = {"sum": "Allreduce SUM", "bcast": "Bcast", "bor": "Allreduce BOR"}


@dataclass(frozen=True)
class Options:
    """What to look at; `settings` holds the flags that training has as well."""

    settings: Settings
    json_file: str
    quick: bool


def build_parser() -> Parser:
    """Return the parser of the doctor's flags."""
    parser = Parser(
        prog="python -m prunex_mpi.doctor",
        description="Check topology, launcher, cores, GPUs, MPI, clocks, versions and file system, "
        "and measure the links. Exit code 1 when training would fail.",
        epilog="Start it as training is to be started: with mpirun or srun, on the same nodes.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"prunex_mpi {__version__}")
    add("--run-dir", default="runs", metavar="DIR", help="folder that results would go to [runs]")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda [auto]")
    add("--mpi-buffers", default="auto", metavar="NAME", help="auto, host or device [auto]")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="virtual nodes, as in training")
    add("--json", default="", metavar="FILE", dest="json_file", help="write what is found there")
    add("--quick", action="store_true", help="neither probe CUDA buffers nor measure links")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="X",
        help=f"seconds without progress before the job is ended [{TIMEOUT_S:g}]",
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name) asks for; neither torch nor MPI is loaded.

    Raises UserError with one line that names the culprit; `--help` and `--version` print and exit.
    """
    given = build_parser().parse_all(argv)
    settings = make(
        run_dir=given.run_dir,
        device=given.device,
        mpi_buffers=given.mpi_buffers,
        ranks_per_node=given.ranks_per_node,
        timeout=given.timeout,
    )
    return Options(settings, given.json_file, given.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.doctor", parse, doctor, argv)


def doctor(world: "MPI.Comm", options: Options) -> int:
    """Examine the job under the eyes of a watchdog. Collective on `world`."""
    heartbeat = Heartbeat()
    timeout_s = options.settings.timeout
    watchdog = Watchdog(heartbeat, world.rank, timeout_s, lambda: end_job(world))
    with closing(watchdog):
        abort_on_exceptions(world, heartbeat)
        findings = check_launcher(world.size, os.environ)
        if errors(findings):
            return report_singleton(findings, options)
        return examine(world, findings, options, heartbeat)


def report_singleton(findings: list[Finding], options: Options) -> int:
    """Say once that the job fell apart; each process is a job of its own that knows no other."""
    if launcher_rank(os.environ):
        time.sleep(SINGLETON_GRACE_S)
        return FAILURE
    from prunex_mpi.base.files import prepare_file, write_json
    from prunex_mpi.tools.doctor import report

    prepare_file("json", options.json_file)
    print(f"{report.head()}\n\n{report.format_findings(findings)}\n", flush=True)
    if options.json_file:
        write_json(options.json_file, report.as_json([], findings, []))
    print(report.verdict(findings), flush=True)
    return FAILURE


def examine(
    world: "MPI.Comm", findings: list[Finding], options: Options, heartbeat: Heartbeat
) -> int:
    """Look at everything in turn; only world rank 0 prints. Collective on `world`."""
    from prunex_mpi.base.files import prepare_file, write_json
    from prunex_mpi.checks.gpus import check_mpi_buffers
    from prunex_mpi.checks.ranks import check_ranks, check_shared_folder
    from prunex_mpi.comm.topology import broadcast_text, nodes_of, together
    from prunex_mpi.run.devices import set_threads
    from prunex_mpi.run.facts import gather_facts
    from prunex_mpi.tools.doctor import report
    from prunex_mpi.tools.doctor.folder import try_folder
    from prunex_mpi.tools.doctor.links import measure_links

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
            findings = [
                *findings,
                *check_ranks(facts, settings.mpi_buffers, settings.ranks_per_node > 0),
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


def find_device(requested: str, host_rank: int) -> tuple["torch.device", str]:
    """Return the device that training would take, or the CPU and why that would fail."""
    import torch

    from prunex_mpi.run.devices import choose_device

    try:
        return choose_device(requested, host_rank), ""
    except UserError as error:
        return torch.device("cpu"), str(error)


def ask_mpi(
    topology: "Topology",
    requested: str,
    device: "torch.device",
    quick: bool,
    heartbeat: Heartbeat,
) -> tuple[bool | None, dict[str, str] | None]:
    """Return on rank 0 what the library claims of CUDA buffers and what the probe says.

    The probe is one job for each operation, whose name it is given by. Rank 0 starts them, the
    others leave it the cores. Collective on `topology.world`.
    """
    from prunex_mpi.run.devices import claimed_cuda_support, probe
    from prunex_mpi.tools.doctor.links import wait_asleep

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


if __name__ == "__main__":
    sys.exit(main())
