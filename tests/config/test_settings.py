"""Settings: precedence, resolution, the round trip through a file, and every kind of bad input."""

import dataclasses
from fractions import Fraction

import pytest
import tomli_w
from refused import assert_refused

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import FORMAT, tomllib
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import (
    BY_NAME,
    FIELDS,
    concerns,
    defaults,
    flat_values,
    make,
    preset_values,
    resumed,
    to_toml,
    with_overrides,
)
from prunex_mpi.core.schedule import schedule_progress
from prunex_mpi.methods.declared import METHODS
from prunex_mpi.settings.fields import PRESETS, SHARED, key_of
from prunex_mpi.settings.values import AUTO


def write(folder, text):
    path = folder / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------------------------------------
# one home per value
# ---------------------------------------------------------------------------------------------


def test_every_setting_has_its_default_in_the_class_or_in_the_recipe_and_never_in_both():
    in_recipe = {*preset_values("recipe")}
    in_class = {name for name, f in FIELDS.items() if f.default is not dataclasses.MISSING}
    assert in_recipe & in_class == set()
    assert in_recipe | in_class == {*FIELDS}


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "recipe"])
def test_presets_name_what_differs_from_the_recipe_alone(preset):
    named, recipe = preset_values(preset), preset_values("recipe")
    assert named
    for name, value in named.items():
        usual = recipe[name] if name in recipe else FIELDS[name].default
        assert value != usual, name


def test_recipe_is_the_default_and_shares_become_iterations():
    settings = parse([])
    assert settings == make() == make("recipe")
    assert settings.preset == "recipe"
    assert settings.local_epochs == Fraction(1, 4)
    stages = settings.warmup_iterations, settings.keep_ramp_iterations, settings.freeze_iteration
    assert stages == (16, 20, 40) and {*map(type, stages)} == {int}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_suit_runs_of_any_length(preset):
    for outer in (*range(1, 49), *range(49, 301, 7)):
        settings = make(preset, outer_iterations=outer)
        assert 1 <= settings.freeze_iteration <= outer
        warmup, ramp = settings.warmup_iterations, settings.keep_ramp_iterations
        assert schedule_progress(settings.freeze_iteration, warmup, ramp) == 1.0


@pytest.mark.parametrize(
    ("preset", "given", "expected"),
    [
        ("text", {}, ("muon", 0.016, 0.1)),
        ("text", {"method": "local-sgd"}, ("muon", 0.016, 0.1)),
        ("text", {"optimizer": "adamw"}, ("adamw", 1e-3, 0.05)),
        ("text", {"method": "pactrain"}, ("adamw", 1e-3, 0.05)),
        ("text", {"optimizer": "sgd"}, ("sgd", 0.05, 5e-4)),
        ("text", {"lr": 0.01}, ("muon", 0.01, 0.1)),
        # Who takes no optimizer is given none.
        ("text", {"method": "lion"}, ("sgd", 1e-3, 0.05)),
        ("recipe", {"method": "dgc", "dataset": "text"}, ("sgd", 0.05, 5e-4)),
        ("recipe", {"method": "dense", "dataset": "text"}, ("adamw", 0.001, 0.05)),
        ("recipe", {"method": "dgc", "dataset": "text", "lr": 0.3}, ("sgd", 0.3, 5e-4)),
        ("recipe", {"method": "dgc"}, ("sgd", 0.2, 5e-4)),
        ("small", {"method": "dense", "optimizer": "adamw"}, ("adamw", 0.001, 0.05)),
        ("small", {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.0}, ("adamw", 3e-3, 0.0)),
        ("finetune", {}, ("sgd", 0.1, 5e-4)),
    ],
    ids=str,
)
def test_rates_go_with_optimizer_method_and_kind_of_data(preset, given, expected):
    settings = make(preset, **given)
    assert (settings.optimizer, settings.lr, settings.weight_decay) == expected


def test_defaults_may_depend_on_data_optimizer_and_method():
    text = make("text")
    assert (text.model, text.groups, text.payload) == ("gpt_nano", ("coupled",), "int4")
    assert make("text", method="dgc").clip_grad == 0.0
    assert make("paper", dataset="text", model="gpt_micro").groups == ("coupled",)
    assert make(method="qsr", optimizer="adamw").options.alpha == 0.001
    assert make(method="one-shot").options.prune_iteration == 32
    assert make(method="one-shot", outer_iterations=1).options.prune_iteration == 1


def test_what_a_method_has_no_use_for_is_as_in_the_recipe():
    dense, recipe = make("paper", method="dense"), make()
    assert (dense.penalty, dense.node_sync, dense.payload) == ("fixed", "step", "fp32")
    assert make(method="dense", penalty=recipe.penalty) == make(method="dense")
    assert_refused(
        lambda: make("paper", method="dense", penalty="balance"), "penalty means nothing"
    )


# ---------------------------------------------------------------------------------------------
# precedence and conversion
# ---------------------------------------------------------------------------------------------


def test_flag_beats_file_beats_preset(tmp_path):
    path = write(tmp_path, 'preset = "paper"\nlr = 0.03\nbatch-size = 7\n')
    settings = parse(["--batch-size", "9", "--config", path])
    assert (settings.batch_size, settings.lr, settings.outer_iterations) == (9, 0.03, 60)
    assert parse(["--config", path, "--preset", "recipe"]).outer_iterations == 64
    assert parse(["--config", path, "--preset", "recipe"]).preset == "recipe"


@pytest.mark.parametrize(
    "flags", [["--groups", "filter", "channel"], ["--groups", "filter", "--groups", "channel"]]
)
def test_lists_extend_on_the_command_line_and_replace_those_of_the_file(tmp_path, flags):
    path = write(tmp_path, 'groups = ["shape"]\nkeep-ratio = 0.25\n')
    settings = parse(["--config", path, *flags])
    assert settings.groups == ("filter", "channel")
    assert settings.keep_ratio == (0.25,)


@pytest.mark.parametrize(
    ("text", "outer", "expected"),
    [("7/16", 64, 28), ("0.4375", 64, 28), ("0.5", 5, 3), ("1", 64, 1), ("1.0", 8, 1), ("0", 8, 0)],
)
def test_shares_and_counts(text, outer, expected):
    flags = ["--outer-iterations", str(outer), "--keep-ramp-iterations", "0"]
    flags += ["--freeze-iteration", "0", "--warmup-iterations", text]
    assert parse(flags).warmup_iterations == expected


def test_numbers_of_a_file_may_be_whole_or_text_where_fractions_are_meant(tmp_path):
    path = write(tmp_path, 'lr = 1\nlocal-epochs = 0.25\nwarmup-iterations = "1/8"\n')
    settings = parse(["--config", path])
    assert type(settings.lr) is float and settings.lr == 1.0
    assert settings.local_epochs == Fraction(1, 4)
    assert settings.warmup_iterations == 8


@pytest.mark.parametrize("text", ["-1", "-1.0", "-1e-3", "-.5"])
def test_negative_numbers_are_values(text):
    assert parse(["--freeze-drift", text]).freeze_drift == float(text)


def test_switches():
    assert parse(["--dataset", "cifar10", "--download"]).download is True
    assert parse(["--dataset", "cifar10", "--download", "--no-download"]).download is False


def test_the_stronger_of_epochs_and_steps_counts(tmp_path):
    steps = write(tmp_path, "local-steps = 10\n")
    settings = parse(["--config", steps])
    assert (settings.local_steps, settings.local_epochs) == (10, 0)
    settings = parse(["--config", steps, "--local-epochs", "2"])
    assert (settings.local_steps, settings.local_epochs) == (0, 2)
    assert parse(["--config", steps, "--local-steps", "0"]).local_epochs == Fraction(1, 4)
    assert with_overrides(settings, local_steps=3).local_epochs == 0


def test_overrides_are_checked():
    settings = make()
    assert with_overrides(settings, lr=0.1) == dataclasses.replace(settings, lr=0.1)
    assert_refused(lambda: with_overrides(settings, lr=-1.0), "lr")
    assert_refused(lambda: with_overrides(settings, learning_rate=1.0), "learning_rate")
    for name, value in (
        ("preset", "paper"),
        ("optimizer", "adamw"),
        ("epochs", 3),
        # What another setting makes meaningless.
        ("beta2", 0.9),
    ):
        assert_refused(lambda n=name, v=value: with_overrides(settings, **{n: v}), name)
    assert_refused(lambda: make(batch_size="32"), "batch-size")
    assert_refused(lambda: make("papers"), "'paper'")


# ---------------------------------------------------------------------------------------------
# the file of a run
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--local-steps", "12", "--groups", "filter", "shape", "--keep-ratio", "0.5", "0.3"],
        ["--local-epochs", "1/3", "--groups", "filter", "shape", "--rho2", "1e-05"],
        ["--data-dir", 'a "quoted"\nfolder\\é', "--freeze-iteration", "0"],
        ["--dataset", "cifar10", "--download", "--outer-iterations", "1", "--seed", str(2**63 - 1)],
    ],
)
def test_round_trip_through_the_file_of_a_run(tmp_path, flags):
    settings = parse(flags)
    text = to_toml(settings, {"torch": "2.4", "mpi": "Open MPI\n5"})
    table = tomllib.loads(text)
    assert table["versions"] == {"torch": "2.4", "mpi": "Open MPI\n5", "format": str(FORMAT)}
    of_method = {key_of(name) for name in SHARED if concerns(name, settings.method)}
    assert set(table) == of_method | {"method", "prunex", "versions"}
    assert parse(["--config", write(tmp_path, text)]) == settings


def test_the_file_of_a_run_repeats_it_elsewhere(tmp_path):
    """Else who repeats a run writes into its folder."""
    settings = parse(["--run-dir", str(tmp_path), "--resume", "--seed", "3"])
    assert (settings.run_dir, settings.resume) == (str(tmp_path), True)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings, {"torch": "2.4"}), encoding="utf-8")
    again = parse(["--config", str(path), "--outer-iterations", "100"])
    assert (again.run_dir, again.resume, again.seed) == ("", False, 3)
    other = parse(["--config", str(path), "--run-dir", "other"])
    assert (other.run_dir, other.resume) == ("other", False)
    with pytest.raises(UserError, match="--resume needs --run-dir"):
        parse(["--config", str(path), "--resume"])
    assert parse(["--config", str(path), "--run-dir", str(tmp_path), "--resume"]) == settings
    # What was measured of the run's images is measured again.
    measured = dataclasses.replace(settings, image_mean=(0.5,) * 3, image_std=(0.25,) * 3)
    path.write_text(to_toml(measured, {"torch": "2.4"}, settings), encoding="utf-8")
    assert parse(["--config", str(path)]).image_mean == ()
    assert parse(["--run-dir", str(tmp_path), "--resume"]).image_mean == (0.5,) * 3
    path.write_text(to_toml(measured, {"torch": "2.4"}), encoding="utf-8")
    assert parse(["--config", str(path)]).image_std == (0.25,) * 3
    # The run has a copy of its tokenizer.
    text = {"dataset": "text", "tokenizer": "gone.json", "run_dir": str(tmp_path)}
    path.write_text(to_toml(make(**text), {"torch": "2.4"}), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    on = ["--run-dir", str(tmp_path), "--resume"]
    assert parse(on).tokenizer == f"{tmp_path}/tokenizer.json"
    with pytest.raises(UserError, match=r"differs from the run's gone\.json"):
        parse([*on, "--tokenizer", "chars"])
    # A file that was not written by a run says what it likes.
    mine = write(tmp_path, f"run-dir = '{tmp_path}/new'\nresume = true")
    assert parse(["--config", mine]).resume


# ---------------------------------------------------------------------------------------------
# methods
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", BY_NAME)
def test_every_method_runs_without_further_flags_and_reads_its_file_back(tmp_path, method, preset):
    settings = parse(["--method", method, "--preset", preset])
    assert settings.method is BY_NAME[method]
    assert type(settings.options) is settings.method.options
    path = write(tmp_path, to_toml(settings, {}))
    assert parse(["--config", path]) == settings
    assert with_overrides(settings, seed=3).options == settings.options


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_declaration_names_what_there_is(method):
    assert {*method.defaults} <= {name for name in FIELDS if concerns(name, method)}
    for field in dataclasses.fields(method.options):
        assert field.metadata["help"] and field.default is not dataclasses.MISSING
    usual = defaults("recipe", method)
    assert all(usual[name] == value for name, value in method.defaults.items())


def test_no_flag_can_be_taken_for_that_of_another_setting():
    flags = [key_of(name) for name in FIELDS]
    assert len({*flags}) == len(flags)


@pytest.mark.parametrize("written", [None, FORMAT - 1, FORMAT + 1])
def test_the_file_of_a_run_of_another_format_is_refused(tmp_path, written):
    table = tomllib.loads(to_toml(make(), {"torch": "2.4"}))
    if written is None:
        del table["versions"]["format"]
    else:
        table["versions"]["format"] = str(written)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    for flags in (
        ["--config", f"{tmp_path}/config.toml"],
        ["--resume", "--run-dir", str(tmp_path)],
    ):
        with pytest.raises(UserError, match="is of a run of another version of prunex_mpi"):
            parse(flags)


def test_options_of_a_method_stand_in_a_table_of_its_name(tmp_path):
    path = write(tmp_path, 'method = "dgc"\n[dgc]\nratio = 0.01\nwarmup-epochs = "2/5"\n')
    own = parse(["--config", path]).options
    assert (own.ratio, own.warmup_epochs) == (0.01, Fraction(2, 5))
    assert parse(["--config", path, "--dgc-ratio", "0.02"]).options.ratio == 0.02
    text = to_toml(parse(["--config", path]), {})
    assert tomllib.loads(text)["dgc"] == {"ratio": 0.01, "warmup-epochs": "2/5"}
    assert 'warmup-epochs = "auto"' in to_toml(make(method="dgc"), {})
    assert_refused(lambda: parse(["--config", path, "--method", "topk"]), "dgc.ratio means nothing")
    assert_refused(lambda: with_overrides(make(), method="dense"), "method")


def test_epochs_say_how_long_a_run_is(tmp_path):
    assert parse(["--epochs", "8"]).outer_iterations == 32
    assert parse(["--epochs", "3", "--local-epochs", "1/2"]).outer_iterations == 6
    assert parse(["--epochs", "8", "--preset", "paper"]).outer_iterations == 2
    assert parse(["--epochs", "8", "--preset", "thin"]).outer_iterations == 32
    path = write(tmp_path, "outer-iterations = 7\n")
    assert parse(["--config", path, "--epochs", "8"]).outer_iterations == 32
    path = write(tmp_path, "epochs = 8\n")
    assert parse(["--config", path, "--outer-iterations", "20"]).outer_iterations == 20


def test_a_resumed_run_keeps_what_was_measured_and_refuses_all_else():
    saved = flat_values(make("thin", local_steps=12, overlap_steps=3))
    asked = {"local_steps": AUTO, "overlap_steps": AUTO, "local_epochs": Fraction(1, 4)}
    assert resumed(saved, asked, asked).local_steps == 12
    on = {**saved, "freeze_drift": 0.01}
    assert resumed(on, {}).freeze_drift == 0.01
    # Off, which happens to be the same number.
    with pytest.raises(UserError, match="--freeze-drift"):
        resumed(on, {"freeze_drift": -1.0})


def test_a_resumed_run_may_be_given_what_was_asked_for_and_measured_otherwise(tmp_path):
    flags = ["--preset", "thin", "--local-epochs", "1/2", "--freeze-iteration", "11/16"]
    flags += ["--evaluate-every", "8", "--outer-iterations", "64"]
    asked = parse(flags)
    assert (asked.local_steps, asked.local_epochs) == (AUTO, Fraction(1, 2))
    for length in (300, 40):
        changes = {"local_steps": 12, "outer_iterations": length, "evaluate_every": 38}
        changes |= {"freeze_iteration": 30, "warmup_iterations": 2, "keep_ramp_iterations": 8}
        measured = with_overrides(asked, overlap_steps=0, **changes)
        (tmp_path / "config.toml").write_text(to_toml(measured, {}, asked), encoding="utf-8")
        again = ["--resume", "--run-dir", str(tmp_path)]
        goes_on = dataclasses.replace(measured, resume=True, run_dir=str(tmp_path))
        assert parse([*again, *flags]) == parse(again) == goes_on
        assert parse([*again, "--local-steps", "12"]) == goes_on
        for other, words in (
            (["--evaluate-every", "9"], "--evaluate-every 9 differs from the run's 38"),
            (["--local-steps", "13"], "--local-steps 13 differs from the run's 12"),
            (["--local-epochs", "1"], "--local-epochs"),
            (["--outer-iterations", "39"], "--outer-iterations 39 differs from the run's"),
        ):
            assert_refused(lambda given=(*again, *other): parse([*given]), words)
        by_epochs = [*again, *flags[:-2], "--epochs"]
        assert parse([*by_epochs, "32"]) == goes_on
        assert_refused(lambda given=by_epochs: parse([*given, "50"]), "--outer-iterations 100")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("local-steps = 4", "--local-epochs 1/2"),
        ("local-steps = 4\npreset = 'thin'", "--local-epochs 1/2"),
        ("local-epochs = '1/2'", "--local-steps 4"),
        ("local-epochs = '1/2'", "--local-steps auto"),
        ("local-steps = 4", "--local-steps 0"),
        ("outer-iterations = 20", "--epochs 8"),
        ("epochs = 8", "--outer-iterations 20"),
    ],
)
def test_a_resumed_run_takes_the_command_that_has_started_it(tmp_path, text, flags):
    command = ["--config", write(tmp_path, text), *flags.split()]
    command += ["--resume", "--run-dir", str(tmp_path)]
    started = parse(command)
    (tmp_path / "config.toml").write_text(to_toml(started, {}), encoding="utf-8")
    assert parse(command) == started


# ---------------------------------------------------------------------------------------------
# bad input
# ---------------------------------------------------------------------------------------------

BAD_FLAGS = [
    ("--keep-ration 0.5", "unknown flag --keep-ration; did you mean --keep-ratio?"),
    ("--keep_ratio=0.5", "did you mean --keep-ratio?"),
    ("--keep 0.5", "--keep;"),
    ("--learning-rate 0.1", "unknown flag --learning-rate; did you mean --lr?"),
    ("-lr 0.1", "unknown flag -lr; did you mean --lr?"),
    ("--no-downlaod", "did you mean --no-download?"),
    ("--colour red", "unknown flag --colour; see --help"),
    ("--method sgdm", "unknown value 'sgdm' (valid: prunex, "),
    ("stray", "'stray'"),
    ("--download yes", "'yes'"),
    ("--lr", "--lr"),
    ("--groups", "--groups"),
    ("--lr fast", "--lr must be a number, not 'fast'"),
    ("--lr nan", "--lr"),
    ("--lr 1e19", "at most"),
    ("--lr 0.1 0.2", "'0.2'"),
    ("--no-lr", "--no-lr"),
    ("--checkpoint-every often", "'often'"),
    ("--batch-size 1.5", "--batch-size must be a whole number"),
    (f"--seed {2**63}", "--seed"),
    ("--keep-ratio 0.5 half", "'half'"),
    ("--keep-ratio 0.5 0.5", "keep-ratio has 2 values for 1 groups"),
    ("--groups filter channel shape --keep-ratio 0.5 0.5", "keep-ratio has 2 values for 3"),
    ("--groups chanel", "did you mean 'channel'?"),
    ("--groups channel --keep-by parameters", "--groups coupled"),
    ("--keep-floor 0.1", "keep-floor means nothing with keep-by groups"),
    ("--score gates --groups coupled --amp fp16", "use bf16"),
    ("--score gates", "give --groups coupled"),
    ("--groups coupled --remove-dropped --freeze-iteration 0", "masks that are final"),
    (
        "--lr-schedule constant --min-lr-ratio 0.1",
        "min-lr-ratio means nothing with lr-schedule constant",
    ),
    ("--eps-abs 0.1", "eps-abs means nothing with after-freeze local-sgd"),
    ("--preset paper --after-freeze local-sgd --eps-rel 0.1", "eps-rel means nothing"),
    (
        "--method local-sgd --momentum 0 --inner-momentum reset",
        "inner-momentum means nothing with momentum 0",
    ),
    (
        "--method diloco --diloco-outer-momentum 0 --diloco-outer-warmup 4",
        "diloco-outer-warmup means nothing with diloco-outer-momentum 0",
    ),
    ("--method dgc --dgc-ratio 1 --dgc-warmup-epochs 2", "dgc-warmup-epochs means nothing with"),
    ("--method dense --local-steps auto", "local-steps auto: dense exchanges in every step"),
    ("--method prunetrain --optimizer muon", "brings back what prunetrain prunes"),
    ("--min-nodes 4", "min-nodes means nothing without --on-node-loss continue; give it as well"),
    ("--comm-share 0.3", "comm-share means nothing without --local-steps auto"),
    ("--method diloco --diloco-alpha 0.5", "diloco-alpha means nothing without --overlap-steps"),
    ("--groups filter filter", "names 'filter' twice"),
    ("--dataset cifar-10", "did you mean 'cifar10'?"),
    ("--stem tiny", "unknown value 'tiny'"),
    ("--data-mode stream", "data-mode is for image files, which digits has none of"),
    (
        "--method dense --topk-ratio 0.1",
        "topk.ratio means nothing to method dense; leave it away (it is for topk)",
    ),
    ("--method topk --amp fp16", "amp fp16: what topk keeps"),
    ("--method pactrain --keep-ratio 0.5 0.25", "keep-ratio has 2 values; pactrain"),
    ("--method pactrain --pactrain-prune-iteration 65", "must be from 0 to the 64"),
    ("--method pactrain --pactrain-ternary --amp fp16", "the scale of pactrain.ternary"),
    ("--no-prunex-duals", "residuals every needs duals"),
    ("--no-prunex-duals --residuals off --penalty balance", "penalty balance needs duals"),
    ("--method gossip --aggregation flat", "aggregation flat: with gossip one leader speaks"),
    ("--method parallax --payload int8", "payload means nothing to method parallax"),
    ("--method prunetrain --compile", "prunetrain changes the model too often"),
    ("--method prunetrain --prunetrain-reconfigure-every 65", "nothing would be removed"),
    ("--method diloco --optimizer adam", "did you mean 'adamw'"),
    ("--method prunex --inner-momentum reset", "(it is for local-sgd, diloco, qsr, sparseloco"),
    ("--method qsr --overlap-steps 1", "every outer iteration evaluates z and waits"),
    ("--method one-shot --one-shot-prune-iteration 0", "from 1 to the 64"),
    ("--preset text --dataset digits", "preset text is for dataset text; leave it or dataset digi"),
    ("--epochs 3 --outer-iterations 5", "epochs and outer-iterations are both given"),
    ("--epochs 3 --local-steps 5", "epochs: how many local-steps"),
    ("--epochs 2000000", "epochs 2000000: outer-iterations must be at most 1000000, not 8000000"),
    ("--help rivals", "--help 'rivals': give --help for the first flags, --help all"),
    ("--method prunex-flat --ranks-per-node 2", "every rank is a node of its own"),
    ("--method prunex-flat --rho2 0.1", "rho2 means nothing to method prunex-flat"),
    ("--method prunex-flat --mask-agreement or", "mask-agreement means nothing to method"),
    ("--method prunex-flat --fragments 2", "fragments means nothing to method"),
    ("--method sparseloco --fragments 2", "fragments means nothing to method sparseloco"),
    ("--method local-sgd --local-steps 6 --fragments 7", "fragments 7 is more than the 6 local"),
    (
        "--method local-sgd --local-steps 6 --fragments 2 --overlap-steps 4 --evaluate-every 9",
        "overlap-steps 4 is more than the 3 local steps",
    ),
    (
        "--method local-sgd --local-steps 6 --fragments 2 --overlap-steps auto --evaluate-every 9",
        "auto measures messages",
    ),
    ("--local-steps 6 --fragments 2 --after-freeze admm", "duals need all of z"),
    ("--remove-dropped", "coupled groups alone"),
    ("--groups coupled --remove-dropped --after-freeze admm", "duals are of the whole"),
    ("--method clicktrain --keep-ratio 0.5 0.5", "keep-ratio has 2 values"),
    (
        "--method clicktrain --clicktrain-choose-iteration 3 --clicktrain-prune-iteration 3",
        "choose-iteration 3 must be less than",
    ),
    ("--method clicktrain --clicktrain-prune-iteration 65", "and that at most the 64"),
    ("--method clicktrain --optimizer muon", "brings back what clicktrain prunes"),
    ("--method clicktrain --groups pattern", "groups"),
    ("--method pactrain --optimizer muon", "back what pactrain prunes"),
    ("--distillation-alpha 0.3", "means nothing without --teacher"),
    ("--distillation-tau 3", "means nothing without --teacher"),
    ("--rack-of 0", "rack-of 0: a rack has at least one node"),
    ("--rack-of (a", "rack-of (a is no regular expression"),
    ("--rack-of rack.*", "put what names the rack in brackets"),
    ("--rack-of 2 --on-node-loss continue", "consecutive ones are not those of a rack"),
    ("--method dense --rack-of 2", "rack-of means nothing to method"),
    ("--model=", "--model"),
    ("--no-test-data", "no-test-data leaves nothing to evaluate on; give --val-split"),
    ("--local-epochs 0", "local-epochs"),
    ("--local-epochs -1", "--local-epochs"),
    ("--local-epochs 1/2/3", "'1/2/3'"),
    ("--local-epochs 1e999999999", "--local-epochs"),
    ("--local-epochs 1 --local-steps 5", "local-steps are both given"),
    ("--warmup-iterations 1.5", "--warmup-iterations"),
    ("--warmup-iterations -1", "--warmup-iterations"),
    ("--freeze-iteration 16/16", "or a share below 1, not '16/16'"),
    ("--warmup-iterations 40", "reach the keep ratio in iteration 60, beyond freeze-iteration 40"),
    ("--warmup-iterations 60 --freeze-iteration 0", "beyond outer-iterations 64"),
    ("--warmup-iterations 5 --keep-ramp-iterations 0 --freeze-iteration 5", "in iteration 6"),
    ("--freeze-iteration 65", "freeze-iteration 65 is after the last of 64"),
    ("--penalty balance --rho1 20", "rho1 20.0 must be from 1e-06 to 10.0"),
    ("--penalty balance --rho2 1e-7", "rho2 1e-07 must be from 1e-06 to 10.0"),
    ("--residuals evaluate --penalty balance", "residuals evaluate: penalty balance looks at"),
    ("--residuals off --eps-rel 1e-3", "residuals off: eps-abs and eps-rel would never be"),
    ("--method dense --preset thin --local-epochs 0", "local-steps auto needs local-epochs"),
    ("--config", "--config"),
    ("--config a.toml --config b.toml", "--config"),
]


@pytest.mark.parametrize(
    "line",
    [
        "--preset paper --after-freeze local-sgd",
        "--preset paper --after-freeze local-sgd --eps-abs 0 --eps-rel 0",
        "--freeze-iteration 0 --eps-abs 0.1",
        "--preset small --keep-by groups",
        "--preset small --keep-by groups --keep-floor 0",
        "--preset thin --comm-share 0.3",
        "--min-nodes 4 --on-node-loss continue",
        "--method diloco --diloco-alpha 0.5 --overlap-steps auto --evaluate-every 4",
        "--method spardl --on-node-loss continue",
        "--teacher a.pt --distillation-alpha 0.3 --distillation-tau 3",
    ],
)
def test_what_a_preset_sets_and_what_means_something_is_taken(line):
    parse(line.split())


@pytest.mark.parametrize(("line", "culprit"), BAD_FLAGS)
def test_bad_flags_end_with_one_line_that_names_them(line, culprit):
    assert_refused(lambda: parse(line.split()), culprit)


BEYOND = [
    (key_of(name), field.metadata[rule] + step)
    for name, field in FIELDS.items()
    for rule, step in (("low", -1), ("above", 0), ("high", 1), ("below", 0))
    if rule in field.metadata
]


@pytest.mark.parametrize(("flag", "value"), BEYOND)
def test_numbers_beyond_their_bounds_are_refused(flag, value):
    assert_refused(lambda: parse([f"--{flag}={value}"]), f"--{flag} must be")


@pytest.mark.parametrize("value", ["", "two\nlines", "\udcff", "x" * 5000])
def test_odd_text_stays_on_one_short_line(value):
    assert_refused(lambda: parse(["--dataset", value]), "--dataset")
    assert_refused(lambda: parse([f"--{value}x"]), "unknown flag")


def test_bytes_that_no_file_could_hold_are_refused():
    assert_refused(lambda: parse(["--data-dir", "\udcff"]), "--data-dir")
    assert_refused(lambda: parse(["--run-dir", "a\0b"]), "--run-dir")


BAD_FILES = [
    ("keep-ration = 0.5", "'keep-ration'"),
    ("keep_ratio = 0.5", "did you mean 'keep-ratio'?"),
    ("[sparsity]\nkeep-floor = 1", "'sparsity'"),
    ("versions = 1", "'versions'"),
    ("[dgc]\nrato = 1", "unknown key 'dgc.rato'"),
    ("[dgc]\nratio = 2", "dgc.ratio in"),
    ("dgc-ratio = 0.1", "did you mean 'dgc.ratio'?"),
    ("lr = 0.1.2", "line 1"),
    ("lr = 0.1\nlr = 0.2", "not a TOML file"),
    ("lr = '0.1'", "lr in"),
    ("lr = true", "lr in"),
    ("lr = nan", "lr in"),
    (f"lr = {10**400}", "lr in"),
    ("batch-size = 1.0", "batch-size in"),
    (f"batch-size = {2**63}", "batch-size in"),
    ("download = 'yes'", "download in"),
    ("data-dir = 3", "data-dir in"),
    ("groups = []", "groups in"),
    ("groups = ['channel', 'fliter']", "did you mean 'filter'?"),
    ("keep-ratio = [true]", "keep-ratio in"),
    ("local-epochs = true", "local-epochs in"),
    ("a = " + "[" * 100_000, "not a TOML file"),
]


@pytest.mark.parametrize(("text", "culprit"), BAD_FILES)
def test_bad_files_end_with_one_line_that_names_the_key(tmp_path, text, culprit):
    path = write(tmp_path, text)
    assert_refused(lambda: parse(["--config", path]), culprit)


# ---------------------------------------------------------------------------------------------
# help and version
# ---------------------------------------------------------------------------------------------


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as end:
        parse([*words])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_few_flags_first_and_all_when_asked(capsys):
    def flags(text):
        return [word for word in text.replace(",", " ").split() if word.startswith("--")]

    first, everything = help_of(capsys, "--help"), help_of(capsys, "--help", "all")
    assert 18 <= len({*flags(first)} - {"--help"}) <= 30
    assert [key for key in map(key_of, FIELDS) if f"--{key}" not in flags(everything)] == []
    assert "--keep-ratio X [X ...]" in everything and "[0.5]" in everything
    assert "{filter,channel,shape,kernel,pattern,coupled}" in everything
    assert "method dgc: deep gradient compression" in everything
    assert "--dgc-warmup-epochs N|P/Q|auto" in everything and "[auto]" in everything
