"""What runs of comparisons came to: read from their folders and from JSON, in tables and curves."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from compared import RAN, cells, column, comparison, outcomes
from recorded import make_run, write_lines

from prunex_mpi import report
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import write_json
from prunex_mpi.base.tables import format_table
from prunex_mpi.tools.report import comparison as comparisons
from prunex_mpi.tools.report import curves
from prunex_mpi.tools.report.comparison import (
    Outcome,
    Point,
    Quality,
    Tuning,
    comparison_from,
    curves_of,
    read_comparison,
    read_measured,
    together,
)
from prunex_mpi.tools.report.comparison_tables import (
    equal_tables,
    results_table,
    seconds_at,
    tuning_tables,
)


def recorded(path: Path, accuracy: bool = True) -> Path:
    """Write a run of three outer iterations, of which the second has no seconds of its ranks."""
    make_run(path, iterations=3, nodes=(1, 1), overlap_steps=1, evaluate_every=2, residuals="off")
    # A vote in the projection, coding between nodes, a loss that the ranks agree on in phase 5.
    seconds = {"local": 8.0, "intra": 1.0, "project": 2.0, "inter": 4.0, "dual": 1.0}
    exchange = {"local": [0.5, 9], "project": [1.5, 9], "inter": [3.0, 9], "dual": [0.25, 9]}
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"seconds": {**seconds, "evaluate": 10.0, "total": 27.0}, "bytes": {"sent": 10}}
        line |= {"val_loss": None, "val_accuracy": None}
    for line, found in ((lines[1], 0.5), (lines[2], 0.75)):
        line |= {"val_loss": 2.0, **({"val_accuracy": found} if accuracy else {})}
    write_lines(path / "metrics.jsonl", lines)
    rank = json.loads((path / "ranks.jsonl").read_text().splitlines()[0])
    write_lines(
        path / "ranks.jsonl", [{**rank, "iteration": k, "exchange": exchange} for k in (1, 3)]
    )
    summary = json.loads((path / "summary.json").read_text())
    work = {"steps": 12, "samples": 48, "extra_samples": 0, "epochs": 0.5, "metadata_bytes": 2}
    best = {"iteration": 3, "loss": 2.0} | ({"accuracy": 0.75} if accuracy else {})
    (path / "summary.json").write_text(json.dumps({**summary, "work": work, "validation": best}))
    return path


def test_a_run_s_folder_tells_what_it_measured(tmp_path):
    found = read_measured(recorded(tmp_path / "run"))
    # Messages are told from work alike in all phases, and evaluations are left out.
    assert (found.sync_s, found.own_s, found.local_s) == (3 * 5.25, 3 * 3.25, 3 * 7.5)
    assert (found.train_s, found.samples, found.metadata_bytes) == (3 * 17, 48, 2)
    assert (found.parameters, found.parameters_left) == (1000, 520)
    # One step of four in an outer iteration hides its exchange.
    assert found.hidden == 0.25
    points = Point(0.5, 2.0, 2, 20, 34.0, 21.5), Point(0.75, 2.0, 3, 30, 51.0, 32.25)
    assert (found.accuracy, found.loss, found.curve) == (0.75, 2.0, points)
    assert found.speedup is None
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "plan.json").write_text('{"forward_s": [0.5, 0.25]}')
    assert read_measured(tmp_path / "run").speedup == 2
    # Where networks have a loss alone.
    found = read_measured(recorded(tmp_path / "text", accuracy=False))
    assert {(x.accuracy, x.loss) for x in (found, *found.curve)} == {(None, 2.0)}


def test_a_run_that_holds_nothing_out_or_is_damaged_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"run is not of a run that can be compared \('work'\)"):
        read_measured(make_run(tmp_path / "run"))
    monkeypatch.setattr(comparisons, "measured_from", lambda run: None)
    (tmp_path / "run" / "model").mkdir()
    for damaged in ('{"forward_s": [1]}', '{"forward_s": [1%s, 2]}' % ("0" * 400)):
        (tmp_path / "run" / "model" / "plan.json").write_text(damaged)
        with pytest.raises(UserError, match="is not of a run that can be compared"):
            read_measured(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_measured(tmp_path / "run")


def test_the_best_trial_is_of_highest_accuracy_then_lowest_loss():
    runs = [
        *outcomes("a", accuracy=0.5, loss=0.1),
        *outcomes("a", accuracy=0.7, loss=0.9),
        *outcomes("a", accuracy=0.7, loss=0.8),
        Outcome("a", 0, 0.1, None, "diverged"),
    ]
    assert Tuning("a", tuple(runs)).best == 2
    assert Tuning("a", tuple(runs[3:])).best is None


def test_the_best_trial_is_at_the_edge_of_what_are_numbers():
    def edge(best: int, *points: dict) -> list[str]:
        runs = [
            replace(run, point=point)
            for n, point in enumerate(points)
            for run in outcomes("a", accuracy=0.5 + (n == best) / 4)
        ]
        return Tuning("a", tuple(runs)).at_edge

    lr = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.4}]
    assert [edge(n, *lr) for n in range(3)] == [["lr"], [], ["lr"]]
    shares = [{"lr": 0.1, "at": at, "by": by} for at, by in (("1/4", "x"), ("1/2", "y"))]
    assert edge(1, *shares) == ["at"]


def test_a_comparison_is_the_same_when_it_is_read_back(tmp_path):
    runs = [*outcomes("dense", "topk"), Outcome("topk", 1, 0.1, None, "why")]
    tunings = (Tuning("topk", tuple(runs[1:])),)
    runs[0] = replace(runs[0], point={"lr": 0.1, "at": "1/4"}, test=Quality(0.4, 2.0))
    found = comparison(runs, tunings=tunings, plan="x", revealed="2026")
    written = json.loads(json.dumps(asdict(found)))
    assert comparison_from(written) == found
    # Files of before have more, which is left out.
    written |= {"data": "", "own_length": [], "targets": [0.7]}
    written["tunings"][0]["chance"] = True
    written["outcomes"][0]["settings"] = "0123"
    written["outcomes"][0]["measured"] |= {"weights": 80, "forward_spread": 0.1}
    assert comparison_from(written) == found


@pytest.mark.parametrize("content", ["", "{}", '{"comparison": {"title": 1}}', None])
def test_a_file_that_holds_no_comparison_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tables.json").write_text(content)
    with pytest.raises(UserError, match=r"tables\.json"):
        read_comparison(tmp_path / "tables.json")


def test_a_table_of_trials_shows_all_of_them_and_what_is_at_the_edge():
    def tuning(row: str, **accuracies: float | None) -> Tuning:
        points = [{"lr": float(lr[1:]), "x": "a"} for lr in accuracies]
        ran = [a and replace(RAN, accuracy=a) for a in accuracies.values()]
        pairs = zip(ran, points, strict=True)
        return Tuning(row, tuple(Outcome(row, 1, 0.1, r, point=p) for r, p in pairs))

    tunings = (
        tuning("dense", _1=0.5, _2=0.75, _4=0.25),
        tuning("topk", _2=None, _8=0.125),
        tuning("dgc", _2=None),
    )
    found = comparison(outcomes("dense", "topk", "dgc"), tunings=tunings)
    (table,) = tuning_tables(found)
    assert column(table, "chosen") == ["lr 2.0, x a", "lr 8.0, x a", "none"]
    assert column(table, "at the edge") == ["no", "lr", "no"]
    assert column(table, "trials")[1] == "lr 2.0, x a: diverged; lr 8.0, x a: 12.5"
    assert any(note.startswith("topk: its best trial") for note in results_table(found).notes)


def test_networks_with_a_loss_alone_are_compared_by_it():
    runs = [*outcomes("a", accuracy=None, loss=1.5), *outcomes("b", accuracy=None, loss=1.25)]
    table = results_table(comparison(runs, plan="x"))
    assert column(table, "validation loss") == [1.5, 1.25]
    assert column(table, "place") == [2, 1]
    assert "1.500" in format_table(table) and "100.00" in format_table(table)
    trials = Tuning("a", tuple(runs))
    assert trials.best == 1


def test_what_was_revealed_is_shown_in_place_of_validation():
    runs = [replace(run, test=Quality(0.4, 2.0)) for run in outcomes("dense", "topk")]
    table = results_table(comparison(runs, plan="x", revealed="2026"))
    assert column(table, "test accuracy %") == pytest.approx([40, 40])
    assert column(table, "validation") == [50, 50]
    assert any("plan x" in note and "2026" in note for note in table.notes)


def test_tables_hold_means_over_seeds_and_say_what_diverged():
    runs = [
        *outcomes("dense"),
        Outcome("dense", 1, 0.1, replace(RAN, accuracy=0.7, sent_bytes=3 * 2**20)),
        Outcome("topk", 0, 0.1, replace(RAN, metadata_bytes=2**18, extra_samples=8)),
        Outcome("topk", 1, 0.1, None, "the loss is not finite"),
    ]
    table = results_table(comparison(runs))
    dense, topk = cells(table, "dense"), cells(table, "topk")
    assert (dense["seed 0"], dense["seed 1"]) == (50, 70)
    assert dense["test accuracy %"] == pytest.approx(60)
    assert dense["+-"] == pytest.approx(200**0.5)
    assert (dense["sent MiB"], dense["of dense %"]) == (2, 100)
    assert (topk["sent MiB"], topk["of dense %"], topk["metadata %"]) == (1, 50, 25)
    assert (dense["sync ms/step"], dense["own ms/step"], dense["own %"]) == (200, 100, 25)
    assert (topk["seed 1"], topk["test accuracy %"], topk["+-"]) == ("diverged", None, None)
    # Who diverged has no place.
    assert (dense["place"], topk["place"]) == (1, None)
    assert table.notes[-3] == "note"
    assert table.notes[-2].startswith("topk: 8 samples more")
    assert table.notes[-1] == "topk, seed 1: the loss is not finite"
    only_failures = [Outcome("topk", 0, 0.1, None, "why")]
    assert column(results_table(comparison(only_failures)), "test accuracy %") == [None]


def test_rows_have_places_by_their_means():
    given = zip("abcd", (0.5, 0.6, 0.5, 0.7), strict=True)
    runs = [run for row, accuracy in given for run in outcomes(row, accuracy=accuracy)]
    assert column(results_table(comparison(runs)), "place") == [3, 2, 3, 1]


def test_a_curve_is_the_mean_over_seeds():
    first, second = RAN.curve
    other = replace(RAN, curve=(first, replace(second, accuracy=0.7)))
    runs = [Outcome("dense", 0, 0.1, RAN), Outcome("dense", 1, 0.1, other)]
    (curve,) = curves_of(comparison([*runs, Outcome("topk", 0, 0.1, None, "why")]))
    assert (curve.row, curve.whole) == ("dense", True)
    assert (curve.sent_bytes, curve.train_s) == ((2**19, 2**20), (3, 7))
    assert curve.values == pytest.approx((25, 60))
    assert (curve.parameters_left, curve.spread) == ((60,), pytest.approx(200**0.5))
    # One was evaluated less often: what both have is drawn.
    shorter = replace(runs[1], measured=replace(other, curve=other.curve[1:]))
    (ends,) = curves_of(comparison([runs[0], shorter]))
    assert (ends.sent_bytes, ends.values) == ((2**20,), pytest.approx((60,)))
    # A mean of those that ended is not one of all.
    lost = Outcome("dense", 2, 0.1, None, "failed: no room", failed=True)
    assert [c.whole for c in curves_of(comparison([*runs, lost]))] == [False]


def course(*points: tuple[int, float, float, float]) -> tuple[Point, ...]:
    """Return evaluations: MiB sent, seconds of training and of computing, accuracy."""
    return tuple(
        Point(accuracy, 1.0, k, int(mib * 2**20), train_s, compute_s)
        for k, (mib, train_s, compute_s, accuracy) in enumerate(points, 1)
    )


def test_overlapping_steps_hide_bytes_on_a_link():
    # 4 MB at 2.5 MB/s; half of 8 seconds of computing hides them.
    assert seconds_at(0.02, RAN, 8.0, 4_000_000) == pytest.approx(8 + 1.6)
    assert seconds_at(0.02, replace(RAN, hidden=0.5), 8.0, 4_000_000) == 8


def test_rows_stand_beside_each_other_at_equal_budgets():
    far = course((50, 10.0, 4.0, 0.2), (100, 20.0, 8.0, 0.4), (200, 40.0, 16.0, 0.8))
    near = course((2, 10.0, 4.0, 0.3), (4, 20.0, 8.0, 0.5))
    times = {"forward_s": 1.0, "dense_forward_s": 2.5}
    runs = [
        *outcomes("far", curve=far, samples=120),
        *outcomes("near", curve=near, samples=80, **times),
        Outcome("wild", 0, 0.1, None, "the loss is nan"),
    ]
    samples, sent, seconds = equal_tables(comparison(runs, plan="x"))
    # A row that was trained for longer is read off between its evaluations.
    assert samples.columns[:4] == ("row", "20", "40", "80")
    assert cells(samples, "near") == {
        **{"row": "near", "20": None, "40": 30, "80": 50, "parameters left": 60},
        "inference, times as fast": 2.5,
    }
    far = cells(samples, "far")
    assert (far["40"], far["80"]) == (pytest.approx(20), pytest.approx(40))
    assert far["inference, times as fast"] is None
    # One that ends with less counts with its end; who diverged has nothing.
    assert sent.columns[1:3] == ("10 MiB", "100 MiB")
    assert [row[1:3] for row in sent.rows] == [(None, 40), (50, 50), (None, None)]
    assert seconds.columns[1:3] == ("30 s measured", "54.8 s at 20 Mbit/s")
    assert [row[1] for row in seconds.rows] == [pytest.approx(60), 50, None]
    # A tenth of the way from 100 MiB, 8 s and 41.9 of the link, to 200, 16 and 83.9.
    assert cells(seconds, "far")["54.8 s at 20 Mbit/s"] == pytest.approx(43.9, abs=0.1)
    # Files of before do not tell computing from messages; losses have three decimals.
    old = [replace(p, accuracy=None, compute_s=None) for p in RAN.curve]
    tables = equal_tables(comparison(outcomes("old", accuracy=None, curve=tuple(old))))
    assert tables[2].columns[:3] == ("row", "7 s measured", "parameters left")
    assert "1.000" in format_table(tables[0])
    assert equal_tables(comparison(runs[2:])) == []
    # On one node nothing leaves it.
    alone = [replace(p, sent_bytes=0) for p in near]
    titles = [t.title for t in equal_tables(comparison(outcomes("one", curve=tuple(alone))))]
    assert titles == ["At equal samples", "At equal seconds"]


def test_the_frontier_is_of_the_rows_that_no_cheaper_one_reaches():
    ends = {"worst": (1, 0.2), "cheap": (1, 0.3), "bad": (4, 0.25), "good": (3, 0.6), "x": (9, 0.9)}
    runs = []
    for row, (mib, accuracy) in ends.items():
        runs += outcomes(row, curve=course((mib, 1.0, 1.0, accuracy)))
    runs.append(Outcome("x", 1, 0.1, None, "diverged"))
    rows = curves_of(comparison(runs))
    assert [row.row for row in rows] == ["x", "good", "cheap", "bad", "worst"]
    assert curves.frontier(rows, "sent_bytes") == ([2**20, 3 * 2**20], [30, 60])


def test_what_has_no_accuracy_is_drawn_by_its_loss_the_lowest_first():
    first, second = (replace(point, accuracy=None) for point in RAN.curve)
    runs = [Outcome("wild", 0, 0.1, None, "why")]
    for row, loss in (("high", 1.5), ("low", 1.0)):
        runs += outcomes(row, accuracy=None, loss=loss, curve=(first, replace(second, loss=loss)))
    found = comparison(runs, plan="0123")
    with curves.styled():
        (panel,) = curves.compared(found, "sent_bytes").axes
    assert panel.get_ylabel() == "validation loss, nats per token"
    names = panel.get_legend_handles_labels()[1]
    assert names == ["Pareto frontier", "1: low", "2: high"]
    assert curves.frontier(curves_of(found), "sent_bytes") == ([2**20], [1.0])


def test_a_comparison_is_its_tables_and_its_pictures(tmp_path, monkeypatch):
    runs = [*outcomes("dense", "a $b"), Outcome("wild", 0, 0.1, None, "the loss is nan")]
    found = comparison(runs, title="Some methods", machine={"processor": "a fast one"})
    write_json(str(tmp_path / "found.json"), {"comparison": asdict(found)})
    monkeypatch.chdir(tmp_path)
    assert report.main(["found.json"]) == 0
    page = (tmp_path / "report.html").read_text()
    for words in (
        *("Some methods", "a fast one", "wild, seed 0, diverged: the loss is nan"),
        *("At equal samples", "At equal bytes", "At equal seconds"),
    ):
        assert words in page
    assert page.count("<img ") == 3


def test_rows_of_several_comparisons_are_drawn_in_one_picture(tmp_path, monkeypatch):
    first, second = (comparison(outcomes(*rows)) for rows in (("dense", "low"), ("dense", "high")))
    merged = together({"first": first, "second": second})
    assert {*merged.by_row} == {"dense (first)", "dense (second)", "low", "high"}
    other = comparison(outcomes("dense", accuracy=None))
    assert together({"first": first, "other": other}) is None
    monkeypatch.chdir(tmp_path)
    for name, found, pictures in (("second", second, 9), ("other", other, 6)):
        write_json(f"{name}.json", {"comparison": asdict(found)})
        write_json("first.json", {"comparison": asdict(first)})
        assert report.main(["first.json", f"{name}.json"]) == 0
        page = (tmp_path / "report.html").read_text()
        assert page.count("<img ") == pictures
        assert ("All rows" in page) == (name == "second")
