"""What ranks have trained when a node is lost: they exchange it without that node."""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nodes import WORLD, nodes_of
from test_checkpoint import HELPERS, new_run

from mpi4py import MPI

from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm import topology as comm
from prunex_mpi.core import statistics
from prunex_mpi.core.statistics import find_reference_
from prunex_mpi.data.batches import BatchStream
from prunex_mpi.run import supervision
from prunex_mpi.run.kept import Kept, begin, keep, put_back, take_work_out

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
    # Exchanges in iterations 3 and 6.
    "nodes apart": ("apart", {**OUTER, "after_freeze": "admm"}),
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

    monkeypatch.setattr(statistics, "find_reference_", fail_in_the_third)
    kept = Kept(run.settings)
    begin(topology, run.context, "", kept)
    kept.context = run.context
    with pytest.raises(Lost):
        for _ in run.iterate():
            keep(topology, FILES, run.context, kept)
    monkeypatch.undo()
    take_work_out(kept)
    kept.lost_at = time.time()
    return kept


def go_on(topology, case, kept):
    """Return the run of those who are left, before it goes on."""
    scenario, changes = CASES[case]
    run = new_run(topology, scenario, torch.float64, **changes)
    files = FILES if topology.world.rank == 0 else None
    assert put_back(topology, files, run.context, kept)
    return run


def survivors(topology):
    """Return the communicator of all but the last node, COMM_NULL there."""
    goes_on = topology.node_index < topology.num_nodes - 1
    return WORLD.Split(0 if goes_on else MPI.UNDEFINED, key=WORLD.rank)


def mean_over(world, tensor):
    """Return the mean over ranks of a tensor."""
    total = np.empty_like(tensor.numpy())
    world.Allreduce(tensor.numpy(), total)
    return torch.from_numpy(total) / world.size


def by_hand(topology, run, work):
    """Return z of the third outer iteration: Eq. 9 and 11 with what those who are left have."""
    state = run.state
    theta = work.tensors["theta"]
    if state.consensus_sgd:
        return mean_over(topology.world, theta)
    numels = torch.tensor([segment.numel for segment in state.layout.segments])
    rho1, rho2 = (
        torch.from_numpy(rho).repeat_interleave(numels) for rho in (state.rho1, state.rho2)
    )
    u = work.tensors["u"]
    if run.settings.method.flat:
        return mean_over(topology.world, theta + u)
    v = work.tensors["v"] - mean_over(topology.world, work.tensors["v"])
    mean = mean_over(topology.node, theta + u)
    z_tilde = (rho1 * mean + rho2 * (state.z - v)) / (rho1 + rho2)
    return mean_over(topology.world, z_tilde + v)


# Of 3 and 1 the one is lost.
@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("case", CASES)
def test_those_who_are_left_exchange_what_they_have_trained(case, ranks_per_node, monkeypatch):
    with nodes_of(1 if "flat" in case else ranks_per_node) as topology:
        if topology.num_nodes == 1:
            pytest.skip("nobody is left")
        kept = train_until_lost(topology, case, monkeypatch)
        left, each = survivors(topology), topology.node_size
        if left == MPI.COMM_NULL:
            return
        work = kept.work
        with comm.nodes_of(left, each) as smaller:
            run = go_on(smaller, case, kept)
            assert (run.state.position.iteration, run.state.position.step) == (3, 3)
            assert kept.steps == 3 and not kept.apart
            wanted = by_hand(smaller, run, work)
            record = next(run.iterate())
            torch.testing.assert_close(run.state.z, wanted, rtol=1e-12, atol=1e-12)
            loss = left.allreduce(work.losses[0]) / left.allreduce(work.losses[1])
            assert record["iteration"] == 3 and record["train_loss"] == pytest.approx(loss)
            if not run.state.consensus_sgd and not run.settings.method.flat:
                assert mean_over(left, run.state.v).abs().max() < 1e-12
        left.Free()


@pytest.mark.parametrize("case", ["prunex", "local-sgd"])
def test_all_go_back_where_one_has_nothing_of_its_own(case, monkeypatch):
    with nodes_of(1) as topology:
        kept = train_until_lost(topology, case, monkeypatch)
        left = survivors(topology)
        if left == MPI.COMM_NULL:
            return
        if left.rank == left.size - 1:
            kept.work = None
        with comm.nodes_of(left, 1) as smaller:
            run = go_on(smaller, case, kept)
            assert (run.state.position.iteration, run.state.position.step) == (3, 0)
            assert kept.steps == 0
            assert torch.equal(run.state.theta, run.state.z)
        left.Free()


def test_ranks_that_were_slower_leave_it_at_their_steps(monkeypatch):
    with nodes_of(1) as topology:
        kept = train_until_lost(topology, "local-sgd", monkeypatch)
        left = survivors(topology)
        if left == MPI.COMM_NULL:
            return
        kept.work = replace(kept.work, step=2 + left.rank % 2)
        samples_among, asked = BatchStream.samples_among, []

        def ask(stream, ranks, order):
            asked.append(ranks)
            return samples_among(stream, ranks, order)

        monkeypatch.setattr(BatchStream, "samples_among", ask)
        with comm.nodes_of(left, 1) as smaller:
            run = go_on(smaller, "local-sgd", kept)
            assert run.state.position.step == (2 if left.size == 1 else 3)
            # Steps so far are counted anew by those of as many ranks as there were.
            assert asked[-1] == WORLD.size
            wanted = mean_over(left, kept.work.tensors["theta"])
            next(run.iterate())
            if left.size > 1:
                torch.testing.assert_close(run.state.z, wanted, rtol=1e-12, atol=1e-12)
        left.Free()


@pytest.mark.parametrize("scenario", ["behind", "diloco int4 in parts", "dense"])
def test_exchanges_behind_the_steps_in_parts_and_at_each_leave_nothing_of_its_own(scenario):
    with nodes_of(1) as topology, HELPERS:
        run = new_run(topology, scenario)
        run.state.position.step = 2
        run.context.heartbeat.enter("local")
        kept = Kept(run.settings, context=run.context, work=SimpleNamespace())
        take_work_out(kept)
        assert kept.work is None


def test_what_is_kept_is_of_the_run_that_trains(monkeypatch):
    found = []
    monkeypatch.setattr(supervision, "evaluate_initial", lambda *_: None)
    monkeypatch.setattr(supervision, "run_to_end", lambda *given: found.append(given[-1].context))
    with nodes_of(1) as topology, HELPERS:
        run = new_run(topology, "behind")
        kept = Kept(run.settings)
        context = replace(run.context, behind=None)
        supervision.train(topology, None, context, None, ReceivedSignal(), None, kept)
        assert found[0].behind is not None
