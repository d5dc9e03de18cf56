"""The tables and the figure of a comparison."""

from dataclasses import replace

import pytest
from compared import RAN, cells, column, comparison, outcomes

from prunex_mpi.base.errors import UserError
from prunex_mpi.research.compare.comparison_tables import (
    draw,
    first_held,
    make_figure,
    measured_table,
    results_table,
    seconds_of,
    target_table,
    tuning_table,
)
from prunex_mpi.research.compare.outcomes import Outcome, Point, Quality, Tuning, to_dict
from prunex_mpi.tools.drawing import styled
from prunex_mpi.tools.report.comparisons import curves_of, front


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


def test_a_course_is_the_mean_over_seeds_on_bytes_and_on_the_seconds_of_others():
    first, second = RAN.curve
    other = replace(RAN, curve=(first, replace(second, accuracy=0.7)))
    runs = [Outcome("dense", 0, 0.1, RAN), Outcome("dense", 1, 0.1, other)]
    found = [*runs, Outcome("topk", 0, 0.1, None, "why")]
    (curve,) = curves_of(list(map(to_dict, found)))
    assert (curve.row, curve.sent_mib, curve.share) == ("dense", (0.5, 1), (3 / 7, 1))
    assert curve.accuracy == pytest.approx((25, 60))
    assert curve.spread == pytest.approx(200**0.5)
    # One was evaluated less often: what both have is drawn.
    shorter = replace(runs[1], measured=replace(other, curve=other.curve[1:]))
    (ends,) = curves_of([to_dict(runs[0]), to_dict(shorter)])
    assert (ends.sent_mib, ends.accuracy) == ((1,), pytest.approx((60,)))
    # Half as long, in half the steps, at a fifth of the pace.
    slow = outcomes("dense", steps=5, sent_bytes=2**19, train_s=17.5)
    assert seconds_of(comparison(runs), comparison(slow)) == {"dense": 35}
    # What sends another number of bytes in a step has another pace.
    slow = outcomes("dense", steps=5, sent_bytes=2**20, train_s=17.5)
    assert seconds_of(comparison(runs), comparison(slow)) == {}


def test_the_front_is_what_no_other_row_surpasses_for_less():
    ends = [(3, 70.0), (1, 50.0), (2, 49.0), (3, 71.0), (9, 71.0), (4, 60.0)]
    assert front(ends) == [(1, 50.0), (3, 71.0)]


@pytest.mark.parametrize("rows", [2, 25, 60])
def test_the_legend_of_a_figure_fits_into_it(rows):
    with styled():
        figure = make_figure(comparison(outcomes(*(f"row {n}" for n in range(rows)))), {})
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == rows
    assert figure.bbox.y0 <= legend.y0 and legend.y1 <= figure.bbox.y1


def test_a_figure_shows_every_row_once_per_panel(tmp_path):
    found = comparison(outcomes("dense", "topk", accuracy=0.5))
    draw(found, {"100 Mbit/s": found, "1 Gbit/s": found}, str(tmp_path / "figure.svg"))
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for words in ("MiB that left a node", "seconds, 100 Mbit/s", "seconds, 1 Gbit/s", "topk"):
        assert text.count(f"<!-- {words} -->") == 1, words
    rates = {f"{number} Mbit/s": found for number in range(4)}
    sizes = []
    for panels in (3, 4, 5):
        with styled():
            figure = make_figure(found, dict(list(rates.items())[: panels - 1]))
        sizes.append(tuple(figure.get_size_inches()))
        names = [axes.get_xlabel() for axes in figure.axes]
        assert names == ["MiB that left a node", *(f"seconds, {x}" for x in rates)][:panels]
    # One row, then rows of two.
    assert sizes[0][1] < sizes[1][1] < sizes[2][1]
    assert sizes[0][0] > sizes[1][0] == sizes[2][0]
    with pytest.raises(UserError, match="nothing to draw"):
        draw(comparison(outcomes("dense", curve=())), {}, str(tmp_path / "none.svg"))
    with pytest.raises(UserError, match="No such file"):
        draw(found, {}, str(tmp_path / "nowhere" / "figure.svg"))
