"""What ranks keep in memory when a node is lost: the others repeat the outer iteration from it."""

import time
from types import SimpleNamespace

import pytest
import torch
from nodes import WORLD, nodes_of
from test_checkpoint import new_run

from mpi4py import MPI

from prunex_mpi.comm import topology as comm
from prunex_mpi.core import exchange
from prunex_mpi.core.exchange import find_reference_
from prunex_mpi.data.batches import BatchStream
from prunex_mpi.run.kept import InMemoryCheckpoint, LostNodes

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.any_mpi,
    pytest.mark.skipif(WORLD.size == 1, reason="nobody is left"),
]

LATE = {"warmup_iterations": 3, "keep_ramp_iterations": 1, "freeze_iteration": 5}
OUTER = {**LATE, "node_sync": "outer"}
CASES = {
    "prunex": ("recipe", LATE),
    "prunex, apart in the node": ("recipe", OUTER),
    "prunex-flat": ("flat", {**LATE, "payload": "fp32"}),
    "local-sgd": ("local-sgd", {}),
}
FILES = SimpleNamespace(lengths=dict, rewind=lambda sizes: None) if WORLD.rank == 0 else None


class Lost(Exception):
    """What MPI raises where a node is lost."""


def train_until_lost(topology, case, monkeypatch):
    """Train to the end of the third outer iteration's local steps; return what is kept."""
    scenario, changes = CASES[case]
    run, calls = new_run(topology, scenario, torch.float64, **changes), []

    def fail_in_the_third(*given):
        calls.append(given)
        if len(calls) == 3:
            raise Lost
        find_reference_(*given)

    monkeypatch.setattr(exchange, "find_reference_", fail_in_the_third)
    kept = InMemoryCheckpoint(run.settings)
    kept.begin(topology, run.context, "")
    with pytest.raises(Lost):
        for _ in run.iterate():
            kept.keep(topology, FILES, run.context)
    monkeypatch.undo()
    kept.lost_at = time.time()
    return kept


def test_work_of_the_first_outer_iteration_is_lost_too():
    with nodes_of(1) as topology:
        run = new_run(topology, "local-sgd", torch.float64)
        kept = InMemoryCheckpoint(run.context.settings)
        kept.begin(topology, run.context, "")
        time.sleep(0.2)
        kept.loss, kept.lost_at = LostNodes((1,), (1,)), time.time()
        assert not kept.put_back(topology, None, run.context)
        kept.tell(topology, None, run.context)
        assert 0.2 <= kept.changes[-1]["lost_seconds"] < 10
        # Of one that is lost right after it, what was lost before does not count again.
        kept.begin(topology, run.context, "")
        kept.lost_at = time.time()
        kept.tell(topology, None, run.context)
        assert kept.changes[-1]["lost_seconds"] < 0.2


def go_on(topology, case, kept):
    """Return the run of those who are left, before it goes on."""
    scenario, changes = CASES[case]
    run = new_run(topology, scenario, torch.float64, **changes)
    files = FILES if topology.world.rank == 0 else None
    assert kept.put_back(topology, files, run.context)
    return run


def survivors(topology):
    """Return the communicator of all but the last node, COMM_NULL there."""
    goes_on = topology.node_index < topology.num_nodes - 1
    return WORLD.Split(0 if goes_on else MPI.UNDEFINED, key=WORLD.rank)


# Of 3 and 1 the one is lost.
@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("case", CASES)
def test_those_who_are_left_repeat_the_outer_iteration(case, ranks_per_node, monkeypatch):
    with nodes_of(1 if "flat" in case else ranks_per_node) as topology:
        if topology.num_nodes == 1:
            pytest.skip("nobody is left")
        kept = train_until_lost(topology, case, monkeypatch)
        left, each = survivors(topology), topology.node_size
        if left == MPI.COMM_NULL:
            return
        samples_among, asked = BatchStream.samples_among, []

        def ask(stream, ranks, order):
            asked.append(ranks)
            return samples_among(stream, ranks, order)

        monkeypatch.setattr(BatchStream, "samples_among", ask)
        with comm.nodes_of(left, each) as smaller:
            run = go_on(smaller, case, kept)
            state = run.state
            assert (state.position.iteration, state.position.step) == (3, 0)
            assert torch.equal(state.z, kept.snapshots[-1].tensors["z"])
            assert torch.equal(state.theta, state.z)
            assert state.consensus_sgd or not (state.u.any() or state.v.any())
            # Steps so far are counted anew by those of as many ranks as there were.
            assert asked[-1] == WORLD.size
            assert next(run.iterate())["iteration"] == 3
        left.Free()
