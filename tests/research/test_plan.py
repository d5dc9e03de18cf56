"""The flags of a comparison, its plans, and the settings of its rows."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from launch import run_python
from refused import assert_refused

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import BY_NAME as METHODS
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.research.plan import Options, parse, read_plan, settings_of
from prunex_mpi.run.problem import make_model
from prunex_mpi.settings.values import AUTO

PLAN = """
[protocol]
trials = 2
length = "1/2"
tune-seed = 3
seeds = [0, 1]

[settings]
model = "resnet8"
outer-iterations = 8
local-steps = 16
keep-ratio = 0.25

[rows.dense]
method = "dense"
grid = {lr = [0.5, 1.0]}

[rows."local-sgd int4, T = 4"]
method = "local-sgd"
payload = "int4"
outer-iterations = 32
local-steps = 4
grid = {lr = [0.1, 0.2]}

[rows.prunex]
method = "prunex"
lr = 0.01
grid = {freeze-iteration = ["7/16", "1/2"]}
"""
LOCAL_STEPS = "local-steps = 4\ngrid = {lr = [0.1, 0.2]}"


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        ("", ["--methods"]),
        ("--methods dense dense", ["--methods", "dense", "twice"]),
        ("--methods dense --seeds", ["--seeds", "at least one"]),
        ("--methods dense --seeds 1 1", ["--seeds", "twice"]),
        ("--methods dense --plan x.toml", ["--methods", "--plan"]),
        ("--plan /nowhere/x.toml", ["--plan", "/nowhere/x.toml"]),
        ("--methods dense topk --keep-ratio 0.5", ["--keep-ratio", "dense, topk"]),
        ("--methods prunex-flat --mask-agreement or", ["--mask-agreement", "(it is for prunex)"]),
        ("--methods dense --seed 3", ["--seed", "--seeds"]),
        ("--methods dense --rows dnse", ["--rows", "no row 'dnse'", "dense"]),
        ("--methods dense --dir d --rows dense --reveal", ["--reveal", "--rows"]),
        ("--methods dense --resume", ["--resume", "--dir"]),
        ("--methods dense --val-split 0", ["val-split 0", "held out"]),
        ("--methods dense --dir d --reveal", ["--reveal", "[protocol]"]),
        ("--methods dense --reveal", ["--reveal", "--dir"]),
    ],
)
def test_bad_flags_are_refused(flags, culprits):
    assert_refused(lambda: parse(flags.split()), *culprits)


def test_a_setting_goes_to_the_methods_that_it_means_something_to():
    flags = "--methods dense prunex prunex-flat topk --keep-ratio 0.25 --ranks-per-node 2"
    options = parse([*flags.split(), "--aggregation=hierarchical", "--lr", "0.3"])
    found = {row.name: settings_of(options.common, row, 5) for row in options.rows}
    assert {settings.lr for settings in found.values()} == {0.3}
    assert {settings.val_split for settings in found.values()} == {0.1}
    assert all(settings.seed == 5 for settings in found.values())
    assert found["prunex"].keep_ratio == found["prunex-flat"].keep_ratio == (0.25,)
    assert found["dense"].aggregation == found["topk"].aggregation == "hierarchical"
    assert found["prunex-flat"].ranks_per_node == 0
    # All methods do the same work: no early stop.
    assert found["prunex"].eps_abs == found["prunex"].eps_rel == 0


def test_a_shorter_run_has_fewer_of_what_counts_iterations(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    options = parse(["--plan", str(tmp_path / "plan.toml")])
    row, length = options.rows[2], options.protocol.length
    assert [p["freeze_iteration"] for p in row.points] == [Fraction(7, 16), Fraction(1, 2)]
    settings = settings_of(options.common, row, 3, row.points[1], length)
    assert (settings.seed, settings.lr, settings.outer_iterations) == (3, 0.01, 4)
    # Shares of a run stay shares.
    assert settings.freeze_iteration == 2
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


BATCH = Path(__file__).resolve().parents[2] / "batch"
FOUND = "batch.found_widths:slim"
# Networks of plans that have been built.
MADE: set[tuple] = set()


def shipped(path: Path) -> Options:
    """Parse a plan of the project, whose own model is trusted."""
    trusted = ["--model", FOUND] if FOUND in path.read_text() else []
    return parse(["--plan", str(path), "--data-dir", "x", *trusted])


@pytest.mark.parametrize("path", sorted(BATCH.glob("p*_*.toml")), ids=lambda path: path.stem)
def test_the_plans_that_are_shipped_can_be_run(path):
    options = shipped(path)
    assert len(options.rows) > 1
    for row in options.rows:
        settings = settings_of(options.common, row, 0)
        network = settings.model, settings.stem, settings.context, settings.tokenizer
        if network not in MADE:
            text = settings.dataset == "text"
            vocabulary = 256 if settings.tokenizer == "bytes" else 65
            with torch.device("meta"):
                make_model(
                    settings, Tokens(vocabulary, settings.context) if text else Images(32, 10)
                )
        MADE.add(network)


def test_results_tell_which_plan_they_are_of():
    """By its hash, or one that the plan names, where a preset's values were written out since."""
    known = ""
    for path in sorted(BATCH.glob("plan_*.toml")):
        known += f"{shipped(path).plan} {path.read_text()}"
    results = sorted((BATCH.parent / "prunex_mpi/methods/results").glob("*.json"))
    assert results
    for path in results:
        plan = json.loads(path.read_text())["comparison"].get("plan")
        assert plan in known if plan else path.name.startswith("vgg19_"), path.name


def test_a_plan_has_rows_of_one_method_with_settings_of_their_own(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    options = parse(["--plan", str(tmp_path / "plan.toml"), "--batch-size", "4"])
    assert [row.name for row in options.rows] == ["dense", "local-sgd int4, T = 4", "prunex"]
    assert options.rows[1].folder == "local-sgd-int4-T-=-4"
    assert options.rows[1].points == [{"lr": 0.1}, {"lr": 0.2}]
    protocol = options.protocol
    assert (protocol.trials, protocol.tune_seed, protocol.seeds) == (2, 3, (0, 1))
    assert options.protocol.length == Fraction(1, 2)
    some = parse(["--plan", str(tmp_path / "plan.toml"), "--batch-size=4", "--rows", "prunex"])
    assert (some.rows, some.plan) == (options.rows[2:], options.plan)


def test_flags_that_are_given_twice_add_up():
    methods = ["--methods", "dense", "topk", "--methods", "prunex"]
    options = parse([*methods, "--seeds", "4", "--seeds", "5"])
    assert [row.name for row in options.rows] == ["dense", "topk", "prunex"]
    assert options.seeds == (4, 5)


COMMON_PLACE = "[settings]\n{0}\n[rows.a]\nmethod = 'dense'"
ROW_PLACE = "[rows.a]\nmethod = 'dense'\n{0}"
TUNED = "[protocol]\ntrials = 1\nlength = '1'\ntune-seed = 3\nseeds = [0]\n"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        *((COMMON_PLACE, what) for what in ("model", "dataset", "loss")),
        *((ROW_PLACE, what) for what in ("model", "loss")),
        *((f"{TUNED}{ROW_PLACE}", f"grid.{what}") for what in ("model", "loss")),
    ],
)
def test_a_plan_imports_only_what_a_flag_repeats(tmp_path, place, what):
    path = tmp_path / "plan.toml"
    value = "['mine:made']" if "grid" in what else "'mine:made'"
    path.write_text(place.format(f"{what} = {value}"), encoding="utf-8")
    what = what.removeprefix("grid.")
    with pytest.raises(UserError, match=rf"names the {what} 'mine:made', and importing it runs"):
        parse(["--plan", str(path)])
    assert parse(["--plan", str(path), f"--{what}", "mine:made"]).rows


@pytest.mark.parametrize(
    ("old", "new", "culprits"),
    [
        ("[rows.dense]", "[row.dense]", ["'row'", "[rows.NAME]"]),
        ('method = "dense"', "", ["[rows.dense]", "no method"]),
        ("lr = 0.01", "lr = -1", ["lr", "above 0"]),
        ("lr = 0.01", "lr = 0.01\nseed = 1", ["seed", "[rows.prunex]"]),
        ("lr = 0.01", 'data-dir = "x"', ["data-dir", "[rows.prunex]"]),
        ("lr = 0.01", "piece-kib = 8", ["piece-kib", "[rows.prunex]"]),
        ('method = "dense"', 'method = "dense"\npayload = "int4"', ["payload", "dense"]),
        ("{lr = [0.5, 1.0]}", "{lr = [0.5]}", ["row dense", "a grid of 1", "2 trials"]),
        ("{lr = [0.5, 1.0]}", "{lr = [0.5, 1.0], momentum = [0.5, 0.9]}", ["row dense", "4"]),
        ("{lr = [0.5, 1.0]}", "{lr = [0.5, 0.5]}", ["lr", "twice"]),
        ("{lr = [0.5, 1.0]}", "{lr = 0.5}", ["lr", "list"]),
        ("{lr = [0.5, 1.0]}", "[0.5, 1.0]", ["grid", "{lr = [0.1, 0.2]}"]),
        ("{lr = [0.5, 1.0]}", "{seed = [1, 2]}", ["seed", "[rows.dense]"]),
        ("{lr = [0.1, 0.2]}", "{local-steps = [4, 8]}", ["local-steps", "beside it"]),
        (LOCAL_STEPS, 'grid = {local-steps = [4, "auto"]}', ["auto", "T = 4", "trials"]),
        ("tune-seed = 3", "tune-seed = 1", ["tune-seed", "different"]),
        ("seeds = [0, 1]", "seeds = [0, 0]", ["seeds", "once"]),
        ("seeds = [0, 1]", "seeds = []", ["seeds", "list"]),
        ("trials = 2", "trials = 0", ["trials", "above 0"]),
        ("trials = 2\n", "", ["[protocol]", "trials"]),
        ('length = "1/2"', 'length = "2"', ["length", "'2'"]),
        ('["7/16", "1/2"]', '["7/16", "1/16"]', ["row prunex, trial", "freeze"]),
        ('model = "resnet8"', "lr = 1", ["lr", "[settings]", "in the rows"]),
        ("local-steps = 4", 'local-epochs = "1/4"\nlocal-steps = "auto"', ["auto", "T = 4"]),
        ("[rows.prunex]", '[rows."local-sgd int4 T = 4"]', ["two rows", "local-sgd-int4-T-=-4"]),
        ("[settings]", "settings = 1\n[rest]", ["'rest'"]),
        ("[settings]", "[settings", ["not a TOML file"]),
    ],
)
def test_a_bad_plan_is_refused(tmp_path, old, new, culprits):
    (tmp_path / "plan.toml").write_text(PLAN.replace(old, new), encoding="utf-8")
    flags = ["--plan", str(tmp_path / "plan.toml"), "--batch-size", "4"]
    assert_refused(lambda: parse(flags), *culprits)


def test_what_is_trained_has_another_digest_and_what_trains_it_has_not(tmp_path):
    path = tmp_path / "plan.toml"

    def digest(text: str, *flags: str) -> str:
        path.write_text(text, encoding="utf-8")
        return parse(["--plan", str(path), *flags]).plan

    first = digest(PLAN)
    same = [["--data-dir=x"], ["--seeds", "5"], ["--timeout=99"]]
    assert {digest(PLAN, *flags) for flags in same} == {first}
    assert digest(PLAN + "# a remark\n") == first
    others = [digest(PLAN.replace("0.5,", "0.25,")), digest(PLAN.replace("[0, 1]", "[0, 1, 2]"))]
    others += [digest(PLAN, "--batch-size=4"), digest(PLAN, "--val-split=0.2")]
    assert len({first, *others}) == 5


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


def test_help_names_methods_and_starts_nothing():
    code = (
        "import sys\n"
        "from prunex_mpi import bench\n"
        "try:\n    bench.main(['compare', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
    )
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr
    for word in (*METHODS, "--reveal", "--plan", "--keep-ratio", "--data-dir"):
        assert word in done.stdout
    assert "--run-dir" not in done.stdout
