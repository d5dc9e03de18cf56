"""What runs of comparisons measured: read back, joined, or refused."""

import json
from dataclasses import asdict, replace

import pytest
from compared import comparison, outcomes

from prunex_mpi.base.errors import UserError
from prunex_mpi.research.compare.comparison_tables import results_table
from prunex_mpi.research.compare.outcomes import (
    Outcome,
    Quality,
    Tuning,
    comparison_from,
    join,
    require_same_work,
)


def test_the_best_trial_is_of_highest_accuracy_then_lowest_loss():
    runs = [
        *outcomes("a", accuracy=0.5, loss=0.1),
        *outcomes("a", accuracy=0.7, loss=0.9),
        *outcomes("a", accuracy=0.7, loss=0.8),
        Outcome("a", 0, 0.1, None, "diverged"),
    ]
    assert Tuning("a", tuple(runs), chance=False).best == 2
    assert Tuning("a", tuple(runs[3:]), chance=False).best is None


def test_the_best_trial_is_at_the_edge_of_what_are_numbers():
    def edge(best: int, *points: dict) -> list[str]:
        runs = [
            replace(run, point=point)
            for n, point in enumerate(points)
            for run in outcomes("a", accuracy=0.5 + (n == best) / 4)
        ]
        return Tuning("a", tuple(runs), chance=False).at_edge

    lr = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.4}]
    assert [edge(n, *lr) for n in range(3)] == [["lr"], [], ["lr"]]
    shares = [{"lr": 0.1, "at": at, "by": by} for at, by in (("1/4", "x"), ("1/2", "y"))]
    assert edge(1, *shares) == ["at"]


def test_rows_that_saw_other_numbers_of_samples_are_not_compared():
    require_same_work([*outcomes("dense", "topk"), Outcome("prunex", 0, 0.1, None, "diverged")])
    with pytest.raises(UserError, match=r"samples \(dense 100, topk 99\)"):
        require_same_work(outcomes("dense") + outcomes("topk", samples=99))
    require_same_work(outcomes("dense") + outcomes("topk", samples=99), ["topk"])


def test_a_comparison_is_the_same_when_it_is_read_back():
    runs = [*outcomes("dense", "topk"), Outcome("topk", 1, 0.1, None, "why")]
    tunings = (Tuning("topk", tuple(runs[1:]), chance=True),)
    runs[0] = replace(runs[0], point={"lr": 0.1, "at": "1/4"}, test=Quality(0.4, 2.0))
    found = comparison(runs, tunings=tunings, plan="x", revealed="2026", own_length=("topk",))
    assert comparison_from(json.loads(json.dumps(asdict(found)))) == found


def test_comparisons_of_different_rows_are_joined():
    runs = outcomes("dense", "topk", "prunex")
    tunings = tuple(Tuning(run.row, (run,), chance=False) for run in runs)
    whole = comparison(runs, tunings=tunings)
    first = comparison(runs[:1], tunings=tunings[:1], notes=("note", "one more"))
    second = comparison(runs[1:], tunings=tunings[1:])
    assert join([first, second]) == replace(whole, notes=("note", "one more"))
    assert join([whole]) == whole


def test_comparisons_of_other_seeds_are_joined():
    first, second = (
        [replace(run, seed=seed) for seed in seeds for run in outcomes("dense", "topk")]
        for seeds in ((0, 1), (2,))
    )
    tunings = tuple(Tuning(run.row, (run,), chance=False) for run in outcomes("dense", "topk"))
    parts = [
        comparison(first[::2], tunings=tunings[:1]),
        comparison(second, tunings=()),
        comparison(first[1::2], tunings=tunings[1:]),
    ]
    joined = join(parts)
    assert joined == comparison(first + second, tunings=tunings)
    # Another job, on other hosts of the kind.
    layouts = [f"2 nodes: node 0 = 1 ranks on {host} (cpu)" for host in "abc"]
    apart = [
        replace(part, machine={"ranks": text}) for part, text in zip(parts, layouts, strict=True)
    ]
    assert join(apart).machine == {"ranks": "2 nodes: node 0 = 1 ranks (cpu)"}
    assert join(apart[:1]).machine == {"ranks": layouts[0]}
    assert results_table(joined).columns[5:8] == ("seed 0", "seed 1", "seed 2")


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (comparison(outcomes("topk"), title="of another model"), "differ in title"),
        (
            comparison([replace(run, seed=1) for run in outcomes("topk")]),
            "'dense' has no run with seed 1, as others have",
        ),
        (
            comparison([replace(run, seed=1, lr=0.2) for run in outcomes("dense")]),
            "'dense' was trained at learning rates of 0.1 and 0.2",
        ),
        (
            comparison([replace(run, seed=1, settings="b") for run in outcomes("dense")]),
            "'dense' had other settings",
        ),
        (comparison(outcomes("topk"), machine={"mpi": "another"}), "differ in machine"),
        (comparison(outcomes("dense")), "row 'dense' with seed 0 is in two"),
        (comparison(outcomes("topk", samples=1)), "not trained on the same number of samples"),
        (comparison(outcomes("topk"), plan="b"), "differ in plan"),
        (comparison(outcomes("topk"), revealed="2026"), "differ in revealed"),
    ],
)
def test_comparisons_that_differ_in_more_than_rows_are_not_joined(other, word):
    with pytest.raises(UserError, match=word):
        mine = [replace(run, settings="a") for run in outcomes("dense")]
        join([comparison(mine), other])


def test_files_of_other_images_are_not_joined():
    parts = [comparison(outcomes(row), data=data) for row, data in (("a", "x"), ("b", ""))]
    assert join(parts).data == "x"
    with pytest.raises(UserError, match="--from: the files are of other images"):
        join([*parts, comparison(outcomes("c"), data="y")])
