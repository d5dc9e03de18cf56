"""The flags of a comparison, its plans, and the settings of its rows."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from compared import run_bench

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.config.resolve import BY_NAME as METHODS
from prunex_mpi.config.resolve import make
from prunex_mpi.research.compare.compare_options import digest_of, parse, read_plan, settings_of
from prunex_mpi.settings.values import AUTO

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
        ("--methods dense --lr 0.1 --tune-lr 0.2", ["--tune-lr", "--lr"]),
        ("--methods dense --tune-lr nan", ["--tune-lr", "finite"]),
        ("--methods dense --tune-length 1/2", ["--tune-length", "--tune-lr"]),
        ("--methods dense --tune-lr 0.2 --tune-length 0", ["--tune-length", "'0'"]),
        ("--methods dense --length x", ["--length", "'x'"]),
        ("--methods dense --length 1e999999999", ["--length"]),
        ("--methods dense --plan x.toml", ["--methods", "--plan"]),
        ("--plan /nowhere/x.toml", ["--plan", "/nowhere/x.toml"]),
        ("--methods dense --equal-bytes dens", ["--equal-bytes", "'dens'", "'dense'"]),
        ("--methods dense --rows dense", ["--rows", "--plan"]),
        ("--methods dense --from x.json", ["--methods", "--from"]),
        ("--from x.json --resume", ["--resume", "--from"]),
        ("--from x.json --times a=b", ["--times", "--figure"]),
        ("--from x.json --figure x.svg --times a", ["--times", "'a'"]),
        ("--methods dense --seeds 3 --tune-lr 0.2 --tune-seed 3", ["--tune-seed", "3"]),
        ("--methods dense topk --keep-ratio 0.5", ["--keep-ratio", "dense, topk"]),
        ("--methods prunex-flat --mask-agreement or", ["--mask-agreement", "(it is for prunex)"]),
        ("--methods topk --topk-ratio 2", ["--topk-ratio", "2"]),
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
        assert (dgc.outer_iterations, dgc.options.warmup_epochs) == (8, warmup)
    assert (prunetrain.options.reconfigure_every, prunetrain.evaluate_every) == (1, 1)


def test_stages_given_as_counts_are_as_large_a_part_of_a_shorter_run():
    flags = "--methods prunex one-shot --warmup-iterations 9 --keep-ramp-iterations 23"
    flags += " --freeze-iteration 32 --one-shot-prune-iteration 64"
    prunex, one_shot = (
        settings_of(options.common, row, 0, length=Fraction(1, 4))
        for options in [parse(flags.split())]
        for row in options.rows
    )
    stages = (prunex.warmup_iterations, prunex.keep_ramp_iterations, prunex.freeze_iteration)
    assert (prunex.outer_iterations, stages) == (16, (2, 6, 8))
    assert one_shot.options.prune_iteration == one_shot.outer_iterations == 16


def test_a_shorter_run_still_has_exchanges_behind_its_steps():
    options = parse(["--methods", "local-sgd", "dense", "--preset=thin", "--local-steps=4"])
    local, dense = (
        settings_of(options.common, row, 0, length=Fraction(1, 16)) for row in options.rows
    )
    assert (local.evaluate_every, local.overlap_steps) == (2, AUTO)
    assert dense.evaluate_every == 1


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("compare_cifar10.toml", 28),
        ("compare_resnet20.toml", 9),
        ("ways_cifar10.toml", 5),
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


COMMON_PLACE = "[settings]\n{0}\n[rows.a]\nmethod = 'dense'"
ROW_PLACE = "[rows.a]\nmethod = 'dense'\n{0}"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        *((COMMON_PLACE, what) for what in ("model", "dataset", "loss")),
        *((ROW_PLACE, what) for what in ("model", "loss")),
    ],
)
def test_a_plan_imports_only_what_a_flag_repeats(tmp_path, place, what):
    path = tmp_path / "plan.toml"
    path.write_text(place.format(f"{what} = 'mine:made'"), encoding="utf-8")
    with pytest.raises(UserError, match=rf"names the {what} 'mine:made', and importing it runs"):
        parse(["--plan", str(path)])
    assert parse(["--plan", str(path), f"--{what}", "mine:made"]).rows


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
        (["dense", "--topk-ratio", "0.1"], ["--topk-ratio", "dense"]),
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


def test_help_names_methods_and_starts_nothing():
    code = (
        "import sys\n"
        "from prunex_mpi import bench\n"
        "try:\n    bench.main(['compare', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
    )
    done = run_bench(code=code)
    assert done.returncode == 0, done.stderr
    for word in (*METHODS, "--tune-lr", "--plan", "--keep-ratio", "--data-dir"):
        assert word in done.stdout
    assert "--run-dir" not in done.stdout


def test_user_errors_end_with_code_2_and_one_line():
    done = run_bench("compare", "--bogus")
    assert done.returncode == USAGE
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("prunex_mpi.bench: error:")
