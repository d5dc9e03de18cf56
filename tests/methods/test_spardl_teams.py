"""SparDL in teams: the authors' arithmetic for any number of workers, by threads for the ranks."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from driving import COMMON, SMALL_BUCKETS, exchange_over, make_context
from nets import RandomStream
from nodes import WORLD
from reference_rivals import spardl as oracle
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.comm.traffic import Clock, Traffic
from prunex_mpi.config.resolve import make
from prunex_mpi.methods import spardl
from prunex_mpi.methods.exchange import RESIDUAL
from prunex_mpi.run.supervision import check_exchange

STEPS = 5


class Ranks:
    """Ranks as threads, which have only one way to send; `sent` is what this one has."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], SimpleQueue]) -> None:
        self.rank, self.size, self.boxes = rank, round(len(boxes) ** 0.5), boxes
        self.sent = self.messages = 0

    def Sendrecv(self, mine, dest, recvbuf, source) -> None:
        mine, received = (b if isinstance(b, np.ndarray) else b[0] for b in (mine, recvbuf))
        self.sent, self.messages = self.sent + mine.nbytes, self.messages + 1
        self.boxes[self.rank, dest].put(mine.copy())
        received[...] = self.boxes[source, self.rank].get(timeout=60)


def settings_of(teams: int, ratio: float):
    return make(method="spardl", spardl_ratio=ratio, spardl_teams=teams, **COMMON)


def gradient_of(rank: int, step: int, count: int) -> torch.Tensor:
    """Return a gradient of which at every other step all have nearly the same: unions are small."""
    own, common = (torch.Generator().manual_seed(1000 * step + r) for r in (rank, 999))
    mine = torch.randn(count, generator=own, dtype=torch.float64)
    shared = torch.randn(count, generator=common, dtype=torch.float64)
    return shared + 0.01 * mine if step % 2 else mine


def steps_of(comm, settings, count: int):
    """Return this rank's context, wire, and grad, residual and h after each step."""
    model = nn.Linear(count, 1, bias=False, dtype=torch.float64)
    context = make_context(settings, model, RandomStream(0, torch.float64))
    link = CountedComm(comm, 1 / comm.size, comm.size, SMALL_BUCKETS, Traffic(), Clock())
    exchange, state, found = exchange_over(link, context), context.state, []
    for step in range(STEPS):
        state.grad.copy_(gradient_of(comm.rank, step, count))
        exchange.exchange_(state.grad)
        kept = state.memory[RESIDUAL], state.memory[spardl.ADAPTED]
        found.append([state.grad.clone(), *(tensor.clone() for tensor in kept)])
    return link, found


def assert_like_the_authors(found, settings, count: int) -> None:
    """Compare what every rank has after each step with the oracle; nothing is lost or made."""
    workers, memory = len(found), {}
    before = torch.zeros(count, dtype=torch.float64)
    for step in range(STEPS):
        given = [gradient_of(rank, step, count) for rank in range(workers)]
        wanted = oracle([{"row": g} for g in given], memory, SimpleNamespace(**vars(settings)))
        sums, residuals, adapted = zip(*(rank[step] for rank in found), strict=True)
        for rank in range(workers):
            # The same bits on all, of whatever team.
            assert torch.equal(sums[rank], sums[0])
            mine = torch.tensor(memory["residuals"][rank], dtype=torch.float64)
            torch.testing.assert_close(residuals[rank], mine, rtol=1e-12, atol=1e-12)
            h, *_ = memory["h"][rank % (workers // settings.options.teams)]
            assert adapted[rank][0] == h
        torch.testing.assert_close(sums[0], wanted["row"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            sums[0] + sum(residuals), before + sum(given), rtol=1e-11, atol=1e-11
        )
        before = sum(residuals)


@pytest.mark.parametrize(
    ("workers", "teams", "count", "ratio"),
    # Teams of one, a number of teams that is no power of two, elements that fill up a block.
    [(4, 2, 61, 0.2), (5, 5, 40, 0.3), (6, 2, 100, 0.1), (6, 3, 100, 0.3), (12, 4, 95, 0.5)],
)
def test_teams_of_any_number_do_what_the_authors_do(workers, teams, count, ratio):
    settings = settings_of(teams, ratio)
    boxes = {(a, b): SimpleQueue() for a in range(workers) for b in range(workers)}
    ranks = [Ranks(rank, boxes) for rank in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        ends = list(pool.map(lambda comm: steps_of(comm, settings, count), ranks))
    comms, found = zip(*ends, strict=True)
    assert_like_the_authors(found, settings, count)
    for comm, link in zip(ranks, comms, strict=True):
        assert link.traffic.sent == comm.sent


def test_four_workers_in_two_teams_send_less_in_fewer_messages():
    """Of 400 elements a tenth, in blocks of 200: 20 to the own team, 10 to 20 to the other."""
    settings = settings_of(2, 0.1)
    boxes = {(a, b): SimpleQueue() for a in range(4) for b in range(4)}
    ranks = [Ranks(rank, boxes) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda comm: steps_of(comm, settings, 400), ranks))
    between = [10, *(int(adapted[0]) for _, _, adapted in ends[0][1][:-1])]
    assert all(10 <= h <= 20 for h in between)
    assert len(set(between)) > 1
    one_team = STEPS * 2 * 3 * 10 * 12
    assert ranks[0].sent == sum((20 + h + 20) * 12 for h in between) < one_team
    assert ranks[0].messages == STEPS * 2 * 3
    most, _ = spardl.SparDl.payload(settings, SimpleNamespace(numel=400), 8, 4)
    assert ends[0][0].traffic.payload == ranks[0].sent <= STEPS * most == STEPS * 60 * 12


def test_what_travels_between_teams_moves_until_there_is_about_enough():
    """Like the authors': steps double while they are right, and turn back by a half."""
    seen, kept = [], (0, 0, 0)
    # Two teams want 1,000 of a block; those that they send are four in five others'.
    for _ in range(40):
        share, *rest = spardl.adapted(kept, 1000, 2)
        seen.append(share)
        kept = spardl.adapted((share, *rest), 1000, 2, found=round(1.8 * share))
    assert seen[:7] == [500, 505, 515, 525, 545, 565, 555]
    assert all(abs(1.8 * share - 1000) < 20 for share in seen[-10:])
    # All alike: as many as are wanted, never more.
    for _ in range(99):
        kept = spardl.adapted(kept, 1000, 2, found=kept[0])
        assert 500 <= kept[0] <= 1000 and 0 < abs(kept[1]) <= 1000
    # Means over ranks that have none begin anew.
    assert spardl.adapted((125.3, 0.2, 0.5), 1000, 2) == (500, 5, 0)


@pytest.mark.mpi(min_size=4)
def test_teams_over_mpi_do_what_the_authors_do():
    settings = settings_of(2, 0.1)
    comm = WORLD.Split(WORLD.rank // 4, key=WORLD.rank)
    link, found = steps_of(comm, settings, 401)
    assert_like_the_authors(comm.allgather(found), settings, 401)
    assert link.traffic.payload <= STEPS * 3 * 21 * 12
    comm.Free()


@pytest.mark.parametrize(("flat", "workers"), [(True, 4), (False, 2)])
def test_a_number_of_teams_that_does_not_divide_the_workers_is_refused(flat, workers):
    topology = SimpleNamespace(world_size=4, num_nodes=2)
    aggregation = "flat" if flat else "hierarchical"
    settings = make(method="spardl", spardl_teams=3, **{**COMMON, "aggregation": aggregation})
    with pytest.raises(UserError, match=f"teams 3 does not divide the {workers} workers; give a"):
        check_exchange(topology, settings)
    with pytest.raises(UserError, match=f"teams 3 does not divide the {workers} workers"):
        spardl.SparDl.payload(settings, SimpleNamespace(numel=10), 4, workers)
