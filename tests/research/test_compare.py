"""The comparison: its flags, its tables, and whole comparisons in one process per rank."""

import json
import math
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from picture_files import write_folder
from PIL import Image
from safetensors.torch import load_file
from test_bench import assert_sane, column, run

from mpi4py import MPI

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.base.progress import Length, Progress
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.topology import nodes_of
from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.core import evaluation
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.models.build import build_model
from prunex_mpi.models.layout import Layout, Segment, build_layout
from prunex_mpi.research.compare import compare_methods, kept_runs, run_rows
from prunex_mpi.research.compare.compare_methods import (
    MOST_RATES,
    affordable,
    at_chance,
    compare,
    hold_out,
    next_rate,
)
from prunex_mpi.research.compare.compare_options import digest_of, parse, read_plan, settings_of
from prunex_mpi.research.compare.comparison_tables import (
    draw,
    equal_table,
    make_figure,
    measured_table,
    results_table,
    seconds_of,
    tuning_table,
)
from prunex_mpi.research.compare.outcomes import (
    NOTHING,
    Comparison,
    Measured,
    Outcome,
    Point,
    Tuning,
    best_rate,
    comparison_from,
    join,
    lies_inside,
    require_same_work,
    to_dict,
)
from prunex_mpi.research.compare.run_rows import count_zeros, curve_of, images_of, operations
from prunex_mpi.settings.methods import METHODS
from prunex_mpi.settings.resolve import make
from prunex_mpi.settings.values import AUTO
from prunex_mpi.tools.drawing import styled
from prunex_mpi.tools.report.comparisons import MOST_CURVES_DRAWN, curves_of, front

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORLD = MPI.COMM_WORLD
# Two outer iterations of one step each, on images that cost next to nothing.
TINY = [
    *("--model=resnet8", "--dataset=synthetic", "--image-size=8", "--batch-size=4"),
    *("--test-samples=16", "--outer-iterations=2", "--local-steps=1", "--ranks-per-node=1"),
    "--progress=off",
]
PRUNED_AT_ONCE = [
    "--warmup-iterations=0",
    "--keep-ramp-iterations=0",
    "--freeze-iteration=1",
]
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
    weights=80,
    zeros=40,
    line_zeros=30,
    forward_s=1.0,
    dense_forward_s=2.0,
    speakers=2,
    ranks=4,
    operations="Allreduce",
    curve=(Point(1, 2**19, 3.0, 0.25), Point(2, 2**20, 7.0, 0.5)),
)


def cells(table: Table, method: str) -> dict:
    (row,) = (row for row in table.rows if row[0] == method)
    return dict(zip(table.columns, row, strict=True))


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        ("", ["--methods"]),
        ("--methods dense tpok", ["--methods", "'tpok'", "'topk'"]),
        ("--methods dense dense", ["--methods", "dense", "twice"]),
        ("--methods dense --lr topk=0.1", ["'topk=0.1'", "not among --methods"]),
        ("--methods dense --lr tokp=0.1", ["'tokp'", "'topk'"]),
        ("--methods dense --lr dense=0", ["'dense=0'", "above 0"]),
        ("--methods dense --lr dense=x", ["'x'", "learning rate"]),
        ("--methods dense --lr 0.1 0.2", ["--lr", "twice"]),
        ("--methods dense --seeds", ["--seeds", "at least one"]),
        ("--methods dense --seeds 1 1", ["--seeds", "twice"]),
        ("--methods dense --seeds -1", ["--seeds", "'-1'"]),
        ("--methods dense --seeds x", ["--seeds", "'x'"]),
        ("--methods dense --lr 0.1 --tune-lr 0.2", ["--tune-lr", "--lr"]),
        ("--methods dense --tune-lr 0.2 0.2", ["--tune-lr", "twice"]),
        ("--methods dense --tune-lr nan", ["--tune-lr", "finite"]),
        ("--methods dense --tune-length 1/2", ["--tune-length", "--tune-lr"]),
        ("--methods dense --tune-lr 0.2 --tune-length 0", ["--tune-length", "'0'"]),
        ("--methods dense --tune-lr 0.2 --tune-length 3/2", ["--tune-length", "'3/2'"]),
        ("--methods dense --length x", ["--length", "'x'"]),
        ("--methods dense --plan x.toml", ["--methods", "--plan"]),
        ("--plan /nowhere/x.toml", ["--plan", "/nowhere/x.toml"]),
        ("--methods dense --equal-bytes dens", ["--equal-bytes", "'dens'", "'dense'"]),
        ("--methods dense --equal-time topk", ["--equal-time", "'topk'"]),
        ("--methods dense --rows dense", ["--rows", "--plan"]),
        ("--from x.json --rows dense", ["--rows", "--from"]),
        ("--methods dense --from x.json", ["--methods", "--from"]),
        ("--from x.json --resume", ["--resume", "--from"]),
        ("--from x.json --times a=b", ["--times", "--figure"]),
        ("--from x.json --figure x.svg --times a", ["--times", "'a'"]),
        ("--methods dense --seeds 3 --tune-lr 0.2 --tune-seed 3", ["--tune-seed", "3"]),
        ("--methods dense topk --keep-ratio 0.5", ["--keep-ratio", "dense, topk"]),
        ("--methods prunex-flat --mask-agreement or", ["--mask-agreement", "(it is for prunex)"]),
        ("--methods dense --compress-ratio 2", ["--compress-ratio", "2"]),
        ("--methods dense --seed 3", ["--seed", "--seeds"]),
        ("--methods dense --resume", ["--resume", "--dir"]),
        (
            "--methods prunex --warmup-iterations 40 --keep-ramp-iterations 0 "
            "--freeze-iteration 48 --tune-lr 0.1 --tune-length 1/64",
            ["--tune-length 1/64", "freeze-iteration"],
        ),
    ],
)
def test_bad_flags_are_refused(flags, culprits):
    with pytest.raises(UserError) as caught:
        parse(flags.split())
    assert caught.value.exit_code == USAGE
    assert "\n" not in str(caught.value)
    assert all(culprit in str(caught.value) for culprit in culprits)


def test_a_setting_goes_to_the_methods_that_it_means_something_to():
    flags = "--methods dense prunex prunex-flat topk --keep-ratio 0.25 --ranks-per-node 2"
    options = parse([*flags.split(), "--aggregation=hierarchical", "--lr", "0.3", "topk=0.1"])
    found = {row.name: settings_of(options.common, row, 5) for row in options.rows}
    assert {m: s.lr for m, s in found.items()} == {
        **dict.fromkeys(("dense", "prunex", "prunex-flat"), 0.3),
        "topk": 0.1,
    }
    assert all(settings.seed == 5 for settings in found.values())
    assert found["prunex"].keep_ratio == found["prunex-flat"].keep_ratio == (0.25,)
    assert found["dense"].aggregation == found["topk"].aggregation == "hierarchical"
    assert found["prunex-flat"].ranks_per_node == 0
    # All methods do the same work: no early stop.
    assert found["prunex"].eps_abs == found["prunex"].eps_rel == 0


def test_runs_that_tune_are_of_another_seed_and_as_long_unless_told():
    flags = "--methods dense prunex --seeds 2 0 --lr dense=0.1 --tune-lr 0.2 0.4"
    options = parse(flags.split())
    assert [row.name for row in options.tuned] == ["prunex"]
    assert (options.tune_seed, options.tune_length, options.length) == (3, 1, 1)
    (row,) = options.tuned
    settings = settings_of(options.common, row, options.tune_seed, 0.4, Fraction(1, 4))
    assert (settings.seed, settings.lr, settings.outer_iterations) == (3, 0.4, 16)
    # Shares of a run stay shares.
    assert settings.freeze_iteration == 7
    flags = ["--methods", "dgc", "prunetrain", "--evaluate-every", "5"]
    for more, warmup in ([], AUTO), (["--dgc-warmup-epochs=4"], Fraction(1, 2)):
        options = parse([*flags, *more])
        dgc, prunetrain = (
            settings_of(options.common, row, 0, length=Fraction(1, 8)) for row in options.rows
        )
        assert (dgc.outer_iterations, dgc.dgc_warmup_epochs) == (8, warmup)
    assert (prunetrain.reconfigure_every, prunetrain.evaluate_every) == (1, 1)


def test_stages_given_as_counts_are_as_large_a_part_of_a_shorter_run():
    flags = "--methods prunex one-shot --warmup-iterations 9 --keep-ramp-iterations 23"
    flags += " --freeze-iteration 32 --prune-iteration 64"
    prunex, one_shot = (
        settings_of(options.common, row, 0, length=Fraction(1, 4))
        for options in [parse(flags.split())]
        for row in options.rows
    )
    stages = (prunex.warmup_iterations, prunex.keep_ramp_iterations, prunex.freeze_iteration)
    assert (prunex.outer_iterations, stages) == (16, (2, 6, 8))
    assert one_shot.prune_iteration == one_shot.outer_iterations == 16


def test_a_shorter_run_still_has_exchanges_behind_its_steps():
    options = parse(["--methods", "local-sgd", "dense", "--preset=thin", "--local-steps=4"])
    local, dense = (
        settings_of(options.common, row, 0, length=Fraction(1, 16)) for row in options.rows
    )
    assert (local.evaluate_every, local.overlap_steps) == (2, AUTO)
    assert dense.evaluate_every == 1


PLAN = """
[settings]
model = "resnet8"
outer-iterations = 8
local-steps = 16
keep-ratio = 0.25

[rows.dense]
method = "dense"
lr = 0.5

[rows."local-sgd int4, T = 4"]
method = "local-sgd"
payload = "int4"
outer-iterations = 32
local-steps = 4

[rows.prunex]
method = "prunex"
tune-lr = [0.01]
"""


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("compare_cifar10.toml", 26),
        ("compare_resnet20.toml", 9),
        ("ways_cifar10.toml", 11),
        ("pruned_cifar10.toml", 11),
        ("ingredients_cifar10.toml", 8),
        ("when_cifar10.toml", 4),
        ("pretrained_cifar10.toml", 6),
        ("pace_vgg19.toml", 6),
    ],
)
def test_the_plans_that_are_shipped_can_be_run(plan, rows):
    path = Path(__file__).resolve().parents[2] / "batch" / plan
    options = parse(["--plan", str(path), "--data-dir", "x", "--seeds", "0", "1", "2"])
    assert len(options.rows) == rows


def test_a_plan_has_rows_of_one_method_with_settings_of_their_own(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    options = parse(["--plan", str(tmp_path / "plan.toml"), "--batch-size", "4", "--tune-lr", "1"])
    assert [row.name for row in options.rows] == ["dense", "local-sgd int4, T = 4", "prunex"]
    assert [row.name for row in options.tuned] == ["local-sgd int4, T = 4", "prunex"]
    dense, local, prunex = (settings_of(options.common, row, 0) for row in options.rows)
    assert (dense.lr, dense.model, dense.batch_size) == (0.5, "resnet8", 4)
    assert (local.payload, local.outer_iterations, local.local_steps) == ("int4", 32, 4)
    assert (prunex.keep_ratio, prunex.payload, prunex.outer_iterations) == ((0.25,), "fp32", 8)
    assert options.rows[1].folder == "local-sgd-int4-T-=-4"
    assert [row.grid for row in options.rows] == [(), (), (0.01,)]


def test_flags_that_are_given_twice_add_up():
    methods = ["--methods", "dense", "topk", "--methods", "prunex"]
    options = parse([*methods, "--lr", "dense=1", "--lr", "topk=2", "--seeds", "4", "--seeds", "5"])
    assert [row.name for row in options.rows] == ["dense", "topk", "prunex"]
    assert [settings_of(options.common, row, 4).lr for row in options.rows[:2]] == [1, 2]
    assert options.seeds == (4, 5)
    shown = parse(
        ["--from", "a", "--from", "b", "--figure", "f.svg", "--times", "x=c", "--times", "y=d"]
    )
    assert shown.sources == ("a", "b")
    assert shown.times == {"x": "c", "y": "d"}


def test_rows_of_a_plan_can_be_chosen(tmp_path):
    path = tmp_path / "plan.toml"
    rows = "".join(f"[rows.{x}]\nmethod = '{x}'\n" for x in ("dense", "topk", "prunex"))
    path.write_text(f"[settings]\ngroups = ['coupled']\n{rows}")
    flags = ["--plan", str(path), "--rows"]
    # In the order of the plan; and what it sets for a row that is left out hurts nobody.
    assert [row.name for row in parse([*flags, "topk", "dense"]).rows] == ["dense", "topk"]
    for more, culprits in (
        (["tpok"], ["--rows", "'tpok'", "'topk'"]),
        (["topk", "topk"], ["--rows", "twice"]),
        (["dense", "--compress-ratio", "0.1"], ["--compress-ratio", "dense"]),
    ):
        with pytest.raises(UserError) as caught:
            parse([*flags, *more])
        assert all(culprit in str(caught.value) for culprit in culprits), str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "culprits"),
    [
        ("[rows.dense]", "[row.dense]", ["'row'", "[rows.NAME]"]),
        ('method = "dense"', "", ["[rows.dense]", "no method"]),
        ('method = "dense"', 'method = "dens"', ["'dens'", "'dense'"]),
        ("lr = 0.5", "lr = -1", ["lr", "above 0"]),
        ("lr = 0.5", "lr = 0.5\ntune-lr = [1]", ["tune-lr", "no lr beside it"]),
        ("lr = 0.5", "tune-lr = 1", ["tune-lr", "a list"]),
        ("lr = 0.5", "tune-lr = [-1]", ["tune-lr", "above 0"]),
        ("lr = 0.5", "seed = 1", ["seed", "[rows.dense]"]),
        ("lr = 0.5", 'data-dir = "x"', ["data-dir", "[rows.dense]"]),
        ("lr = 0.5", "piece-kib = 8", ["piece-kib", "[rows.dense]"]),
        ("lr = 0.5", 'payload = "int4"', ["payload", "dense"]),
        ("lr = 0.5", "lrr = 0.5", ["'lrr'", "'lr'"]),
        ('model = "resnet8"', "lr = 1", ["lr", "[settings]", "in the rows"]),
        ("local-steps = 4", "local-steps = 8", ["as many samples", "local-sgd int4, T = 4"]),
        ("local-steps = 4", 'local-epochs = "1/4"\nlocal-steps = "auto"', ["auto", "T = 4"]),
        ("[rows.prunex]", '[rows."local-sgd int4 T = 4"]', ["two rows", "local-sgd-int4-T-=-4"]),
        ("[settings]", "settings = 1\n[rest]", ["'rest'"]),
        ("[settings]", "[settings", ["not TOML"]),
    ],
)
def test_a_bad_plan_is_refused(tmp_path, old, new, culprits):
    (tmp_path / "plan.toml").write_text(PLAN.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        parse(["--plan", str(tmp_path / "plan.toml"), "--batch-size", "4"])
    assert "\n" not in str(caught.value)
    assert all(culprit in str(caught.value) for culprit in culprits), str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[settings]\nbatch-size = 4\n", "no rows"),
        ("rows = 3\n", "are tables"),
        ("[rows]\ndense = 3\n", "are tables"),
    ],
)
def test_a_plan_without_rows_is_refused(tmp_path, text, why):
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=why):
        read_plan(str(tmp_path / "plan.toml"))


def test_the_held_out_images_are_taken_from_those_that_train():
    settings = make(method="dense", dataset="synthetic", train_samples=60, image_size=8)
    with nodes_of(MPI.COMM_SELF) as alone:
        whole = load_dataset(alone, settings).train
        load = partial(load_dataset, alone)
        held_out = hold_out(load, settings)
        assert (len(held_out.train.labels), len(held_out.test.labels)) == (48, 12)
        # A fifth of six images is 1.2: which classes give the odd two is carried over.
        assert held_out.test.labels.bincount(minlength=10).sub(1.2).abs().max() < 1
        both = torch.cat([held_out.train.images, held_out.test.images]).flatten(1)
        assert sorted(both.tolist()) == sorted(whole.images.flatten(1).tolist())
        assert (held_out.train_total, held_out.test_total) == (48, 12)
        with pytest.raises(UserError, match="no class has enough"):
            hold_out(load, replace(settings, train_samples=10))


def test_zeros_in_whole_rows_and_columns_are_told_from_others():
    kernel = torch.ones(3, 2, 2)
    kernel[1] = 0  # a filter
    kernel[:, 0, 1] = 0  # a column of the GEMM view
    kernel[0, 1, 1] = 0  # an element
    layout = Layout((Segment("w", (3, 2, 2), 0, 12), Segment("b", (4,), 12, 4)), 16)
    flat = torch.cat([kernel.flatten(), torch.zeros(4)])
    assert count_zeros(flat, layout) == (12, 7, 6)


def outcomes(*rows: str, **changes: object) -> list[Outcome]:
    return [Outcome(row, 0, 0.1, replace(RAN, **changes)) for row in rows]


def comparison(runs: list[Outcome], **changes: object) -> Comparison:
    rows, seeds = (tuple(dict.fromkeys(getattr(r, key) for r in runs)) for key in ("row", "seed"))
    empty = Comparison("title", {}, rows, seeds, (), tuple(runs), {}, {}, ("note",))
    return replace(empty, **changes)


def searched(peak: float, start: tuple[float, ...]) -> dict[float, tuple[float, float]]:
    """Search where accuracy falls with the distance to `peak` in factors of 2."""
    scores: dict[float, tuple[float, float]] = {}
    while (rate := next_rate(scores, start)) is not None:
        assert rate not in scores
        scores[rate] = (1 - abs(math.log2(rate / peak)) / 100, 0.0)
    return scores


@pytest.mark.parametrize("peak", [0.1, 0.05, 0.8, 6.4, 0.1 / 2**7])
@pytest.mark.parametrize("start", [(0.1,), (0.1, 0.2), (0.05, 0.1, 0.2)])
def test_the_search_goes_on_until_the_best_lies_inside(start, peak):
    scores = searched(peak, start)
    assert best_rate(scores) == pytest.approx(peak)
    assert lies_inside(scores)
    assert len(scores) <= MOST_RATES


def test_the_search_ends_and_says_that_its_best_is_at_the_end():
    scores = searched(1e9, (0.1,))
    assert len(scores) == MOST_RATES and not lies_inside(scores)
    # Where everything diverges lower rates are tried.
    nothing = {0.1: NOTHING, 0.2: NOTHING}
    assert next_rate(nothing, (0.1, 0.2)) == 0.05
    assert best_rate(nothing) is None and not lies_inside(nothing)


def test_the_best_rate_is_of_highest_accuracy_then_lowest_loss():
    scores = {1.0: (0.5, -0.1), 2.0: (0.7, -0.9), 3.0: (0.7, -0.8), 4.0: NOTHING}
    assert best_rate(scores) == 3


def test_an_accuracy_is_at_chance_within_three_standard_errors_of_guessing():
    # Of 900 images guessing gets 90 of 10 classes right, give or take 9.
    assert at_chance(117 / 900, 10, 900)
    assert not at_chance(118 / 900, 10, 900)


def test_a_tuning_table_shows_every_rate_that_was_tried():
    def tuning(row: str, chance: bool, **accuracies: float | None) -> Tuning:
        runs = [
            Outcome(row, 1, float(lr[1:]), a and replace(RAN, accuracy=a))
            for lr, a in accuracies.items()
        ]
        return Tuning(row, tuple(runs), chance)

    tunings = (
        tuning("dense", False, _1=0.5, _2=0.75, _4=0.25),
        tuning("topk", True, _2=None, _8=0.125),
    )
    table = tuning_table(comparison(outcomes("dense", "topk"), tunings=tunings))
    assert table.columns == ("row", "1", "2", "4", "8", "chosen", "inside", "at chance")
    assert table.rows == (
        ("dense", 50, 75, 25, None, 2, "yes", "no"),
        ("topk", None, "diverged", None, 12.5, 8, "no", "yes"),
    )


def test_rows_that_saw_other_numbers_of_samples_are_not_compared():
    require_same_work([*outcomes("dense", "topk"), Outcome("prunex", 0, 0.1, None, "diverged")])
    with pytest.raises(RuntimeError, match="samples"):
        require_same_work(outcomes("dense") + outcomes("topk", samples=99))
    with pytest.raises(RuntimeError, match="fewer samples"):
        require_same_work(outcomes("dense", extra_samples=-1))


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
    assert dense["mean %"] == pytest.approx(60)
    assert dense["+-"] == pytest.approx(200**0.5)
    assert (dense["sent MiB"], dense["of dense %"]) == (2, 100)
    assert (topk["sent MiB"], topk["of dense %"]) == (1, 50)
    assert (dense["sync ms/step"], dense["own ms/step"], dense["own %"]) == (200, 100, 25)
    assert (topk["seed 1"], topk["mean %"], topk["+-"]) == ("diverged", None, None)
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
    assert column(results_table(comparison(only_failures)), "mean %") == [None]
    assert measured_table(only_failures).rows[0][1:4] == (None, None, None)


def test_rows_have_places_but_for_those_tuned_at_chance():
    runs = [
        o
        for a, row in ((0.5, "a"), (0.6, "b"), (0.5, "c"), (0.7, "d"))
        for o in outcomes(row, accuracy=a)
    ]
    tunings = (Tuning("d", (runs[-1],), chance=True), Tuning("a", (runs[0],), chance=False))
    table = results_table(comparison(runs, tunings=tunings))
    assert {row: cells(table, row)["place"] for row in "abcd"} == {
        "a": 2,
        "b": 1,
        "c": 2,
        "d": None,
    }
    assert any(note.startswith("d: no better than guessing") for note in table.notes)


def test_a_row_that_did_better_in_the_short_run_that_tuned_it_is_named():
    def noted(whole: float, short: float, samples: int) -> bool:
        runs = [o for row in ("a", "b") for o in outcomes(row, accuracy=whole)]
        trials = [
            *outcomes("a", accuracy=short, samples=samples),
            Outcome("a", 3, 0.2, None, "inf"),
        ]
        diverged = Tuning("b", (Outcome("b", 3, 0.1, None, "inf"),), chance=False)
        tunings = (Tuning("a", tuple(trials), chance=False), diverged)
        notes = results_table(comparison(runs, tunings=tunings)).notes
        return any("a: 49.0 % after whole runs, 52.0 % after the shorter" in n for n in notes)

    assert noted(0.49, 0.52, samples=50)
    assert not noted(0.52, 0.49, samples=50) and not noted(0.49, 0.52, samples=100)


def test_a_table_of_equal_bytes_shows_the_reference_and_names_who_is_cheaper():
    runs = outcomes("dense", accuracy=0.8) + outcomes("prunex", accuracy=0.6) + outcomes("topk")
    runs += outcomes("dgc", sent_bytes=3 * 2**20)
    again = outcomes("dense", accuracy=0.55, epochs=0.5)
    found = comparison(runs, equal={"bytes": tuple(again)}, reference={"bytes": "prunex"})
    table = equal_table(found, "bytes", again)
    assert table.title == "With the bytes of prunex"
    assert column(table, "row") == ["prunex", "dense"]
    assert column(table, "mean %") == pytest.approx([60, 55])
    assert column(table, "at full length") == pytest.approx([60, 80])
    assert column(table, "epochs") == [2, 0.5]
    assert table.notes[1:] == (
        "learning rates: those of the whole runs",
        "at full length no dearer than prunex: topk",
        "dearer, and not trained anew: dgc",
    )
    dear = [replace(run, measured=replace(RAN, sent_bytes=2**20 + 1)) for run in again]
    notes = equal_table(replace(found, equal={"bytes": tuple(dear)}), "bytes", dear).notes
    assert notes[-1] == "more than prunex nevertheless, by whole iterations: dense"


def test_a_comparison_is_the_same_when_it_is_read_back():
    runs = [*outcomes("dense", "topk"), Outcome("topk", 1, 0.1, None, "why")]
    tunings = (Tuning("topk", tuple(runs[1:]), chance=True),)
    equal = {"bytes": tuple(runs[:1])}
    found = comparison(runs, tunings=tunings, equal=equal, reference={"bytes": "topk"})
    assert comparison_from(json.loads(json.dumps(to_dict(found)))) == found


def test_comparisons_of_different_rows_are_joined():
    runs = outcomes("dense", "topk", "prunex")
    tunings = tuple(Tuning(run.row, (run,), chance=False) for run in runs)
    equal, reference = {"bytes": tuple(outcomes("dense"))}, {"bytes": "prunex"}
    whole = comparison(runs, tunings=tunings, equal=equal, reference=reference)
    first = comparison(runs[:1], tunings=tunings[:1], notes=("note", "one more"))
    second = comparison(runs[1:], tunings=tunings[1:], equal=equal, reference=reference)
    assert join([first, second]) == replace(whole, notes=("note", "one more (of dense)"))
    assert join([whole]) == whole


def test_joined_notes_say_of_which_rows_they_are():
    runs = outcomes("dense", "topk", "prunex")
    rates = [f"learning rates: {way}" for way in ("given", "tuned")]
    again = [replace(run, seed=1) for run in runs]
    parts = [
        comparison(runs[:2], notes=(rates[0], "1/4 of each")),
        comparison(runs[2:], notes=(rates[1], "1/4 of each")),
    ]
    named = (f"{rates[0]} (of dense, topk)", "1/4 of each", f"{rates[1]} (of prunex)")
    joined = join(parts)
    assert joined.notes == named
    # Once more: what says whose it is needs no more.
    assert join([joined, comparison(again, notes=("other",))]).notes == (
        named[0],
        "1/4 of each (of dense, topk, prunex; seed 0)",
        named[2],
        "other (of dense, topk, prunex; seed 1)",
    )
    tuned = replace(joined, tunings=(Tuning("dense", tuple(runs[:1]), chance=False),))
    assert tuning_table(tuned).notes[1:] == (named[0], named[2])


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


def test_a_table_leaves_empty_what_a_seed_has_not_got():
    first, second = (
        [replace(run, seed=seed) for run in outcomes("dense", "topk")] for seed in (0, 1)
    )
    equal, reference = {"bytes": tuple(second[:1])}, {"bytes": "topk"}
    joined = join([comparison(first), comparison(second, equal=equal, reference=reference)])
    table = equal_table(joined, "bytes", joined.equal["bytes"])
    assert [cells(table, row)["seed 0"] for row in ("topk", "dense")] == [50, None]
    assert [cells(table, row)["seed 1"] for row in ("topk", "dense")] == [50, 50]
    assert "of fewer seeds than topk: dense" in table.notes


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
        (
            comparison(outcomes("topk"), equal={"bytes": ()}, reference={"bytes": "topk"}),
            "equal to different ones",
        ),
        (
            comparison(
                outcomes("topk"),
                equal={"bytes": tuple(outcomes("half", "half"))},
                reference={"bytes": "dense"},
            ),
            "row 'half' with seed 0 is in two",
        ),
    ],
)
def test_comparisons_that_differ_in_more_than_rows_are_not_joined(other, word):
    equal = {"equal": {"bytes": ()}, "reference": {"bytes": "dense"}}
    with pytest.raises(UserError, match=word):
        mine = [replace(run, settings="a") for run in outcomes("dense")]
        join([comparison(mine, **equal), other])


def test_a_digest_tells_settings_apart_that_make_another_row():
    first = make("recipe", keep_ratio=0.5)
    same = (
        replace(first, seed=3, lr=0.4, data_dir="elsewhere", timeout=5.0),
        # The preset has no say in what it has said.
        replace(first, preset="thin"),
    )
    others = (replace(first, keep_ratio=(0.2,)), replace(first, evaluate_every=2))
    assert {digest_of(settings) for settings in same} == {digest_of(first)}
    assert len({digest_of(settings) for settings in (first, *others)}) == 3


def test_a_curve_adds_up_what_was_sent_and_leaves_evaluations_out():
    records = [
        {
            "iteration": k,
            "bytes": {"sent": 10},
            "seconds": {"total": 5.0, "evaluate": 1.0},
            "test_accuracy": accuracy,
        }
        for k, accuracy in ((1, None), (2, 0.5), (3, 0.75))
    ]
    assert curve_of(records) == (Point(2, 20, 8.0, 0.5), Point(3, 30, 12.0, 0.75))


def test_the_operations_of_every_method_are_named():
    for method in METHODS:
        assert "All" in operations(make(method=method))
    assert operations(make(method="topk")) == "Allgatherv"
    assert operations(make(method="powersgd")) == "Allreduce, Reduce, Bcast"
    assert operations(make(method="local-sgd")) == "Allreduce"
    assert operations(make(method="local-sgd", payload="int8sum")) == "Allreduce"
    assert operations(make(method="local-sgd", payload="int4")) == "Alltoallv, Allgather"


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


def test_of_many_rows_the_ends_alone_are_drawn_the_best_one_first():
    ran = {f"row {n}": n / 100 for n in range(1, MOST_CURVES_DRAWN + 2)}
    shares = {"row 1": 0.5, "row 2": 0.97}

    def drawn(count: int) -> tuple[list[str], int]:
        runs = [
            Outcome(
                row,
                0,
                0.1,
                replace(
                    RAN,
                    curve=(RAN.curve[0], replace(RAN.curve[1], accuracy=accuracy)),
                    parameters_left=round(RAN.parameters_left * shares.get(row, 1.0)),
                ),
            )
            for row, accuracy in list(ran.items())[:count]
        ]
        with styled():
            panel = make_figure(comparison(runs), {}).axes[0]
        hollow = [c[0] for c in panel.containers if c[0].get_markerfacecolor() == "white"]
        assert len(hollow) == 1
        courses = sum(len(line.get_xdata()) == len(RAN.curve) for line in panel.lines)
        return panel.get_legend_handles_labels()[1], courses

    names, courses = drawn(MOST_CURVES_DRAWN)
    assert courses == MOST_CURVES_DRAWN
    assert names[0] == f"row {MOST_CURVES_DRAWN}"
    names, courses = drawn(MOST_CURVES_DRAWN + 1)
    assert courses == 0
    assert names[:2] == [f"1 row {MOST_CURVES_DRAWN + 1}", f"2 row {MOST_CURVES_DRAWN}"]


@pytest.mark.parametrize("rows", [2, 25, 60])
def test_the_legend_of_a_figure_fits_into_it(rows):
    with styled():
        figure = make_figure(
            comparison([Outcome(f"row {n}", 0, 0.1, RAN) for n in range(rows)]), {}
        )
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


def test_what_no_figure_can_be_drawn_with_is_refused(monkeypatch):
    flags = ["--methods", "dense", "--figure"]
    with pytest.raises(UserError, match=r"ends in \.svg"):
        kept_runs.prepare(parse([*flags, "figure.txt"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[report\]"):
        kept_runs.prepare(parse([*flags, "figure.svg"]))


def test_help_names_methods_and_starts_nothing():
    code = (
        "import sys\n"
        "from prunex_mpi import bench\n"
        "try:\n    bench.main(['compare', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    for word in (*METHODS, "--tune-lr", "--plan", "--keep-ratio", "--data-dir"):
        assert word in done.stdout
    assert "--run-dir" not in done.stdout


def test_user_errors_end_with_code_2_and_one_line():
    done = run("compare", "--bogus")
    assert done.returncode == USAGE
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("prunex_mpi.bench: error:")


# --------------------------------------------------------------------------------------------------
# Whole comparisons
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch):
    """Leave this process's threads, log and exception hook as they are; search briefly."""
    monkeypatch.setattr("prunex_mpi.research.compare.compare_methods.MOST_RATES", 2)
    monkeypatch.setattr("prunex_mpi.run.start.set_threads", lambda _: 1)
    monkeypatch.setattr(compare_methods, "set_up_logging", lambda *_: None)
    monkeypatch.setattr("prunex_mpi.run.program.abort_on_exceptions", lambda *_: None)


def compared(flags: list[str], folder) -> tuple[dict[str, Table], str]:
    """Run a comparison; return its tables by their first word, as written, and where it wrote."""
    place = broadcast_text(WORLD, str(folder))
    if WORLD.rank == 0:
        Path(place).mkdir(exist_ok=True)
    WORLD.Barrier()
    files = [f"--dir={place}/runs", f"--json={place}/tables.json"]
    assert compare(WORLD, parse([*TINY, f"--train-samples={8 * WORLD.size}", *flags, *files])) == 0
    with open(f"{place}/tables.json", encoding="utf-8") as file:
        written = json.load(file)["tables"]
    tables = [
        Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
        for t in written
    ]
    return {table.title.split()[0]: table for table in tables}, place


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("method", ["prunex", "one-shot"])
def test_what_was_taken_out_counts_as_zeros(quiet, tmp_path, method):
    stages = PRUNED_AT_ONCE if method == "prunex" else ["--prune-iteration=1"]
    found = []
    for number, more in enumerate(([], ["--remove-dropped"])):
        flags = ["--methods", method, *stages, "--groups", "coupled", *more]
        place = compared(flags, tmp_path / str(number))[1]
        whole = json.loads(Path(f"{place}/tables.json").read_text(encoding="utf-8"))
        found.append(whole["comparison"]["outcomes"][0]["measured"])
    masked, smaller = found
    assert masked["zeros"] > 0.5 * masked["weights"]
    for name in ("parameters", "parameters_left", "weights", "zeros", "line_zeros"):
        assert masked[name] == smaller[name], name


@pytest.mark.any_mpi
@pytest.mark.mpi(min_size=2)
def test_methods_are_compared_on_the_same_samples(quiet, tmp_path, capsys):
    flags = ["--methods", "dense", "topk", "prunex", *PRUNED_AT_ONCE]
    flags += ["--tune-lr", "0.1", "--tune-length=1/2", "--lr", "topk=0.05"]
    tables, place = compared(flags, tmp_path)
    results, measured, tuned = tables["Comparison:"], tables["The"], tables["Learning"]
    for table in (results, measured):
        assert_sane(table)
    assert column(results, "row") == ["dense", "topk", "prunex"]
    assert set(column(results, "samples")) == {2 * 4 * WORLD.size}
    assert set(column(results, "epochs")) == {1}
    assert column(tuned, "row") == ["dense", "prunex"]
    assert cells(results, "topk")["lr"] == 0.05
    assert cells(results, "prunex")["lr"] == cells(tuned, "prunex")["chosen"]

    model = build_model("resnet8", num_classes=10, image_size=8)
    numel = build_layout(model).numel
    statistics = sum(2 * m.num_features for m in model.modules() if hasattr(m, "running_var"))
    message = 2 * 4 * (numel + statistics)
    dense, topk, prunex = (cells(results, m) for m in ("dense", "topk", "prunex"))
    ring = 2 * (WORLD.size - 1) / WORLD.size
    assert dense["sent MiB"] * 2**20 == pytest.approx(message * ring, rel=1e-4)
    assert prunex["sent MiB"] < 0.6 * dense["sent MiB"]
    assert prunex["of dense %"] == pytest.approx(100 * prunex["sent MiB"] / dense["sent MiB"])
    assert prunex["parameters left"] < 0.6 * numel
    assert cells(measured, "dense")["bytes saved, times"] == 1
    assert cells(measured, "dense")["metadata %"] == 0
    assert cells(measured, "prunex")["in whole lines %"] == pytest.approx(100)
    # Half of what topk sends, but for the statistics.
    share = sum(kept_per_layer(build_layout(model).segments, 0.01))
    share /= 2 * share + statistics
    assert cells(measured, "topk")["metadata %"] == pytest.approx(100 * share, rel=1e-4)
    assert topk["sent MiB"] < 0.2 * dense["sent MiB"]

    printed = capsys.readouterr().out
    if WORLD.rank:
        assert printed == ""
        return
    for title in ("Comparison: ", "The same rows in the columns of", "Learning rates"):
        assert f"\n\n{title}" in printed
    for method in ("dense", "topk", "prunex"):
        with open(f"{place}/runs/{method}-0/summary.json", encoding="utf-8") as file:
            total = json.load(file)
        assert total["status"] == "completed"
        assert 100 * total["test_accuracy"] == pytest.approx(cells(results, method)["mean %"])


@pytest.mark.any_mpi
@pytest.mark.mpi(min_size=2)
def test_what_says_where_values_belong_is_told_from_the_values(quiet, tmp_path):
    tables, _ = compared(["--methods", "dgc", "omnireduce", "--compress-ratio=1"], tmp_path)
    # All that dgc sends travels whole.
    assert cells(tables["The"], "dgc")["metadata %"] == 0
    # Statistics, and in a step three blocks of 256 elements, each with its number.
    model = build_model("resnet8", num_classes=10, image_size=8)
    statistics = sum(2 * m.num_features for m in model.modules() if hasattr(m, "running_var"))
    share = 3 / (3 * 257 + statistics)
    assert cells(tables["The"], "omnireduce")["metadata %"] == pytest.approx(100 * share)


@pytest.mark.any_mpi
@pytest.mark.mpi(min_size=2)
def test_a_method_that_diverges_is_a_row_that_says_so(quiet, tmp_path):
    flags = ["--methods", "dense", "local-sgd", "prunex-flat", "--seeds", "0", "1"]
    flags += ["--lr", "dense=1e18", "local-sgd=0.1", "--tune-lr", "1e18"]
    tables, _ = compared([*flags, *PRUNED_AT_ONCE], tmp_path)
    results = tables["Comparison:"]
    for method, why in (("dense", "finite"), ("prunex-flat", "every learning rate")):
        row = cells(results, method)
        assert row["seed 0"] == row["seed 1"] == "diverged"
        assert row["mean %"] is None
        assert sum(n.startswith(f"{method}, seed") and why in n for n in results.notes) == 2
    assert cells(results, "local-sgd")["mean %"] is not None
    assert cells(tables["Learning"], "prunex-flat")["chosen"] is None


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_directory_that_is_there_is_refused_before_anything_runs(quiet, tmp_path):
    place = broadcast_text(WORLD, str(tmp_path))
    if WORLD.rank == 0:
        (tmp_path / "topk-1").mkdir()
    WORLD.Barrier()
    flags = ["--methods", "dense", "topk", "--seeds", "0", "1", f"--dir={place}"]
    with pytest.raises(UserError, match="topk-1 is there already"):
        compare(WORLD, parse([*TINY, *flags]))


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("tuned", [[], ["--tune-lr", "0.1"]])
def test_a_row_that_can_not_be_is_refused_before_anything_runs(quiet, monkeypatch, tuned):
    monkeypatch.setattr(run_rows, "run_one", lambda *_, **__: pytest.fail("it was trained"))
    flags = ["--methods", "dense", "prunex", "--groups=coupled", "--keep-by=parameters"]
    with pytest.raises(UserError, match="row prunex: --keep-ratio 1e-05 of the parameters"):
        compare(WORLD, parse([*TINY, *tuned, *flags, "--keep-ratio=0.00001"]))


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("--methods dense local-sgd --init-from=RUNS/dense-{seed} --seeds 0 1", "dense, seed 1"),
        ("--methods dense --teacher=RUNS/none-{seed} --init-from=RUNS/dense-0", "dense, seed 0"),
        ("--methods dense --teacher=RUNS/none-{seed} --teacher-share=0.5", "/none-0'"),
        # The seed that tunes, of a row that is tuned.
        ("--methods dense --init-from=RUNS/dense-{seed} --tune-lr 0.1", "dense, seed 1"),
        ("--methods dense --init-from=RUNS/dense-{seed} --lr 0.1", ""),
        ("--methods dense --init-from=RUNS/half-{seed}", "nor the folder of a complete run"),
        ("--methods dense --init-from=torchvision", ""),
        # What is kept needs none.
        ("--methods dense --init-from=RUNS/none-{seed} --dir=RUNS --resume", ""),
    ],
)
def test_networks_to_begin_with_are_looked_for_before_anything_runs(tmp_path, flags, missing):
    for name in ("dense-0", "half-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").touch()
    (tmp_path / "dense-0" / "summary.json").touch()
    (tmp_path / "outcomes").mkdir()
    (tmp_path / "outcomes" / "dense-0.json").touch()
    options = parse([*TINY, *flags.replace("RUNS", str(tmp_path)).split()])
    if not missing:
        kept_runs.refuse_missing(options)
        return
    with pytest.raises(UserError, match=missing) as caught:
        kept_runs.refuse_missing(options)
    assert "\n" not in str(caught.value)


def test_networks_that_an_earlier_run_leaves_are_not_missed(tmp_path):
    plan = tmp_path / "plan.toml"
    later = f'[rows.later]\nmethod = "topk"\ninit-from = "{tmp_path}/runs/dense-{{seed}}"\n'
    flags = [f"--plan={plan}", "--seeds", "0", "1", f"--dir={tmp_path}/runs"]
    plan.write_text(f'[rows.dense]\nmethod = "dense"\n{later}')
    options = parse(flags)
    kept_runs.refuse_missing(options)
    plan.write_text(f'{later}[rows.dense]\nmethod = "dense"\n')
    options = parse(flags)
    with pytest.raises(UserError, match="row later, seed 0: --init-from"):
        kept_runs.refuse_missing(options)


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_network_that_is_not_there_is_missed_on_every_rank(quiet, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_methods, "take_places", pytest.fail)
    place = broadcast_text(WORLD, str(tmp_path))
    with pytest.raises(UserError, match=f"row dense, seed 3: --init-from '{place}/x-3' is neither"):
        compare(
            WORLD, parse([*TINY, "--methods=dense", "--seeds=3", f"--init-from={place}/x-{{seed}}"])
        )


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_comparison_is_not_named_by_the_model_of_its_first_row(quiet, tmp_path):
    plan = Path(broadcast_text(WORLD, str(tmp_path))) / "plan.toml"
    if WORLD.rank == 0:
        row = '[rows.{}]\nmethod = "dense"\n'
        plan.write_text(row.format("narrow") + 'model = "resnet8-w4"\n' + row.format("wide"))
    WORLD.Barrier()
    tables, _ = compared([f"--plan={plan}", "--seeds=0"], tmp_path / "runs")
    assert tables["Comparison:"].title.startswith("Comparison: resnet8, synthetic, ")


@pytest.mark.mpi
def test_rows_by_epochs_that_round_to_other_steps_are_refused_before_they_train(
    quiet, tmp_path, monkeypatch
):
    plan = Path(broadcast_text(WORLD, str(tmp_path))) / "plan.toml"
    rows = '[rows.{}]\nmethod = "dense"\nlocal-epochs = "{}"\nouter-iterations = {}\n'
    if WORLD.rank == 0:
        # 15 steps an epoch: a quarter is 4, a half 8.
        plan.write_text(rows.format("often", "1/4", 8) + rows.format("whole", "1", 2))
    WORLD.Barrier()
    monkeypatch.setattr(run_rows, "run_one", pytest.fail)
    flags = [*TINY[:5], f"--train-samples={60 * WORLD.size}", "--ranks-per-node=1"]
    options = parse([f"--plan={plan}", *flags, "--seeds=0"])
    with pytest.raises(UserError, match="whole has 120 and often 128"):
        compare(WORLD, options)


@pytest.mark.parametrize(
    ("iterations", "spent", "allowed", "left"),
    [(392, 1802, 23, 5), (392, 1802, 22, 4), (392, 1802, 1, 1), (3, 10, 9, 2)],
)
def test_a_row_at_equal_bytes_spends_no_more(iterations, spent, allowed, left):
    assert affordable(iterations, spent, allowed) * iterations == left


def rates_tried(tables: dict[str, Table], row: str) -> list[str]:
    """Return the learning rates that a row was tried at."""
    tried = cells(tables["Learning"], row)
    others = ("row", "chosen", "inside", "at chance")
    return [rate for rate, cell in tried.items() if rate not in others and cell is not None]


def noting_methods(monkeypatch) -> list[str]:
    """Return a list of the methods that are trained from now on, in their order."""
    trained: list[str] = []
    real = run_rows.run_one

    def noted(bench, settings, *rest):
        trained.append(settings.method)
        return real(bench, settings, *rest)

    monkeypatch.setattr(run_rows, "run_one", noted)
    return trained


@pytest.mark.any_mpi
@pytest.mark.mpi(min_size=2)
def test_an_interrupted_comparison_goes_on_and_parts_come_together(
    quiet, tmp_path, monkeypatch, capsys
):
    flags = ["--tune-lr", "0.1", "--seeds", "0", "1"]
    flags += ["--outer-iterations=4", "--local-steps=2", "--evaluate-every=2"]
    both = ["--methods", "dense", "local-sgd", *flags, "--equal-bytes=local-sgd"]
    whole, _ = compared(both, tmp_path / "whole")
    for method, more in (("dense", []), ("local-sgd", ["--resume"])):
        compared(["--methods", method, *flags, *more], tmp_path / "parts")
    trained = noting_methods(monkeypatch)
    capsys.readouterr()
    merged, place = compared([*both, "--resume"], tmp_path / "parts")
    printed = capsys.readouterr().out
    # Only what nobody has done yet: dense, as far as the bytes of local-sgd go: three learning
    # rates, and two seeds.
    assert set(trained) == {"dense"}
    assert len(trained) == len(rates_tried(merged, "dense, equal bytes")) + 2
    for title in ("Comparison:", "Learning", "With"):
        for row in ("dense", "local-sgd"):
            before, after = cells(whole[title], row), cells(merged[title], row)
            timed = [key for key in before if key.endswith((" s", "ms/step", "own %"))]
            assert {**before, **dict.fromkeys(timed)} == {**after, **dict.fromkeys(timed)}
    assert (
        cells(merged["With"], "dense")["epochs"] < cells(merged["Comparison:"], "dense")["epochs"]
    )
    # The file alone says as much.
    assert compare(WORLD, parse([f"--from={place}/tables.json"])) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_other_images_of_the_same_names_are_told_apart(tmp_path):
    folder = Path(broadcast_text(WORLD, str(tmp_path / "images")))
    if WORLD.rank == 0:
        write_folder(folder, train=8, test=4)
    WORLD.Barrier()

    def found(**changes):
        settings = make(dataset="imagefolder", data_dir=str(folder), batch_size=2, **changes)
        with nodes_of(WORLD) as topology, closing(load_dataset(topology, settings)) as dataset:
            return images_of(WORLD, dataset)

    first = found()
    for changes in ({"seed": 3}, {"data_mode": "stream"}, {"test_samples": 8}):
        assert found(**changes) == first
    WORLD.Barrier()
    if WORLD.rank == 0:
        for path in folder.glob("test/*/*"):
            Image.new("RGB", (8, 8)).save(path)
    WORLD.Barrier()
    assert found() != first


def test_files_of_other_images_are_not_joined() -> None:
    parts = [comparison(outcomes(row), data=data) for row, data in (("a", "x"), ("b", ""))]
    assert join(parts).data == "x"
    with pytest.raises(UserError, match="--from: the files are of other images"):
        join([*parts, comparison(outcomes("c"), data="y")])


@pytest.mark.mpi(min_size=2)
def test_a_row_at_equal_bytes_has_the_rate_that_is_best_for_its_length(
    quiet, tmp_path, monkeypatch
):
    flags = ["--methods", "dense", "local-sgd", "--tune-lr", "0.1", "--lr", "local-sgd=0.1"]
    flags += ["--outer-iterations=4", "--local-steps=2", "--evaluate-every=2"]
    monkeypatch.setattr("prunex_mpi.research.compare.compare_methods.MOST_RATES", MOST_RATES)
    real, judged = run_rows.run_one, []

    def choosy(bench, settings, dataset, *rest):
        found = real(bench, settings, dataset, *rest)
        best = 0.1 if settings.outer_iterations == 4 else 0.4
        far = abs(math.log2(settings.lr / best))
        judged.append((settings.outer_iterations, settings.seed, settings.lr, dataset.test_total))
        return replace(found, measured=replace(found.measured, accuracy=1 - far / 8))

    monkeypatch.setattr(run_rows, "run_one", choosy)
    tables, _ = compared([*flags, "--equal-bytes=local-sgd", "--seeds", "0", "1"], tmp_path)
    assert cells(tables["Comparison:"], "dense")["lr"] == 0.1
    row = cells(tables["With"], "dense")
    assert row["lr"] == 0.4
    assert row["mean %"] == pytest.approx(100)
    assert any(n == "learning rates: searched for this length" for n in tables["With"].notes)
    assert cells(tables["Learning"], "dense, equal bytes")["chosen"] == 0.4
    # On held-out images, not on those that the row is judged on.
    shorter = [run for run in judged if run[0] < 4]
    (tests,) = {images for _, seed, _, images in shorter if seed < 2}
    (held_out,) = {images for _, seed, _, images in shorter if seed == 2}
    assert held_out != tests
    assert [lr for _, seed, lr, _ in shorter if seed == 2] == [0.1, 0.05, 0.2, 0.4, 0.8]


@pytest.mark.any_mpi
@pytest.mark.mpi(min_size=2)
def test_one_more_seed_changes_nothing_about_rows_of_equal_bytes(quiet, tmp_path, monkeypatch):
    flags = ["--methods", "dense", "local-sgd", "--outer-iterations=4", "--local-steps=2"]
    flags += ["--evaluate-every=2", "--equal-bytes=local-sgd"]
    real = run_rows.run_one

    def uneven(bench, settings, *rest):
        found = real(bench, settings, *rest)
        sent = found.measured.sent_bytes
        if settings.method == "local-sgd":
            sent //= 1 + settings.seed
        return replace(found, measured=replace(found.measured, sent_bytes=sent))

    monkeypatch.setattr(run_rows, "run_one", uneven)
    before, _ = compared([*flags, "--seeds=0"], tmp_path)
    after, _ = compared([*flags, "--seeds", "0", "1", "--resume"], tmp_path)
    first, both = (cells(tables["With"], "dense") for tables in (before, after))
    assert first["seed 0"] == both["seed 0"]
    assert first["epochs"] > both["epochs"]


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_each_seed_of_a_row_can_begin_with_the_network_of_its_own(quiet, tmp_path):
    _, first = compared(["--methods", "dense", "--seeds", "0", "1"], tmp_path / "first")
    flags = ["--methods", "local-sgd", "--seeds", "0", "1", "--teacher-share=0.1"]
    paths = [f"--{name}={first}/runs/dense-{{seed}}" for name in ("init-from", "teacher")]
    _, second = compared([*flags, *paths], tmp_path / "second")
    digests = {}
    for seed in (0, 1):
        with open(f"{second}/runs/local-sgd-{seed}/config.toml", "rb") as file:
            found = tomllib.load(file)
        assert found["init-from"] == found["teacher"] == f"{first}/runs/dense-{seed}"
        digests[seed] = found["init-digest"]
    assert digests[0] != digests[1]
    # Both are of one row, as it stands in the file.
    assert compare(WORLD, parse([f"--from={second}/tables.json"])) == 0


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_run_that_was_kept_is_not_taken_for_another(quiet, tmp_path):
    flags = ["--methods", "local-sgd"]
    compared(flags, tmp_path)
    place = broadcast_text(WORLD, str(tmp_path))
    again = [*TINY, f"--train-samples={8 * WORLD.size}", *flags, f"--dir={place}/runs", "--resume"]
    with pytest.raises(UserError, match="another momentum"):
        compare(WORLD, parse([*again, "--momentum=0.5"]))
    outcome = Path(place) / "runs" / "outcomes" / "local-sgd-0.json"
    if WORLD.rank == 0:
        kept = outcome.read_text(encoding="utf-8")
        wrong = {**json.loads(kept), "place": {"ranks on nodes": "9 9"}}
        outcome.write_text(json.dumps(wrong), encoding="utf-8")
    WORLD.Barrier()
    with pytest.raises(UserError, match="other ranks on nodes \\('9 9'; here"):
        compare(WORLD, parse(again))
    if WORLD.rank == 0:
        outcome.write_text(kept, encoding="utf-8")
    WORLD.Barrier()
    with pytest.raises(UserError, match="is there already; --resume"):
        compare(WORLD, parse([word for word in again if word != "--resume"]))
    if WORLD.rank == 0:
        (tmp_path / "runs" / "outcomes" / "local-sgd-0.json").write_text("{", encoding="utf-8")
    WORLD.Barrier()
    with pytest.raises(UserError, match="can't be read"):
        compare(WORLD, parse(again))
    # Nor is a run of somebody's removed that has the name of one, as what an interrupted one left.
    if WORLD.rank == 0:
        (tmp_path / "runs" / "outcomes" / "local-sgd-0.json").unlink()
    WORLD.Barrier()
    with pytest.raises(UserError, match="does not know"):
        compare(WORLD, parse(again))
    run = Path(place) / "runs" / "local-sgd-0"
    if WORLD.rank == 0:
        (run / "summary.json").unlink()
        (run / "checkpoints" / "000001").mkdir(parents=True)
    WORLD.Barrier()
    with pytest.raises(UserError, match="holds a run with checkpoints"):
        compare(WORLD, parse(again))
    held = FileLock(run / "lock")
    if WORLD.rank == 0:
        shutil.rmtree(run / "checkpoints")
        held.acquire()
    WORLD.Barrier()
    with pytest.raises(UserError, match="is being trained by another job"):
        compare(WORLD, parse(again))
    held.release()
    WORLD.Barrier()
    assert compare(WORLD, parse(again)) == 0
    assert (Path(place) / "runs" / "local-sgd-0" / "summary.json").exists()


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_what_is_kept_of_a_run_is_what_was_evaluated(quiet, tmp_path, monkeypatch):
    judged = []
    real = evaluation.judge

    def judge(topology, work, shard):
        judged.append(work.state.z.clone())
        return real(topology, work, shard)

    monkeypatch.setattr(evaluation, "judge", judge)
    _, place = compared(["--methods", "dense", "--ema=0.75"], tmp_path)
    tensors = load_file(f"{place}/runs/dense-0/state.safetensors")
    names = [name for name in tensors if "running" not in name and "num_batches" not in name]
    assert torch.equal(
        torch.cat([tensors[n].flatten() for n in names]).sort()[0], judged[1].sort()[0]
    )
    assert len(judged) == 2
    WORLD.Barrier()


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_an_outcome_that_can_not_be_kept_ends_every_rank_alike(quiet, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prunex_mpi.research.compare.kept_runs.write_json_durably", full)
    with pytest.raises(UserError, match="local-sgd-0 can't be written: No space left"):
        compared(["--methods", "local-sgd"], tmp_path)


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_progress_is_out_of_all_outer_iterations(quiet, tmp_path, monkeypatch):
    totals: list[int] = []

    def noted(length: Length, *rest: object) -> Progress:
        totals.append(length.iterations)
        return Progress(length, *rest)

    monkeypatch.setattr("prunex_mpi.run.supervision.Progress", noted)
    compared(["--methods", "qsr", "--outer-iterations=8"], tmp_path)
    with open(f"{broadcast_text(WORLD, str(tmp_path))}/runs/qsr-0/summary.json") as file:
        assert totals == [json.load(file)["iterations"]]
    assert totals[0] > 2


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("content", ["", "{}", '{"comparison": {"title": 1}}', None])
def test_a_file_that_holds_no_comparison_is_refused(tmp_path, content):
    place = broadcast_text(WORLD, str(tmp_path))
    if content is not None and WORLD.rank == 0:
        (tmp_path / "tables.json").write_text(content, encoding="utf-8")
    WORLD.Barrier()
    with pytest.raises(UserError, match="--from"):
        compare(WORLD, parse([f"--from={place}/tables.json"]))


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("file", ["json", "figure"])
def test_what_can_not_be_written_is_refused_before_anything_runs(tmp_path, file):
    place = broadcast_text(WORLD, str(tmp_path))
    if file != "figure":
        both = [f"--{file}={place}/x.svg", f"--figure={place}/../{Path(place).name}/x.svg"]
        with pytest.raises(UserError, match=f"--{file} and --figure name one file"):
            compare(WORLD, parse(["--methods=dense", *both]))
    if WORLD.rank == 0:
        whole = {"comparison": to_dict(comparison(outcomes("dense")))}
        (tmp_path / "tables.json").write_text(json.dumps(whole), encoding="utf-8")
    WORLD.Barrier()
    nowhere = f"--{file}={place}/nowhere/x.svg"
    for flags in (["--methods=dense"], [f"--from={place}/tables.json"]):
        with pytest.raises(UserError, match=f"--{file} .*No such file"):
            compare(WORLD, parse([*flags, nowhere]))
