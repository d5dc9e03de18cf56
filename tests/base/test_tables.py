"""Tables: aligned for people, whole in JSON."""

import json

from prunex_mpi.base.tables import LossCell, Table, as_json, format_lines, format_table


def test_tables_align_and_survive_json():
    table = Table("t", ("name", "n"), (("long name", 1), ("x", None), ("y", 1234.5)), ("note",))
    assert format_table(table).splitlines() == [
        "t",
        "  name          n",
        "  long name     1",
        "  x             -",
        "  y          1234",
        "  note",
    ]
    written = json.loads(json.dumps(as_json({"mpi": "m"}, [table])))
    assert written["tables"][0]["rows"] == [["long name", 1], ["x", None], ["y", 1234.5]]


def test_losses_have_three_decimals_and_stand_on_the_right():
    losses = (("a", LossCell(2.0204)), ("b", None), ("c", LossCell(12.5)))
    rows = tuple((name, 0.2, loss, 7.0) for name, loss in losses)
    table = Table("t", ("row", "lr", "loss", "epochs"), rows)
    assert format_table(table).splitlines()[1:] == [
        "  row    lr    loss  epochs",
        "  a    0.20   2.020    7.00",
        "  b    0.20       -    7.00",
        "  c    0.20  12.500    7.00",
    ]
    assert json.loads(json.dumps(as_json({}, [table])))["tables"][0]["rows"] == [*map(list, rows)]


def test_names_of_others_are_shown_and_not_obeyed():
    table = Table("t", ("class", "n"), (("\x1b[2Jant\nbee\u202e", 1), ("caf\u00e9 \udc80", 2)))
    rows = [line.rsplit(maxsplit=1) for line in format_table(table).splitlines()[2:]]
    assert rows == [["  \\x1b[2Jant\\nbee\\u202e", "1"], ["  café \\udc80", "2"]]
    assert format_lines([("name", "a\rb")]) == "name  a\\rb"


def test_lines_are_aligned():
    assert format_lines([("a", "1"), ("long name", "2")]) == "a          1\nlong name  2"
