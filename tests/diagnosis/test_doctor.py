"""The doctor: every check on facts that are right and wrong, what is gathered, and the program."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from launch import environment, run_job
from nodes import NODE_SHAPES, WORLD, nodes_of
from refused import assert_refused

from mpi4py import MPI

from prunex_mpi import doctor
from prunex_mpi.base.errors import UserError, listed, log
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.config.resolve import make
from prunex_mpi.diagnosis import examine
from prunex_mpi.diagnosis import probe as doctor_probe
from prunex_mpi.diagnosis import ranks as findings_ranks
from prunex_mpi.diagnosis.devices import (
    bytes_free,
    cores_of_the_job,
    existing_folder,
    from_json,
    gather_facts,
    thread_level,
)
from prunex_mpi.diagnosis.findings import (
    HAN_SEGMENTS,
    REDUCTIONS,
    SETTINGS,
    SEVERITIES,
    Finding,
    RankFacts,
    check_agreement,
    check_launcher,
    check_thread_level,
    describe_launcher,
    errors,
    launcher_rank,
    per_machine,
)
from prunex_mpi.doctor import parse
from prunex_mpi.run import start

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
RANK = RankFacts(
    rank=0,
    host="alpha",
    node=0,
    host_rank=0,
    cores=(0, 1, 2, 3),
    job_cores=4,
    cpu_limit=64,
    threads=2,
    versions={"torch": "2.5", "prunex_mpi": "0.1", "python": "3.11", "mpi": "M", "mpi4py": "4.1"},
    clock=1000.0,
    device="cpu",
    device_problem="",
    gpu="",
    gpu_id="",
    gpus=0,
    allocator="",
    launcher="srun (PMIx)",
    thread_level="multiple",
    mpi_settings={},
    free_bytes=2**40,
)
# Two machines of two ranks, all well.
JOB = [
    replace(RANK, rank=i, host=("alpha", "beta")[i // 2], node=i // 2, host_rank=i % 2)
    for i in range(4)
]


def with_gpus(ranks: list[RankFacts], names: list[str], gpus: int = 2) -> list[RankFacts]:
    """Give the ranks the GPUs that are named."""
    return [
        replace(rank, device=f"cuda:{i}", gpu="H", gpu_id=name, gpus=gpus)
        for i, (rank, name) in enumerate(zip(ranks, names, strict=True))
    ]


def changed(rank: int, **changes: object) -> list[RankFacts]:
    """Return the job with one rank changed."""
    return [replace(r, **changes) if r.rank == rank else r for r in JOB]


def under(library: str, ranks: list[RankFacts] = JOB, **settings: str) -> list[RankFacts]:
    """Give the ranks another MPI library and a changed environment."""
    versions = {**RANK.versions, "mpi": library}
    return [replace(rank, versions=versions, mpi_settings=settings) for rank in ranks]


def the_only(findings: list[Finding], severity: str, *words: str) -> Finding:
    """Return the one finding, which must have this severity and hold these words."""
    assert len(findings) == 1, findings
    assert findings[0].severity == severity, findings[0]
    for word in words:
        assert word in findings[0].line()
    return findings[0]


def test_a_good_job_has_no_complaints():
    findings = findings_ranks.check_ranks(JOB, "auto", False)
    assert {f.severity for f in findings} == {"ok"}
    assert {"versions", "clocks", "nodes", "device", "cores", "threads"} <= {
        f.subject for f in findings
    }
    assert examine.verdict(findings) == "ready to train"


@pytest.mark.parametrize(
    ("name", "severity"),
    [*((name, "error") for name in RANK.versions if name != "mpi4py"), ("mpi4py", "warning")],
)
def test_versions_that_differ_are_named_with_their_hosts(name, severity):
    other = changed(3, versions={**RANK.versions, name: "9.9"})
    found = findings_ranks.check_versions(other)
    the_only(found, severity, f"{name} is {RANK.versions[name]} on alpha, beta", "9.9 on beta")


@pytest.mark.parametrize(
    ("ahead", "severity"), [(0.5, "ok"), (1.5, "note"), (60.0, "note"), (61.0, "warning")]
)
def test_clocks_may_differ_by_little(ahead, severity):
    found = the_only(findings_ranks.check_clocks(changed(2, clock=1000.0 + ahead)), severity)
    assert ("beta is" in found.reason) == (severity != "ok")


def test_nodes_are_what_shares_a_machine():
    check = findings_ranks.check_nodes
    the_only(check(JOB, False), "ok", "2 nodes of 2 ranks on 2 machines")
    apart = [replace(rank, node=rank.rank) for rank in JOB]
    the_only(check(apart, False), "warning", "/dev/shm")
    the_only(check(apart, True), "ok", "4 virtual nodes")
    across = [replace(rank, node=(rank.rank + 1) // 2) for rank in JOB]
    the_only(check(across, True), "warning", "spans alpha, beta", "--ranks-per-node")
    the_only(check(JOB[:3], False), "note", "1 to 2 ranks")


def test_every_rank_needs_the_same_kind_of_device():
    check = findings_ranks.check_devices
    the_only(check(JOB), "ok", "CPU")
    the_only(check([replace(RANK, gpus=2)]), "ok", "beside GPUs")
    mixed = with_gpus(JOB[:2], ["a", "b"]) + JOB[2:]
    the_only(check(mixed), "error", "cuda on alpha, cpu on beta")
    without = [replace(rank, device_problem="no GPU") for rank in JOB]
    the_only(check(without), "error", "rank 0 on alpha: no GPU")


def test_gpus_are_counted_per_machine():
    check = findings_ranks.check_gpus
    assert check(JOB) == []
    the_only(check(with_gpus(JOB, ["a", "b", "c", "d"])), "ok", "on alpha, beta: 2 ranks")
    shared = the_only(check(with_gpus(JOB, ["a", "a", "c", "d"]))[:1], "warning", "on alpha")
    assert "2 ranks share one GPU of 2" in shared.reason
    the_only(check(with_gpus(JOB[:2], ["a", "b"], gpus=4)), "note", "2 of 4 GPUs are not used")
    # Each rank sees only its own: the same number of another GPU.
    the_only(check(with_gpus(JOB[:2], ["a", "b"], gpus=1)), "ok")


@pytest.mark.parametrize(
    ("setting", "buffers", "severity"),
    [
        (EXPANDABLE, "auto", "warning"),
        (EXPANDABLE, "device", "error"),
        (EXPANDABLE, "host", None),
        ("PYTORCH_ALLOC_CONF=max_split_size_mb:64, expandable_segments : true", "auto", "warning"),
        ("PYTORCH_ALLOC_CONF=expandable_segments:False", "device", None),
        ("", "device", None),
    ],
)
def test_expandable_segments_and_mpi(setting, buffers, severity):
    on_cpu = [replace(rank, allocator=setting) for rank in JOB]
    assert findings_ranks.check_allocator(on_cpu, buffers) == []
    found = findings_ranks.check_allocator(with_gpus(on_cpu, list("abcd")), buffers)
    if severity is None:
        assert found == []
    else:
        the_only(found, severity, "expandable_segments", "CUDA IPC", "alpha, beta")


@pytest.mark.parametrize(
    ("cores", "job_cores", "severity", "words"),
    [
        ([(0, 1)] * 2, 2, "ok", "2 ranks may use 2 cores"),
        ([(0,), (1,)], 2, "ok", "2 ranks may use 2 cores"),
        ([(0, 1)] * 4, 2, "warning", "4 ranks share 2 cores"),
        ([(0,)] * 2, 4, "warning", "2 ranks are bound to the same 1 of 4 cores"),
        ([(0,)] * 2, 1, "warning", "2 ranks share 1 cores"),
        ([(0,), (0,), (1, 2, 3)], 8, "warning", "2 ranks are bound to the same 1 of 8"),
        ([(0,), (0, 1), (1,)], 8, "warning", "3 ranks are bound to the same 2 of 8"),
        ([(0,), (1,)], 64, "warning", "bound to 2 of 64 cores"),
    ],
)
def test_ranks_need_cores_of_their_own(cores, job_cores, severity, words):
    ranks = [replace(RANK, rank=i, cores=c, job_cores=job_cores) for i, c in enumerate(cores)]
    found = the_only(findings_ranks.check_cores(ranks), severity, words)
    assert bool(found.remedy) == (severity == "warning")


@pytest.mark.parametrize(
    ("ranks", "threads", "severities"),
    [(2, 1, ["ok", "ok"]), (2, 2, ["ok", "warning"]), (4, 1, ["warning", "ok"])],
)
def test_what_slurm_and_quotas_give_counts_and_not_the_affinity(ranks, threads, severities):
    """Nor do cores idle that nobody may keep busy."""
    one = replace(RANK, cores=tuple(range(8)), job_cores=64, cpu_limit=2, threads=threads)
    job = [replace(one, rank=i) for i in range(ranks)]
    found = [*findings_ranks.check_cores(job), *findings_ranks.check_threads(job)]
    assert [finding.severity for finding in found] == severities
    for finding in found:
        assert "2 of " in finding.reason and "Slurm or by a cgroup's quota" in finding.reason
    assert " 2 of 64 " in examine.format_topology(job)


def test_idle_cores_matter_less_beside_a_gpu():
    ranks = with_gpus([replace(RANK, cores=(0,), job_cores=64)], ["a"], gpus=1)
    the_only(findings_ranks.check_cores(ranks), "note", "bound to 1 of 64")


@pytest.mark.parametrize(
    ("threads", "ranks", "severity"),
    [(2, 2, "ok"), (4, 1, "ok"), (4, 2, "warning"), (1, 8, "ok"), (2, 8, "warning")],
)
def test_threads_fit_the_cores(threads, ranks, severity):
    job = [replace(RANK, rank=i, threads=threads) for i in range(ranks)]
    fair = f"OMP_NUM_THREADS={max(1, 4 // ranks)}"
    words = [fair, f"{ranks} ranks of {threads} threads share 4 cores"]
    the_only(findings_ranks.check_threads(job), severity, *(words if severity != "ok" else []))


def test_free_space_is_that_of_rank_zero():
    check = findings_ranks.check_free_space
    the_only(check(changed(1, free_bytes=0)), "ok", "1024.0 GiB")
    the_only(check(changed(0, free_bytes=2**20)), "warning", "1 MiB are left", "--run-dir")
    assert check(changed(0, free_bytes=-1)) == []


def test_a_folder_that_is_not_shared_is_an_error_per_host():
    the_only(findings_ranks.check_shared_folder("runs", {}), "ok", "runs")
    found = findings_ranks.check_shared_folder("runs", {"alpha": "no space", "beta": "not there"})
    assert [f.severity for f in found] == ["error", "error"]
    assert "on beta: not there" in found[1].reason


PASSED = {"Allreduce SUM": "", "Bcast": ""}
CRASHED = {"Allreduce SUM": "", "Bcast": "the probe ended with code 139"}


@pytest.mark.parametrize(
    ("requested", "kind", "claimed", "probed", "severities"),
    [
        ("auto", "cpu", None, None, ["note"]),
        ("host", "cpu", None, None, ["note"]),
        ("device", "cpu", None, None, ["error"]),
        ("host", "cuda", True, None, ["ok"]),
        ("auto", "cuda", True, None, ["note"]),
        ("auto", "cuda", False, None, ["note"]),
        ("device", "cuda", False, None, ["error"]),
        ("auto", "cuda", None, PASSED, ["ok", "ok"]),
        ("auto", "cuda", True, CRASHED, ["ok", "note"]),
        # The user's word overrides the probe, and training takes it.
        ("device", "cuda", True, CRASHED, ["ok", "warning"]),
    ],
)
def test_buffers_are_what_the_probe_says(requested, kind, claimed, probed, severities):
    found = findings_ranks.check_mpi_buffers(requested, kind, claimed, probed)
    assert [f.severity for f in found] == severities
    if kind == "cuda":
        says = {True: "claims", False: "denies", None: "does not say"}[claimed]
        assert says in found[0].reason
    if probed is CRASHED:
        assert "Bcast on CUDA buffers: the probe ended with code 139" in found[1].reason
    for finding in errors(found):
        assert finding.subject == "--mpi-buffers device"


def test_what_was_not_tried_between_hosts_is_said():
    check = findings_ranks.check_between
    the_only(check(["first", "last"], PASSED), "note", "on first alone", "diagnosis.probe cuda")
    for hosts, probed in ((["first"], PASSED), (["first", "last"], None), (["a", "b"], CRASHED)):
        assert check(hosts, probed) == []


OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH 5.0.2"
CRAY = "MPI VERSION : CRAY MPICH version 9"


@pytest.mark.parametrize(
    ("library", "settings", "remedy"),
    [
        (OPEN_MPI, {}, "take an MPI that gives MPI_THREAD_MULTIPLE"),
        (MPICH, {}, "take an MPI that gives MPI_THREAD_MULTIPLE"),
        (CRAY, {}, "set MPICH_MAX_THREAD_SAFETY=multiple"),
        (MPICH, {"MPI4PY_RC_THREAD_LEVEL": "single"}, "unset MPI4PY_RC_THREAD_LEVEL"),
        (OPEN_MPI, {"OMPI_MPI_THREAD_LEVEL": "2"}, "unset OMPI_MPI_THREAD_LEVEL"),
    ],
)
def test_overlap_needs_an_mpi_for_several_threads(library, settings, remedy):
    job = under(library, **settings)
    the_only(check_thread_level(job), "ok", "MPI_THREAD_MULTIPLE")
    job[3] = replace(job[3], thread_level="funneled")
    found = the_only(
        check_thread_level(job), "warning", "MPI_THREAD_FUNNELED on beta", "overlap-steps"
    )
    assert found.remedy.startswith(remedy)


def test_algorithms_must_be_those_of_all_ranks():
    check, reductions, segments = check_agreement, REDUCTIONS, HAN_SEGMENTS
    assert check(under(OPEN_MPI)) == []
    assert check(under(OPEN_MPI, **{reductions: "1", segments: "524288"})) == []
    mixed = under(OPEN_MPI, JOB[:2]) + under(OPEN_MPI, JOB[2:], **{reductions: "1"})
    found = the_only(check(mixed), "error", f"{reductions} is unset on alpha, 1 on beta")
    assert found.remedy.endswith(f"mpirun -x {reductions}")
    mixed = under(OPEN_MPI, JOB[:2], **{segments: "65536"}) + under(OPEN_MPI, JOB[2:])
    the_only(check(mixed), "error", f"{segments} is 65536 on alpha, unset on beta")
    for name, value in (("OMPI_MCA_coll", "^han"), ("OMPI_MCA_coll_han_priority", "0")):
        other = under(OPEN_MPI, JOB[:2], **{name: value}) + under(OPEN_MPI, JOB[2:])
        the_only(check(other), "error", f"{name} is {value} on alpha, unset on beta")
    # One machine has no use for these; another library for none of them.
    assert check([replace(rank, host="alpha") for rank in mixed]) == []
    assert check(under(MPICH, JOB[:2], **{reductions: "1"}) + under(MPICH, JOB[2:])) == []


@pytest.mark.parametrize(
    ("variables", "name", "rank"),
    [
        ({}, "none", 0),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"},
            "mpirun of Open MPI (PMIx)",
            2,
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "SLURM_STEP_ID": "0"},
            "mpiexec of MPICH or Intel MPI (PMI-1 or PMI-2)",
            1,
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, "srun (no PMI)", 3),
        ({"SLURM_STEP_ID": "0", "PMIX_RANK": "1", "SLURM_PROCID": "1"}, "srun (PMIx)", 1),
        ({"SLURM_STEP_ID": "0", "PMI_FD": "9", "PMI_RANK": "5"}, "srun (PMI-1 or PMI-2)", 5),
        # The shell of an allocation; mpirun leaves it as it is in its first rank.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "none", 0),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, "none", 0),
        ({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "0"}, "PMIx", 1),
    ],
)
def test_launchers_are_known_by_what_they_leave(variables, name, rank):
    assert name in describe_launcher(variables)
    assert launcher_rank(variables) == rank


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, "4 ranks"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, "3 ranks"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "2 ranks"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "4 tasks"),
        # srun itself offers PMI-2; mpiexec in an allocation has srun start one helper per node.
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "PMI_SIZE": "4"}, "4 tasks"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}, "8 ranks"),
    ],
)
def test_a_job_that_fell_apart_is_an_error(variables, words):
    found = the_only(check_launcher(1, variables), "error", words, "world of 1")
    assert ("srun --mpi=" in found.remedy) == ("tasks" in words)
    the_only(check_launcher(4, variables), "ok", "one job of 4 ranks")


def test_one_process_is_what_it_is():
    the_only(check_launcher(1, {}), "note", "mpirun or srun")
    the_only(check_launcher(1, {"OMPI_COMM_WORLD_SIZE": "1"}), "ok")
    # From a shell that is one of the tasks of srun --pty.
    shell = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    for variable in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        the_only(check_launcher(1, {**shell, variable: "1"}), "ok", "mp")
    the_only(check_launcher(1, shell, terminal=True), "ok")
    shell["SLURM_STEP_ID"] = "4294967290"
    the_only(check_launcher(1, shell), "note", "without a launcher")
    the_only(check_launcher(1, {"SLURM_NTASKS": "4"}), "warning", "4 tasks", "one process")
    the_only(check_launcher(1, {"PMI_SIZE": "many"}), "note")


def test_machines_with_the_same_finding_are_named_together():
    def check(ranks: list[RankFacts]) -> list[Finding]:
        return [Finding("note", "host", "even" if int(ranks[0].host) % 2 == 0 else "odd")]

    ranks = [replace(RANK, host=str(i)) for i in range(9)]
    reasons = [f.reason for f in per_machine(ranks, check)]
    assert reasons == ["on 0, 2, 4 and 2 more: even", "on 1, 3, 5 and 1 more: odd"]
    assert listed(["a", "b", "a", "c"]) == "a, b, c"


def test_the_worst_stands_first_with_its_remedy():
    findings = [
        Finding("ok", "fine", "all is well"),
        Finding("error", "very bad", "long " * 40, "do this"),
    ]
    text = examine.format_findings(findings)
    lines = text.splitlines()
    assert lines[1].startswith("  error    very bad  long long")
    assert all(len(line) <= examine.WIDTH for line in lines)
    assert lines[-2].strip() == "-> do this"
    assert lines[-1] == "  ok       fine      all is well"
    assert examine.verdict(findings) == "training would fail: very bad"
    assert {f.severity for f in findings} <= set(SEVERITIES)


def test_the_table_has_a_line_per_node():
    rows = examine.format_topology(with_gpus(JOB, ["a", "b", "c", "d"])).splitlines()
    assert len(rows) == 4
    assert rows[2].split() == ["0", "alpha", "2", "4", "of", "4", "2", "cuda:0", "H+cuda:1", "H"]


def test_facts_survive_as_text_even_from_another_version():
    assert from_json(json.dumps(asdict(JOB[3])), JOB[0]) == JOB[3]
    sent = asdict(JOB[3])
    del sent["gpus"]
    sent["more"] = 1
    assert from_json(json.dumps(sent), replace(RANK, gpus=7)) == replace(JOB[3], gpus=7)


def test_cores_of_a_slurm_job_are_those_it_was_given(monkeypatch):
    assert cores_of_the_job({}) >= 1
    assert cores_of_the_job({"SLURM_CPUS_ON_NODE": "1"}) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    cores_of = "prunex_mpi.diagnosis.devices.cores_of"
    monkeypatch.setattr(cores_of, lambda cpus: tuple({cpu % 32 for cpu in cpus}))
    assert cores_of_the_job({}) == 32
    # Of hardware threads.
    assert cores_of_the_job({"SLURM_CPUS_ON_NODE": "16"}) == 8


def test_the_folder_above_counts_where_there_is_none_yet(tmp_path):
    assert existing_folder(str(tmp_path / "a" / "b")) == tmp_path
    assert existing_folder(str(tmp_path)) == tmp_path
    assert bytes_free(str(tmp_path / "a")) > 0


def test_tokens_are_left_and_found(tmp_path):
    path = str(tmp_path / "token")
    left = {"run_dir": "/r", "path": path, "token": "secret"}
    assert examine.leave_token(path, "secret") == ""
    assert examine.find_token("/r", left) == ""
    assert "--run-dir means /s here" in examine.find_token("/s", left)
    other = {**left, "token": "other"}
    assert "another file" in examine.find_token("/r", other, limit_s=0)
    Path(path).unlink()
    assert "No such file" in examine.find_token("/r", left, limit_s=0)
    assert "can't be written" in examine.leave_token("/proc/none/token", "secret")


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        (["now"], ["'now'"]),
        (["--device", "tpu"], ["device", "'tpu'"]),
        (["--ranks-per-node", "-1"], ["ranks-per-node", "-1"]),
        (["--timeout", "0"], ["timeout", "0"]),
    ],
)
def test_bad_flags_are_refused(flags, culprits):
    assert_refused(lambda: parse(flags), *culprits)


def test_a_device_that_is_absent_is_told_not_raised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device, problem = examine.find_device("cuda", 0)
    assert device == CPU
    assert "--device cuda" in problem
    assert examine.find_device("auto", 0) == (CPU, "")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_facts_of_all_ranks_reach_rank_zero(ranks_per_node):
    with nodes_of(ranks_per_node) as topology:
        facts = gather_facts(topology, CPU, "runs", f"problem of {WORLD.rank}")
        assert bool(facts) == (WORLD.rank == 0)
        if not facts:
            return
    assert [rank.rank for rank in facts] == list(range(WORLD.size))
    assert [rank.node for rank in facts] == [
        i // min(ranks_per_node, WORLD.size) for i in range(WORLD.size)
    ]
    assert [rank.device_problem for rank in facts] == [f"problem of {i}" for i in range(WORLD.size)]
    for rank in facts:
        assert rank.cores and set(rank.cores) <= set(range(os.cpu_count() or 1))
        assert rank.job_cores >= len(rank.cores)
        assert rank.threads >= 1
        assert set(rank.versions) == {"prunex_mpi", "torch", "python", "mpi4py", "mpi"}
        assert rank.thread_level == thread_level()
        assert rank.mpi_settings == {
            name: os.environ[name] for name in SETTINGS if name in os.environ
        }
    assert max(r.clock for r in facts) - min(r.clock for r in facts) < 1
    assert findings_ranks.check_versions(facts)[0].severity == "ok"


@pytest.mark.mpi
def test_every_node_opens_what_rank_zero_wrote(tmp_path):
    folder = broadcast_text(WORLD, str(tmp_path))
    with nodes_of(1) as topology:
        assert examine.try_folder(topology, f"{folder}/new/run") == {}
        problems = examine.try_folder(topology, "/proc/none/run")
        assert list(problems.values()) == (
            ["/proc can't be written (No such file or directory)"] if WORLD.rank == 0 else []
        )
        # Nothing can be removed there either.
        problems = examine.try_folder(topology, f"{__file__}/run")
        assert list(problems.values()) == (
            [f"{__file__} can't be written (Not a directory)"] if WORLD.rank == 0 else []
        )
    if WORLD.rank == 0:
        assert not any(tmp_path.iterdir())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ranks_per_node", [1, WORLD.size])
def test_a_host_that_sees_another_folder_is_found(ranks_per_node, monkeypatch):
    """Even one where all ranks belong to a node that is led from elsewhere."""
    if WORLD.rank == 1:
        monkeypatch.setattr(examine.os.path, "abspath", lambda path: f"/elsewhere/{path}")
    with nodes_of(ranks_per_node) as topology:
        if WORLD.rank == 1:
            topology = replace(topology, host_rank=0)
        problems = examine.try_folder(topology, "runs")
    monkeypatch.undo()
    if WORLD.rank == 0:
        (problem,) = problems.values()
        assert "--run-dir means /elsewhere/runs here" in problem


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("requested", "quick", "claim", "probes"),
    [
        ("auto", False, True, True),
        ("device", False, None, True),
        ("auto", True, True, False),
        ("host", False, True, False),
        ("auto", False, False, False),
    ],
)
def test_each_operation_is_probed_by_itself_on_rank_zero(
    requested, quick, claim, probes, monkeypatch
):
    settings = make(mpi_buffers=requested, timeout=60.0)

    def probe(device: str, operation: str, timeout_s: float) -> str:
        assert (WORLD.rank, device, timeout_s) == (0, "cuda", 60.0)
        return f"{operation} crashed" if operation == "bcast" else ""

    monkeypatch.setattr(examine, "claimed_cuda_support", lambda: claim)
    monkeypatch.setattr(examine, "probe", probe)
    with nodes_of(1) as topology:
        claimed, probed = examine.ask_mpi(topology, settings, CUDA, quick, Heartbeat())
        assert examine.ask_mpi(topology, settings, CPU, False, Heartbeat()) == (None, None)
    if WORLD.rank or not probes:
        assert probed is None
    else:
        passed = {name: "" for name, _ in doctor_probe.TRIALS.values()}
        assert probed == {**passed, "Bcast": "bcast crashed"}
    assert claimed == (claim if WORLD.rank == 0 else None)


@pytest.mark.mpi(min_size=2)
def test_a_trial_sees_wrong_numbers():
    class Deaf:
        """A library that answers, but wrongly."""

        size, rank = 2, 1

        def Allreduce(self, *_: object, **__: object) -> None:
            pass

        Reduce = Bcast = Alltoallv = Allgather = Allgatherv = Allreduce

    for name, (_, operation) in doctor_probe.TRIALS.items():
        if name == doctor_probe.SPEED:
            continue
        # No assert, which python -O leaves out.
        with pytest.raises(RuntimeError, match="wrong"):
            operation(Deaf(), "cpu")


@pytest.mark.mpi
@pytest.mark.parametrize(("slow", "refused"), [("device", True), ("host", False)])
def test_a_library_that_copies_more_slowly_than_we_do_is_seen(slow, refused, monkeypatch):
    def allreduce(_comm: MPI.Comm, _flat: torch.Tensor, way: str) -> None:
        sleep(0.01 if way == slow else 0.001)

    monkeypatch.setattr(doctor_probe, "build_transport", lambda *given: Way(given[-1]))
    monkeypatch.setattr(doctor_probe, "allreduce_", allreduce)
    with pytest.raises(RuntimeError, match="times as long") if refused else nullcontext():
        doctor_probe.try_speed(WORLD, "cpu")


@pytest.mark.mpi
def test_ranks_of_the_probe_take_gpus_in_turn(monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(doctor_probe, "TRIALS", {"bcast": ("Bcast", lambda *_: None)})
    doctor_probe.main("cuda")
    doctor_probe.main("cpu")
    assert taken == [WORLD.rank % 2]


@pytest.mark.jobs
def test_a_rank_that_fails_ends_the_whole_probe(tmp_path):
    """The other one would wait for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    del torch.full\n"
    )
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    words = ["-m", "prunex_mpi.diagnosis.probe", "cpu", "bcast"]
    ended = run_job(2, words, tmp_path, PYTHONPATH=paths)
    assert ended.returncode == 1 and "AttributeError: " in ended.stderr


class Way(str):
    """One of the transports, that says which."""

    staging = ()


@pytest.mark.jobs
def test_program_under_the_launcher(tmp_path):
    arguments = ["-m", "prunex_mpi.doctor", "--ranks-per-node", "1", "--json", "found.json"]
    lacking = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    ended = run_job(2, [*arguments, "--device", "cpu"], tmp_path, **lacking)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for words in ("MPI library", "Topology: 2 ranks", "Findings"):
        assert ended.stdout.count(words) == 1, ended.stdout
    assert "ready to train" in ended.stdout.splitlines()[-1]
    for words in ("MPI_THREAD_SERIALIZED", "unset MPI4PY_RC_THREAD_LEVEL"):
        assert ended.stdout.count(words) == 1, ended.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ready"] is True
    assert len(found["ranks"]) == 2
    assert not any(f["severity"] == "error" for f in found["findings"])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_program_says_what_would_fail(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    flags = ["--quick", "--run-dir", "/proc/none/run", "--device", "cpu"]
    assert doctor.doctor(MPI.COMM_SELF, parse([*flags, "--mpi-buffers", "device"])) == 1
    said = capsys.readouterr().out
    assert said.endswith("training would fail: file system, --mpi-buffers device\n")
    assert "/proc can't be written" in said


@pytest.mark.jobs
def test_singletons_are_one_finding_told_by_one_of_them(monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(("OMPI_COMM", "PMI", "SLURM")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(examine, "SINGLETON_GRACE_S", 0.0)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for rank in "01":
        monkeypatch.setenv("SLURM_PROCID", rank)
        assert doctor.doctor(MPI.COMM_SELF, parse([])) == 1
        printed = capsys.readouterr().out
        if rank == "1":
            assert printed == ""
        else:
            assert printed.count("  error  ") == 1
            assert "Slurm started 2 tasks" in printed
            assert printed.endswith("training would fail: launcher\n")


def test_training_says_and_refuses_what_the_doctor_does(monkeypatch, caplog):
    job = [replace(rank, threads=64) for rank in under(OPEN_MPI)]
    place = start.Place(SimpleNamespace(world=MPI.COMM_SELF), CPU, 1, "")
    monkeypatch.setattr(start, "gather_facts", lambda *_: job)
    monkeypatch.setattr(log, "propagate", True)
    start.apply_findings(place, parse([]).settings)
    assert caplog.text.count("set OMP_NUM_THREADS=") == 1
    job[1] = replace(job[1], mpi_settings={"OMPI_MCA_coll": "^han"})
    with pytest.raises(UserError, match=r"OMPI_MCA_coll is .*han on alpha"):
        start.apply_findings(place, parse([]).settings)
