"""Communicators of every node shape, errors and texts that all ranks share, threads of a rank."""

import os
import socket

import numpy as np
import pytest
import torch
from nodes import NODE_SHAPES, WORLD, nodes_of

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError
from prunex_mpi.comm import topology as module
from prunex_mpi.comm.agreement import (
    broadcast_text,
    digests_agree,
    gather_text,
    raise_together,
    require_same,
)
from prunex_mpi.comm.topology import build_topology, describe, library_name, rack_name


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_virtual_nodes_hold_consecutive_ranks_and_the_last_takes_the_rest(ranks_per_node):
    step = min(ranks_per_node, WORLD.size)
    starts = range(0, WORLD.size, step)
    sizes = tuple(min(step, WORLD.size - start) for start in starts)
    with nodes_of(ranks_per_node) as topology:
        index, node_rank = divmod(WORLD.rank, step)
        assert topology.node_sizes == sizes
        assert topology.num_nodes == len(sizes)
        assert topology.node_index == index
        assert (topology.node.rank, topology.node_size) == (node_rank, sizes[index])
        assert (topology.world.rank, topology.world_size) == (WORLD.rank, WORLD.size)
        assert topology.is_leader == (node_rank == 0)
        assert (topology.leader == MPI.COMM_NULL) == (node_rank != 0)
        if topology.is_leader:
            assert (topology.leader.rank, topology.leader.size) == (index, len(sizes))
        weights = np.array([topology.node_weight if topology.is_leader else 0.0])
        WORLD.Allreduce(MPI.IN_PLACE, weights, op=MPI.SUM)
        assert weights[0] == pytest.approx(1, abs=1e-15)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", [0, 1])
def test_nodes_and_host_ranks_are_what_shares_memory(ranks_per_node):
    shared = WORLD.Split_type(MPI.COMM_TYPE_SHARED, key=WORLD.rank)
    with nodes_of(ranks_per_node) as topology:
        # Virtual nodes do not change who shares the machine's cores and devices.
        assert (topology.host_rank, topology.host_size) == (shared.rank, shared.size)
        if ranks_per_node == 0:
            assert (topology.node.rank, topology.node_size) == (shared.rank, shared.size)
            assert sum(topology.node_sizes) == WORLD.size
    shared.Free()


@pytest.mark.mpi
def test_the_callers_communicator_is_only_borrowed():
    with nodes_of(1, "2") as topology:
        # The same ranks in the same order, but messages of their own.
        assert MPI.Comm.Compare(topology.world, WORLD) == MPI.CONGRUENT
        racks = topology.racks
    made = [topology.world, topology.node, topology.leader]
    made += [] if racks is None else [racks.inside, racks.between]
    assert made == [MPI.COMM_NULL] * len(made)
    WORLD.Barrier()


@pytest.mark.mpi
def test_more_ranks_per_node_than_ranks_is_refused_everywhere():
    with pytest.raises(UserError, match=f"--ranks-per-node {WORLD.size + 1} .* {WORLD.size} ranks"):
        build_topology(WORLD, WORLD.size + 1)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2, 1)], ids=str)
@pytest.mark.mpi(min_size=4)
def test_racks_are_split_from_the_leaders_whatever_the_order_of_hosts(sizes, monkeypatch):
    """Hosts of several racks take turns, as far as there are any left."""
    turns = [rack for place in range(4) for rack, size in enumerate(sizes) if place < size]
    racks = [*turns, *[0] * (WORLD.size - 4)]
    host = f"r{racks[WORLD.rank]}-n{WORLD.rank}"
    members = [rank for rank, rack in enumerate(racks) if rack == racks[WORLD.rank]]
    monkeypatch.setattr("socket.gethostname", lambda: host)
    with nodes_of(1, r"^(.*)-n\d+$") as topology:
        found = topology.racks
        assert found.sizes == tuple(racks.count(rack) for rack in range(len(sizes)))
        assert found.index == racks[WORLD.rank]
        assert topology.num_peers == len(sizes)
        assert (found.inside.rank, found.inside.size) == (members.index(WORLD.rank), len(members))
        first = WORLD.rank == members[0]
        assert (found.between != MPI.COMM_NULL) == first
        if first:
            assert (found.between.rank, found.between.size) == (found.index, len(sizes))
        assert str(list(found.sizes)) in describe(topology, "cpu") or WORLD.rank
    assert found.inside == found.between == MPI.COMM_NULL


@pytest.mark.mpi
@pytest.mark.parametrize("rack_of", ["1", "1000", "(.*)"])
def test_one_rack_and_racks_of_one_node_are_two_levels_and_said(rack_of, caplog):
    with nodes_of(1, rack_of) as topology:
        assert topology.racks is None
        assert topology.num_peers == topology.num_nodes
        warned = WORLD.rank == 0 and topology.num_nodes > 1
    words = "each is a rack of its own" if rack_of == "1" else "all are in rack"
    assert [words in line for line in caplog.messages] == [True] * warned


@pytest.mark.mpi
@pytest.mark.parametrize("rack_of", ["slurm", "(x)yz"])
def test_no_rack_is_looked_for_where_there_is_one_node(rack_of, monkeypatch):
    """As on the machine where the size of messages is printed first."""
    monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
    with nodes_of(WORLD.size, rack_of) as topology:
        assert topology.racks is None


def test_a_rack_has_the_name_of_its_switches(monkeypatch):
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf2.node7")
    assert rack_name("slurm", 5) == "core.leaf2"
    assert [rack_name("3", node) for node in range(7)] == list("0001112")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("rack_of", "words"),
    [("(x)yz", "rack-of (x)yz: its group finds no rack"), ("slurm", "no switch in SLURM_TOPO")],
)
def test_a_rack_that_nobody_can_tell_is_refused_everywhere(rack_of, words, monkeypatch):
    monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: f"host{WORLD.rank}")
    with pytest.raises(UserError) as caught:
        build_topology(WORLD, 1, rack_of=rack_of)
    assert words in str(caught.value)


TEXTS = ("", "a", "Grüße, θ ⊙ m", "x" * 100_000, "line\nline\0end")


@pytest.mark.mpi
@pytest.mark.parametrize("shift", range(len(TEXTS)))
def test_texts_of_any_length_reach_rank_zero_in_order(shift):
    texts = [TEXTS[(rank + shift) % len(TEXTS)] for rank in range(WORLD.size)]
    assert gather_text(WORLD, texts[WORLD.rank]) == ([] if WORLD.rank else texts)


@pytest.mark.mpi
@pytest.mark.parametrize("text", TEXTS)
def test_text_of_any_root_reaches_every_rank(text):
    for root in {0, WORLD.size - 1}:
        mine = text if WORLD.rank == root else f"other {WORLD.rank}"
        assert broadcast_text(WORLD, mine, root) == text


@pytest.mark.mpi
def test_error_of_one_rank_is_raised_on_all_with_its_code_and_place():
    for rank in range(WORLD.size):
        error = UserError("cannot read θ.bin", UNREADABLE) if WORLD.rank == rank else None
        with pytest.raises(UserError) as caught:
            raise_together(WORLD, error)
        assert caught.value.exit_code == UNREADABLE
        assert str(caught.value).endswith("cannot read θ.bin")
        if WORLD.size > 1:
            assert str(caught.value).startswith(f"rank {rank} on ")


@pytest.mark.mpi
def test_error_that_all_ranks_share_is_said_once_without_a_rank():
    with pytest.raises(UserError) as caught:
        raise_together(WORLD, UserError("keep ratio 0"))
    assert str(caught.value) == "keep ratio 0"
    assert caught.value.exit_code == USAGE


@pytest.mark.mpi(min_size=3)
def test_of_several_errors_the_lowest_ranks_is_raised():
    code = WORLD.rank + 1
    error = None if WORLD.rank == 0 else UserError(f"fault {WORLD.rank}", code)
    with pytest.raises(UserError, match=r"^rank 1 on .*: fault 1$") as caught:
        raise_together(WORLD, error)
    assert caught.value.exit_code == 2


@pytest.mark.mpi
def test_require_same_accepts_equal_values_and_refuses_one_stranger():
    require_same(WORLD, "the settings", "lr = 0.1")
    if WORLD.size == 1:
        return
    for rank in range(WORLD.size):
        found = f"'lr = 0.2' on rank {rank}, 'lr = 0.1' on rank 0"
        if rank == 0:
            found = "'lr = 0.1' on rank 1, 'lr = 0.2' on rank 0"
        with pytest.raises(
            UserError, match=f"^the settings differ between ranks: {found};"
        ) as caught:
            require_same(WORLD, "the settings", f"k = 1\nlr = {0.1 if WORLD.rank != rank else 0.2}")
        assert caught.value.exit_code == USAGE


@pytest.mark.mpi
@pytest.mark.parametrize("digest", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_digests_agree_only_if_all_do_and_every_rank_hears_it(digest):
    assert digests_agree(WORLD, digest)
    if WORLD.size == 1:
        return
    for rank in range(WORLD.size):
        for other in (digest ^ 1, digest ^ (1 << 63), digest ^ (2**64 - 1)):
            assert not digests_agree(WORLD, other if WORLD.rank == rank else digest)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_description_names_each_node_its_host_and_its_devices_once(ranks_per_node):
    with nodes_of(ranks_per_node) as topology:
        text = describe(topology, f"cpu, {WORLD.rank + 1} threads")
        sizes = topology.node_sizes
    if WORLD.rank:
        assert text == ""
        return
    head, *tail = text.split("; ")
    summary, first = head.rsplit(": ", 1)
    assert f"{len(sizes)} nodes, {WORLD.size} ranks" in summary
    assert library_name() in summary
    assert first.count(socket.gethostname()) == 1
    expected = [f"node {node} = {size} ranks on " for node, size in enumerate(sizes)]
    assert [node[: len(start)] for node, start in zip([first, *tail], expected, strict=True)] == (
        expected
    )
    places = [text.index(f"cpu, {rank + 1} threads") for rank in range(WORLD.size)]
    assert places == sorted(places)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("cores", "sharers", "limit", "host_size", "threads"),
    [
        *((8, 1, 16, 1, 8), (8, 4, 16, 4, 2), (8, 3, 16, 3, 2), (2, 4, 4, 4, 1), (2, 1, 8, 2, 2)),
        # A quota is for all ranks of the machine, whichever cores are theirs.
        *((64, 1, 2, 1, 2), (64, 4, 8, 4, 2), (64, 4, 2, 4, 1), (4, 1, 4, 2, 2)),
    ],
)
def test_ranks_share_the_cores_they_may_all_use(
    cores, sharers, limit, host_size, threads, monkeypatch
):
    set_to: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # Two hardware threads each.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2 * cores)))
    monkeypatch.setattr(module, "cores_of", lambda cpus: tuple({cpu // 2 for cpu in cpus}))
    monkeypatch.setattr(module, "cpu_limit", lambda: limit)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    module.set_threads(sharers, host_size)
    assert set_to == [threads]


def test_omp_num_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    assert module.set_threads(1, 1) == before == torch.get_num_threads()
