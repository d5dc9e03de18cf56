"""Check what ranks say of themselves: software, clocks, nodes, cores, disk, GPUs and MPI."""

from collections import Counter
from collections.abc import Mapping, Sequence

from prunex_mpi.base.errors import listed
from prunex_mpi.base.units import GIB, MIB
from prunex_mpi.diagnosis.findings import (
    Finding,
    RankFacts,
    by_host,
    differences,
    grouped,
    per_machine,
)

CLOCK_NOTE_S = 1.0
CLOCK_WARNING_S = 60.0
LEAST_FREE_BYTES = GIB
# A run is refused where these differ between ranks; the others only go into the report.
MUST_AGREE = ("prunex_mpi", "torch", "mpi", "python")


def check_ranks(facts: Sequence[RankFacts], mpi_buffers: str, virtual: bool) -> list[Finding]:
    """Do every check that needs no more than the facts of all ranks.

    `mpi_buffers` is the setting (auto | host | device); `virtual` says that --ranks-per-node made
    the nodes.
    """
    return [
        *check_versions(facts),
        *check_clocks(facts),
        *check_nodes(facts, virtual),
        *check_devices(facts),
        *check_gpus(facts),
        *check_allocator(facts, mpi_buffers),
        *check_cores(facts),
        *check_threads(facts),
        *check_free_space(facts),
    ]


def check_versions(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find software that is not the same on every rank."""
    findings = []
    remedy = "start every rank in the same environment, on a file system that all nodes share"
    for name in facts[0].versions:
        where = differences(facts, lambda rank, name=name: rank.versions.get(name, "none"))
        if where:
            severity = "error" if name in MUST_AGREE else "warning"
            findings.append(Finding(severity, "versions", f"{name} is {where}", remedy))
    return findings or [Finding("ok", "versions", "the same software on every rank")]


def check_clocks(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find clocks that differ: time limits and heartbeats are compared between ranks."""
    slow, fast = (choose(facts, key=lambda rank: rank.clock) for choose in (min, max))
    apart = fast.clock - slow.clock
    if apart <= CLOCK_NOTE_S:
        return [Finding("ok", "clocks", f"{apart:.3f} s apart")]
    severity = "warning" if apart > CLOCK_WARNING_S else "note"
    reason = (
        f"{fast.host} is {apart:.1f} s ahead of {slow.host}; time limits and heartbeats are "
        "compared between nodes"
    )
    remedy = "have the nodes set their clocks by one server (chrony, ntp)"
    return [Finding(severity, "clocks", reason, remedy)]


def check_nodes(facts: Sequence[RankFacts], virtual: bool) -> list[Finding]:
    """Find nodes that are not what shares a machine, and nodes of different sizes."""
    nodes = grouped(facts, lambda rank: rank.node)
    sizes, machines = [len(ranks) for ranks in nodes.values()], len(by_host(facts))
    for node, ranks in nodes.items():
        if len(hosts := sorted({rank.host for rank in ranks})) > 1:
            reason = (
                f"node {node} spans {listed(hosts)}: what is meant to stay inside a node "
                "crosses the network"
            )
            remedy = "leave --ranks-per-node away, or give a divisor of the ranks per machine"
            return [Finding("warning", "nodes", reason, remedy)]
    if not virtual and len(sizes) > machines:
        reason = (
            f"{machines} machines make {len(sizes)} nodes: some ranks of one machine share no "
            "memory, so they work as separate nodes"
        )
        remedy = "let the ranks of a machine share /dev/shm (containers), or give --ranks-per-node"
        return [Finding("warning", "nodes", reason, remedy)]
    if min(sizes) < max(sizes):
        reason = (
            f"nodes of {min(sizes)} to {max(sizes)} ranks: averages are weighted, and the "
            "smaller nodes wait for the larger"
        )
        return [Finding("note", "nodes", reason, "start the same number of ranks on every node")]
    kind = "virtual nodes" if virtual else "nodes"
    text = f"{len(sizes)} {kind} of {sizes[0]} ranks on {machines} machines"
    return [Finding("ok", "nodes", text)]


def check_cores(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find ranks that must share cores, and cores that binding keeps from ranks."""

    def check(ranks: Sequence[RankFacts]) -> list[Finding]:
        usable = {core for rank in ranks for core in rank.cores}
        limit = min(rank.cpu_limit for rank in ranks)
        there = max(len(usable), *(rank.job_cores for rank in ranks))
        job_cores = min(limit, there)
        sharers = Counter(rank.cores for rank in ranks)
        crowded = max(sharers, key=lambda cores: sharers[cores] / len(cores))
        bound, to = sharers[crowded], len(crowded)
        if bound <= to:
            # No set of cores by itself has too many ranks, but they may overlap.
            bound, to = len(ranks), len(usable)
        unbound = "start with mpirun --bind-to none, or srun --cpu-bind=none"
        wait = "a rank that waits in MPI keeps its core busy, so that the others stand still"
        if len(ranks) > job_cores:
            reason = f"{len(ranks)} ranks share {limited(there, limit)}: {wait}"
            remedy = f"start at most {job_cores} ranks per machine"
            return [Finding("warning", "cores", reason, remedy)]
        if bound > to:
            reason = f"{bound} ranks are bound to the same {to} of {job_cores} cores: {wait}"
            return [Finding("warning", "cores", reason, unbound)]
        if 2 * len(usable) <= job_cores:
            severity = "warning" if any(not rank.gpu_id for rank in ranks) else "note"
            reason = f"the ranks are bound to {len(usable)} of {job_cores} cores: the others idle"
            remedy = f"{unbound}, or more cores per rank (--cpus-per-task)"
            return [Finding(severity, "cores", reason, remedy)]
        text = f"{len(ranks)} ranks may use {limited(len(usable), limit)}"
        return [Finding("ok", "cores", text)]

    return per_machine(facts, check)


def check_threads(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find more threads of torch than cores that they may run on."""

    def check(ranks: Sequence[RankFacts]) -> list[Finding]:
        limit = min(rank.cpu_limit for rank in ranks)
        there = len({core for rank in ranks for core in rank.cores})
        cores, words = min(limit, there), limited(there, limit)
        each = max(rank.threads for rank in ranks)
        if each > 1 and sum(rank.threads for rank in ranks) > cores:
            reason = f"{len(ranks)} ranks of {each} threads share {words}: each is in another's way"
            fair = max(1, cores // len(ranks))
            remedy = f"set OMP_NUM_THREADS={fair}, or unset it for a fair share"
            return [Finding("warning", "threads", reason, remedy)]
        return [Finding("ok", "threads", f"{each} per rank on {words}")]

    return per_machine(facts, check)


def limited(cores: int, limit: int) -> str:
    """Return how many of some cores the ranks of a machine may keep busy, in words."""
    if cores <= limit:
        return f"{cores} cores"
    return f"{limit} of {cores} cores (limited by Slurm or by a cgroup's quota)"


def check_free_space(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find a full disk below the run directory, as rank 0 sees it, which writes most of it."""
    free = facts[0].free_bytes
    if free < 0:
        return []
    if free < LEAST_FREE_BYTES:
        reason = (
            f"{free / MIB:.0f} MiB are left for the run directory; two checkpoints of every "
            "rank go there"
        )
        return [
            Finding("warning", "free space", reason, "make room, or give a --run-dir elsewhere")
        ]
    return [Finding("ok", "free space", f"{free / GIB:.1f} GiB for the run directory")]


def check_shared_folder(folder: str, problems: Mapping[str, str]) -> list[Finding]:
    """Check the folder of the run by what went wrong with it, by host."""
    if not problems:
        return [Finding("ok", "file system", f"every node opens what rank 0 writes for {folder}")]
    remedy = "give a --run-dir that can be written, on a file system that all nodes share"
    return [
        Finding("error", "file system", f"on {host}: {problem}", remedy)
        for host, problem in problems.items()
    ]


def check_devices(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find ranks without the device that was asked for, or with another kind than the others."""
    problems = {rank.device_problem: rank for rank in reversed(facts) if rank.device_problem}
    if problems:
        return [
            Finding("error", "device", f"rank {rank.rank} on {rank.host}: {problem}")
            for problem, rank in problems.items()
        ]
    if where := differences(facts, lambda rank: rank.device.partition(":")[0]):
        reason = f"the kinds of device differ between ranks: {where}"
        remedy = "ask for GPUs on every node, or give --device cpu"
        return [Finding("error", "device", reason, remedy)]
    if facts[0].device != "cpu":
        return [Finding("ok", "device", "every rank has a GPU")]
    unused = ", beside GPUs" if any(rank.gpus for rank in facts) else ""
    return [Finding("ok", "device", f"every rank computes on the CPU{unused}")]


def check_gpus(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find GPUs that several ranks share, and GPUs that nobody uses."""

    def check(ranks: Sequence[RankFacts]) -> list[Finding]:
        users = Counter(rank.gpu_id for rank in ranks if rank.gpu_id)
        if not users:
            return []
        most, gpus = max(users.values()), max(max(rank.gpus for rank in ranks), len(users))
        if most > 1:
            reason = f"{most} ranks share one GPU of {gpus}: they take turns, and share its memory"
            remedy = f"start at most {gpus} ranks per machine, each with a GPU that it sees"
            return [Finding("warning", "GPU", reason, remedy)]
        if len(users) < gpus:
            text = f"{gpus - len(users)} of {gpus} GPUs are not used"
            return [Finding("note", "GPU", text, f"start {gpus} ranks per machine")]
        return [Finding("ok", "GPU", f"{len(users)} ranks, each with a GPU of its own")]

    return per_machine(facts, check)


def check_allocator(facts: Sequence[RankFacts], mpi_buffers: str) -> list[Finding]:
    """Find an allocator of torch whose memory MPI can't share between processes."""
    using = [
        rank
        for rank in facts
        if rank.gpu_id and "expandable_segments:true" in rank.allocator.replace(" ", "").lower()
    ]
    if not using or mpi_buffers == "host":
        return []
    reason = (
        f"{using[0].allocator} on {listed([rank.host for rank in using])}: such memory can't "
        "be shared between processes (CUDA IPC), which a CUDA-aware MPI does"
    )
    remedy = "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or give --mpi-buffers host"
    severity = "error" if mpi_buffers == "device" else "warning"
    return [Finding(severity, "expandable_segments", reason, remedy)]


def check_mpi_buffers(
    requested: str, kind: str, claimed: bool | None, probed: Mapping[str, str] | None
) -> list[Finding]:
    """Check --mpi-buffers by what the library claims and, by operation, what the probe found.

    `kind` is cpu or cuda; `probed` holds "" for what passed, None where nothing was tried.
    """
    subject = "CUDA-aware MPI"
    if kind == "cpu":
        if requested == "device":
            return [device_buffers_on_cpu()]
        return [Finding("note", subject, "there is no GPU in use: nothing to probe")]
    says = {True: "claims", False: "denies", None: "does not say"}[claimed]
    claim = f"the MPI library {says} that it takes CUDA buffers"
    if requested == "host":
        return [Finding("ok", subject, f"not needed: --mpi-buffers host; {claim}")]
    if claimed is False:
        return [device_buffers_refused(claim) if requested == "device" else _staged(claim)]
    if probed is None:
        return [Finding("note", subject, f"{claim}; not probed")]
    findings = []
    for operation, problem in probed.items():
        reason = f"{operation} on CUDA buffers: {problem}"
        if problem and requested == "device":
            text = f"{reason}; --mpi-buffers device overrides that, and training may crash or wait"
            remedy = "use --mpi-buffers host or auto"
            findings.append(Finding("warning", "--mpi-buffers device", text, remedy))
        elif problem:
            findings.append(_staged(reason))
        else:
            findings.append(Finding("ok", subject, f"{operation} passed on CUDA buffers; {claim}"))
    return findings


def check_between(hosts: Sequence[str], probed: Mapping[str, str] | None) -> list[Finding]:
    """Say what was not tried where CUDA buffers passed on one of several hosts."""
    if probed is None or len(hosts) == 1 or any(probed.values()):
        return []
    reason = f"CUDA buffers were tried on {hosts[0]} alone, not on the way to other hosts"
    remedy = "start python -m prunex_mpi.diagnosis.probe cuda as the job is to be started"
    return [Finding("note", "CUDA-aware MPI", reason, remedy)]


def device_buffers_on_cpu() -> Finding:
    """Return what is wrong with device buffers where there is no device."""
    remedy = "give --device cuda, or leave --mpi-buffers away"
    return Finding("error", "--mpi-buffers device", "the tensors are on the CPU here", remedy)


def device_buffers_refused(reason: str) -> Finding:
    """Return what is wrong with device buffers where MPI can't take them."""
    remedy = "use --mpi-buffers host or a CUDA-aware MPI"
    return Finding("error", "--mpi-buffers device", reason, remedy)


def _staged(reason: str) -> Finding:
    text = f"{reason}; tensors go through host memory"
    return Finding("note", "CUDA-aware MPI", text, "an MPI with CUDA and UCX saves the copies")
