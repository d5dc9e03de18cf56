"""A trace of all ranks: events that nest, on one clock, with the bytes of metrics.jsonl."""

import json
import time
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_directory
from nodes import WORLD, nodes_of
from small_runs import SCENARIOS, small_run

from prunex_mpi.base.errors import FAILURE, Diverged
from prunex_mpi.base.trace import HELPER
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.records import tracing
from prunex_mpi.run.supervision import progress_of, recorded

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

KINDS = ("payload", "mask", "intra", "control", "evaluate", "setup", "sent")
PHASES = {"local", "intra", "project", "inter", "dual", "evaluate"}


def traced(
    files: RunDirectory | None, scenario: str, ranks_per_node: int, **changes: Any
) -> list[dict[str, Any]]:
    """Run a scenario with a trace; return this rank's metrics."""
    with (
        nodes_of(ranks_per_node) as topology,
        small_run(topology, scenario, trace=True, progress="off", **changes) as context,
        tracing(topology, files, context),
        closing(progress_of(topology, context)) as progress,
    ):
        return [record for record, _ in recorded(topology, files, context, progress)]


def everyones(numbers: list[int]) -> list[list[int]]:
    """Return what each rank passes in."""
    found = np.zeros((WORLD.size, len(numbers)), dtype=np.int64)
    WORLD.Allgather(np.array(numbers, dtype=np.int64), found)
    return found.tolist()


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Check that of each two events of a thread one follows the other, or lies in it."""
    open_until: list[int] = []
    starts = [round(1000 * event["ts"]) for event in events]
    assert starts == sorted(starts)
    for event, start in zip(events, starts, strict=True):
        end = start + round(1000 * event["dur"])
        assert end >= start
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


@pytest.mark.parametrize(
    ("scenario", "ranks_per_node"),
    [
        ("recipe", 2),
        ("recipe", 3),
        ("behind", 2),
        ("int8sum", 2),
        ("flat consensus", 1),
        ("topk", 2),
        ("pactrain", 2),
        *(
            pytest.param(scenario, 2, marks=pytest.mark.long)
            for scenario in SCENARIOS
            if scenario not in ("recipe", "behind", "int8sum", "flat consensus", "topk", "pactrain")
        ),
    ],
)
def test_it_has_all_ranks_with_events_that_nest_and_all_bytes(scenario, ranks_per_node):
    with run_directory() as files:
        records = traced(files, scenario, ranks_per_node)
        sums = everyones([sum(record["bytes"][kind] for record in records) for kind in KINDS])
        if files is None:
            return
        first, *events = read(files.path / "trace.json")
        assert first["name"] == "trace_begins"
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        nodes = [rank // min(ranks_per_node, WORLD.size) for rank in range(WORLD.size)]
        assert [names[rank].split(" (")[0] for rank in sorted(names)] == [
            f"rank {rank}, node {node}" for rank, node in enumerate(nodes)
        ]
        threads = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append(event)
        for found in threads.values():
            assert_nested(found)
        helpers = {rank for rank, thread in threads if thread == HELPER}
        assert helpers == (set(range(WORLD.size)) if scenario == "behind" else set())
        for rank in range(WORLD.size):
            main = threads[rank, 0]
            steps = [e["name"] for e in main if e["cat"] == "step"]
            assert steps == ["step 1", "step 2"] * len(records)
            iterations = [e["name"] for e in main if e["cat"] == "iteration"]
            assert iterations == [f"outer iteration {n + 1}" for n in range(len(records))]
            assert {e["name"] for e in main if e["cat"] == "phase"} <= PHASES
            counted = [
                sum(e["args"].get(kind, 0) for e in [*main, *threads[rank, HELPER]])
                for kind in KINDS
            ]
            assert counted == sums[rank], rank
        metrics = [
            json.loads(line) for line in (files.path / "metrics.jsonl").read_text().splitlines()
        ]
        assert sums[0] == [sum(record["bytes"][kind] for record in metrics) for kind in KINDS]


def test_the_ranks_have_one_clock(monkeypatch):
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 1000.0 * WORLD.rank)
    with run_directory() as files:
        traced(files, "recipe", 2)
        if files is None:
            return
        events = [e for e in read(files.path / "trace.json")[1:] if e["ph"] == "X"]
        assert all(0 <= event["ts"] < 300e6 for event in events)
        times = defaultdict(list)
        for event in events:
            if event["name"] == "Allreduce and Bcast of norms":
                times[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
        assert len(times) == WORLD.size
        for turn in zip(*times.values(), strict=True):
            # Nobody gets the sum before everyone has come.
            assert max(start for start, _ in turn) <= min(end for _, end in turn) + 20e3


def test_it_is_continued_by_the_job_that_goes_on():
    with run_directory() as files:
        traced(files, "recipe", 2)
        traced(files, "recipe", 2, resume=True)
        if files is None:
            return
        events = [e for e in read(files.path / "trace.json")[1:] if e["ph"] == "X"]
        mine = [e for e in events if e["pid"] == 0 and e["cat"] == "iteration"]
        assert [e["name"][-1] for e in mine] == list("123123")
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(mine))
        assert_nested([e for e in events if e["pid"] == 0])


def test_a_run_that_diverges_leaves_what_there_was():
    with run_directory() as files, nodes_of(2) as topology:
        with (
            pytest.raises(Diverged),
            small_run(topology, "recipe", trace=True) as context,
            tracing(topology, files, context),
        ):
            context.state.position.clock.note("phase", "the last", time.perf_counter())
            raise Diverged("on all ranks", FAILURE)
        assert context.state.position.clock.trace is None
        if files is not None:
            text = (files.path / "trace.json").read_text()
            found = [e for e in json.loads(text + "]") if e["name"] == "the last"]
            assert [event["pid"] for event in found] == list(range(WORLD.size))
