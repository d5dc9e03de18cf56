"""The benchmark: its tables are complete and sane, its flags are checked, --help loads nothing."""

import json

import pytest
import torch
from compared import assert_sane, column
from launch import run_python
from refused import assert_refused

from mpi4py import MPI

from prunex_mpi import bench
from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.comm.topology import Topology, build_topology, free_topology, nodes_of
from prunex_mpi.config.resolve import make
from prunex_mpi.research import measure
from prunex_mpi.research.bench import choose_sections, parse, run_sections
from prunex_mpi.research.measure import Bench, block_codes, collectives, kernels
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools import export_proof
from prunex_mpi.tools.export_proof import Action, seconds_per_call, wall_times

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]

CPU = torch.device("cpu")
SMALL = make(model="resnet8", batch_size=4, device="cpu")


def bench_on(topology: Topology, settings: Settings = SMALL, **more: object) -> Bench:
    """Return where sections measure, in one turn unless told otherwise."""
    more = {"models": ("resnet8",), **more}
    return Bench(topology, settings, build_transport(CPU, 32.0, "host"), CPU, Heartbeat(), **more)


@pytest.fixture
def alone():
    topology = build_topology(MPI.COMM_SELF)
    yield bench_on(topology, repeat=2)
    free_topology(topology)


def test_kernels_time_every_step_against_a_copy_of_the_stated_bytes(alone):
    steps, _ = kernels(alone)
    assert_sane(steps)
    assert all(
        ms > 0 for name in steps.columns if name.endswith("ms") for ms in column(steps, name)
    )
    assert column(steps, "step") == [
        "intra candidate",
        "projection",
        "pack",
        "unpack",
        "dual update",
        "dual update + norms",
    ]
    size = dict(zip(column(steps, "step"), column(steps, "MiB"), strict=True))
    assert size["dual update"] == 2 * size["projection"] == 2 * size["unpack"]
    assert 0.4 < size["pack"] / size["projection"] < 0.7
    for row in steps.rows:
        named = dict(zip(steps.columns, row, strict=True))
        assert named["times copy"] == pytest.approx(named["step ms"] / named["copy ms"])
        promised = named["step"] in ("projection", "pack", "unpack", "dual update")
        assert named["aim"] == (3.0 if promised else None)


def test_codes_by_blocks_are_timed_against_a_copy_of_the_vector(alone):
    table = block_codes(alone, 300 * 128)
    assert_sane(table)
    steps = list(zip(column(table, "payload"), column(table, "step"), strict=True))
    assert steps[:3] == [("fp16", "encode"), ("fp16", "decode"), ("fp16", "add")]
    assert steps[-3:] == [("int2", "encode"), ("int2", "decode"), ("int2", "add")]
    bits = dict(zip(column(table, "payload"), column(table, "bits per value"), strict=True))
    codes = {"int8": 8.125, "int4": 4.125, "int2": 2.125}
    assert bits == {"fp16": 16, "bf16": 16, **codes}


def test_overhead_trains_with_the_driver_before_and_after_the_freeze(alone):
    records = measure.train(alone, "resnet8")
    half = 1 + measure.MEASURED
    assert [r["frozen"] for r in records] == [False] * half + [True] * half
    (table,) = measure.overhead(alone)
    assert_sane(table)
    assert column(table, "freeze") == ["before", "after"]
    for row in table.rows:
        named = dict(zip(table.columns, row, strict=True))
        consensus = sum(named[f"{phase} ms"] for phase in CONSENSUS_PHASES) / 1e3
        share = 100 * consensus / (named["local s"] + consensus)
        assert named["share %"] == pytest.approx(share)
        assert 0 < share < 100


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_collectives_are_timed_alike_on_every_rank(ranks_per_node):
    world = MPI.COMM_WORLD
    topology = build_topology(world, ranks_per_node)
    (transfers,) = collectives(bench_on(topology))
    many_nodes, big_nodes = topology.num_nodes > 1, max(topology.node_sizes) > 1
    free_topology(topology)
    assert_sane(transfers)
    measured = set(
        zip(column(transfers, "operation"), column(transfers, "communicator"), strict=True)
    )
    assert {("Allreduce", "world"), ("Bcast", "world")} <= measured
    assert (("Allreduce", "leader") in measured) == many_nodes
    assert (("Bcast", "node") in measured) == big_nodes
    assert (("Allreduce, Bcast", "leader, node") in measured) == (many_nodes and big_nodes)
    titles = world.allgather([row[:2] for row in transfers.rows])
    assert all(other == titles[0] for other in titles)


@pytest.mark.mpi(min_size=2)
def test_dense_and_ddp_take_the_same_steps():
    settings = make(model="resnet8", batch_size=2, device="cpu")
    with nodes_of(MPI.COMM_WORLD) as topology:
        # In float64: the two add gradients in another order.
        models = ("odd_models:resnet8_double",)
        bench = bench_on(topology, settings, models=models, steps=2, repeat=2)
        (table,) = measure.compare_with_ddp(bench)
    assert_sane(table)
    (row,) = table.rows
    named = dict(zip(table.columns, row, strict=True))
    # Of two turns the medians are means: between the two ratios lies that of the sums.
    assert 0.1 < named["dense / DDP"] * named["DDP ms"] / named["dense ms"] < 10
    assert 0.1 < named["dense / lean DDP"] * named["lean DDP ms"] / named["dense ms"] < 10
    assert named["|difference|"] < 1e-12


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        (["--repaet", "3"], ["--repaet", "--repeat"]),
        (["kernel"], ["'kernel'", "'kernels'"]),
        (["--repeat", "0"], ["--repeat", "0"]),
        (["--threads", "-1"], ["--threads", "-1"]),
        (["--device", "tpu"], ["device", "'tpu'"]),
        (["ddp", "compare"], ["compare"]),
        (["ddp", "--amp", "fp16"], ["amp off or bf16"]),
    ],
)
def test_bad_flags_are_refused(flags, culprits):
    assert_refused(lambda: parse(flags), *culprits)


@pytest.mark.mpi(min_size=2)
def test_every_rank_refuses_what_cannot_be_measured_before_anything_is(monkeypatch):
    monkeypatch.setattr(measure, "collectives", pytest.fail)
    threads = torch.get_num_threads()
    flags = ["collectives", "ddp", "--models=resnet21", "--model=resnet8"]
    options = parse([*flags, f"--threads={threads}"])
    with pytest.raises(UserError, match="resnet21"):
        run_sections(MPI.COMM_WORLD, options, Heartbeat())


def test_a_section_that_hangs_ends_the_job():
    code = (
        "import time\n"
        "from prunex_mpi import bench\n"
        "from prunex_mpi.research import measure\n"
        "measure.make_state = lambda *_: time.sleep(100)\n"
        "bench.main(['kernels', '--model=resnet8', '--threads=1', '--timeout=2'])\n"
    )
    done = run_python(["-c", code])
    assert done.returncode == FAILURE
    assert "no progress for 2 s in phase kernels" in done.stderr


def test_sections_fit_the_number_of_ranks():
    assert choose_sections((), 1) == ("kernels", "overhead")
    assert choose_sections((), 4) == ("collectives",)
    assert choose_sections(("all",), 4) == choose_sections((), 4)
    assert choose_sections(("all", "ddp"), 4) == ("collectives", "ddp")
    assert choose_sections(("ddp",), 1) == ("ddp",)
    for section, ranks, says in (
        ("kernels", 2, "kernels is measured on one rank, not 2"),
        ("overhead", 2, "overhead is measured on one rank, not 2"),
        ("collectives", 1, "collectives needs 2 or more ranks"),
    ):
        with pytest.raises(UserError, match=says):
            choose_sections((section,), ranks)


@pytest.mark.usefixtures("failing_instead_of_aborting")
def test_the_program_prints_the_machine_and_writes_the_same_tables(tmp_path, capsys):
    path = tmp_path / "bench.json"
    flags = ["kernels", "--model=resnet8", "--repeat=1", "--threads=1", f"--json={path}"]
    assert bench.main(flags) == 0
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert f"torch {torch.__version__}" in written["machine"]["machine"]
    assert "1 threads per rank" in written["machine"]["machine"]
    for text in (*written["machine"].values(), *(t["title"] for t in written["tables"])):
        assert text in printed


def test_actions_take_turns_and_the_first_turn_is_not_counted():
    order = []
    actions = {
        "a": Action(lambda: order.append("a"), lambda: order.append("prepare")),
        "b": Action(lambda: order.append("b")),
    }
    heartbeat = Heartbeat()
    times = wall_times(actions, 2, CPU, heartbeat)
    assert order == ["prepare", "a", "b"] * 3
    # A long section is no rank that hangs.
    assert heartbeat.beats == 6
    assert all(len(taken) == 2 and (taken >= 0).all() for taken in times.values())
    order.clear()
    wall_times(actions, 2, CPU, heartbeat, alternate=True)
    assert order == ["b", "prepare", "a", "prepare", "a", "b", "b", "prepare", "a"]


def test_slow_networks_take_fewer_turns(monkeypatch):
    calls = []
    slow = torch.nn.Identity()
    slow.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(export_proof, "SAMPLE_S", 1e-9)
    for most, turns in ((1e3, 5), (0.0, 1)):
        monkeypatch.setattr(export_proof, "MOST_S", most)
        calls.clear()
        assert seconds_per_call({"slow": slow}, torch.ones(1), 5, Heartbeat())["slow"] > 0
        # Two calls before, and a turn that is not counted.
        assert len(calls) == 2 + 1 + turns
