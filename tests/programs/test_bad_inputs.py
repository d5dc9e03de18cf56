"""Bad flags, files, data, run directories and checkpoints: one line, the right code, no traceback.

All inputs go through `prunex_mpi.train.main` in this process, a world of one rank.
"""

import io
import json
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import odd_models
import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from prunex_mpi import train
from prunex_mpi.config.resolve import FIELDS, GIVEN
from prunex_mpi.run import checkpoint_files, program
from prunex_mpi.settings.fields import SHARED, key_of

FAILURE, USAGE, UNREADABLE = 1, 2, 3
LIMIT_S = 20
SHORT = [
    *("--model", "odd_models:small", "--local-steps", "1", "--batch-size", "16"),
    *("--warmup-iterations", "1", "--keep-ramp-iterations", "1", "--freeze-iteration", "3"),
    *("--outer-iterations", "3", "--checkpoint-every", "1"),
]
SYNTHETIC = [
    *("--dataset", "synthetic", "--image-size", "8"),
    *("--train-samples", "64", "--test-samples", "16"),
]
DRY = ["--dry-run", "--model", "odd_models:small", *SYNTHETIC]
OLDER, NEWEST = "000001-iteration-2-step-0", "000002-iteration-3-step-0"
RANK_0, MANIFEST = "rank-00000.safetensors", "manifest.json"
BOTH_REFUSED = (f"{NEWEST}: ", f"{OLDER}: ")
# The same inputs each time, and nothing kept between two runs of the suite.
PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=15)

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One bad input: what is damaged or given, and how the program must answer."""

    name: str
    damage: Damage
    code: int | tuple[int, ...]
    words: tuple[str, ...]
    flags: str = ""


@dataclass(frozen=True)
class Ended:
    """How the program ended and what it wrote to standard error, but for records of the log."""

    code: int
    lines: list[str]
    records: list[str]


# --------------------------------------------------------------------------------------------------
# The program in this process
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def kept_alive() -> Iterator[None]:
    """Turn an abort of the job into a failure of the test."""

    def abort_job(_world: object) -> None:
        raise AssertionError("the program aborted the job")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "abort_job", abort_job)
        yield


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError where the program hangs."""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the program did not end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def run(*argv: object) -> Ended:
    """Run the program; whatever its end, no thread and no handler of a signal may stay."""
    errors = io.StringIO()
    hook = sys.excepthook
    try:
        with limited(), redirect_stderr(errors), redirect_stdout(io.StringIO()):
            before, threads = handlers(), set(threading.enumerate())
            code = train.main([str(word) for word in argv])
            assert handlers() == before
            # One of an earlier test may end meanwhile.
            assert not set(threading.enumerate()) - threads
    finally:
        # It stays for what main raises, and would abort the job of these tests.
        sys.excepthook = hook
    lines = errors.getvalue().splitlines()
    is_record = [line.startswith("[0/1] ") for line in lines]
    records = [line for line, record in zip(lines, is_record, strict=True) if record]
    return Ended(code, [line for line in lines if line not in records], records)


def assert_refused(ended: Ended, codes: int | tuple[int, ...], *words: str) -> None:
    assert ended.code in (codes if isinstance(codes, tuple) else (codes,)), ended
    assert len(ended.lines) == 1, ended.lines
    assert ended.lines[0].startswith("prunex_mpi.train: error: ")
    for word in words:
        assert word in ended.lines[0]


def assert_refused_or_ran(ended: Ended, *codes: int) -> None:
    """For drawn inputs, some of which are good."""
    if ended.code:
        assert_refused(ended, codes)
    else:
        assert not ended.lines


def parameters(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------

BIG = str(2**62)
# What parsing alone refuses is in config/test_settings.py.
FLAGS: dict[str, tuple[int, tuple[str, ...]]] = {
    # flags: code, words of the line
    "--dataset cifar11": (USAGE, ("'cifar11'", "'cifar10'", "package.module:factory")),
    "--dataset nowhere:f": (USAGE, ("dataset nowhere:f: cannot import 'nowhere'",)),
    "--dataset own_data:damaged --train-samples 6 --test-samples 2": (
        UNREADABLE,
        ("own_data:damaged train[4]", "RuntimeError: broken on purpose"),
    ),
    "--dataset own_data:tensors --download": (USAGE, ("download", "own_data:tensors")),
    "--dataset digits --download": (USAGE, ("download", "cifar10 and cifar100", "digits")),
    "--ranks-per-node 2": (USAGE, ("--ranks-per-node 2", "1 ranks")),
    "--mpi-buffers device --device cpu": (USAGE, ("--mpi-buffers device", "--device cuda")),
    "--on-node-loss continue": (USAGE, ("start it with Open MPI's mpirun --with-ft ulfm",)),
    "--model resnet21": (USAGE, ("'resnet21'", "did you mean 'resnet")),
    "--model nowhere:f": (USAGE, ("cannot import 'nowhere'",)),
    "--model odd_models:_rank": (USAGE, ("odd_models:_rank", "TypeError")),
    "--model odd_models:more_while_training": (
        USAGE,
        ("returns tuple while it trains", "one tensor"),
    ),
    "--model odd_models:centred": (USAGE, ("training moves buffer 1.mean", "BatchNorm's")),
    "--model odd_models:counting": (USAGE, ("training moves 1.steps", "persistent=True")),
    "--model odd_models:draws": (USAGE, ("odd_models:draws is another one each time", "buffer")),
    "--model odd_models:noisy": (USAGE, ("odd_models:noisy computes something else", "training")),
    "--model odd_models:expanded": (USAGE, ("odd_models:expanded can't load", "clone()")),
    "--model odd_models:without_values": (USAGE, ("0.weight of the model is meta",)),
    "--model odd_models:extra_state": (USAGE, ("0._extra_state, a dict", "get_extra_state")),
    "--model odd_models:small --stem cifar": (USAGE, ("--stem cifar",)),
    f"--image-size {BIG}": (USAGE, ("image-size",)),
    f"--train-samples {BIG}": (USAGE, ("train-samples",)),
    f"--test-samples {BIG}": (USAGE, ("test-samples",)),
    "--lr 9e18": (FAILURE, ("not finite",)),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags(tmp_path, flags):
    code, words = FLAGS[flags]
    ended = run(*SHORT, *SYNTHETIC, "--run-dir", tmp_path / "run", *flags.split())
    assert_refused(ended, code, *words)
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("model", "method", "more"),
    [("odd_models:small", "parallax", []), ("gpt_nano", "embrace", ["--dry-run"])],
)
def test_models_without_an_embedding_of_its_own(tmp_path, model, more, method):
    (tmp_path / "text").write_text("Some text." * 1000)
    data = ["--dataset", "text", "--data-dir", tmp_path / "text"] if "gpt" in model else SYNTHETIC
    flags = ["--model", model, "--method", method, "--run-dir", tmp_path / "run", *more]
    ended = run(*flags, *data)
    assert_refused(ended, USAGE, "no nn.Embedding whose weights no other layer shares", "-untied")
    assert not (tmp_path / "run/summary.json").exists()


WORDS = st.text(st.characters(exclude_categories=["Cs"]) | st.just("\udcff"), max_size=20)
NAMES = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=20)


@PROPERTY
@given(NAMES.filter(lambda name: name not in ("help", "version", "config")))
def test_unknown_flags_are_named_with_a_known_one_or_help(name):
    if name.removeprefix("no-") in map(key_of, FIELDS):
        return
    ended = run(*SHORT, f"--{name}")
    assert_refused(ended, USAGE, "unknown flag")
    assert ended.lines[0].endswith("?") != ended.lines[0].endswith("; see --help")


@PROPERTY
@given(st.lists(WORDS.filter(lambda word: not word.startswith("-h")), min_size=1, max_size=3))
def test_words_that_are_no_flags(words):
    assert_refused(run(*words, *DRY), USAGE)


NUMBERS = (
    st.integers(max_value=10)
    | st.integers(min_value=2**62)
    | st.floats()
    | st.fractions().map(str)
    | st.sampled_from(["", " ", "1_0", "٣", "1e999999999", "0x10", "--", "1/0", "true"])
)
# How long a dry run takes, and how much memory, depends on these two.
COUNTED = ("outer_iterations", "epochs", "image_size")
VALUED = sorted(name for name, field in FIELDS.items() if field.type is not bool)


@settings(PROPERTY, max_examples=50)
@given(st.sampled_from(VALUED), WORDS | NUMBERS)
def test_drawn_values_of_flags(name, value):
    if name in COUNTED and isinstance(value, int) and value > 10:
        value = -value
    ended = run(*DRY, f"--{key_of(name)}={value}")
    # A file of weights that is not there can't be read.
    assert_refused_or_ran(ended, USAGE, *([UNREADABLE] if name == "init_from" else []))


@pytest.mark.parametrize("flag", ["--run-dir", "--data-dir", "--model", "--config"])
@pytest.mark.parametrize("name", ["first\nsecond", "\r", "\udcff", "a" * 300, "/dev/null/x"])
def test_names_that_no_message_may_break_on(flag, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for existing in ("first\nsecond", "\r"):
        Path(existing).write_text("not TOML, not a folder")
    extra = ["--dataset", "imagefolder"] if flag == "--data-dir" else []
    run_dir = ["--run-dir", "run"] if flag != "--run-dir" else []
    ended = run(*SHORT, *SYNTHETIC, *extra, *run_dir, f"{flag}={name}")
    assert_refused(ended, (USAGE, UNREADABLE))


# --------------------------------------------------------------------------------------------------
# Files of settings
# --------------------------------------------------------------------------------------------------

# Keys and values that a file may not have are in config/test_settings.py.
CONFIGS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    # name: contents, words of the line
    "cut": (b"lr = 0.1\nmodel = 'res", ("not a TOML file",)),
    "binary": (b"\x7fELF\x00\xff", ("not a TOML file",)),
    "latin-1": ("model = 'é'".encode("latin-1"), ("not a TOML file",)),
    "byte order mark": (b"\xef\xbb\xbflr = 0.1", ("not a TOML file",)),
    "long number": (b"seed = " + b"9" * 5000, ("not a TOML file",)),
    "empty key": (b'"" = 8', ("unknown key ''",)),
    "newline in key": (b'"a\\nb" = 8', ("unknown key 'a\\nb'",)),
    "nul": (b'model = "a\\u0000b"', ("model", "UTF-8")),
    "empty text": (b'model = ""', ("model", "empty")),
    "resume": (b"resume = true", ("--resume needs --run-dir",)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_files_of_settings(tmp_path, name):
    contents, words = CONFIGS[name]
    (tmp_path / "a.toml").write_bytes(contents)
    assert_refused(run("--config", tmp_path / "a.toml", *DRY), USAGE, *words)


@pytest.mark.parametrize("kind", ["absent", "folder", "link to itself", "under a file"])
def test_no_file_of_settings(tmp_path, kind):
    path = tmp_path / "a.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "under a file":
        path.write_text("")
        path /= "b.toml"
    assert_refused(run("--config", path, *DRY), USAGE, "cannot read --config", path.name)


def run_with_config(contents: bytes) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_bytes(contents)
        return run("--config", path, *DRY)


@PROPERTY
@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode()))
def test_drawn_bytes_as_settings(contents):
    assert_refused_or_ran(run_with_config(contents), USAGE)


TOML_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**70), 10)
    | st.floats()
    | st.text(max_size=10)
    | st.dates().map(lambda day: date(max(day.year, 1000), 1, 1)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


KEYS = sorted([*SHARED, *GIVEN])


@settings(PROPERTY, max_examples=30)
@given(st.dictionaries(st.sampled_from(KEYS), TOML_VALUES, min_size=1, max_size=3))
def test_drawn_values_of_keys(values):
    table = {key_of(name): value for name, value in values.items()}
    assert_refused_or_ran(run_with_config(tomli_w.dumps(table).encode()), USAGE)


# --------------------------------------------------------------------------------------------------
# Folders of images
# --------------------------------------------------------------------------------------------------


def make_images(folder: Path, suffix: str = "png") -> None:
    """Write 8 training and 2 test images of 8x8 for each of two classes."""
    for half, count in (("train", 8), ("test", 2)):
        for label in ("cat", "dog"):
            (folder / half / label).mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / half / label / f"{number}.{suffix}")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def replace(path: Path, contents: bytes | None = None, link: str = "") -> None:
    """Put bytes, a link or, without both, a folder in the place of whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if link:
        path.symlink_to(link)
    elif contents is None:
        path.mkdir()
    else:
        path.write_bytes(contents)


def cut(path: Path, size: int) -> None:
    replace(path, path.read_bytes()[:size])


IMAGE = "train/cat/3.png"
SHAPE = ("--data-dir must hold train/<class>/*",)
BROKEN = ("cannot read image", "repair or remove it")
FOLDERS = [
    Case("absent", shutil.rmtree, UNREADABLE, SHAPE),
    Case("file", lambda p: replace(p, b""), UNREADABLE, SHAPE),
    Case("no train", lambda p: shutil.rmtree(p / "train"), UNREADABLE, ("train", *SHAPE)),
    Case("no test", lambda p: shutil.rmtree(p / "test"), UNREADABLE, ("test", *SHAPE)),
    Case("no classes", lambda p: replace(p / "train"), UNREADABLE, ("train", *SHAPE)),
    Case("train is a file", lambda p: replace(p / "train", b""), UNREADABLE, SHAPE),
    Case("class is a file", lambda p: replace(p / "train/cat", b""), UNREADABLE, ("'cat'",)),
    Case("empty class", lambda p: empty(p / "train/dog"), UNREADABLE, ("'dog'",)),
    Case("empty test class", lambda p: empty(p / "test/dog"), UNREADABLE, ("'dog'",)),
    Case("other test class", lambda p: (p / "test/dog").rename(p / "test/cow"), 3, ("'cow'",)),
    Case("more test classes", lambda p: shutil.copytree(p / "test/dog", p / "test/c"), 3, ("c",)),
    Case("cut data", lambda p: cut(p / IMAGE, 60), UNREADABLE, BROKEN),
    Case("bad test image", lambda p: replace(p / "test/cat/1.png", b"x"), UNREADABLE, BROKEN),
    Case("newline in name", lambda p: replace(p / "train/cat/a\nb.png", b"x"), UNREADABLE, BROKEN),
    Case("odd name", lambda p: replace(p / "train/cat/\udcff.png", b"x"), UNREADABLE, BROKEN),
    Case("odd class", lambda p: (p / "train/cat").rename(p / "train/\udcff"), 3, ("class",)),
    Case("too few", lambda _: None, USAGE, ("--train-samples 17",), "--train-samples 17"),
    Case("huge", lambda _: None, USAGE, ("image-size",), f"--image-size {2**31}"),
]


@parameters(FOLDERS)
def test_bad_folders_of_images(tmp_path, case):
    images = tmp_path / "images"
    make_images(images)
    case.damage(images)
    data = ["--dataset", "imagefolder", "--data-dir", images, *case.flags.split()]
    assert_refused(run(*SHORT, *data, "--run-dir", tmp_path / "run"), case.code, *case.words)


def test_image_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    make_images(tmp_path / "images")
    (tmp_path / "images" / IMAGE).chmod(0)
    data = ["--dataset", "imagefolder", "--data-dir", tmp_path / "images"]
    assert_refused(run(*SHORT, *data, "--run-dir", tmp_path / "run"), UNREADABLE, *BROKEN)


@PROPERTY
@given(st.sampled_from(["png", "jpg", "bmp", "ppm", "webp"]), st.data())
def test_damaged_images(suffix, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images", suffix)
        image = folder / f"images/train/dog/2.{suffix}"
        contents = bytearray(image.read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(contents) - 1), max_size=4)):
            contents[place] = data.draw(st.integers(0, 255))
        image.write_bytes(contents[: data.draw(st.integers(0, len(contents)))])
        source = ["--dataset", "imagefolder", "--data-dir", folder / "images"]
        ended = run(*SHORT, *source, "--evaluate-every", 3, "--run-dir", folder / "run")
        assert_refused_or_ran(ended, UNREADABLE)


# --------------------------------------------------------------------------------------------------
# Run directories
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run with two checkpoints, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "KEEP", 3)
        ended = run(*SHORT, *SYNTHETIC, "--run-dir", folder)
    assert (ended.code, ended.lines) == (0, [])
    # The last one, from which nothing is left to do.
    shutil.rmtree(folder / "checkpoints" / "000003-iteration-4-step-0")
    assert sorted(os.listdir(folder / "checkpoints")) == [OLDER, NEWEST]
    return folder


@pytest.fixture
def interrupted(finished, tmp_path) -> Path:
    return interrupt(finished, tmp_path / "run")


def interrupt(finished: Path, folder: Path) -> Path:
    """Return a copy of the run as a job leaves it that dies after its last checkpoint."""
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    (folder / "state.safetensors").unlink()
    return folder


def resume(folder: Path, *flags: object) -> Ended:
    return run("--resume", "--run-dir", folder, "--model", "odd_models:small", *flags)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def config(old: str, new: str) -> Damage:
    return lambda folder: edit(folder / "config.toml", old, new)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def drop_line(folder: Path, key: str) -> None:
    path = folder / "config.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{key} =")))


def flagged(name: str, flags: str, words: str) -> Case:
    return Case(name, lambda _: None, USAGE, (words,), flags)


def refused(name: str, damage: Damage, *words: str, flags: str = "") -> Case:
    return Case(name, damage, UNREADABLE, words, flags)


SMALL_NET = "odd_models:small"
ANOTHER = ("no checkpoint can be used", "another config.toml")
CHANGED = ("no checkpoint can be used", "metrics.jsonl")
SUMMARY = ("summary.json", "can't be read")
NO_SUMMARY = ("summary.json", "is not what the run wrote (status)")
CONFIG, METRICS = "config.toml", "metrics.jsonl"
RUNS = [
    refused("no config", lambda p: (p / CONFIG).unlink(), "without its config.toml"),
    refused("config a folder", lambda p: replace(p / CONFIG), CONFIG, "directory"),
    refused("config a link to nothing", lambda p: replace(p / CONFIG, link="x"), "config"),
    refused("config binary", lambda p: replace(p / CONFIG, b"\xff\0"), "not a TOML file"),
    refused("config deep", lambda p: replace(p / CONFIG, b"a=" + b"[" * 10**5), "TOML"),
    refused("config empty", lambda p: replace(p / CONFIG, b""), CONFIG),
    refused("config lacks lr", lambda p: drop_line(p, "lr"), CONFIG, "has no lr"),
    refused("config unknown key", config("lr =", "rl ="), "'rl'", CONFIG),
    refused("config bad value", config("lr = ", "lr = -"), "lr", "above 0", CONFIG),
    refused("other model", config(SMALL_NET, "resnet8"), *ANOTHER, flags="--model resnet8"),
    refused("config other lr", config("lr = ", "lr = 1"), *ANOTHER),
    refused("config other versions", config("[versions]", "[versions]\nx = '1'"), *ANOTHER),
    Case("unknown model", config(SMALL_NET, "m:x"), USAGE, ("'m'",), "--model m:x"),
    refused("config a pipe", lambda p: pipe(p / CONFIG), CONFIG, "not a regular file"),
    refused(
        "misfit", config("freeze-iteration = 3", "freeze-iteration = 9"), "iteration 9", CONFIG
    ),
    refused("summary a pipe", lambda p: pipe(p / "summary.json"), *SUMMARY),
    *(
        refused(f"summary {text[:12]}", lambda p, t=text: replace(p / "summary.json", t), *SUMMARY)
        for text in (b"{", b"\xff", b"[" * 10**5)
    ),
    *(
        refused(f"summary {text}", lambda p, t=text: replace(p / "summary.json", t), *NO_SUMMARY)
        for text in (b"[]", b"{}")
    ),
    refused("summary a folder", lambda p: replace(p / "summary.json"), *SUMMARY),
    refused("a loop", lambda p: replace(p / "summary.json", link="summary.json"), *SUMMARY),
    refused("metrics empty", lambda p: replace(p / METRICS, b""), *CHANGED),
    refused("metrics cut", lambda p: cut(p / METRICS, 99), *CHANGED),
    refused("metrics absent", lambda p: (p / METRICS).unlink(), *CHANGED),
    refused("metrics a folder", lambda p: replace(p / METRICS), *CHANGED),
    refused("metrics endless", lambda p: replace(p / METRICS, link="/dev/zero"), *CHANGED),
    refused("metrics changed", lambda p: edit(p / METRICS, 'on": 1', 'on": 2'), *CHANGED),
    refused("layers changed", lambda p: edit(p / "layers.jsonl", "0", "1"), "layers.jsonl"),
    refused(
        "no checkpoint, metrics a folder",
        lambda p: (shutil.rmtree(p / "checkpoints"), replace(p / METRICS)),
        METRICS,
    ),
    Case("state a folder", lambda p: replace(p / "state.safetensors"), FAILURE, ("results",)),
    Case("checkpoints a file", lambda p: replace(p / "checkpoints", b""), (1, 3), ("checkpoint",)),
    Case("heartbeats a file", lambda p: replace(p / "heartbeats", b""), USAGE, ("heartbeats",)),
    Case("lock a folder", lambda p: replace(p / "lock"), USAGE, ("--run-dir", "directory")),
    Case("run a file", lambda p: replace(p, b""), USAGE, ("--run-dir", "Not a directory")),
    flagged("lr differs", "--lr 0.5", "--lr 0.5 differs from the run's"),
    flagged("model differs", "--model resnet8", "--model resnet8 differs"),
    flagged("preset differs", "--preset paper", "--preset paper differs"),
    flagged("groups differ", "--groups filter", "--groups filter differs"),
    flagged("fewer iterations", "--outer-iterations 2", "--outer-iterations 2"),
    flagged("unknown flag", "--checkpoint 1", "--checkpoint-every"),
]


@parameters(RUNS)
def test_bad_run_directories(interrupted, case):
    case.damage(interrupted)
    assert_refused(resume(interrupted, *case.flags.split()), case.code, *case.words)


def test_a_whole_run_goes_on(interrupted):
    """What the other tests damage is good: without damage it is taken."""
    ended = resume(interrupted)
    assert (ended.code, ended.lines) == (0, [])
    assert any(f"going on from checkpoint {NEWEST}" in line for line in ended.records)


@pytest.mark.parametrize("extra", [[], ["--resume"]], ids=["new", "resume"])
@pytest.mark.parametrize("place", ["file", "file/run", "/dev/null/run", "/proc/run", "a" * 300])
def test_run_directory_that_can_not_be_made(tmp_path, place, extra):
    (tmp_path / "file").write_text("")
    ended = run(*SHORT, *SYNTHETIC, *extra, "--run-dir", tmp_path / place)
    assert_refused(ended, USAGE, "--run-dir", "choose another")


def test_a_run_directory_is_looked_at_before_the_data_are_read(interrupted):
    data = ["--dataset", "imagefolder", "--data-dir", interrupted / "nowhere"]
    ended = run(*SHORT, *data, "--run-dir", interrupted)
    assert_refused(ended, USAGE, "--run-dir", "already holds a run")


def test_run_directory_that_may_not_be_written(interrupted):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    interrupted.chmod(0o500)
    try:
        assert_refused(resume(interrupted), USAGE, "--run-dir", "ermission")
    finally:
        interrupted.chmod(0o700)


def test_run_directory_in_use_by_another_process(interrupted):
    code = "import sys, filelock as f; l = f.FileLock(sys.argv[1]); l.acquire(); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, interrupted / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        ended = resume(interrupted)
        other.communicate(b"\n", timeout=LIMIT_S)
    assert_refused(ended, USAGE, "in use by another job")


def test_the_lock_is_given_back_after_an_error_too(interrupted):
    manifest = interrupted / "checkpoints" / NEWEST / MANIFEST
    contents = manifest.read_bytes()
    in_both(lambda p: cut(p / MANIFEST, 10))(interrupted)
    assert resume(interrupted).code == UNREADABLE
    manifest.write_bytes(contents)
    assert resume(interrupted).code == 0


@pytest.mark.parametrize("place", ["link", "file"])
def test_what_is_no_checkpoint_does_not_stop_the_next_ones(interrupted, place):
    """The newest is taken away, and something else has its name."""
    newest = interrupted / "checkpoints" / NEWEST
    shutil.rmtree(newest)
    replace(newest, b"", link=OLDER if place == "link" else "")
    ended = resume(interrupted)
    assert (ended.code, ended.lines) == (0, [])
    assert any(f"going on from checkpoint {OLDER}" in line for line in ended.records)


def flip(path: Path, place: int, bit: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1 << bit
    path.write_bytes(contents)


@PROPERTY
@given(st.data())
def test_config_of_a_run_with_a_flipped_bit(finished, data):
    size = (finished / "config.toml").stat().st_size
    with tempfile.TemporaryDirectory() as name:
        folder = interrupt(finished, Path(name) / "run")
        path = folder / "config.toml"
        flip(path, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
        assert_refused(resume(folder), (USAGE, UNREADABLE))


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


def in_both(damage: Damage) -> Damage:
    """Return what does `damage` to the folder of each checkpoint."""
    return lambda run: [damage(run / "checkpoints" / name) for name in (OLDER, NEWEST)]


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the manifest says and make its checksum right again."""
    path = folder / MANIFEST
    manifest = json.loads(json.loads(path.read_text())["body"])
    changed = change(manifest)
    body = json.dumps(manifest if changed is None else changed)
    path.write_text(json.dumps({"crc32": zlib.crc32(body.encode()), "body": body}))


def says(key: str, value: object) -> Damage:
    def change(manifest: dict[str, Any]) -> None:
        assert key in manifest
        manifest[key] = value

    return lambda folder: rewrite_manifest(folder, change)


def link_to_itself_moved(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def both(name: str, damage: Damage, *words: str) -> Case:
    return refused(name, in_both(damage), *BOTH_REFUSED, *words)


WRITTEN = f"{MANIFEST} is not what was written"
PLAIN = "is missing or is not a plain file"
CHECKPOINTS = [
    both("rank file absent", lambda p: (p / RANK_0).unlink(), RANK_0, PLAIN),
    both("rank file a folder", lambda p: replace(p / RANK_0), RANK_0, PLAIN),
    both("rank file a link", lambda p: link_to_itself_moved(p / RANK_0), RANK_0, PLAIN),
    both("rank file a pipe", lambda p: ((p / RANK_0).unlink(), os.mkfifo(p / RANK_0)), PLAIN),
    both("rank file a device", lambda p: replace(p / RANK_0, link="/dev/zero"), PLAIN),
    both("rank file cut", lambda p: cut(p / RANK_0, 100), RANK_0, "has 100 bytes of"),
    both("rank file longer", lambda p: (p / RANK_0).open("ab").write(b"\0"), RANK_0, "bytes of"),
    both("rank file flipped", lambda p: flip(p / RANK_0, 30_000, 4), "checksum", RANK_0),
    both("manifest absent", lambda p: (p / MANIFEST).unlink(), MANIFEST, PLAIN),
    both("manifest a folder", lambda p: replace(p / MANIFEST), MANIFEST, PLAIN),
    both("manifest a link", lambda p: link_to_itself_moved(p / MANIFEST), MANIFEST, PLAIN),
    both("manifest cut", lambda p: cut(p / MANIFEST, 300), WRITTEN),
    *(
        both(f"manifest {text[:12]}", lambda p, t=text: replace(p / MANIFEST, t), WRITTEN)
        for text in (b"", b"{}", b"\xff", b"[" * 10**5)
    ),
    both(
        "manifest of another body",
        lambda p: edit(p / MANIFEST, "node_sizes", "node_sizeS"),
        f"checksum of {MANIFEST}",
    ),
    both("both absent", lambda p: empty(p), PLAIN),
    both("other format", says("format", 2), "format 2"),
]


@parameters(CHECKPOINTS)
def test_bad_checkpoints(interrupted, case):
    case.damage(interrupted)
    assert_refused(resume(interrupted), case.code, "no checkpoint can be used", *case.words)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: cut(p / RANK_0, 100),
        lambda p: flip(p / RANK_0, 30_000, 0),
        lambda p: (p / RANK_0).unlink(),
        lambda p: replace(p / MANIFEST, b""),
        lambda p: rewrite_manifest(p, lambda m: m.update(config="")),
    ],
    ids=["cut", "flipped", "absent", "manifest", "config"],
)
def test_the_older_checkpoint_is_used_when_the_newest_is_damaged(interrupted, finished, damage):
    damage(interrupted / "checkpoints" / NEWEST)
    ended = resume(interrupted)
    assert (ended.code, ended.lines) == (0, [])
    assert any(f"refused checkpoint {NEWEST}: " in line for line in ended.records)
    assert any(f"going on from checkpoint {OLDER}" in line for line in ended.records)
    delivered = [folder / "state.safetensors" for folder in (interrupted, finished)]
    assert delivered[0].read_bytes() == delivered[1].read_bytes()


@settings(PROPERTY, max_examples=20)
@given(st.sampled_from([RANK_0, MANIFEST]), st.booleans(), st.data())
def test_one_flipped_bit_or_any_cut_is_noticed(finished, file, flipped, data):
    with tempfile.TemporaryDirectory() as name:
        folder = interrupt(finished, Path(name) / "run")
        for checkpoint in (OLDER, NEWEST):
            path = folder / "checkpoints" / checkpoint / file
            place = data.draw(st.integers(0, path.stat().st_size - 1))
            if flipped:
                flip(path, place, data.draw(st.integers(0, 7)))
            else:
                cut(path, place)
        assert_refused(resume(folder), UNREADABLE, *BOTH_REFUSED, file)


# --------------------------------------------------------------------------------------------------
# A model that is another one now
# --------------------------------------------------------------------------------------------------


class OtherOrder(nn.Module):
    """As many parameters as odd_models.small, in another order."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(8, num_classes)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)).mean((2, 3)))


SMALL = odd_models.small


def wider(num_classes: int, image_size: int) -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    return nn.Sequential(nn.Conv2d(3, 9, 3), nn.Conv2d(9, 8, 3), *head)


def with_statistics(num_classes: int, image_size: int) -> nn.Module:
    body = SMALL(num_classes, image_size)
    return nn.Sequential(*body[:1], nn.BatchNorm2d(8, affine=False), *body[1:])


MODELS: dict[str, tuple[Callable[..., Any], int, tuple[str, ...]]] = {
    # name: factory, code, words of the line
    "wider": (wider, UNREADABLE, BOTH_REFUSED),
    "in another order": (lambda num_classes, image_size: OtherOrder(num_classes), 3, BOTH_REFUSED),
    "in float64": (lambda **sizes: SMALL(**sizes).double(), UNREADABLE, BOTH_REFUSED),
    "with statistics": (with_statistics, UNREADABLE, BOTH_REFUSED),
    "without convolution": (odd_models.no_convolution, USAGE, ("no convolution",)),
    "none": (lambda **_: None, USAGE, ("NoneType",)),
    "raising": (lambda **_: {}["x"], USAGE, ("KeyError",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_source_of_the_model_has_changed(interrupted, monkeypatch, name):
    factory, code, words = MODELS[name]
    monkeypatch.setattr(odd_models, "small", factory)
    assert_refused(resume(interrupted), code, *words)
