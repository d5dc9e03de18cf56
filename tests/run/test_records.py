"""ranks.jsonl: what each rank worked and what it waited for, phase by phase."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nodes import WORLD, nodes_of
from small_runs import DRIVERS, small_run

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import RANK_PHASES, RESIDUALS
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core import exchange
from prunex_mpi.run import supervision
from prunex_mpi.run.supervision import RankRecords, outer_iterations

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

# How long a rank is kept from a phase, what others may seem to work on a busy machine meanwhile,
# and what they wait at least.
DELAY_S, MOST_WORK_S, LEAST_WAIT_S = 0.8, 0.5, 0.6


class Delayed(Heartbeat):
    """A rank that comes late to a phase of the second outer iteration."""

    late = ""

    def enter(self, phase: str, iteration: int | None = None) -> None:
        super().enter(phase, iteration)
        if self.iteration == 2 and phase == self.late:
            time.sleep(DELAY_S)


def drive(
    topology: Topology, scenario: str, heartbeat: Heartbeat | None = None, **changes: Any
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield the driver's record and the row of ranks.jsonl of each outer iteration."""
    rows = RankRecords(topology)
    with small_run(topology, scenario, heartbeat, **changes) as context:
        for record in outer_iterations(topology, context):
            yield record, rows.gather(record["iteration"], record["rank"])


@pytest.mark.parametrize(
    ("scenario", "ranks_per_node"),
    # One of each driver, and what differs in how it sends.
    [(name, 2) for name in (*DRIVERS, "paper", "behind", "topk", "pactrain")]
    + [("recipe", 1), ("recipe", 3), ("int4", 3)],
)
def test_work_and_messages_are_all_that_a_rank_does_in_a_phase(scenario, ranks_per_node):
    each = 1 if scenario == "flat consensus" else ranks_per_node
    with nodes_of(each) as topology:
        for record, row in drive(topology, scenario):
            mine = record["rank"]
            for phase in RANK_PHASES:
                whole = mine["work"][phase] + mine["exchange"][phase]
                assert whole == pytest.approx(record["seconds"][phase], abs=1e-9)
                assert min(mine["work"][phase], mine["exchange"][phase]) >= -1e-9
            assert 0 <= mine["broadcast"] <= mine["exchange"]["inter"] + 1e-9
            if topology.node_size > 1 and scenario in ("recipe", "int4", "local sgd"):
                assert mine["broadcast"] > 0
            if WORLD.size > 1:
                # The ranks agree on going on, and on the loss.
                assert mine["exchange"]["local"] > 0
                assert mine["exchange"]["evaluate"] > 0 or record["test_loss"] is None
                inside = mine["exchange"]["inter"] + mine["exchange"]["intra"]
                assert inside > 0
            assert (row is None) == (WORLD.rank > 0)
            if row is None:
                continue
            assert row["iteration"] == record["iteration"]
            assert row["node"] == [rank // min(each, WORLD.size) for rank in range(WORLD.size)]
            nodes = topology.num_nodes
            hosts = [socket.gethostname()] * nodes if record["iteration"] == 1 else None
            assert row.get("hosts") == hosts
            assert row["broadcast"][0] == pytest.approx(mine["broadcast"], abs=1e-6)
            assert len(row["broadcast"]) == WORLD.size
            for part in ("work", "exchange"):
                assert list(row[part]) == list(RANK_PHASES)
                for phase, seconds in row[part].items():
                    assert len(seconds) == WORLD.size
                    assert seconds[0] == pytest.approx(mine[part][phase], abs=1e-6)
                    assert seconds == [round(s, 6) for s in seconds]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("scenario", "late", "changes"),
    [
        ("recipe", "local", {}),
        ("recipe", "evaluate", {"bn": "recalibrate"}),
        ("paper", "project", {}),
        ("behind", "inter", {}),
        ("flat consensus", "inter", {}),
        ("topk", "inter", {}),
        *(
            pytest.param(*case, {}, marks=pytest.mark.long)
            for case in (
                *(("recipe", "intra"), ("recipe", "project"), ("recipe", "evaluate")),
                *(("recipe", "inter"), ("recipe", "dual"), ("int4", "inter")),
                *(("paper", "inter"), ("paper", "dual")),
                *(("flat consensus", "project"), ("local sgd", "intra"), ("sparseloco", "inter")),
                *(("dense", "local"), ("topk", "local"), ("prunetrain", "project")),
            )
        ),
    ],
)
def test_who_waits_for_a_late_rank_does_not_seem_to_work(scenario, late, changes):
    with nodes_of(1 if scenario == "flat consensus" else 2) as topology:
        slow = WORLD.size - 1
        heartbeat = Delayed()
        heartbeat.late = late if slow == WORLD.rank else ""
        waited, worked = 0.0, 0.0
        for record, _ in drive(topology, scenario, heartbeat, **changes):
            mine = record["rank"]
            worked = max(worked, *mine["work"].values())
            # Of the others at the end of an exchange behind the steps as well.
            waited += sum(mine["exchange"].values()) if record["iteration"] >= 2 else 0.0
        assert worked < MOST_WORK_S
        # Whoever does not speak in a phase waits in a later one.
        assert WORLD.rank == slow or waited > LEAST_WAIT_S


@pytest.mark.mpi(min_size=2)
def test_who_works_long_does_not_seem_to_wait(monkeypatch):
    slow, real = WORLD.size - 1, exchange.take_over_

    def take_over_(*arguments: Any, **options: Any) -> Any:
        if slow == WORLD.rank:
            time.sleep(DELAY_S)
        return real(*arguments, **options)

    monkeypatch.setattr(exchange, "take_over_", take_over_)
    with nodes_of(2) as topology:
        _, row = next(drive(topology, "recipe"))
        if row is None:
            return
        context, dual = row["work"]["inter"], row["exchange"]["dual"]
        assert int(np.argmax(context)) == slow
        assert context[slow] > DELAY_S
        assert int(np.argmin(dual)) == slow
        assert all(s > LEAST_WAIT_S for s in dual[:slow])


@pytest.mark.parametrize("scenario", ["recipe", "flat consensus", "dense"])
def test_residuals_of_ranks_add_up_to_those_of_the_run(scenario):
    with nodes_of(1 if scenario == "flat consensus" else 2) as topology:
        measured = 0
        for record, row in drive(topology, scenario):
            if row is None:
                continue
            if record["residuals"]["intra_dual"] is None:
                assert row["residuals"] is None
                continue
            measured += 1
            for name in RESIDUALS:
                own = np.array(row["residuals"][name])
                whole = record["residuals"][name]
                assert np.sqrt((own**2).sum()) == pytest.approx(whole, rel=1e-5, abs=1e-12)
            if scenario == "recipe":
                # z is everyone's, z_i the node's.
                found = row["residuals"]
                assert len(set(found["inter_dual"])) == 1
                assert len(set(found["inter_primal"])) <= topology.num_nodes
        if WORLD.rank == 0:
            assert measured == (0 if scenario == "dense" else 2)


def test_many_ranks_have_no_row_in_every_outer_iteration(monkeypatch):
    monkeypatch.setattr(supervision, "RANKS_EACH", 1)
    with nodes_of(2) as topology:
        rows = RankRecords(topology)
        rank: dict[str, Any] = {
            part: dict.fromkeys(RANK_PHASES, 0.0) for part in ("work", "exchange")
        }
        rank |= {"broadcast": 0.0, "residuals": {}}
        found = [rows.gather(iteration, rank) for iteration in range(5, 14)]
        if WORLD.rank == 0:
            has = [row["iteration"] for row in found if row]
            assert has == [5, *(k for k in range(6, 14) if k % WORLD.size == 0)]
            assert [k for k in range(5, 14) if found[k - 5] and "hosts" in found[k - 5]] == [5]
        else:
            assert found == [None] * 9
