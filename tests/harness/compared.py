"""Tables of bench and compare, and fabricated runs of comparisons."""

import math
from dataclasses import replace

from prunex_mpi.base.tables import Table, format_table
from prunex_mpi.tools.report.comparison import Comparison, Measured, Outcome, Point

RAN = Measured(
    accuracy=0.5,
    loss=1.0,
    samples=100,
    extra_samples=0,
    epochs=2.0,
    steps=10,
    payload_bytes=2**20,
    sent_bytes=2**20,
    metadata_bytes=0,
    sync_s=2.0,
    own_s=1.0,
    local_s=4.0,
    train_s=7.0,
    parameters=100,
    parameters_left=60,
    curve=(Point(0.25, 2.0, 1, 2**19, 3.0, 1.0), Point(0.5, 1.0, 2, 2**20, 7.0, 5.0)),
)


def column(table: Table, name: str) -> list:
    index = table.columns.index(name)
    return [row[index] for row in table.rows]


def assert_sane(table: Table) -> None:
    assert table.rows, table.title
    for row in table.rows:
        assert len(row) == len(table.columns)
        numbers = [cell for cell in row if not isinstance(cell, str | None)]
        assert numbers, row
        assert all(math.isfinite(n) and n >= 0 for n in numbers), row
    lines = format_table(table).splitlines()
    assert len(lines) == 2 + len(table.rows) + len(table.notes)


def cells(table: Table, method: str) -> dict:
    (row,) = (row for row in table.rows if row[0] == method)
    return dict(zip(table.columns, row, strict=True))


def outcomes(*rows: str, **changes: object) -> list[Outcome]:
    return [Outcome(row, 0, 0.1, replace(RAN, **changes)) for row in rows]


def comparison(runs: list[Outcome], **changes: object) -> Comparison:
    rows, seeds = (tuple(dict.fromkeys(getattr(r, key) for r in runs)) for key in ("row", "seed"))
    empty = Comparison("title", {}, rows, seeds, (), tuple(runs), ("note",))
    return replace(empty, **changes)
