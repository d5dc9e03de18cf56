"""A trace of each rank by torch's profiler: phases and messages of the first outer iterations."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from jobs import run_directory
from nodes import WORLD, nodes_of
from small_runs import small_run

from prunex_mpi.base.errors import FAILURE, Diverged
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.supervision import TRACED, progress_of, recorded, tracing

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]


def own_trace(files: RunDirectory | None) -> Path:
    """Return this rank's file. Collective."""
    folder = Path(broadcast_text(WORLD, str(files.path) if files is not None else ""))
    return folder / (f"trace-rank-{WORLD.rank:05d}.json" if WORLD.rank else "trace.json")


def names_in(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def profiler_of(context: RunContext):
    return context.state.position.clock.profiler


@pytest.mark.parametrize(
    ("scenario", "message"), [("recipe", "payload"), ("int4", "sum of codes"), ("topk", "sent")]
)
def test_each_rank_has_a_file_of_phases_and_messages(scenario, message):
    with run_directory() as files:
        path = own_trace(files)
        if WORLD.rank == 0:
            # Replaced, and not opened.
            os.mkfifo(path)
        with (
            nodes_of(1) as topology,
            small_run(topology, scenario, trace=True, progress="off") as context,
            tracing(topology, files, context),
            closing(progress_of(topology, context)) as progress,
        ):
            count = len(list(recorded(topology, files, context, progress)))
        assert profiler_of(context) is None
        names = names_in(path)
        assert names.count("phase local") == min(count, TRACED)
        assert names.count("phase evaluate") >= 1
        if WORLD.size > 1:
            assert any(message in name for name in names)
        assert json.loads(path.read_text())["rank"] == WORLD.rank


def test_a_run_that_diverges_leaves_what_there_was():
    with run_directory() as files, nodes_of(2) as topology:
        path = own_trace(files)
        with (
            pytest.raises(Diverged),
            small_run(topology, "recipe", trace=True) as context,
            tracing(topology, files, context),
        ):
            with context.state.position.clock.named("the last"):
                pass
            raise Diverged("on all ranks", FAILURE)
        assert profiler_of(context) is None
        assert "the last" in names_in(path)
