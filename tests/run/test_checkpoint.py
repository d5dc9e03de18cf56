"""Checkpoints over MPI: bit-exact on the same nodes, a stated rule on others, damage refused."""

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from beats import PAUSE_S, Noted, count_closely
from jobs import NoisyNet, run_directory
from launch import repeatable
from nets import OF_EMBEDDINGS, Reader
from nodes import WORLD, nodes_of
from safetensors import safe_open

from mpi4py import MPI

from prunex_mpi.base import files as base_files
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.comm.preemption import StopAgreement, stop_agreement
from prunex_mpi.comm.topology import Topology, free_topology
from prunex_mpi.config.resolve import make
from prunex_mpi.core.evaluation import EMA_COUNT, memory_of_evaluation
from prunex_mpi.core.lasting import lasting
from prunex_mpi.core.mask_choice import make_groups
from prunex_mpi.core.memory import FIRST, FROM_Z, MEAN, RANK, SUM, ZERO
from prunex_mpi.core.state import (
    CODED,
    KNOWN,
    PLAIN,
    Position,
    Problem,
    RunContext,
    State,
    build_state,
    every_rank_sends,
)
from prunex_mpi.data.request import Request
from prunex_mpi.methods.declared import METHODS
from prunex_mpi.methods.exchanges import memory_of
from prunex_mpi.methods.hsadmm import complete_z
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.run import checkpoint, checkpoint_files
from prunex_mpi.run.checkpoint import contents, misfit, put_common
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.problem import build_problem, load_dataset
from prunex_mpi.run.supervision import Checkpoints, outer_iterations
from prunex_mpi.settings.fields import Settings

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

COMMON = {"dataset": "synthetic", "train_samples": 64, "test_samples": 16, "image_size": 8}
COMMON |= {"batch_size": 4, "outer_iterations": 6, "local_steps": 3, "lr": 0.05}
RAMP = {"warmup_iterations": 1, "keep_ramp_iterations": 2}
# Older versions of torch have none.
MUON = "muon" if hasattr(torch.optim, "Muon") else "adamw"
SCENARIOS = {
    "recipe": {**RAMP, "freeze_iteration": 4, "model_ema_decay": 0.75},
    "paper": dict(
        RAMP, preset="paper", freeze_iteration=5, freeze_drift=-1.0, groups=("channel", "filter")
    ),
    "fp16": dict(
        RAMP,
        amp="fp16",
        groups=("coupled",),
        freeze_iteration=3,
        after_freeze="admm",
        node_sync="outer",
    ),
    "flat": dict(
        RAMP, method="prunex-flat", freeze_iteration=4, after_freeze="admm", payload="int4"
    ),
    "outer": dict(
        RAMP, freeze_iteration=5, residuals="off", node_sync="outer", model_ema_decay=0.75
    ),
    "dense": {"method": "dense"},
    "topk": {"method": "topk", "aggregation": "hierarchical"},
    # Pruned at the end of the first iteration, stable in the second.
    "pactrain": dict(
        method="pactrain",
        aggregation="hierarchical",
        pactrain_prune_iteration=1,
        pactrain_stable_window=2,
        pactrain_ternary=True,
    ),
    # Chosen in the second iteration, pruned at the end of the third.
    "clicktrain": dict(
        method="clicktrain",
        aggregation="hierarchical",
        clicktrain_choose_iteration=1,
        clicktrain_prune_iteration=3,
    ),
    "dgc": {"method": "dgc", "aggregation": "hierarchical", "dgc_ratio": 0.02},
    "powersgd": {"method": "powersgd", "aggregation": "hierarchical"},
    "dion": {"method": "dion", "aggregation": "hierarchical", "lr": 0.002},
    "omnireduce": {"method": "omnireduce", "omnireduce_block_size": 16},
    "fp16 gradients": {"method": "fp16"},
    "terngrad": {"method": "terngrad", "aggregation": "hierarchical"},
    "spardl": {"method": "spardl"},
    "lion": {"method": "lion"},
    "adacgd": {"method": "adacgd", "aggregation": "hierarchical"},
    "diloco": {"method": "diloco"},
    "diloco adamw": {"method": "diloco", "optimizer": "adamw", "lr": 0.002},
    # MuLoCo.
    "diloco muon int2": dict(
        method="diloco", optimizer=MUON, inner_momentum="keep", payload="int2", lr=0.002
    ),
    # Its fourth round has six steps.
    "qsr": {"method": "qsr", "qsr_alpha": 0.07},
    "sparseloco": {"method": "sparseloco", "sparseloco_ratio": 0.01, "node_sync": "outer"},
    "one-shot": dict(
        method="one-shot", one_shot_prune_iteration=4, groups=("coupled",), score="gates"
    ),
    "prunetrain": dict(
        method="prunetrain",
        prunetrain_reconfigure_every=3,
        prunetrain_threshold=0.27,
        model_ema_decay=0.5,
    ),
}
COVERED = {changes.get("method", "prunex") for changes in SCENARIOS.values()}
SCENARIOS |= {m.name: {"method": m.name} for m in METHODS if m.name not in COVERED}
# Those whose workers alone use what is the same on all of them.
WORKERS_SHARE = ("dgc", "powersgd", "adacgd")
# Exchanges of iterations 1, 2 and 4 run behind the local steps of the next.
BEHIND = {"residuals": "off", "evaluate_every": 5, "overlap_steps": 1}
FEWER_BITS = {
    "int4": {**RAMP, "groups": ("coupled",), "freeze_iteration": 4, "payload": "int4"},
    "racks": {**RAMP, "freeze_iteration": 4, "payload": "int4", "rack_of": "3"},
    "int8": dict(
        RAMP, groups=("channel",), freeze_iteration=4, after_freeze="admm", payload="int8"
    ),
    "diloco int4": {"method": "diloco", "payload": "int4"},
    # What it has dropped is gone from the fourth iteration on.
    "removed": dict(
        RAMP,
        groups=("coupled",),
        freeze_iteration=3,
        remove_dropped=True,
        payload="int4",
        score="gates",
        model_ema_decay=0.75,
    ),
}
OVERLAPPED = {
    "behind": {**RAMP, **BEHIND, "freeze_iteration": 3},
    "int4 behind": {
        **FEWER_BITS["int4"],
        **BEHIND,
        "freeze_iteration": 3,
        "overlap_steps": 2,
        "model_ema_decay": 0.75,
    },
    "paper int8 behind": {
        **RAMP,
        **BEHIND,
        "preset": "paper",
        "freeze_iteration": 0,
        "freeze_drift": -1.0,
        "penalty": "fixed",
        "eps_abs": 0.0,
        "eps_rel": 0.0,
        "payload": "int8",
    },
    "diloco int4 behind": {"method": "diloco", "payload": "int4", **BEHIND},
    "one-shot bf16 behind": {**BEHIND, "payload": "bf16", "method": "one-shot", "overlap_steps": 3},
}
for name in ("diloco int4 behind", "one-shot bf16 behind"):
    del OVERLAPPED[name]["residuals"]
OVERLAPPED["one-shot bf16 behind"] |= {"one_shot_prune_iteration": 3, "groups": ("coupled",)}
# Steps 1, 2 and 3 send a part each, or 1 and 3; after the freeze in iteration 3.
STREAMED = {
    "diloco int4 in parts": dict(
        method="diloco",
        payload="int4",
        fragments=3,
        overlap_steps=1,
        evaluate_every=5,
        diloco_alpha=0.5,
    ),
    "one-shot in parts": dict(
        method="one-shot",
        groups=("coupled",),
        one_shot_prune_iteration=3,
        fragments=2,
        inner_momentum="reset",
        model_ema_decay=0.75,
    ),
    "removed int4 in parts": {
        **FEWER_BITS["removed"],
        **BEHIND,
        "fragments": 2,
        "optimizer": MUON,
        "lr": 0.002,
    },
}
SCENARIOS |= {**FEWER_BITS, **OVERLAPPED, **STREAMED}
SCENARIOS["qsr int4 behind"] = {**OVERLAPPED["diloco int4 behind"], **SCENARIOS["qsr"]}
UNDER_WAY_OFTEN = (
    *(("int4 behind", 3, 1), ("int4 behind", 4, 2)),
    *(("paper int8 behind", 3, 2), ("paper int8 behind", 14, 2)),
)
# One local step into the fourth outer iteration.
IN_THE_FOURTH = 10
# What they keep is of kinds that others have.
RARELY = ("int8", "racks", "diloco int4", "behind", "diloco int4 behind", "one-shot bf16 behind")
RARELY += ("fp16 gradients", "bf16", "spardl", "parallax", "embrace")
RARELY += ("int4", "local-sgd", "qsr", "omnireduce", "terngrad", "lion", "topk")
# Followers that hold something of their own, or nothing of what their leaders hold, are in these.
OF_NODES = ("recipe", "paper", "fp16", "outer", "topk", "dgc", "pactrain", "diloco", "one-shot")
OF_NODES += ("removed", "int4 behind", "paper int8 behind")


def seldom(cases: Iterable[tuple], often: Iterable[tuple]) -> list:
    """Return cases to test, of which all but `often` take long and are of kinds that these have."""
    cases, found = list(cases), set(often)
    assert found <= set(cases)
    return [pytest.param(*c, marks=[] if c in found else [pytest.mark.long]) for c in cases]


def left_cases() -> list:
    """Return scenario, place and ranks per node of what is left between two local steps.

    What does nothing of its own within a node is seen on nodes of one rank, of which two do.
    """
    found = []
    for name in SCENARIOS:
        marks = [] if name in OF_NODES else [pytest.mark.two_ranks]
        marks += [pytest.mark.long] if name in RARELY else []
        found.append(pytest.param(name, IN_THE_FOURTH, 2 if name in OF_NODES else 1, marks=marks))
    # Before the first step, before the step at which z arrives, and after it.
    found += seldom(product(OVERLAPPED, (3, 4, 14), (1, 2)), UNDER_WAY_OFTEN)
    between_parts = product(STREAMED, (2, 14), (1,))
    return found + [pytest.param(*case, marks=pytest.mark.two_ranks) for case in between_parts]


@dataclass
class Run:
    """What one job holds."""

    topology: Topology
    context: RunContext

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def state(self) -> State:
        return self.context.state

    @property
    def problem(self) -> Problem:
        return self.context.problem

    def iterate(self, stop: StopAgreement | None = None) -> Iterator[dict]:
        context = replace(self.context, stop=stop)
        for record in outer_iterations(self.topology, context):
            yield repeatable(record)

    def save(self, files: RunDirectory | None) -> None:
        Checkpoints(self.topology, files, "off", ReceivedSignal()).write(self.context)

    def restore(self, files: RunDirectory | None) -> checkpoint.Restored:
        if self.context.helper is not None:
            self.context.helper.finish()
        return checkpoint.restore(self.topology, files, self.context)


# The helper threads of a test's runs, which end with it.
HELPERS = ExitStack()


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    yield
    HELPERS.close()


def new_run(
    topology: Topology,
    scenario: str,
    dtype: torch.dtype = torch.float32,
    fixed: Sequence[str] = (),
    **changes: object,
) -> Run:
    """Build a run as the program does, from the same seeds each time; some weights may be fixed."""
    settings = make(**{**COMMON, **SCENARIOS[scenario], **changes})
    torch.manual_seed(0)
    np.random.seed(topology.world.rank)
    model = (Reader(10, 8) if scenario in OF_EMBEDDINGS else NoisyNet()).to(dtype)
    for name in fixed:
        model.get_parameter(name).requires_grad_(False)
    layout = build_layout(model)
    transport = build_transport(torch.device("cpu"), 2**-10, "host")
    dataset = load_dataset(topology, Request.of(settings))
    heartbeat, device = Heartbeat(), torch.device("cpu")
    problem = build_problem(topology, settings, dataset, model, device, transport, heartbeat)
    groups = make_groups(settings, model, layout, Images(dataset.image_size))
    state = build_state(model, layout, groups, settings)
    for memory in (memory_of, memory_of_evaluation):
        state.memory.declare(memory(settings, state))
    wanted = settings.overlap_steps != 0
    helper = HELPERS.enter_context(exchanging_asynchronously(topology, wanted, transport))
    context = RunContext(state, problem, settings, transport, heartbeat, helper=helper)
    return Run(topology, context)


def vectors(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of all that a run computes with."""
    state = run.state
    found = {name: getattr(state, name) for name in ("theta", "u", "v", "z_node", "z")}
    found |= state.optimizer.tensors()
    shares = run.topology.is_leader or run.settings.method.name not in WORKERS_SHARE
    # Followers have no use for what the workers share.
    found |= {n: e.tensor for n, e in state.memory.items() if shares or e.owner == RANK}
    if state.message.residual is not None:
        found["residual"] = state.message.residual
    found |= dict(run.problem.model.named_buffers())
    arrays = {"mask": state.mask.bits, "rho1": state.rho1, "rho2": state.rho2}
    found |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


@dataclass
class End:
    """Where a run has come to."""

    vectors: dict[str, torch.Tensor]
    position: Position


def end_of(run: Run) -> End:
    return End(vectors(run), run.state.position)


def assert_same(first: End, second: Run) -> None:
    a, b = first.vectors, vectors(second)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert first.position == second.state.position


@cache
def whole_run(scenario: str, ranks_per_node: int) -> tuple[list[dict], End]:
    """Return the records and the end of a run that nobody leaves, which several tests share."""
    with nodes_of(ranks_per_node, SCENARIOS[scenario].get("rack_of", "")) as topology:
        run = new_run(topology, scenario)
        records = list(run.iterate())
        HELPERS.close()
        return records, end_of(run)


# One of each kind; nodes of two, and all others, are in what is left between two local steps.
@pytest.mark.parametrize(
    ("scenario", "ranks_per_node"),
    [
        *(("recipe", 3), ("outer", 2), ("prunetrain", 3), ("int4 behind", 1)),
        *(pytest.param("recipe", shape, marks=pytest.mark.long) for shape in (1, 2, 4)),
    ],
)
def test_a_restored_run_goes_on_bit_for_bit(scenario, ranks_per_node):
    expected, end = whole_run(scenario, ranks_per_node)
    racks = SCENARIOS[scenario].get("rack_of", "")
    with nodes_of(ranks_per_node, racks) as topology, run_directory() as files:
        first = new_run(topology, scenario)
        iterations = first.iterate()
        records = [next(iterations) for _ in range(2)]
        first.save(files)
        # Restored before the freeze, and after it.
        second = new_run(topology, scenario)
        assert second.restore(files).name == "000001-iteration-3-step-0"
        iterations = second.iterate()
        records += [next(iterations) for _ in range(3)]
        second.save(files)
        third = new_run(topology, scenario)
        assert third.restore(files).name == "000002-iteration-6-step-0"
        assert_same(end_of(second), third)
        records += list(third.iterate())
        assert records == expected
        assert_same(end, third)


class StopsAt:
    """Take the place of StopAgreement: every rank leaves at its `call`-th safe point."""

    def __init__(self, call: int) -> None:
        self.left, self.calls = call, 1

    def reached(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("scenario", "call", "ranks_per_node"), left_cases())
def test_a_run_left_between_two_local_steps_goes_on_bit_for_bit(scenario, call, ranks_per_node):
    if ranks_per_node > WORLD.size and call != IN_THE_FOURTH:
        pytest.skip("covered by a smaller node size: the job has fewer ranks")
    expected, end = whole_run(scenario, ranks_per_node)
    with nodes_of(ranks_per_node) as topology, run_directory() as files:
        first = new_run(topology, scenario)
        records = list(first.iterate(StopsAt(call)))
        position, overlap = first.state.position, first.settings.overlap_steps
        assert (position.iteration, position.step) == (call // 3 + 1, call % 3)
        if call != IN_THE_FOURTH and scenario in STREAMED:
            streams = first.state.consensus_sgd
            assert bool(position.part) == streams
            assert bool(position.in_flight) == (streams and overlap > 0)
        elif call != IN_THE_FOURTH:
            coded = topology.num_nodes > 1 and first.settings.payload != "fp32"
            # Stopping comes first where z would arrive.
            waits = position.step <= overlap
            assert position.in_flight == ((CODED if coded else PLAIN) if waits else "")
        first.save(files)
        second = new_run(topology, scenario)
        assert second.restore(files).name == f"000001-iteration-{call // 3 + 1}-step-{call % 3}"
        assert records + list(second.iterate()) == expected
        assert_same(end, second)
        assert len(expected) == (5 if scenario.startswith("qsr") else 6)


@pytest.mark.two_ranks
def test_the_average_takes_in_each_z_once_in_parts_too():
    counts = []
    for fragments in (1, 2):
        with nodes_of(1) as topology, HELPERS:
            run = new_run(topology, "one-shot in parts", fragments=fragments)
            list(run.iterate())
            counts.append(int(run.state.memory[EMA_COUNT]))
    assert counts[0] == counts[1] > 0


@pytest.mark.two_ranks
@pytest.mark.parametrize("scenario", ["recipe", "diloco"])
def test_evaluation_leaves_training_alone(scenario):
    """What is delivered is the same bits however often it is evaluated on the way."""
    with nodes_of(2) as topology:
        often = new_run(topology, scenario, bn="recalibrate")
        list(often.iterate())
        rarely = new_run(topology, scenario, bn="recalibrate", evaluate_every=5)
        list(rarely.iterate())
        assert_same(end_of(often), rarely)
        if scenario == "diloco":
            # What is delivered was estimated on z, which training did not notice.
            averaged = new_run(topology, scenario, bn="average", evaluate_every=5)
            list(averaged.iterate())
            assert torch.equal(averaged.state.z, often.state.z)
            found = [run.state.bn_modules[0].running_mean for run in (averaged, often)]
            assert not torch.equal(*found)


def test_a_checkpoint_without_what_is_under_way_is_refused():
    with nodes_of(1) as topology:
        run = new_run(topology, "int4 behind")
        list(run.iterate(StopsAt(3)))
        run.context.helper.finish()
        first = WORLD.rank == 0
        whose = {"leader": True, "first": first, "same_nodes": True}
        tensors, numbers = contents(topology, run.state, run.problem)
        assert misfit(tensors, numbers, run.state, run.problem, **whose) == ""
        for key, reason in (("message", "in flight"), ("stats", "stats is None")):
            less = {name: tensor for name, tensor in tensors.items() if name != key}
            found = misfit(less, numbers, run.state, run.problem, **whose)
            assert reason in found if first or key == "stats" else found == ""


@pytest.mark.two_ranks
@pytest.mark.parametrize("after", [1, 3])
def test_weights_that_are_not_trained_come_back(after):
    fixed = [name for name, _ in NoisyNet().named_parameters()][:1]
    with run_directory() as files:
        with nodes_of(1) as topology:
            first = new_run(topology, "recipe", fixed=fixed)
            with torch.no_grad():
                for name in fixed:
                    first.problem.model.get_parameter(name).fill_(0.25)
            list(first.iterate(StopsAt(4)))
            first.save(files)
        with nodes_of(after) as topology:
            second = new_run(topology, "recipe", fixed=fixed)
            second.restore(files)
            for name in fixed:
                parameter = second.problem.model.get_parameter(name)
                assert torch.equal(parameter, torch.full_like(parameter, 0.25))
                assert not parameter.requires_grad


DEALT_OUT = [
    (*case, call)
    for call in (4, 13)
    for case in (
        *((scenario, *shapes) for shapes in ((1, 3), (3, 1)) for scenario in OVERLAPPED),
        *((scenario, 3, 1) for scenario in FEWER_BITS),
        *(("int4 behind", 1, 4), ("int4 behind", 4, 1)),
    )
]
DEALT_OUT_OFTEN = (
    *(("int4 behind", 1, 3, 4), ("int4 behind", 3, 1, 13), ("int4 behind", 4, 1, 4)),
    *(("paper int8 behind", 1, 3, 13), ("paper int8 behind", 3, 1, 4)),
    *(("int4", 3, 1, 4), ("removed", 3, 1, 13)),
)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("scenario", "before", "after", "call"), seldom(DEALT_OUT, DEALT_OUT_OFTEN)
)
def test_other_nodes_take_over_what_is_under_way_and_what_is_left_over(
    scenario, before, after, call
):
    """What has been exchanged becomes part of z; what rounding left over is dealt out."""
    with run_directory() as files:
        with nodes_of(before) as topology:
            first = new_run(topology, scenario, torch.float64)
            list(first.iterate(StopsAt(call)))
            first.save(files)
            if first.state.position.in_flight:
                complete_z(first.context)
            old, sizes = vectors(first), topology.node_sizes
        with nodes_of(after) as topology:
            if topology.node_sizes == sizes:
                return
            second = new_run(topology, scenario, torch.float64)
            assert second.restore(files).other_nodes
            new = vectors(second)
            common = [n for n, e in first.state.memory.items() if e.elsewhere == FIRST and n in old]
            for name in ("z", "mask", "rho1", "rho2", *common):
                assert torch.equal(new[name], old[name]), name
            for name in ("theta", "z_node"):
                assert torch.equal(new[name], old["z"]), name
            assert not new["u"].any() and not new["v"].any()
            position = second.state.position
            assert (position.iteration, position.step, position.in_flight) == (call // 3 + 1, 0, "")
            if "residual" in old:
                total, dealt = old["residual"].numpy(), new["residual"].numpy()
                WORLD.Allreduce(total.copy(), total)
                assert total.any() == (len(sizes) > 1)
                share = topology.node_weight if topology.is_leader else 0.0
                np.testing.assert_allclose(dealt, share * total, rtol=1e-12, atol=1e-15)
                assert KNOWN in new
            records = list(second.iterate())
            assert [record["iteration"] for record in records] == [*range(call // 3 + 1, 7)]
            gone = second.state.z.clone()
            second.state.mask.apply_(gone)
            assert torch.equal(gone, second.state.z)


# By the fourth iteration the supports are stable.
PRUNED_FIRST = {"pactrain_ternary": False, "pactrain_prune_iteration": 0}
GATES = {"groups": ("coupled",), "score": "gates"}
HIERARCHICAL = {"aggregation": "hierarchical"}
# Scenario, changes, ranks per node before and after.
ELSEWHERE = [
    ("recipe", {}, 1, 4),
    ("paper", {}, 3, 2),
    ("outer", {}, 1, 4),
    ("diloco adamw", {}, 1, 4),
    ("one-shot", {**GATES, "node_sync": "outer"}, 1, 4),
    ("sparseloco", {"node_sync": "step"}, 2, 3),
    ("powersgd", {"aggregation": "flat"}, 2, 3),
    *((name, HIERARCHICAL, 2, 3) for name in ("topk", "dgc")),
    ("pactrain", PRUNED_FIRST, 2, 3),
    *(
        pytest.param(*case, 2, 3, marks=pytest.mark.long)
        for case in (
            ("topk", {"aggregation": "flat"}),
            ("omnireduce", {}),
            *((name, HIERARCHICAL) for name in ("spardl", "lion")),
            ("diloco", {}),
            ("one-shot", {**GATES, "node_sync": "step"}),
        )
    ),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("scenario", "changes", "before", "after"), ELSEWHERE)
def test_all_that_lasts_goes_to_other_nodes_as_it_is_declared(scenario, changes, before, after):
    # In float64: sums over ranks in another order.
    with run_directory() as files:
        with nodes_of(before) as topology:
            first = new_run(topology, scenario, torch.float64, **changes)
            # In the fourth iteration, one local step in.
            list(first.iterate(StopsAt(10)))
            first.save(files)
            old, sizes = lasting(first.state, first.problem.model), topology.node_sizes
        with nodes_of(after) as topology:
            if topology.node_sizes == sizes:
                return
            second = new_run(topology, scenario, torch.float64, **changes)
            restored = second.restore(files)
            assert restored.other_nodes
            new, state = lasting(second.state, second.problem.model), second.state
            assert new.keys() == old.keys()
            weight = topology.node_weight if topology.is_leader else 0.0
            weight = 1 / WORLD.size if every_rank_sends(second.settings) else weight
            sums = []
            for name, entry in new.items():
                if name.startswith("buffer."):
                    # BatchNorm's are means of moments.
                    continue
                total = np.empty_like(mine := old[name].tensor.double().numpy())
                WORLD.Allreduce(mine, total)
                if entry.elsewhere in (SUM, MEAN):
                    sums.append(total.any())
                wanted = {
                    FIRST: lambda mine=mine: WORLD.bcast(mine),
                    SUM: lambda total=total: weight * total,
                    MEAN: lambda total=total: total / WORLD.size,
                    FROM_Z: old["z"].tensor.numpy,
                    ZERO: lambda mine=mine: np.zeros_like(mine),
                }[entry.elsewhere]()
                found = entry.tensor.double().numpy()
                np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14, err_msg=name)
            assert any(sums)
            assert np.array_equal(state.mask.bits, first.state.mask.bits)
            assert (state.position.iteration, state.position.step) == (4, 0)
            (text,) = restored.describe()
            assert "on other nodes" in text
            assert [record["iteration"] for record in second.iterate()] == [4, 5, 6]
            # sum_i P_i v_i = 0 holds on the new nodes, too.
            weighted = topology.node_size * state.v.numpy()
            total = np.zeros_like(weighted)
            if topology.is_leader:
                topology.leader.Allreduce(weighted, total)
                assert np.abs(total).max() < 1e-12


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lost", [False, True])
def test_what_the_lost_had_estimated_is_lost_with_them(lost):
    """What AdaCGD's workers take for the sum of their estimates is that of those who are left."""
    with nodes_of(1) as topology:
        run = new_run(topology, "adacgd", torch.float64, method="adacgd")
        list(run.iterate(StopsAt(10)))
        tensors, numbers = contents(topology, run.state, run.problem)
        mine = {key: tensor.clone() for key, tensor in tensors.items()}, numbers
        memory = run.state.memory
        summed, estimate = memory["sum_of_estimates"].clone(), memory["estimate"].numpy()
        stays = not lost or WORLD.rank < WORLD.size - 1
        left = np.empty_like(estimate)
        WORLD.Allreduce(estimate * stays, left)
        assert np.allclose(summed.numpy(), left, rtol=0, atol=1e-12) is not lost
        put_common(topology, lambda: iter([mine] * stays), WORLD.size, run.context)
        np.testing.assert_allclose(memory["sum_of_estimates"], left, rtol=0, atol=1e-14)
        total = np.empty_like(left)
        WORLD.Allreduce(memory["estimate"].numpy(), total)
        np.testing.assert_allclose(total, left, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_what_pactrain_prunes_in_an_outer_iteration_that_a_run_leaves_stays_pruned_elsewhere():
    with run_directory() as files:
        with nodes_of(2) as topology:
            first = new_run(topology, "pactrain", **PRUNED_FIRST)
            list(first.iterate(StopsAt(2)))
            first.save(files)
        with nodes_of(3 if WORLD.size > 2 else 1) as topology:
            second = new_run(topology, "pactrain", **PRUNED_FIRST)
            assert second.restore(files).other_nodes
            pruned = second.state.memory["pruned"]
            assert second.state.frozen and pruned.any()
            assert not second.state.theta[pruned].any()


def test_a_checkpoint_brings_back_channels_that_went_after_it():
    """A network that becomes smaller is built as it was, larger or smaller than it is now."""
    with nodes_of(2) as topology, run_directory() as files:
        run = new_run(topology, "prunetrain")
        iterations = run.iterate()
        sizes = []
        for _ in range(4):
            run.save(files)
            next(iterations)
            sizes.append(run.state.theta.numel())
        iterations.close()
        assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
        # The two newest stay: from before and after the removal.
        assert run.restore(files).name == "000004-iteration-4-step-0"
        assert run.state.theta.numel() == sizes[2]
        if files is not None:
            newest = files.path / "checkpoints" / "000004-iteration-4-step-0" / "manifest.json"
            newest.write_text("{}")
        WORLD.Barrier()
        assert run.restore(files).name == "000003-iteration-3-step-0"
        assert run.state.theta.numel() == sizes[1]
        assert next(run.iterate())["density"] < 1


@contextmanager
def dealt_out_in_turn() -> Iterator[Topology]:
    """Make two nodes as of real hosts when ranks are placed cyclically: of every other rank."""
    world = WORLD.Dup()
    node = world.Split(world.rank % 2, key=world.rank)
    leader = world.Split(0 if node.rank == 0 else MPI.UNDEFINED, key=world.rank)
    sizes = (world.size - world.size // 2, world.size // 2)
    here = node.rank, node.size, 1
    topology = Topology(world, node, leader, world.rank % 2, sizes, *here)
    try:
        yield topology
    finally:
        free_topology(topology)


@pytest.mark.parametrize("scenario", ["recipe", pytest.param("paper", marks=pytest.mark.long)])
def test_nodes_need_not_be_of_consecutive_ranks(scenario):
    if WORLD.size < 4:
        pytest.skip("consecutive ranks anyway")
    with run_directory() as files:
        with dealt_out_in_turn() as topology:
            whole = new_run(topology, scenario)
            expected = list(whole.iterate())
            first = new_run(topology, scenario)
            records = list(islice(first.iterate(), 3))
            first.save(files)
            second = new_run(topology, scenario)
            restored = second.restore(files)
            assert (restored.refused, restored.other_nodes) == ((), False)
            assert_same(end_of(first), second)
            assert records + list(second.iterate()) == expected
            assert_same(end_of(whole), second)
        with nodes_of(2) as topology:
            assert new_run(topology, scenario).restore(files).other_nodes


@pytest.mark.parametrize(("scenario", "once"), [("recipe", True), ("paper", False)])
def test_what_ranks_of_a_node_hold_alike_is_written_once(scenario, once):
    """Gradients averaged at each step keep them alike, one average per iteration does not."""
    with nodes_of(2) as topology, run_directory() as files:
        run = new_run(topology, scenario)
        next(run.iterate())
        run.save(files)
        for rank in range(WORLD.size) if files is not None else ():
            path = files.path / "checkpoints" / checkpoint_files.valid_names(files.path)[0]
            with safe_open(checkpoint_files.rank_file(path, rank), framework="pt") as file:
                keys, numbers = set(file.keys()), json.loads(file.metadata()["numbers"])
            alike = {"theta", "u", "optimizer.momentum_buffer"}
            follows = rank % 2 == 1
            assert ("as_leader" in numbers) == follows
            assert keys >= {"order", "generator.data"}
            assert not keys & alike if follows and once else keys >= alike
            if follows:
                assert alike <= set(numbers["as_leader"]) or not once
                assert keys.isdisjoint(numbers["as_leader"])


def swap_ranks(folder: Path) -> None:
    """Give the first and the last rank each other's file, and the manifest their records."""
    first, last = (checkpoint_files.rank_file(folder, rank) for rank in (0, WORLD.size - 1))
    first.rename(folder / "moved")
    last.rename(first)
    (folder / "moved").rename(last)
    manifest = folder / "manifest.json"
    told = json.loads(json.loads(manifest.read_text())["body"])
    told["ranks"][0], told["ranks"][-1] = told["ranks"][-1], told["ranks"][0]
    body = json.dumps(told)
    manifest.write_text(json.dumps({"crc32": zlib.crc32(body.encode()), "body": body}))


@pytest.mark.mpi(min_size=2)
@pytest.mark.two_ranks
@pytest.mark.parametrize("victim", ["first", "last", "manifest", "swapped"])
def test_damage_on_one_rank_is_refused_by_all(victim):
    with nodes_of(2) as topology, run_directory() as files:
        run = new_run(topology, "recipe")
        iterations = run.iterate()
        next(iterations)
        run.save(files)
        good = vectors(run)
        next(iterations)
        run.save(files)
        rank = 0 if victim in ("first", "swapped") else WORLD.size - 1
        if files is not None:
            newest = files.path / "checkpoints" / checkpoint_files.valid_names(files.path)[0]
            path = newest / f"rank-{rank:05d}.safetensors"
            path = newest / "manifest.json" if victim == "manifest" else path
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            if victim == "swapped":
                swap_ranks(newest)
            else:
                path.write_bytes(data)
        WORLD.Barrier()
        second = new_run(topology, "recipe")
        restored = second.restore(files)
        assert restored.name == "000001-iteration-2-step-0"
        assert len(restored.refused) == 1
        assert victim in restored.refused[0] or f"{rank:05d}.safetensors" in restored.refused[0]
        found = vectors(second)
        assert all(torch.equal(found[name], good[name]) for name in good)
        # The damaged one does not count any more: two good ones remain after the next two.
        for _ in range(2):
            second.save(files)
        if files is not None:
            names = checkpoint_files.valid_names(files.path)
            assert len(names) == 2
            assert len(list((files.path / "checkpoints").iterdir())) == 2


@pytest.mark.two_ranks
def test_a_rank_that_cannot_write_ends_all_and_leaves_the_last(monkeypatch):
    with nodes_of(2) as topology, run_directory() as files:
        run = new_run(topology, "recipe")
        run.save(files)
        if WORLD.rank == WORLD.size - 1:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(checkpoint_files, "save_tensors", full)
        with pytest.raises(UserError, match="No space left on device"):
            run.save(files)
        if files is not None:
            assert checkpoint_files.valid_names(files.path) == ["000001-iteration-1-step-0"]
        assert new_run(topology, "recipe").restore(files).name == "000001-iteration-1-step-0"


@pytest.mark.two_ranks
def test_a_slow_disk_of_one_rank_is_no_standstill(monkeypatch):
    """Writing and reading take long on the last rank; all go on meanwhile."""
    slow = PAUSE_S if WORLD.rank == WORLD.size - 1 else 0
    count_closely(monkeypatch)
    for module, name in ((checkpoint_files, "SYNC"), (base_files, "CHUNK")):
        monkeypatch.setattr(module, f"{name}_BYTES", 2048)
    fsync = os.fsync

    def slow_sync(descriptor: int) -> None:
        time.sleep(slow)
        fsync(descriptor)

    def slow_sum(*given: Any) -> int:
        time.sleep(slow)
        return zlib.crc32(*given)

    heartbeat = Noted()
    with nodes_of(1) as topology, run_directory() as files:
        run = new_run(topology, "recipe")
        run.context = replace(run.context, heartbeat=heartbeat)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow_sync)
            heartbeat.check(lambda: run.save(files))
        monkeypatch.setattr(base_files, "zlib", SimpleNamespace(crc32=slow_sum))
        for ranks_per_node in (1, 2):
            with nodes_of(ranks_per_node) as mine:
                second = new_run(mine, "recipe")
                second.context = replace(second.context, heartbeat=heartbeat)
                heartbeat.check(lambda run=second: run.restore(files))


def test_ranks_agree_on_where_to_stop():
    """One rank's signal stops all of them at the same step, without waiting for each other."""
    received = ReceivedSignal()
    steps = 0
    with stop_agreement(WORLD, received, None) as stop:
        while not stop.reached():
            steps += 1
            if steps == 5 and WORLD.rank == WORLD.size - 1:
                received.number = 10
            assert steps < 10**7
    assert stop.reason == "SIGUSR1"
    every = np.empty(WORLD.size, dtype=np.int64)
    WORLD.Allgather(np.array([steps]), every)
    assert len(set(every.tolist())) == 1
    assert steps >= 5
