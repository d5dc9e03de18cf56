"""Parallax and EmbRace over MPI: the sum of dense SGD, by the bytes of rows that are touched."""

import numpy as np
import pytest
import torch
from counting import Counting
from driving import (
    COMMON,
    STEPS,
    exchange_over,
    make_context,
    node_sizes_of,
    run_driver,
    wire_of,
)
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from places import DEVICE
from torch import nn

from mpi4py import MPI

from prunex_mpi.config.resolve import make

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

ROWS, WIDTH = 403, 8


def drawn(share, width=WIDTH):
    """Return a pattern: the gradients of all workers, each with its own `share` of rows."""

    def pattern(workers):
        generator = torch.Generator().manual_seed(5)
        given = torch.randn(workers, ROWS, width, generator=generator, dtype=torch.float64)
        for worker, rows in enumerate(given):
            untouched = torch.randperm(ROWS, generator=generator)[round(share * ROWS) :]
            # Zeros of both signs.
            rows[untouched] = -0.0 if worker % 2 else 0.0
        return given

    return pattern


def changed(change_, share=0.1):
    """Return a pattern of which `change_` alters the gradients."""

    def pattern(workers):
        given = drawn(share)(workers)
        change_(given)
        return given

    return pattern


def keep_apart_(given):
    """Let no two workers have a row in common."""
    given.zero_()
    for worker, rows in enumerate(given):
        rows[7 + 40 * worker : 40 * (worker + 1)] = 1 + worker


def cancel_(given):
    """Let pairs of workers have what adds up to nothing, in whatever order."""
    given.mul_(100).round_()
    given[1::2] = -given[: len(given) // 2 * 2 : 2]


PATTERNS = {
    "1 %": drawn(0.01),
    "10 %": drawn(0.1),
    "60 %": drawn(0.6),
    "all": drawn(1.0),
    "none": drawn(0.0),
    "none in common": changed(keep_apart_),
    "one worker's alone": changed(lambda given: given[1:].zero_()),
    "sums of zero": changed(cancel_),
    # Fewer columns than four workers.
    "narrow": drawn(0.1, width=3),
    "no numbers": changed(lambda given: given[-1, 5].fill_(float("nan"))),
}


def by_rows(touched, union, rank, size):
    """Return what a leader of Parallax hands over, bytes of values, then of numbers.

    `touched` [from, rows] and `union` [rows], whose sums go to all, are bool, `size` is of a row.
    Rows for other owners, then the sums of its own.
    """
    own = np.arange(len(union)) % len(touched) == rank
    count = int((touched[rank] & ~own).sum() + (union & own).sum())
    return np.array([count * size, count * 4])


def by_columns(touched, union, rank, size):
    """Return what a worker of EmbRace hands over: others' columns, then the sums of its own."""
    width = size // 8
    own = width * (rank + 1) // len(touched) - width * rank // len(touched)
    mine = touched[rank].sum()
    return np.array([(mine * (width - own) + union.sum() * own) * 8, mine * 4])


def all_by_rows(touched, union, width):
    """Return how many values and numbers Parallax sends: each row to its owner, each sum to all."""
    workers = len(touched)
    owned = sum(touched[r, r::workers].sum() for r in range(workers))
    rows = touched.sum() - owned + (workers - 1) * union.sum()
    return rows * width, rows


def all_by_columns(touched, union, width):
    """Return how many values and numbers EmbRace sends: each column likewise, numbers to all."""
    workers = len(touched)
    ends = width * np.arange(workers + 1) // workers
    left = (touched.sum(axis=1) * (width - np.diff(ends))).sum()
    sums = (workers - 1) * union.sum() * width
    return left + sums, (workers - 1) * touched.sum()


# What one worker hands over, what all send, and how many counts a worker tells the others.
SENT = {
    "parallax": (by_rows, all_by_rows, lambda workers: (workers, 1)),
    "embrace": (by_columns, all_by_columns, lambda workers: (1, 0)),
}


# Fewer than these send less of the same.
MANY = (WORLD.size, WORLD.size - 1)
CASES = [(p, n) for p in PATTERNS for n in range(1, WORLD.size + 1) if n in MANY or p == "10 %"]


@pytest.mark.parametrize(("pattern", "workers"), CASES)
@pytest.mark.parametrize("method", ["parallax", "embrace"])
def test_sums_are_dense_and_bytes_those_of_the_rows(method, pattern, workers):
    comm = WORLD.Split(0 if WORLD.rank < workers else MPI.UNDEFINED, key=WORLD.rank)
    if comm == MPI.COMM_NULL:
        return
    by_hand, in_all, told = SENT[method]
    given = PATTERNS[pattern](workers)
    width = given.shape[2]
    model = nn.Sequential(nn.Embedding(ROWS, width)).double()
    context = make_context(make(method=method, **COMMON), model, RandomStream(0, torch.float64))
    link = wire_of(Counting(comm))
    exchange, grad = exchange_over(link, context), context.state.grad
    total = given.sum(dim=0)
    for _ in range(2):
        grad.copy_(given[comm.rank].flatten())
        exchange.exchange_(grad)
        found = grad.cpu().view(ROWS, width)
        torch.testing.assert_close(found, total, rtol=1e-13, atol=1e-13, equal_nan=True)
        assert len({*comm.allgather(found.numpy().tobytes())}) == 1
    touched, union = (given != 0).any(dim=2).numpy(), (total != 0).any(dim=1).numpy()
    if method == "embrace":
        # Sums of zero go to all as well.
        union = touched.any(axis=0)
    dense = np.array([8 * ROWS * width, 0])
    # Nobody to save bytes for, or rows that are no fewer.
    whole = workers == 1 or pattern == "all"
    mine = dense if whole else by_hand(touched, union, comm.rank, 8 * width)
    # How many rows, and of Parallax how many sums.
    before, after = told(workers)
    mine[1] += 4 * before + 4 * after * (not whole)
    assert [link.traffic.payload, link.traffic.mask] == (2 * mine).tolist()
    sent = np.array([link.traffic.sent, link.comm.sent])
    comm.Allreduce(MPI.IN_PLACE, sent)
    if not whole:
        assert link.comm.positions == link.traffic.mask
        values, numbers = in_all(touched, union, width)
        counts = workers * (workers - 1) * (before + after)
        assert sent[1] == 2 * (8 * values + 4 * numbers + 4 * counts)
        # An Allreduce sends 2 (M - 1)/M of the embedding, each of M workers.
        assert sent[1] < 4 * (workers - 1) * 8 * ROWS * width
        # Each count of a message is rounded down.
        assert 0 <= sent[1] - sent[0] < 0.01 * sent[1] + 500
    comm.Free()


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_a_node_sends_the_rows_that_its_ranks_look_up(ranks_per_node):
    settings = make(method="parallax", **{**COMMON, "outer_iterations": 1})
    model = new_net(torch.float32, "parallax")
    rows, width = model.embedding.weight.shape
    streams = [RandomStream(rank, torch.float32) for rank in range(WORLD.size)]
    sizes = node_sizes_of(WORLD.size, min(ranks_per_node, WORLD.size))
    starts = np.cumsum([0, *sizes])
    touched = np.zeros((STEPS, len(sizes), rows), dtype=bool)
    for step in range(STEPS):
        for rank, stream in enumerate(streams):
            node = int(np.searchsorted(starts, rank, side="right")) - 1
            touched[step, node, model.tokens(stream.next()[0]).numpy()] = True
    dense = 4 * STEPS * sum(p.numel() for p in model.parameters())
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        ((record, state),) = run_driver(topology, settings, model, stream)
        assert [s.name for s in state.layout.embeddings] == ["embedding.weight", "positions.weight"]
        if not topology.is_leader:
            return
        node, nodes, inside = topology.leader.rank, topology.num_nodes, topology.node_size
    # Counts of both embeddings; positions are touched in all rows.
    wanted = np.array([dense, STEPS * 2 * 4 * nodes])
    if nodes > 1:
        wanted += [-4 * STEPS * rows * width, STEPS * 4]
        wanted += sum(by_rows(step, step.any(axis=0), node, 4 * width) for step in touched)
    found = record["bytes"]
    assert found["dense"] == dense and found["evaluate"] == 0
    assert [found["payload"], found["mask"]] == wanted.tolist()
    assert found["intra"] == (2 * dense if inside > 1 else 0)
    assert DEVICE.type != "cpu" or (found["payload"] < dense) == (nodes > 1)
