"""Data sets that a function of the user's makes: the same images, and what is wrong with them."""

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from image_folders import CLASSES, write_folder
from own_data import Own
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import FakeData

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, log
from prunex_mpi.data import datasets
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.decoding import to_rgb
from prunex_mpi.data.request import Part, Request
from prunex_mpi.settings.fields import SHARED

WHOLE = Part(0, 1, threads=3)
DATASETS = SHARED["dataset"].metadata["choices"]


def load(name: str, part: Part = WHOLE, data_dir: str = "x", **ways: Any) -> Dataset:
    name = name if name in DATASETS or ":" in name else f"own_data:{name}"
    return datasets.load(Request(dataset=name, data_dir=data_dir, seed=3, **ways), part)


def assert_same(one: Dataset, other: Dataset) -> None:
    for half in ("train", "test", "val"):
        first, second = getattr(one, half), getattr(other, half)
        assert (first is None) == (second is None)
        if first is not None:
            assert torch.equal(first.images[:], second.images[:])
            assert torch.equal(first.labels, second.labels)
    facts = ("num_classes", "image_size", "train_total", "test_total", "flip", "pad", "val_total")
    assert [getattr(one, f) for f in facts] == [getattr(other, f) for f in facts]
    assert one.class_names == other.class_names


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Load what is made of a training and a test half."""

    def start(train: Any, test: Any = None, **ways: Any) -> Dataset:
        halves = {True: train, False: train if test is None else test}
        monkeypatch.setattr(own_data, "made", lambda data_dir, train: halves[train], raising=False)
        return load("made", **ways)

    return start


def items(count: int = 6, **attributes: Any) -> Own:
    """Return images of one colour each, labels 0, 1, 2, 0, ..."""
    images = [np.full((3, 4, 4), 4 * number, dtype=np.uint8) for number in range(count)]
    return Own(images, [number % 3 for number in range(count)], **attributes)


# --------------------------------------------------------------------------------------------------
# What is loaded
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize(("part", "val"), [(WHOLE, 0.0), (Part(1, 3), 0.0), (Part(0, 2), 0.2)])
def test_digits_by_a_function_are_those_built_in(mode, part, val):
    found = load("digits_again", part, data_mode=mode, val_split=val)
    assert_same(load("digits", part, val_split=val), found)


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_files_by_a_function_are_those_of_their_folder(tmp_path, mode, size):
    folder = str(write_folder(tmp_path, train=6, test=2))
    ways = {"data_dir": folder, "image_size": size, "part": Part(1, 2)}
    plain, found = load("imagefolder", **ways), load("from_files", data_mode=mode, **ways)
    assert_same(plain, found)
    assert found.class_names == CLASSES
    text = "18 images to train on and 6 to test on in own_data:from_files, 3 classes"
    assert found.found == text


GREY = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)
COLOURS = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
CLEAR = Image.fromarray(np.full((4, 4, 4), 77, dtype=np.uint8), "RGBA")


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (COLOURS, COLOURS),
        (GREY, GREY),
        (torch.from_numpy(COLOURS), COLOURS),
        (torch.from_numpy(GREY), GREY),
        (tv_tensors.Image(torch.from_numpy(COLOURS)), COLOURS),
        (COLOURS[:, ::-1, ::-1], COLOURS[:, ::-1, ::-1]),
        (Image.fromarray(GREY[0]), GREY),
        (Image.fromarray(GREY[0]).convert("P"), GREY),
        (CLEAR, np.asarray(to_rgb(CLEAR, "")).transpose(2, 0, 1)),
    ],
)
def test_images_of_all_kinds(made, image, pixels):
    loaded = made([(image, 0)] * 2)
    assert loaded.train.images.dtype == torch.uint8
    assert np.array_equal(loaded.train.images[0], np.broadcast_to(pixels, (3, 4, 4)))


@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, torch.tensor, np.array], ids=lambda kind: kind.__name__
)
def test_labels_of_all_kinds(made, kind):
    one = items()
    plain = made(list(zip(one.images, one.own, strict=True)))
    labels = [kind(label) for label in one.own]
    found = made(list(zip(one.images, labels, strict=True)))
    held = made(Own(one.images, labels, targets=labels))
    assert torch.equal(plain.train.labels, found.train.labels)
    assert torch.equal(plain.train.labels, held.train.labels)
    assert plain.train.labels.tolist() != sorted(plain.train.labels.tolist())


def test_the_example_of_the_readme(tmp_path, monkeypatch):
    text = (Path(datasets.__file__).parent / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    folder = write_folder(tmp_path, train=4, test=2)
    for split in ("train", "test"):
        paths = sorted(path.relative_to(tmp_path) for path in (folder / split).glob("*/*"))
        lines = [f"{path.parent.name} {path}\n" for path in paths]
        (tmp_path / f"{split}.txt").write_text("".join(lines))
    found = load("mine:Pictures", data_dir=str(tmp_path))
    assert_same(load("imagefolder", data_dir=str(tmp_path)), found)


def test_data_sets_of_torch_and_torchvision(made):
    loaded = load("tensors")
    assert (loaded.train_total, loaded.test_total, loaded.num_classes) == (100, 40, 10)
    fakes = [FakeData(8, (3, 6, 6), 4, random_offset=offset) for offset in (0, 8)]
    assert made(*fakes).train.images.shape == (8, 3, 6, 6)


@pytest.mark.parametrize(
    ("attributes", "reads"),
    [
        ({"targets": [0, 1, 2, 0, 1, 2]}, False),
        ({"targets": torch.tensor([0, 1, 2, 0, 1, 2])}, False),
        ({"labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)}, False),
        ({"targets": None, "labels": (0, 1, 2, 0, 1, 2)}, False),
        ({}, True),
        ({"targets": [0, 1]}, True),
        ({"targets": ["ant", "bee", "cat"] * 2}, True),
        ({"targets": torch.zeros(6, 2, dtype=torch.int64)}, True),
        ({"targets": torch.zeros(6)}, True),
        # Its items have other labels than it holds.
        ({"targets": [5, 6, 7, 5, 6, 7], "target_transform": lambda label: label - 5}, True),
    ],
)
def test_labels_are_taken_from_where_they_are_held(made, caplog, attributes, reads):
    with caplog.at_level(logging.INFO, log.name):
        loaded = made(items(**attributes))
    text = "own_data:made train: all 6 items are gone through for their labels"
    assert (text in caplog.text) == reads
    assert sorted(loaded.train.labels.tolist()) == [0, 0, 1, 1, 2, 2]


def test_numbers_and_names_of_classes(made):
    def classes(train: Any, test: Any = None) -> tuple[int, tuple[str, ...]]:
        halves = [items(classes=names) for names in (train, test or train)]
        loaded = made(*halves)
        return loaded.num_classes, loaded.class_names

    assert classes(["a", "b", "c"]) == (3, ("a", "b", "c"))
    assert classes(("a", "b", "c", "d"), ["a", "b", "c"]) == (4, ("a", "b", "c", "d"))
    for none in ("abc", [], [1, 2, 3], [("a", "b")] * 3, {"a": 0, "b": 1, "c": 2}, 3):
        assert classes(none) == (3, ())


def test_images_are_mirrored_unless_their_data_set_says_no(made):
    assert [made(items(**a)).flip for a in ({}, {"flip": True}, {"flip": False})] == [1, 1, 0]
    assert made([(np.zeros((3, 32, 32), np.uint8), 0)]).pad == 4


@pytest.mark.parametrize("threads", [1, 4])
def test_items_are_asked_for_by_so_many_threads(made, threads):
    """With one thread no two items are asked for at a time."""
    running, most, lock = 0, 0, threading.Lock()

    class Counting(Own):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            pause.wait(0.002)
            with lock:
                running -= 1
            return super().__getitem__(index)

    pause = threading.Event()
    few = items(60)
    made(Counting(few.images, few.own, targets=few.own), part=Part(0, 1, threads=threads))
    assert most == 1 if threads == 1 else most > 1


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------

BAD = [
    # function, exit code, words
    ("absent", USAGE, "own_data has no function 'absent' to make the data set"),
    ("without_parameters", UNREADABLE, "failed with data_dir='x', train=True (TypeError:"),
    ("nothing", USAGE, "returned no map-style data set for data_dir='x', train=True (TypeError:"),
    ("iterable", USAGE, "Stream can't be indexed): return what has len(data) and data[i]"),
    ("no_items", USAGE, "set can't be indexed"),
    ("raising", UNREADABLE, "failed with data_dir='x', train=True (FileNotFoundError: [Errno 2]"),
    ("empty", UNREADABLE, "has no image for data_dir='x', train=False"),
    ("no_pairs", UNREADABLE, "train[0] is dict, not an image and its label: return a pair"),
    ("three_values", UNREADABLE, "train[0] is 3 values, not an image and its label"),
    ("labels_of_text", UNREADABLE, "train[0] has the label 'cat': labels are whole numbers"),
    ("labels_of_floats", UNREADABLE, "train[0] has the label tensor(1.)"),
    ("labels_of_vectors", UNREADABLE, "train[0] has the label tensor([1])"),
    ("negative", UNREADABLE, "train[4] has the label -1: labels are whole numbers, from 0 on"),
    ("negative_items", UNREADABLE, "train[0] has the label -1"),
    ("more_in_test", UNREADABLE, "test[5] has the label 3, own_data:more_in_test train 3 classes"),
    ("other_classes", UNREADABLE, "class 1 is 'bee' in own_data:other_classes train and 'cat'"),
    ("few_classes", UNREADABLE, "train[2] has the label 2, own_data:few_classes train 2 classes"),
    ("broken_classes", UNREADABLE, "cannot read the attribute classes of own_data:broken_classes"),
    ("floats", UNREADABLE, "train[0] is float32 [3, 8, 8], not a PIL image, or uint8 [3, H, W]"),
    ("colours_last", UNREADABLE, "train[0] is uint8 [8, 8, 3], not a PIL image"),
    ("no_image", UNREADABLE, "train[0] is str, not a PIL image"),
    ("sizes", UNREADABLE, "train[4] is 9x8, not 8x8: give --image-size 8"),
    ("false_targets", UNREADABLE, "train[4] has the label 1, which was 2 at the start"),
    ("damaged", UNREADABLE, "cannot read image own_data:damaged train[4] (RuntimeError: broken on"),
]


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize(("name", "code", "words"), BAD)
def test_what_is_wrong_is_said_in_a_line(name, code, words, mode):
    with pytest.raises(UserError) as caught:
        loaded = load(name, data_mode=mode)
        assert mode == "stream"
        loaded.train.images[:]
        loaded.reader.raise_error()
    assert words in str(caught.value) and f"own_data:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code


def test_other_sizes_are_cropped_on_request():
    assert load("sizes", image_size=4).train.images.shape == (6, 3, 4, 4)
