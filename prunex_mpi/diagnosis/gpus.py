"""Judge GPUs, their sharing, and whether MPI takes their memory."""

from collections.abc import Mapping, Sequence

from prunex_mpi.base.errors import listed
from prunex_mpi.diagnosis.findings import Finding, RankFacts, per_machine


def check_devices(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find ranks without the device that was asked for, or with another kind than the others."""
    problems = {rank.device_problem: rank for rank in reversed(facts) if rank.device_problem}
    if problems:
        return [
            Finding("error", "device", f"rank {rank.rank} on {rank.host}: {problem}")
            for problem, rank in problems.items()
        ]
    kinds: dict[str, list[str]] = {}
    for rank in facts:
        kinds.setdefault(rank.device.partition(":")[0], []).append(rank.host)
    if len(kinds) > 1:
        where = ", ".join(f"{kind} on {listed(hosts)}" for kind, hosts in kinds.items())
        return [
            Finding(
                "error",
                "device",
                f"the kinds of device differ between ranks: {where}",
                "ask for GPUs on every node, or give --device cpu",
            )
        ]
    kind = next(iter(kinds))
    unused = kind == "cpu" and any(rank.gpus for rank in facts)
    text = "every rank computes on the CPU" + (", beside GPUs" if unused else "")
    return [Finding("ok", "device", text if kind == "cpu" else "every rank has a GPU")]


def check_gpus(facts: Sequence[RankFacts]) -> list[Finding]:
    """Find GPUs that several ranks share, and GPUs that nobody uses."""

    def check(ranks: Sequence[RankFacts]) -> list[Finding]:
        users: dict[str, int] = {}
        for rank in ranks:
            if rank.gpu_id:
                users[rank.gpu_id] = users.get(rank.gpu_id, 0) + 1
        if not users:
            return []
        most, gpus = max(users.values()), max(max(rank.gpus for rank in ranks), len(users))
        if most > 1:
            return [
                Finding(
                    "warning",
                    "GPU",
                    f"{most} ranks share one GPU of {gpus}: they take turns, and share its memory",
                    f"start at most {gpus} ranks per machine, each with a GPU that it sees",
                )
            ]
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
    return [
        Finding(
            "error" if mpi_buffers == "device" else "warning",
            "expandable_segments",
            f"{using[0].allocator} on {listed([rank.host for rank in using])}: such memory can't "
            "be shared between processes (CUDA IPC), which a CUDA-aware MPI does",
            "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or give --mpi-buffers host",
        )
    ]


def check_mpi_buffers(
    requested: str, kind: str, claimed: bool | None, probed: Mapping[str, str] | None
) -> list[Finding]:
    """Judge --mpi-buffers by what the library claims and, by operation, what the probe found.

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
        return [_unusable(requested, claim)]
    if probed is None:
        return [Finding("note", subject, f"{claim}; not probed")]
    findings = []
    for operation, problem in probed.items():
        if problem:
            findings.append(_unusable(requested, f"{operation} on CUDA buffers: {problem}"))
        else:
            findings.append(Finding("ok", subject, f"{operation} passed on CUDA buffers; {claim}"))
    return findings


def goes_through_host(
    requested: str, kind: str, claimed: bool | None, probed: Mapping[str, str] | None
) -> bool:
    """Say whether tensors are known to be on GPUs that MPI reaches through host memory.

    As `check_mpi_buffers`: what was not probed is not known.
    """
    if kind == "cpu" or requested == "device":
        return False
    return requested == "host" or claimed is False or any((probed or {}).values())


def device_buffers_on_cpu() -> Finding:
    """Return what is wrong with device buffers where there is no device."""
    return Finding(
        "error",
        "--mpi-buffers device",
        "the tensors are on the CPU here",
        "give --device cuda, or leave --mpi-buffers away",
    )


def device_buffers_refused(reason: str) -> Finding:
    """Return what is wrong with device buffers where MPI can't take them."""
    remedy = "use --mpi-buffers host or a CUDA-aware MPI"
    return Finding("error", "--mpi-buffers device", reason, remedy)


def _unusable(requested: str, reason: str) -> Finding:
    if requested == "device":
        return device_buffers_refused(reason)
    return Finding(
        "note",
        "CUDA-aware MPI",
        f"{reason}; tensors go through host memory",
        "load a CUDA-aware MPI to save the copies",
    )
