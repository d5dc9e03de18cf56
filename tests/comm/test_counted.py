"""Counted communicators: who has what weight; messages are sent, counted and timed at once."""

from dataclasses import asdict

import pytest
import torch
from driving import assert_alike_on_all_ranks, comms_of, wire_of
from nodes import NODE_SHAPES, WORLD, nodes_of
from torch.profiler import ProfilerActivity, profile

from mpi4py import MPI

from prunex_mpi.base.units import dealt_bytes, ring_bytes, shifted_bytes
from prunex_mpi.comm.counted import reduce_between_nodes_
from prunex_mpi.comm.traffic import Clock, Traffic

pytestmark = pytest.mark.mpi

COUNT = 500


def ours(rank: int = WORLD.rank) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float64) + 1000 * rank


def everyones_sum() -> torch.Tensor:
    return sum(ours(rank) for rank in range(WORLD.size))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_weights_add_up_to_one_over_those_who_speak(ranks_per_node, flat):
    with nodes_of(ranks_per_node) as topology:
        workers = comms_of(topology, flat=flat).workers
        count = WORLD.size if flat else topology.num_nodes
        sums = torch.tensor([workers.is_member, workers.weight], dtype=torch.float64).numpy()
        WORLD.Allreduce(MPI.IN_PLACE, sums)
        assert sums[0] == count
        assert sums[1] == pytest.approx(1)
        assert workers.is_member == (workers.weight > 0)
        if not flat and workers.is_member:
            assert workers.weight == topology.node_size / WORLD.size
            assert workers.comm.size == count
        several = topology.num_nodes > 1
        assert workers.ring == (count if several else 1)
        assert workers.inside == (topology.node_size if flat and several else 1)


def test_a_reduction_counts_its_operand_and_what_a_ring_sends():
    link, flat = wire_of(WORLD), ours()
    link.reduce_(flat)
    assert torch.equal(flat, everyones_sum())
    size = 8 * COUNT
    assert link.traffic == Traffic(payload=size, sent=ring_bytes(WORLD.size, size))
    bits = torch.tensor([1 << WORLD.rank], dtype=torch.uint8)
    link.reduce_(bits, MPI.BOR, kind="mask")
    assert int(bits) == 2**WORLD.size - 1
    assert link.traffic.mask == 1
    assert link.traffic.payload == size


def test_a_reduction_to_the_first_and_a_broadcast_are_half_a_reduction_each():
    link, flat = wire_of(WORLD), ours()
    link.reduce_to_first_(flat)
    assert torch.equal(flat, everyones_sum() if WORLD.rank == 0 else ours())
    link.broadcast_(flat)
    assert torch.equal(flat, everyones_sum())
    size = 8 * COUNT
    half = ring_bytes(WORLD.size, size, passes=1)
    assert link.traffic == Traffic(payload=2 * size, sent=2 * half)


def test_what_the_first_rank_finishes_is_everyones_and_counts_once():
    link, flat = wire_of(WORLD), ours()

    def finish_() -> None:
        assert WORLD.rank == 0
        flat.neg_()

    link.reduce_by_first_(flat, finish_)
    assert torch.equal(flat, -everyones_sum())
    size = 8 * COUNT
    assert link.traffic == Traffic(payload=size, sent=ring_bytes(WORLD.size, size))


def test_gathers_count_what_everyone_contributes():
    link = wire_of(WORLD)
    everyone = torch.empty(WORLD.size, COUNT, dtype=torch.float64)
    link.gather_(ours(), everyone)
    assert torch.equal(everyone, torch.stack([ours(rank) for rank in range(WORLD.size)]))
    size = 8 * COUNT
    sent = ring_bytes(WORLD.size, WORLD.size * size, passes=1)
    assert link.traffic == Traffic(payload=size, sent=sent)

    counts = link.gather_counts(WORLD.rank + 1)
    assert counts == list(range(1, WORLD.size + 1))
    sent += ring_bytes(WORLD.size, WORLD.size * 8, passes=1)
    assert link.traffic == Traffic(payload=size + 8, sent=sent)

    together = torch.empty(sum(counts), dtype=torch.float64)
    link.gather_parts_(ours()[: counts[WORLD.rank]], counts, together)
    assert torch.equal(together, torch.cat([ours(r)[:c] for r, c in enumerate(counts)]))
    sent += ring_bytes(WORLD.size, 8 * sum(counts), passes=1)
    assert link.traffic == Traffic(payload=size + 8 + 8 * counts[WORLD.rank], sent=sent)


def test_shares_for_other_nodes_leave_a_node_whatever_the_way():
    """Ranks 0 to 3 on two nodes, each with 60 bytes of 15 for every rank, pair by pair."""
    for inside in (1, 2, 3, 4):
        leaving = [(a, b) for a in range(inside) for b in range(inside, 4)]
        assert dealt_bytes(4, inside, 60, passes=0) == 15 * len(leaving)
        assert dealt_bytes(4, inside, 60, passes=1) == 15 * (len(leaving) + 3)
    assert dealt_bytes(4, 1, 60, passes=0) == ring_bytes(4, 60, passes=1)
    assert dealt_bytes(1, 1, 60, passes=1) == 0


def test_what_is_shifted_leaves_a_node_where_its_receiver_is_in_another():
    for inside in (1, 2, 3, 4):
        for distance in (1, 2, 3):
            leaving = [rank for rank in range(inside) if (rank + distance) % 4 >= inside]
            assert shifted_bytes(4, inside, distance, 60) == 60 * len(leaving)
    assert shifted_bytes(1, 1, 3, 60) == 0


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_sums_over_all_ranks_are_the_same_either_way(ranks_per_node, flat):
    with nodes_of(ranks_per_node) as topology:
        comms = comms_of(topology, flat=flat)
        values = ours()
        comms.sum_(values)
        assert torch.equal(values, everyones_sum())
        assert_alike_on_all_ranks(values)
        size, inside = 8 * COUNT, topology.node_size > 1 and not flat
        traffic = comms.workers.traffic
        assert traffic.payload == size
        assert traffic.intra == (2 * size if inside else 0)
        assert traffic.sent == ring_bytes(comms.workers.ring, size)


@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_sums_between_nodes_reach_everyone_and_evaluation_leaves_no_node(ranks_per_node):
    with nodes_of(ranks_per_node) as topology:
        comms = comms_of(topology)
        index = topology.node_index
        values = ours(index)
        reduce_between_nodes_(comms.workers, comms.node, values, kind="evaluate")
        assert torch.equal(values, sum(ours(node) for node in range(topology.num_nodes)))
        inside = 8 * COUNT if topology.node_size > 1 else 0
        assert comms.node.traffic == Traffic(evaluate=8 * COUNT, intra=inside)


@pytest.mark.parametrize("each", [2, 3])
def test_with_racks_sums_and_broadcasts_are_the_same_and_each_ring_is_counted(each):
    """On 4 ranks racks of 2 + 2 and of 3 + 1 nodes; on fewer there is one rack."""
    with nodes_of(1, str(each)) as topology:
        link, flat, size = comms_of(topology).workers, ours(), 8 * COUNT
        link.reduce_(flat)
        assert torch.equal(flat, everyones_sum())
        bits = torch.tensor([1 << WORLD.rank], dtype=torch.uint8)
        link.reduce_(bits, MPI.BOR)
        assert int(bits) == 2**WORLD.size - 1
        flat = ours()
        link.reduce_to_first_(flat)
        if WORLD.rank == 0:
            assert torch.equal(flat, everyones_sum())
        link.broadcast_(flat)
        assert torch.equal(flat, everyones_sum())
        if WORLD.size == 4:
            # Two passes of two vectors, one of them in halves, and of a byte; of two racks.
            between = 2 * size + 1
            inside = ([2, 2] if each == 2 else [3, 1])[WORLD.rank // each]
            once, twice = (ring_bytes(inside, passes * size, 1) for passes in (1, 2))
            assert link.traffic.racks == between
            assert link.traffic.sent == between + 2 * once + twice + ring_bytes(inside, 2, 1)


def test_time_in_messages_is_told_from_the_methods_own(monkeypatch):
    clock, now = Clock(), iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    device = torch.device("cpu")
    with clock.computing(device), clock.exchanging(device, "Bcast"):
        pass
    # Four readings, one second apart, from outside in and out again.
    assert clock == Clock(method=2.0, exchange=1.0)
    assert clock.messages == 1.0


def test_messages_of_a_phase_are_told_apart_and_set_up_has_its_own(monkeypatch):
    clock, now = Clock(), iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    device = torch.device("cpu")
    with clock.exchanging(device, "Allreduce of a digest", part="agreed"):
        pass
    assert clock == Clock(agreed=1.0)
    with (
        clock.setting_up(device),
        clock.exchanging(device, "Bcast", part="agreed"),
        clock.exchanging(device, "Bcast"),
    ):
        pass
    assert clock == Clock(agreed=1.0, setup=5.0)


@pytest.mark.any_mpi
@pytest.mark.two_ranks
def test_a_trace_has_the_messages_with_what_was_counted():
    """Each rank loads the profiler, which takes it seconds."""
    link, flat = wire_of(WORLD), ours()
    link.reduce_(flat)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        link.clock.profiler = profiler
        link.reduce_(flat)
        link.broadcast_(flat, kind="mask")
    size, halves = 8 * COUNT, [ring_bytes(WORLD.size, 8 * COUNT, passes) for passes in (2, 1)]
    sent = [f", sent {half}" if WORLD.size > 1 else "" for half in halves]
    names = [event.name for event in profiler.events()]
    wanted = [f"Allreduce, payload {size}{sent[0]}", f"Bcast, mask {size}{sent[1]}"]
    assert [name for name in names if name in wanted] == wanted
    # It is no part of what is compared, copied and written with the seconds.
    assert asdict(link.clock).keys() == asdict(Clock()).keys()
