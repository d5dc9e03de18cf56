"""The tables and the curves of a comparison."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from compared import RAN, cells, column, comparison, outcomes

from prunex_mpi import report
from prunex_mpi.base.files import write_json
from prunex_mpi.base.record_keys import ACCURACY
from prunex_mpi.base.tables import as_json, format_table
from prunex_mpi.research.compare.comparison_tables import (
    first_held,
    measured_table,
    results_table,
    tables_of,
    target_table,
    tuning_table,
)
from prunex_mpi.research.compare.outcomes import Outcome, Point, Quality, Tuning
from prunex_mpi.tools.report import curves
from prunex_mpi.tools.report.read_compared import Compared, curves_of, problem_of, read_compared


def test_a_table_of_trials_shows_all_of_them_and_what_is_at_the_edge():
    def tuning(row: str, chance: bool, **accuracies: float | None) -> Tuning:
        points = [{"lr": float(lr[1:]), "x": "a"} for lr in accuracies]
        ran = [a and replace(RAN, accuracy=a) for a in accuracies.values()]
        pairs = zip(ran, points, strict=True)
        return Tuning(row, tuple(Outcome(row, 1, 0.1, r, point=p) for r, p in pairs), chance)

    tunings = (
        tuning("dense", False, _1=0.5, _2=0.75, _4=0.25),
        tuning("topk", True, _2=None, _8=0.125),
        tuning("dgc", True, _2=None),
    )
    found = comparison(outcomes("dense", "topk", "dgc"), tunings=tunings)
    table = tuning_table(found)
    assert column(table, "chosen") == ["lr 2.0, x a", "lr 8.0, x a", "none"]
    assert column(table, "at the edge") == ["no", "lr", "no"]
    assert column(table, "at chance") == ["no", "yes", "yes"]
    assert column(table, "trials")[1] == "lr 2.0, x a: diverged; lr 8.0, x a: 12.5"
    assert any(note.startswith("topk: its best trial") for note in results_table(found).notes)


def test_networks_with_a_loss_alone_are_compared_by_it():
    runs = [*outcomes("a", accuracy=None, loss=1.5), *outcomes("b", accuracy=None, loss=1.25)]
    table = results_table(comparison(runs, plan="x"))
    assert column(table, "validation loss") == [1.5, 1.25]
    assert column(table, "place") == [2, 1]
    assert "1.500" in format_table(table) and "100.00" in format_table(table)
    trials = Tuning("a", tuple(runs), chance=False)
    assert trials.best == 1
    curve = tuple(
        replace(p, accuracy=None, loss=loss) for p, loss in zip(RAN.curve, (2.0, 1.5), strict=True)
    )
    assert first_held(curve, 2.0) == curve[0]
    assert first_held(curve, 1.5) is None


def test_what_was_revealed_is_shown_in_place_of_validation():
    runs = [replace(run, test=Quality(0.4, 2.0)) for run in outcomes("dense", "topk")]
    table = results_table(comparison(runs, plan="x", revealed="2026"))
    assert column(table, "test accuracy %") == pytest.approx([40, 40])
    assert column(table, "validation") == [50, 50]
    assert any("plan x" in note and "2026" in note for note in table.notes)


def test_the_time_to_a_target_is_computing_and_bytes_on_a_link():
    points = [(1, 0.3, 10**6), (2, 0.8, 2 * 10**6), (3, 0.6, 3 * 10**6), (4, 0.8, 4 * 10**6)]
    points += [(5, 0.9, 5 * 10**6)]
    curve = tuple(Point(k, sent, 9.0 * k, a, 1.0, 2.0 * k) for k, a, sent in points)
    assert first_held(curve, 0.7) == curve[3]
    runs = [
        *outcomes("dense", curve=curve),
        Outcome("dense", 1, 0.1, replace(RAN, curve=curve[:3])),
        *outcomes("behind", curve=curve, hidden=0.5),
    ]
    table = target_table(comparison(runs, seeds=(0, 1)), 0.7)
    dense, behind = cells(table, "dense"), cells(table, "behind")
    assert dense["seeds"] == "1 of 2"
    assert dense["sent MiB"] == pytest.approx(4e6 / 2**20)
    # 4 MB at 2.5 MB/s; half of 8 seconds of computing hides them.
    assert dense["s at 20 Mbit/s"] == pytest.approx(8 + 1.6)
    assert dense["s at 1 Gbit/s"] == pytest.approx(8 + 0.032)
    assert behind["s at 20 Mbit/s"] == 8
    assert cells(target_table(comparison(runs), 0.95), "dense")["sent MiB"] is None
    # Files of before do not tell computing from messages.
    for run in runs:
        curve = tuple(replace(p, compute_s=None) for p in run.measured.curve)
        old = comparison([replace(run, measured=replace(run.measured, curve=curve))])
        found = cells(target_table(old, 0.0), run.row)
        assert found["sent MiB"] is not None and found["s at 20 Mbit/s"] is None


def test_tables_hold_means_over_seeds_and_say_what_diverged():
    runs = [
        *outcomes("dense"),
        Outcome("dense", 1, 0.1, replace(RAN, accuracy=0.7, sent_bytes=3 * 2**20)),
        Outcome("topk", 0, 0.1, replace(RAN, sync_s=0.5, extra_samples=8, operations="Allgatherv")),
        Outcome("topk", 1, 0.1, None, "the loss is not finite"),
    ]
    table = results_table(comparison(runs))
    dense, topk = cells(table, "dense"), cells(table, "topk")
    assert (dense["seed 0"], dense["seed 1"]) == (50, 70)
    assert dense["test accuracy %"] == pytest.approx(60)
    assert dense["+-"] == pytest.approx(200**0.5)
    assert (dense["sent MiB"], dense["of dense %"]) == (2, 100)
    assert (topk["sent MiB"], topk["of dense %"]) == (1, 50)
    assert (dense["sync ms/step"], dense["own ms/step"], dense["own %"]) == (200, 100, 25)
    assert (topk["seed 1"], topk["test accuracy %"], topk["+-"]) == ("diverged", None, None)
    # Who diverged has no place.
    assert (dense["place"], topk["place"]) == (1, None)
    assert table.notes[-3] == "note"
    assert table.notes[-2].startswith("topk: 8 samples more")
    assert table.notes[-1] == "topk, seed 1: the loss is not finite"
    measured = measured_table(runs)
    assert cells(measured, "topk")["sync saved, times"] == 4
    assert cells(measured, "topk")["in whole lines %"] == 75
    assert cells(measured, "topk")["operations between nodes"] == "Allgatherv"
    assert cells(measured, "topk")["bytes saved, times"] == 2
    assert cells(measured, "dense")["bytes saved, times"] == 1
    assert cells(measured, "dense")["inference, times"] == 2
    assert cells(measured, "dense")["topology: who speaks"] == "2 of 4 ranks"
    # Nothing to set it against.
    assert column(measured_table(outcomes("topk")), "sync saved, times") == [None]
    only_failures = [Outcome("topk", 0, 0.1, None, "why")]
    assert column(results_table(comparison(only_failures)), "test accuracy %") == [None]
    assert measured_table(only_failures).rows[0][1:4] == (None, None, None)


def test_rows_have_places_but_for_those_tuned_at_chance():
    given = zip("abcd", (0.5, 0.6, 0.5, 0.7), strict=True)
    runs = [run for row, accuracy in given for run in outcomes(row, accuracy=accuracy)]
    tunings = (Tuning("d", (runs[-1],), chance=True), Tuning("a", (runs[0],), chance=False))
    table = results_table(comparison(runs, tunings=tunings))
    assert [cells(table, row)["place"] for row in "abcd"] == [2, 1, 2, None]
    assert any(note.startswith("d: no better than guessing") for note in table.notes)


def test_a_course_is_the_mean_over_seeds():
    first, second = RAN.curve
    other = replace(RAN, curve=(first, replace(second, accuracy=0.7)))
    runs = [Outcome("dense", 0, 0.1, RAN), Outcome("dense", 1, 0.1, other)]
    found = [*runs, Outcome("topk", 0, 0.1, None, "why")]
    (curve,) = curves_of(list(map(asdict, found)), ACCURACY)
    assert (curve.label, curve.sent_mib, curve.seconds) == ("dense", (0.5, 1), (3, 7))
    assert curve.values == pytest.approx((25, 60))
    assert curve.spread == pytest.approx(200**0.5)
    # One was evaluated less often: what both have is drawn.
    shorter = replace(runs[1], measured=replace(other, curve=other.curve[1:]))
    (ends,) = curves_of([asdict(runs[0]), asdict(shorter)], ACCURACY)
    assert (ends.sent_mib, ends.values) == ((1,), pytest.approx((60,)))
    # A mean of those that ended says of how many.
    lost = Outcome("dense", 2, 0.1, None, "failed: no room", failed=True)
    (some,) = curves_of([*map(asdict, runs), asdict(lost)], ACCURACY)
    assert (curve.label, some.label) == ("dense", "dense (2 of 3 seeds)")
    assert problem_of(asdict(lost)) == "dense, seed 2, failed: no room"


def compared(folder: Path, runs: list[Outcome], **more: object) -> Compared:
    """Return what a page reads of a comparison of these runs."""
    found = comparison(runs, **more)
    whole = as_json({}, tables_of(found)) | {"comparison": asdict(found)}
    write_json(folder / "found.json", whole)
    return read_compared(folder / "found.json")


def test_what_has_no_accuracy_is_drawn_by_its_loss_the_lowest_first(tmp_path):
    first, second = (replace(point, accuracy=None) for point in RAN.curve)
    runs = [Outcome("wild", 0, 0.1, None, "why")]
    for row, loss in (("high", 1.5), ("low", 1.0)):
        curve = first, replace(second, loss=loss)
        runs += outcomes(row, accuracy=None, loss=loss, curve=curve)
    found = compared(tmp_path, runs, plan="0123")
    assert [(c.label, c.values[-1]) for c in found.curves] == [("low", 1.0), ("high", 1.5)]
    with curves.styled():
        (panel,) = curves.compared(found, "sent_mib").axes
    assert panel.get_ylabel() == "validation loss, nats per token"
    # The page shows as many decimals as were printed.
    assert format_table(found.tables[0]) == format_table(
        results_table(comparison(runs, plan="0123"))
    )


def test_a_comparison_is_its_tables_and_its_pictures(tmp_path, monkeypatch):
    runs = [*outcomes("dense", "a $b"), Outcome("wild", 0, 0.1, None, "the loss is nan")]
    compared(tmp_path, runs, title="Some methods", machine={"processor": "a fast one"})
    monkeypatch.chdir(tmp_path)
    assert report.main(["found.json"]) == 0
    page = (tmp_path / "report.html").read_text()
    for words in ("Some methods", "a fast one", "wild, seed 0, diverged: the loss is nan"):
        assert words in page
    assert page.count("<img ") == 2


def test_of_many_rows_the_ends_alone_are_drawn_the_best_one_first(tmp_path):
    def drawn(count: int) -> tuple[list[str], int]:
        runs = []
        for n in range(count):
            curve = (RAN.curve[0], replace(RAN.curve[1], accuracy=n / 100))
            runs += outcomes(f"row {n}", curve=curve)
        with curves.styled():
            (panel,) = curves.compared(compared(tmp_path, runs), "seconds").axes
        whole = sum(len(line.get_xdata()) == len(RAN.curve) for line in panel.lines)
        return panel.get_legend_handles_labels()[1], whole

    most = curves.MOST_ROWS
    names, whole = drawn(most)
    assert (names[0], whole) == (f"row {most - 1}", most)
    names, whole = drawn(most + 1)
    assert (names[0], whole) == (f"1: row {most}", 0)
