"""The comparison: its flags, its tables, and whole comparisons in one process per rank."""

import json
from dataclasses import replace

import pytest
import torch
from test_bench import assert_sane, column, run

from mpi4py import MPI

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.comm.topology import nodes_of
from prunex_mpi.core.problem import load_dataset
from prunex_mpi.models.build import build_model
from prunex_mpi.models.layout import Layout, Segment, build_layout
from prunex_mpi.settings.methods import METHODS
from prunex_mpi.settings.resolve import make
from prunex_mpi.tools.compare import compare as bench_compare
from prunex_mpi.tools.compare.compare import compare, hold_out
from prunex_mpi.tools.compare.options import parse, settings_of, tuning_settings
from prunex_mpi.tools.compare.run import count_zeros
from prunex_mpi.tools.compare.tables import (
    Measured,
    Outcome,
    Tuning,
    choose_rate,
    measured_table,
    operations,
    require_same_work,
    results_table,
    tuning_table,
)

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
    dense_bytes=4 * 2**20,
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
        ("--methods dense --tune-iterations 2", ["--tune-iterations", "--tune-lr"]),
        ("--methods dense --tune-lr 0.2 --tune-iterations 0", ["--tune-iterations", "0"]),
        ("--methods dense --tune-lr 0.2 --tune-iterations x", ["--tune-iterations", "'x'"]),
        ("--methods dense --seeds 3 --tune-lr 0.2 --tune-seed 3", ["--tune-seed", "3"]),
        ("--methods dense topk --keep-ratio 0.5", ["--keep-ratio", "dense, topk"]),
        ("--methods dense --compress-ratio 2", ["--compress-ratio", "2"]),
        ("--methods dense --seed 3", ["--seed", "--seeds"]),
        ("--methods dense --resume", ["--resume"]),
        (
            "--methods prunex --warmup-iterations 9 --tune-lr 0.1 --tune-iterations 4",
            ["--tune-iterations 4", "warmup-iterations"],
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
    found = {m: settings_of(options, m, 5, options.lr[m]) for m in options.methods}
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


def test_runs_that_tune_are_short_and_of_another_seed():
    flags = "--methods dense prunex --seeds 2 0 --lr dense=0.1 --tune-lr 0.2 0.4"
    options = parse(flags.split())
    assert options.tuned == ("prunex",)
    assert (options.tune_seed, options.tune_iterations) == (3, 16)
    settings = tuning_settings(options, "prunex", 0.4)
    assert (settings.seed, settings.lr, settings.outer_iterations) == (3, 0.4, 16)
    # Shares of a run stay shares.
    assert settings.freeze_iteration == 12


def test_the_held_out_images_are_taken_from_those_that_train():
    settings = make(method="dense", dataset="synthetic", train_samples=23, image_size=8)
    with nodes_of(MPI.COMM_SELF) as alone:
        dataset = load_dataset(alone, settings)
        held_out = hold_out(alone, dataset)
        assert (len(held_out.train.labels), len(held_out.test.labels)) == (19, 4)
        both = torch.cat([held_out.train.images, held_out.test.images])
        assert torch.equal(both, dataset.train.images)
        assert (held_out.train_total, held_out.test_total) == (19, 4)
        one = load_dataset(alone, replace(settings, train_samples=1))
        with pytest.raises(UserError, match="too few"):
            hold_out(alone, one)


def test_zeros_in_whole_rows_and_columns_are_told_from_others():
    kernel = torch.ones(3, 2, 2)
    kernel[1] = 0  # a filter
    kernel[:, 0, 1] = 0  # a column of the GEMM view
    kernel[0, 1, 1] = 0  # an element
    layout = Layout((Segment("w", (3, 2, 2), 0, 12), Segment("b", (4,), 12, 4)), 16)
    flat = torch.cat([kernel.flatten(), torch.zeros(4)])
    assert count_zeros(flat, layout) == (12, 7, 6)


def outcomes(*methods: str, **changes: object) -> list[Outcome]:
    return [Outcome(method, 0, 0.1, replace(RAN, **changes)) for method in methods]


def test_the_best_rate_is_of_highest_accuracy_then_lowest_loss():
    accuracies, losses = (0.5, 0.7, 0.7, None), (0.1, 0.9, 0.8, None)
    runs = [
        Outcome("dense", 1, lr, a and replace(RAN, accuracy=a, loss=loss))
        for lr, a, loss in zip((1, 2, 3, 4), accuracies, losses, strict=True)
    ]
    assert choose_rate((1, 2, 3, 4), runs) == 3
    assert choose_rate((4,), runs[3:]) is None
    table = tuning_table(
        (1, 2, 3, 4), [Tuning("dense", accuracies, 3), Tuning("topk", (None,) * 4, None)], "how"
    )
    assert [row[1:] for row in table.rows] == [
        (50, 70, 70, "diverged", 3, "no"),
        *[(*["diverged"] * 4, None, "no")],
    ]
    assert column(
        tuning_table((1, 2), [Tuning("dense", (0.1, 0.2), 2)], ""), "end of the grid"
    ) == ["yes"]


def test_methods_that_saw_other_numbers_of_samples_are_not_compared():
    require_same_work([*outcomes("dense", "topk"), Outcome("prunex", 0, 0.1, None, "diverged")])
    with pytest.raises(RuntimeError, match="samples"):
        require_same_work(outcomes("dense") + outcomes("topk", samples=99))
    with pytest.raises(RuntimeError, match="fewer samples"):
        require_same_work(outcomes("dense", extra_samples=-1))


def test_tables_hold_means_over_seeds_and_say_what_diverged():
    runs = [
        *outcomes("dense"),
        Outcome("dense", 1, 0.1, replace(RAN, accuracy=0.7, payload_bytes=3 * 2**20)),
        Outcome("topk", 0, 0.1, replace(RAN, sync_s=0.5, extra_samples=8, operations="Allgatherv")),
        Outcome("topk", 1, 0.1, None, "the loss is not finite"),
    ]
    table = results_table("title", (0, 1), runs, ["note"])
    dense, topk = cells(table, "dense"), cells(table, "topk")
    assert (dense["accuracy %, seed 0"], dense["accuracy %, seed 1"]) == (50, 70)
    assert dense["mean"] == pytest.approx(60)
    assert (dense["payload MiB"], dense["MiB/point"]) == (2, pytest.approx(2 / 60))
    assert (dense["sync ms/step"], dense["sync s/epoch"], dense["own %"]) == (200, 1, 25)
    assert (topk["accuracy %, seed 1"], topk["mean"]) == ("diverged", 50)
    assert table.notes[-3] == "note"
    assert table.notes[-2].startswith("topk: 8 samples more")
    assert table.notes[-1] == "topk, seed 1: the loss is not finite"
    measured = measured_table(runs)
    assert cells(measured, "topk")["sync saved, times"] == 4
    assert cells(measured, "topk")["in whole lines %"] == 75
    assert cells(measured, "topk")["operations between nodes"] == "Allgatherv"
    assert cells(measured, "dense")["bytes saved, times"] == pytest.approx((4 + 4 / 3) / 2)
    assert cells(measured, "dense")["inference, times"] == 2
    assert cells(measured, "dense")["topology: who speaks"] == "2 of 4 ranks"
    # Nothing to set it against.
    assert column(measured_table(outcomes("topk")), "sync saved, times") == [None]
    only_failures = [Outcome("topk", 0, 0.1, None, "why")]
    assert column(results_table("title", (0,), only_failures, []), "mean") == [None]
    assert measured_table(only_failures).rows[0][1:4] == (None, None, None)


def test_the_operations_of_every_method_are_named():
    for method in METHODS:
        assert "All" in operations(make(method=method))
    assert operations(make(method="topk")) == "Allgatherv"
    assert operations(make(method="powersgd")) == "Allreduce, Reduce, Bcast"
    assert operations(make(method="local-sgd")) == "Allreduce"
    assert operations(make(method="local-sgd", payload="int8sum")) == "Allreduce"
    assert operations(make(method="local-sgd", payload="int4")) == "Alltoallv, Allgather"


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
    for word in (*METHODS, "--tune-lr", "--keep-ratio", "--data-dir"):
        assert word in done.stdout
    assert "--run-dir" not in done.stdout


@pytest.mark.parametrize(
    "flags", [["compare", "--methods", "tpok"], ["kernels", "compare"], ["compare", "--bogus"]]
)
def test_user_errors_end_with_code_2_and_one_line(flags):
    done = run(*flags)
    assert done.returncode == USAGE
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("prunex_mpi.bench: error:")


# --------------------------------------------------------------------------------------------------
# Whole comparisons
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch):
    """Leave this process's threads, log and exception hook as they are."""
    monkeypatch.setattr("prunex_mpi.run.start.set_threads", lambda _: 1)
    monkeypatch.setattr(bench_compare, "set_up_logging", lambda *_: None)
    monkeypatch.setattr("prunex_mpi.run.program.abort_on_exceptions", lambda *_: None)


def compared(flags: list[str], folder) -> tuple[dict[str, Table], str]:
    """Run a comparison; return its tables by their first word, as written, and where it wrote."""
    place = broadcast_text(WORLD, str(folder))
    files = [f"--dir={place}/runs", f"--json={place}/tables.json", f"--text={place}/tables.txt"]
    assert compare(WORLD, parse([*TINY, f"--train-samples={8 * WORLD.size}", *flags, *files])) == 0
    with open(f"{place}/tables.json", encoding="utf-8") as file:
        written = json.load(file)["tables"]
    tables = [
        Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
        for t in written
    ]
    return {table.title.split()[0]: table for table in tables}, place


@pytest.mark.mpi(min_size=2)
def test_methods_are_compared_on_the_same_samples(quiet, tmp_path, capsys):
    flags = ["--methods", "dense", "topk", "prunex", *PRUNED_AT_ONCE]
    flags += ["--tune-lr", "0.1", "0.01", "--tune-iterations=1", "--lr", "topk=0.05"]
    tables, place = compared(flags, tmp_path)
    results, measured, tuned = tables["Comparison:"], tables["The"], tables["Learning"]
    for table in (results, measured):
        assert_sane(table)
    assert column(results, "method") == ["dense", "topk", "prunex"]
    assert set(column(results, "samples")) == {2 * 4 * WORLD.size}
    assert set(column(results, "epochs")) == {1}
    assert column(tuned, "method") == ["dense", "prunex"]
    assert cells(results, "topk")["lr"] == 0.05
    assert cells(results, "prunex")["lr"] == cells(tuned, "prunex")["chosen"]

    model = build_model("resnet8", num_classes=10, image_size=8)
    numel = build_layout(model).numel
    statistics = sum(2 * m.num_features for m in model.modules() if hasattr(m, "running_var"))
    message = 2 * 4 * (numel + statistics)
    dense, topk, prunex = (cells(results, m) for m in ("dense", "topk", "prunex"))
    assert dense["payload MiB"] * 2**20 == pytest.approx(message)
    assert dense["sent MiB"] == pytest.approx(
        dense["payload MiB"] * 2 * (WORLD.size - 1) / WORLD.size, rel=1e-4
    )
    assert prunex["payload MiB"] < 0.6 * dense["payload MiB"]
    assert prunex["parameters left"] < 0.6 * numel
    assert cells(measured, "dense")["bytes saved, times"] == 1
    assert cells(measured, "dense")["metadata %"] == 0
    assert cells(measured, "prunex")["in whole lines %"] == pytest.approx(100)
    # Half of what topk sends, but for the statistics.
    share = 1 - 2 * 4 * statistics / (topk["payload MiB"] * 2**20)
    assert cells(measured, "topk")["metadata %"] == pytest.approx(50 * share)

    printed = capsys.readouterr().out
    if WORLD.rank:
        assert printed == ""
        return
    with open(f"{place}/tables.txt", encoding="utf-8") as file:
        assert file.read() == printed
    for method in ("dense", "topk", "prunex"):
        with open(f"{place}/runs/{method}-0/summary.json", encoding="utf-8") as file:
            total = json.load(file)
        assert total["status"] == "completed"
        assert 100 * total["test_accuracy"] == pytest.approx(cells(results, method)["mean"])


@pytest.mark.mpi(min_size=2)
def test_a_method_that_diverges_is_a_row_that_says_so(quiet, tmp_path):
    flags = ["--methods", "dense", "local-sgd", "prunex-flat", "--seeds", "0", "1"]
    flags += ["--lr", "dense=1e18", "local-sgd=0.1", "--tune-lr", "1e18", "--tune-iterations=2"]
    tables, _ = compared([*flags, *PRUNED_AT_ONCE], tmp_path)
    results = tables["Comparison:"]
    for method, why in (("dense", "finite"), ("prunex-flat", "every learning rate")):
        row = cells(results, method)
        assert row["accuracy %, seed 0"] == row["accuracy %, seed 1"] == "diverged"
        assert row["mean"] is None
        assert sum(n.startswith(f"{method}, seed") and why in n for n in results.notes) == 2
    assert cells(results, "local-sgd")["mean"] is not None
    assert cells(tables["Learning"], "prunex-flat")["chosen"] is None


@pytest.mark.mpi
def test_a_directory_that_is_there_is_refused_before_anything_runs(quiet, tmp_path):
    place = broadcast_text(WORLD, str(tmp_path))
    if WORLD.rank == 0:
        (tmp_path / "topk-1").mkdir()
    WORLD.Barrier()
    flags = ["--methods", "dense", "topk", "--seeds", "0", "1", f"--dir={place}"]
    with pytest.raises(UserError, match="topk-1 is there already"):
        compare(WORLD, parse([*TINY, *flags]))
