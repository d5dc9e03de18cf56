"""The helper thread: what it raises arrives, one exchange at a time, refused without threads."""

import threading

import numpy as np
import pytest
import torch
from nodes import NODE_SHAPES, WORLD, nodes_of

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import HELPER
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import Transport, for_another_thread

pytestmark = pytest.mark.mpi

TRANSPORT = Transport(1024)


@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_both_threads_sum_at_once(ranks_per_node):
    """Neither takes what the other one sends, over the same ranks."""
    with (
        nodes_of(ranks_per_node) as topology,
        exchanging_asynchronously(topology, True, TRANSPORT) as it,
    ):
        assert it.node.size == topology.node_size
        assert (it.between == MPI.COMM_NULL) == (topology.leader == MPI.COMM_NULL)
        mine, theirs, names = np.full(1000, 1.0), np.full(1000, 1000.0), []

        def exchange() -> None:
            names.append(threading.current_thread().name)
            for _ in range(20):
                it.node.Allreduce(MPI.IN_PLACE, theirs, op=MPI.MAX)
                if it.between != MPI.COMM_NULL:
                    it.between.Allreduce(MPI.IN_PLACE, theirs, op=MPI.MAX)

        it.begin(exchange)
        for _ in range(20):
            topology.node.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
            if topology.leader != MPI.COMM_NULL:
                topology.leader.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
        it.finish()
        assert set(mine) == {1.0} and set(theirs) == {1000.0}
        assert names[0].startswith(HELPER)
        # There is nothing more to wait for.
        it.finish()


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), UserError("no")])
def test_what_the_helper_raises_is_raised_where_it_is_waited_for(error):
    def exchange() -> None:
        raise error

    with nodes_of(2) as topology, exchanging_asynchronously(topology, True, TRANSPORT) as helper:
        helper.begin(exchange)
        with pytest.raises(type(error)) as caught:
            helper.finish()
        assert caught.value is error
        # It can be used again.
        helper.begin(lambda: None)
        helper.finish()


def test_one_exchange_at_a_time():
    go_on = threading.Event()
    with nodes_of(2) as topology, exchanging_asynchronously(topology, True, TRANSPORT) as helper:
        helper.begin(go_on.wait)
        with pytest.raises(RuntimeError, match="under way already"):
            helper.begin(lambda: None)
        go_on.set()
        helper.finish()


def test_a_user_error_that_all_ranks_raise_waits_for_what_is_under_way():
    done = []
    with nodes_of(2) as topology:

        def fail() -> None:
            with exchanging_asynchronously(topology, True, TRANSPORT) as helper:
                helper.begin(lambda: done.append(helper.node.allreduce(1)))
                raise UserError("all of us")

        with pytest.raises(UserError, match="all of us"):
            fail()
        assert done == [topology.node_size]
    assert not [t for t in threading.enumerate() if t.name.startswith(HELPER)]


def test_nothing_is_made_where_nothing_is_wanted(monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SINGLE)
    with nodes_of(2) as topology, exchanging_asynchronously(topology, False, TRANSPORT) as helper:
        assert helper is None


def test_one_rank_without_threads_is_refused_on_all(monkeypatch):
    if WORLD.rank == WORLD.size - 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with (
        nodes_of(2) as topology,
        pytest.raises(UserError, match="MPI_THREAD_MULTIPLE"),
        exchanging_asynchronously(topology, True, TRANSPORT),
    ):
        pass


def test_threads_do_not_share_host_memory(monkeypatch):
    assert for_another_thread(TRANSPORT) is TRANSPORT
    # No machine here needs a GPU for this.
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, pin_memory: real(t))
    staged = Transport(8, (torch.zeros(8), torch.zeros(8)))
    other = for_another_thread(staged)
    assert other.bucket_bytes == 8
    places = {t.data_ptr() for t in (*staged.staging, *other.staging)}
    assert len(places) == 4
