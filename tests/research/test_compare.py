"""Whole comparisons in one process per rank: trials, runs, and the last pass."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from compared import assert_sane, cells, column
from filelock import FileLock
from image_folders import write_folder

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE, PREEMPTED, UserError
from prunex_mpi.base.files import tomllib
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.compress.sparse import kept_per_layer
from prunex_mpi.data import text_files
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research import compare as comparing
from prunex_mpi.research.compare import compare
from prunex_mpi.research.plan import parse
from prunex_mpi.run import job, supervision
from prunex_mpi.tools import evaluate_network, evaluate_options
from prunex_mpi.tools.evaluate_network import evaluate

WORLD = MPI.COMM_WORLD


# Two outer iterations of one step each, on images that cost next to nothing.
pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]

TINY = [
    *("--model=resnet8", "--dataset=synthetic", "--image-size=8", "--batch-size=4"),
    *("--test-samples=16", "--outer-iterations=2", "--local-steps=1", "--ranks-per-node=1"),
    *("--val-split=0.2", "--progress=off"),
]


PRUNED_AT_ONCE = ["--warmup-iterations=0", "--keep-ramp-iterations=0", "--freeze-iteration=1"]


@pytest.fixture
def quiet(monkeypatch):
    """Leave this process's threads, log and exception hook as they are."""
    monkeypatch.setattr("prunex_mpi.run.start.set_threads", lambda *_: 1)
    for module in (comparing, job):
        monkeypatch.setattr(module, "set_up_logging", lambda *_: None)
    monkeypatch.setattr("prunex_mpi.run.program.abort_on_exceptions", lambda *_: None)


def compared(flags: list[str], folder, status: int = 0) -> tuple[dict[str, Table], str]:
    """Run a comparison; return its tables by their first word, as written, and where it wrote."""
    place = broadcast_text(WORLD, str(folder))
    on_rank_0(lambda: Path(place).mkdir(exist_ok=True))
    files = [f"--dir={place}/runs", f"--json={place}/tables.json"]
    options = parse([*TINY, f"--train-samples={10 * WORLD.size}", *flags, *files])
    assert compare(WORLD, options) == status
    with open(f"{place}/tables.json", encoding="utf-8") as file:
        written = json.load(file)["tables"]
    tables = [
        Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
        for t in written
    ]
    return {table.title.split()[0]: table for table in tables}, place


@pytest.mark.mpi(min_size=2)
def test_methods_are_compared_on_the_same_samples(quiet, tmp_path, capsys):
    flags = ["--methods", "dense", "topk", "prunex", *PRUNED_AT_ONCE, "--lr=0.1"]
    tables, place = compared(flags, tmp_path)
    results = tables["Comparison:"]
    assert_sane(results)
    assert column(results, "row") == ["dense", "topk", "prunex"]
    assert set(column(results, "samples")) == {2 * 4 * WORLD.size}
    assert set(column(results, "epochs")) == {1}

    model = build_model("resnet8", Images(8, 10))
    numel = build_layout(model).numel
    statistics = sum(2 * m.num_features for m in model.modules() if hasattr(m, "running_var"))
    message = 2 * 4 * (numel + statistics)
    dense, topk, prunex = (cells(results, m) for m in ("dense", "topk", "prunex"))
    ring = 2 * (WORLD.size - 1) / WORLD.size
    assert dense["sent MiB"] * 2**20 == pytest.approx(message * ring, rel=1e-4)
    assert prunex["sent MiB"] < 0.6 * dense["sent MiB"]
    assert prunex["of dense %"] == pytest.approx(100 * prunex["sent MiB"] / dense["sent MiB"])
    assert prunex["parameters left"] < 0.6 * numel
    assert dense["metadata %"] == 0
    # Half of what topk sends, but for the statistics.
    share = sum(kept_per_layer(build_layout(model).segments, 0.01))
    share /= 2 * share + statistics
    assert topk["metadata %"] == pytest.approx(100 * share, rel=1e-4)
    assert topk["sent MiB"] < 0.2 * dense["sent MiB"]

    printed = capsys.readouterr().out
    if WORLD.rank:
        assert printed == ""
        return
    assert "\n\nComparison: " in printed
    for method in ("dense", "topk", "prunex"):
        with open(f"{place}/runs/{method}-0/summary.json", encoding="utf-8") as file:
            total = json.load(file)
        assert total["status"] == "completed"
        assert total["test_accuracy"] is None
        assert total["validation"]["iteration"] in (1, 2)
        accuracy = cells(results, method)["validation accuracy %"]
        assert 100 * total["validation"]["accuracy"] == pytest.approx(accuracy)


def on_rank_0(action: Callable[[], object]) -> None:
    """Let rank 0 do something before any rank goes on."""
    if WORLD.rank == 0:
        action()
    WORLD.Barrier()


def write_plan(folder: Path, *rows: str, trials: int = 2) -> str:
    """Write a plan with these rows on world rank 0; return the flag that names it."""
    path = Path(broadcast_text(WORLD, str(folder))) / "plan.toml"
    if WORLD.rank == 0:
        path.parent.mkdir(exist_ok=True)
        tuning = f'trials = {trials}\nlength = "1/2"\ntune-seed = 3\nseeds = [0, 1]\n'
        path.write_text("\n".join((f"[protocol]\n{tuning}", *rows)), encoding="utf-8")
    WORLD.Barrier()
    return f"--plan={path}"


DENSE = '[rows.dense]\nmethod = "dense"\ngrid = {lr = [0.1, 0.2]}'
LOCAL = """[rows.local]
method = "local-sgd"
lr = 0.1
grid = {momentum = [0.0, 0.9]}"""


def noting_runs(monkeypatch) -> list[tuple[str, int]]:
    """Return a list of the methods and seeds that are trained from now on, in their order."""
    trained: list[tuple[str, int]] = []
    real = job.run

    def noted(world, settings, *rest):
        trained.append((settings.method.name, settings.seed))
        return real(world, settings, *rest)

    monkeypatch.setattr(job, "run", noted)
    return trained


def whole(place: str) -> dict:
    """Return the comparison that was written as JSON."""
    return json.loads(Path(f"{place}/tables.json").read_text(encoding="utf-8"))["comparison"]


@pytest.mark.mpi
def test_networks_that_read_text_are_revealed_too(quiet, tmp_path, monkeypatch):
    place = Path(broadcast_text(WORLD, str(tmp_path)))
    if WORLD.rank == 0:
        (place / "text").mkdir()
        for name, count in (("train.txt", 200), ("test.txt", 50)):
            text = "".join(f"{i} and {i + 1};" for i in range(count))
            (place / "text" / name).write_text(text)
    opened: list[str] = []
    open_regular = text_files.open_regular
    note = lambda path: opened.append(Path(path).name) or open_regular(path)  # noqa: E731
    monkeypatch.setattr(text_files, "open_regular", note)
    lr = "grid = {lr = [0.001, 0.002]}"
    plan = write_plan(tmp_path, f'[rows.dense]\nmethod = "dense"\n{lr}')
    flags = [plan, "--dataset=text", "--tokenizer=chars", "--context=8", "--model=tiny_text:gpt"]
    flags += [f"--data-dir={place}/text", "--batch-size=4", "--outer-iterations=2"]
    flags += ["--local-steps=2", "--progress=off", f"--dir={place}/runs"]
    assert compare(WORLD, parse(flags)) == 0
    # The first rank of a machine reads for all of them.
    assert {*opened} == (set() if WORLD.rank else {"train.txt"})
    # All read the same text: once is enough.
    reads: list[str] = []
    real = evaluate_network.share_text
    monkeypatch.setattr(evaluate_network, "share_text", lambda *a: reads.append(a[1]) or real(*a))
    assert compare(WORLD, parse([*flags, "--reveal", f"--json={place}/tables.json"])) == 0
    assert len(reads) == 1
    tested = [run["test"] for run in whole(str(place))["outcomes"]]
    assert [quality["accuracy"] for quality in tested] == [None, None]
    assert all(0 < quality["loss"] < 10 for quality in tested)


@pytest.mark.mpi
def test_no_run_reads_a_test_image_and_the_last_pass_does_once(quiet, tmp_path, monkeypatch):
    images = Path(broadcast_text(WORLD, str(tmp_path / "images")))
    if WORLD.rank == 0:
        write_folder(images, train=20, test=6)
        # What reads them now does not get far.
        (images / "test").rename(images / "kept")
    plan = write_plan(tmp_path, DENSE, LOCAL)
    flags = [plan, "--dataset=imagefolder", f"--data-dir={images}", "--train-samples=0"]
    flags.append("--test-samples=0")
    trained = noting_runs(monkeypatch)
    with pytest.raises(UserError, match=r"--reveal: the run dense-trial-0 is missing"):
        compared([*flags, "--reveal"], tmp_path)
    tables, place = compared([*flags, "--resume"], tmp_path)
    # As many trials of each row, with another seed than its runs.
    trials = [("dense", 3)] * 2 + [("local-sgd", 3)] * 2
    assert trained == trials + [(row, seed) for seed in (0, 1) for row in ("dense", "local-sgd")]
    assert column(tables["Trials"], "at the edge") == ["lr", "momentum"]
    found = whole(place)
    assert [len(tuning["runs"]) for tuning in found["tunings"]] == [2, 2]
    for tuning, key in zip(found["tunings"], ("lr", "momentum"), strict=True):
        best = max(
            tuning["runs"], key=lambda r: (r["measured"]["accuracy"], -r["measured"]["loss"])
        )
        runs = [run for run in found["outcomes"] if run["row"] == tuning["row"]]
        assert [run["point"] for run in runs] == [best["point"]] * 2
        assert set(best["point"]) == {key}
    protocol = {"trials": 2, "length": "1/2", "tune_seed": 3, "seeds": [0, 1], "validation": 0.2}
    assert (found["protocol"], found["revealed"]) == (protocol, "")
    assert cells(tables["Comparison:"], "dense")["validation accuracy %"] is not None

    with pytest.raises(UserError, match="test"):
        compared([*flags, "--reveal"], tmp_path)
    with pytest.raises(UserError, match="finish it with --reveal"):
        compared([*flags, "--resume"], tmp_path)
    on_rank_0(lambda: (images / "kept").rename(images / "test"))
    on_rank_0(lambda: Path(f"{place}/runs/reveal.json").unlink())
    # What can't be tested is told before anything is noted.
    model = Path(f"{place}/runs/local-1/state.safetensors")
    on_rank_0(lambda: model.rename(f"{model}.kept"))
    with pytest.raises(UserError, match=r"local-1/state\.safetensors"):
        compared([*flags, "--reveal"], tmp_path)
    assert not Path(f"{place}/runs/reveal.json").exists()
    WORLD.Barrier()
    on_rank_0(lambda: Path(f"{model}.kept").rename(model))
    tables, place = compared([*flags, "--reveal"], tmp_path)
    assert len(trained) == 8
    after = whole(place)
    assert after["plan"] == found["plan"] and after["revealed"]
    tested = [run["test"] for run in after["outcomes"]]
    assert all(0 <= quality["accuracy"] <= 1 for quality in tested)
    # What is shown is what `evaluate` finds of these networks.
    options = evaluate_options.parse([f"{place}/runs/dense-1", f"--json={place}/test.json"])
    evaluate(WORLD, options, Heartbeat())
    if WORLD.rank == 0:
        alone = json.loads(Path(f"{place}/test.json").read_text(encoding="utf-8"))
        assert alone["accuracy"] == pytest.approx(tested[2]["accuracy"])
        assert alone["loss"] == pytest.approx(tested[2]["loss"])
    cell = cells(tables["Comparison:"], "dense")
    assert cell["seed 0"] == pytest.approx(100 * tested[0]["accuracy"])
    # No second look, whatever has become of them.
    WORLD.Barrier()
    on_rank_0(lambda: (images / "test").rename(images / "kept"))
    for more in (["--reveal"], ["--resume"]):
        compared([*flags, *more], tmp_path)
        again = whole(place)
        assert (again["outcomes"], again["revealed"]) == (after["outcomes"], after["revealed"])
    # Nor with other networks, or by another plan.
    if WORLD.rank == 0:
        for name in ("summary.json", "state.safetensors"):
            shutil.copy(f"{place}/runs/dense-0/{name}", f"{place}/runs/dense-1/{name}")
    WORLD.Barrier()
    with pytest.raises(UserError, match=r"was done at .* with other networks"):
        compared([*flags, "--reveal"], tmp_path)
    with pytest.raises(UserError, match=r"another plan .* was revealed there"):
        compared([*flags, "--batch-size=2", "--resume"], tmp_path)
    on_rank_0(lambda: Path(f"{place}/runs/dense-1/summary.json").unlink())
    with pytest.raises(UserError, match=r"the run dense-1 is missing"):
        compared([*flags, "--resume"], tmp_path)


@pytest.mark.mpi(min_size=2)
def test_a_row_that_diverges_or_fails_says_so_and_ends_no_other(quiet, tmp_path, monkeypatch):
    diverging = '[rows.wild]\nmethod = "dense"\ngrid = {lr = [1e18, 1e17]}'
    plan = write_plan(tmp_path, diverging, LOCAL.replace("local]", "poor]"), DENSE)
    real = job.run

    def failing(world, settings, *rest):
        if "poor" in settings.run_dir and settings.seed == broken:
            raise UserError("no room for it")
        return real(world, settings, *rest)

    monkeypatch.setattr(job, "run", failing)
    broken = 1
    tables, _ = compared([plan], tmp_path, status=FAILURE)
    results = tables["Comparison:"]
    wild, poor = cells(results, "wild"), cells(results, "poor")
    assert wild["seed 0"] == wild["seed 1"] == "diverged"
    assert wild["validation accuracy %"] is None
    assert cells(tables["Trials"], "wild")["chosen"] == "none"
    assert poor["seed 0"] is not None and poor["seed 1"] == "failed"
    assert "poor, seed 1: failed: no room for it" in results.notes
    assert cells(results, "dense")["validation accuracy %"] is not None
    with pytest.raises(UserError, match=r"--reveal: the run poor-1 is missing"):
        compared([plan, "--reveal"], tmp_path)
    # What has failed is tried again; where a trial did, nothing is chosen.
    broken = -1
    tables, _ = compared([plan, "--resume"], tmp_path)
    assert cells(tables["Comparison:"], "poor")["seed 1"] is not None
    broken = 3
    alone = write_plan(tmp_path / "alone", LOCAL.replace("local]", "poor]"))
    tables, _ = compared([alone], tmp_path / "other", status=FAILURE)
    assert cells(tables["Comparison:"], "poor")["seed 0"] == "failed"


@pytest.mark.mpi
def test_a_row_that_can_not_be_is_refused_before_anything_runs(quiet, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "run", lambda *_: pytest.fail("it was trained"))
    flags = ["--methods", "dense", "prunex", "--groups=coupled", "--keep-by=parameters"]
    flags.append(f"--dir={broadcast_text(WORLD, str(tmp_path))}")
    with pytest.raises(UserError, match="row prunex: --keep-ratio 1e-05 of the parameters"):
        compare(WORLD, parse([*TINY, *flags, "--keep-ratio=0.00001"]))


def test_rows_are_trained_on_as_many_samples_unless_they_say_otherwise(tmp_path):
    # 12 steps an epoch: an eighth is 2, a half 6.
    row = '[rows.{}]\nmethod = "dense"\nlocal-epochs = "{}"\nouter-iterations = {}\n'
    unequal = row.format("often", "1/8", 8) + row.format("whole", "1/2", 2)
    one = '[rows.one]\nmethod = "dense"\nlocal-epochs = "1/2"\ngrid = {outer-iterations = [2, 4]}'

    def check(text: str) -> None:
        (tmp_path / "plan.toml").write_text(text)
        options = parse([f"--plan={tmp_path}/plan.toml", *TINY[:4]])
        comparing.check_rows(options, 48, Images(8, 10))

    with pytest.raises(UserError, match=r"whole has 48 and often 64 .* own-length = true"):
        check(unequal)
    check(f"{unequal}own-length = true\n")
    tuned = '[protocol]\ntrials = 2\nlength = "1/2"\ntune-seed = 3\nseeds = [0]\n'
    with pytest.raises(UserError, match=r"row one: trials must be .* have 48 to 96 per rank"):
        check(tuned + one)


@pytest.mark.mpi
def test_each_seed_of_a_row_can_begin_with_the_network_of_its_own(quiet, tmp_path):
    _, first = compared(["--methods", "dense", "--seeds", "0", "1"], tmp_path / "first")
    flags = ["--methods", "local-sgd", "--seeds", "0", "1", "--distillation-alpha=0.1"]
    paths = [f"--{name}={first}/runs/dense-{{seed}}" for name in ("init-from", "teacher")]
    _, second = compared([*flags, *paths], tmp_path / "second")
    digests = {}
    for seed in (0, 1):
        with open(f"{second}/runs/local-sgd-{seed}/config.toml", "rb") as file:
            found = tomllib.load(file)
        assert found["init-from"] == found["teacher"] == f"{first}/runs/dense-{seed}"
        digests[seed] = found["init-digest"]
    assert digests[0] != digests[1]


@pytest.mark.mpi
def test_a_run_that_was_kept_is_not_taken_for_another(quiet, tmp_path):
    flags = ["--methods", "local-sgd"]
    compared(flags, tmp_path)
    place = broadcast_text(WORLD, str(tmp_path))
    again = [*TINY, f"--train-samples={10 * WORLD.size}", *flags, f"--dir={place}/runs", "--resume"]
    with pytest.raises(UserError, match="another momentum"):
        compare(WORLD, parse([*again, "--momentum=0.5"]))
    run = Path(place) / "runs" / "local-sgd-0"
    assert not (run / "checkpoints").exists()
    summary = (run / "summary.json").read_text(encoding="utf-8")
    WORLD.Barrier()
    for changed, words in (
        ({"nodes": [9]}, r"other ranks on nodes \(\[9\]; here"),
        ({"delivered": {**json.loads(summary)["delivered"], "data": "9"}}, r"other data \(9; here"),
        ({"validation": None}, r"is not what the run wrote \(validation\)"),
    ):
        text = json.dumps({**json.loads(summary), **changed})
        on_rank_0(lambda text=text: (run / "summary.json").write_text(text))
        with pytest.raises(UserError, match=words):
            compare(WORLD, parse(again))
    on_rank_0(lambda: (run / "summary.json").write_text(summary))
    with pytest.raises(UserError, match="is there already; --resume"):
        compare(WORLD, parse([word for word in again if word != "--resume"]))
    # One that has not ended is not trained by two jobs.
    held = FileLock(run / "lock")
    if WORLD.rank == 0:
        (run / "summary.json").unlink()
        held.acquire()
    WORLD.Barrier()
    assert compare(WORLD, parse(again)) == FAILURE
    held.release()
    WORLD.Barrier()
    assert compare(WORLD, parse(again)) == 0


@pytest.mark.mpi(min_size=2)
def test_a_comparison_that_is_stopped_goes_on_from_the_checkpoint_of_its_run(
    quiet, tmp_path, monkeypatch
):
    flags = ["--methods", "dense", "prunex", *PRUNED_AT_ONCE, "--outer-iterations=8"]
    _, undisturbed = compared(flags, tmp_path / "whole")
    began: list[int] = []
    real_run, real = job.run, supervision.iterate

    def stopped(world, settings, watchdog, received, *rest):
        # The second run, as long as it has not been stopped yet.
        received.number = signal.SIGTERM if len(began) == 1 else 0
        return real_run(world, settings, watchdog, received, *rest)

    def noted(topology, files, context, *rest):
        began.append(context.state.position.iteration)
        return real(topology, files, context, *rest)

    monkeypatch.setattr(job, "run", stopped)
    monkeypatch.setattr(supervision, "iterate", noted)
    with pytest.raises(UserError, match="stopped: go on with --resume --dir") as caught:
        compared(flags, tmp_path / "parts")
    assert caught.value.exit_code == PREEMPTED
    _, place = compared([*flags, "--resume"], tmp_path / "parts")
    assert began[:2] == [1, 1] and 1 < began[2] < 8
    timed = {"sync_s", "own_s", "local_s", "train_s", "curve"}
    for one, other in zip(whole(undisturbed)["outcomes"], whole(place)["outcomes"], strict=True):
        a, b = ({**run["measured"], **dict.fromkeys(timed)} for run in (one, other))
        assert a == b
