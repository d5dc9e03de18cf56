"""The cost model: numbers computed by hand, bounds, and what must grow with what."""

from dataclasses import replace

import pytest

from prunex_mpi.base.tables import format_table
from prunex_mpi.config.resolve import make
from prunex_mpi.core.sums import MOST_SUMMED
from prunex_mpi.run.cost import (
    Exchange,
    Kernels,
    Link,
    bound_s,
    coding_s,
    exchange_s,
    kernels_of,
    latency_s,
    packing_s,
    sent_bytes,
    share,
)
from prunex_mpi.run.dry_run import Travelling, cost_table, exchange_of
from prunex_mpi.settings.fields import NODES, PAYLOADS

LINK = Link(gbit=1.0, latency_us=50.0)
KERNELS = Kernels(pack=2.0, unpack=4.0, piece_us=10.0, encode=1.0, add=2.0, decode=4.0)
# A message of 125 MB takes a second at 1 Gbit/s, and a leader sends 1.5 of it.
RECORDS = Exchange(
    nodes=4,
    message_bytes=125_000_000,
    reductions=0,
    gatherings=3,
    values_bytes=1_000_000_000,
    model_bytes=2_000_000_000,
    pieces=100,
)
SUMS = replace(RECORDS, reductions=3, gatherings=0)
WHAT = Travelling(parameters=1_000_000, statistics=1_000, model=4_000_000, size=4, pieces=20)


def test_seconds_are_those_computed_by_hand():
    assert sent_bytes(RECORDS) == 187_500_000
    assert bound_s(LINK, RECORDS) == pytest.approx(1.5)
    # 3 buckets, 2 exchanges of 3 messages each; 3 buckets, there and back in 2 rounds.
    assert latency_s(LINK, RECORDS) == pytest.approx(18 * 50e-6)
    assert latency_s(LINK, SUMS) == pytest.approx(12 * 50e-6)
    # Encode all, add 3 of 4 parts, decode all.
    assert coding_s(KERNELS, RECORDS) == pytest.approx(1 + 0.75 / 2 + 1 / 4)
    assert packing_s(KERNELS, RECORDS) == pytest.approx(2 / 2 + 2 / 4 + 100 * 10e-6)
    assert exchange_s(LINK, KERNELS, RECORDS) == pytest.approx(1.5 + 0.0009 + 1.625 + 1.501)
    assert share(1.0, 3.0) == 0.25


def test_one_node_sends_nothing_and_codes_nothing():
    for exchange in (RECORDS, SUMS):
        alone = replace(exchange, nodes=1)
        assert sent_bytes(alone) == bound_s(LINK, alone) == latency_s(LINK, alone) == 0
        assert coding_s(KERNELS, alone) == 0
        assert exchange_s(LINK, KERNELS, alone) == packing_s(KERNELS, alone)


def test_no_exchange_beats_its_bound_and_all_grow():
    for payload in PAYLOADS:
        kernels, before = kernels_of(payload, 5.0), 0.0
        for nodes in NODES:
            exchange = exchange_of(payload, WHAT, nodes, 2**20)
            seconds = exchange_s(LINK, kernels, exchange)
            assert seconds > bound_s(LINK, exchange) > 0
            assert seconds > before
            before = seconds
            assert exchange_s(Link(2.0, 50.0), kernels, exchange) < seconds
            assert exchange_s(Link(1.0, 100.0), kernels, exchange) > seconds
            assert exchange_s(LINK, kernels_of(payload, 10.0), exchange) < seconds
            larger = exchange_of(payload, replace(WHAT, parameters=2_000_000), nodes, 2**20)
            assert exchange_s(LINK, kernels, larger) > seconds


def test_local_steps_hide_what_goes_between_nodes_and_no_more():
    packing = packing_s(KERNELS, RECORDS)
    whole = exchange_s(LINK, KERNELS, RECORDS)
    assert exchange_s(LINK, KERNELS, RECORDS, 1.0) == pytest.approx(whole - 1)
    assert exchange_s(LINK, KERNELS, RECORDS, 1000.0) == packing


def test_messages_are_cut_into_buckets():
    # 4,004,000 bytes as they are; 7,813 blocks of 66 bytes and 8 of 256 for the statistics.
    plain = exchange_of("fp32", WHAT, 4, 2**20)
    assert (plain.message_bytes, plain.reductions, plain.gatherings) == (4_004_000, 4, 0)
    coded = exchange_of("int4", WHAT, 4, 2**18)
    assert coded.message_bytes == 7_813 * 66 + 8 * 256
    assert (coded.reductions, coded.gatherings) == (0, 2 + 1)
    # Maxima and integers of each bucket are added up; statistics travel as records.
    summed = exchange_of("int8sum", WHAT, 4, 2**20)
    assert (summed.reductions, summed.gatherings) == (2, 1)
    assert coded.values_bytes == 4_004_000 and coded.model_bytes == 16_000_000


@pytest.mark.parametrize("flags", [{}, {"step_ms": 10.0, "local_steps": 20}])
def test_the_table_has_a_row_per_payload_and_number_of_nodes(flags):
    given = {"dry_run": True, "link_gbit": 1.0, **flags}
    settings = make(nodes=(1, 2, 18, 19), **given)
    table = cost_table(settings, settings.estimate, WHAT)
    rows = {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert len(rows) == 7 * 4 == len(table.rows)
    for (payload, nodes), row in rows.items():
        if payload == "int8sum" and nodes > MOST_SUMMED:
            assert set(list(row.values())[2:]) == {None}
            continue
        assert row["exchange s"] >= row["bound s"] + row["pack s"] > row["bound s"] >= 0
        if flags:
            assert row["share %"] == pytest.approx(100 * share(row["exchange s"], 0.2))
    assert rows["fp32", 1]["bytes sent"] == 0
    assert rows["fp32", 2]["bytes sent"] == 4_004_000
    assert rows["int4", 18]["bytes sent"] == round(34 / 18 * (7_813 * 66 + 8 * 256))
    assert " - " in format_table(table)


def test_the_share_is_of_what_is_not_hidden():
    given = {"dry_run": True, "link_gbit": 1e-3, "step_ms": 1e6, "local_steps": 20}
    given |= {"evaluate_every": 4, "residuals": "evaluate"}
    runs = [make(overlap_steps=steps, **given) for steps in (0, 5, "auto")]
    whole, behind, auto = (cost_table(run, run.estimate, WHAT) for run in runs)
    assert behind == auto
    for exposed, hidden in zip(whole.rows, behind.rows, strict=True):
        assert hidden[:-1] == exposed[:-1]
        assert hidden[-1] is None or hidden[-1] < exposed[-1] / 10
