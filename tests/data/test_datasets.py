"""Shards, data sets and augmented batches."""

import itertools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from image_folders import write_folder, write_tars
from PIL import Image
from sklearn.datasets import load_digits

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError
from prunex_mpi.data import datasets as data
from prunex_mpi.data import image_files
from prunex_mpi.data.batches import (
    Shard,
)
from prunex_mpi.data.datasets import Dataset, hold_out
from prunex_mpi.data.request import Part, Request


def load(name: str, rank: int = 0, size: int = 1, **changes: object) -> Dataset:
    return data.load(Request(dataset=name, **changes), Part(rank, size))


def refuse(name: str, exit_code: int, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        load(name, **changes)
    assert caught.value.exit_code == exit_code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def images_of(shard: Shard) -> list[bytes]:
    return [image.numpy().tobytes() for image in shard.images]


def is_valid(dataset: Dataset) -> bool:
    side = dataset.image_size
    return all(
        shard.images.dtype == torch.uint8
        and shard.labels.dtype == torch.int64
        and shard.images.shape == (len(shard.labels), 3, side, side)
        and shard.images.is_contiguous()
        and bool((shard.labels < dataset.num_classes).all())
        for shard in (dataset.train, dataset.test)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_are_disjoint_and_training_shards_equal(size):
    options = {"image_size": 8, "train_samples": 50, "test_samples": 7}
    whole = load("synthetic", **options)
    parts = [load("synthetic", **options, rank=rank, size=size) for rank in range(size)]
    assert all(is_valid(part) for part in parts)
    train = [images_of(part.train) for part in parts]
    assert {len(images) for images in train} == {50 // size}
    assert len(set(itertools.chain(*train))) == 50 // size * size == parts[0].train_total
    # What is read must not depend on how many ranks read it.
    labels = torch.cat([part.train.labels for part in parts])
    assert list(itertools.chain(*train)) == images_of(whole.train)[: len(labels)]
    assert torch.equal(labels, whole.train.labels[: len(labels)])
    test = [images_of(part.test) for part in parts]
    assert set(itertools.chain(*test)) == set(images_of(whole.test))
    assert sorted(map(len, test)) == [7 // size + (r >= size - 7 % size) for r in range(size)]
    assert parts[0].test_total == 7


@pytest.mark.parametrize("size", [1, 3])
def test_the_images_held_out_are_the_same_for_any_number_of_ranks(size):
    whole = load("digits", seed=4)
    parts = [load("digits", rank, size, seed=4, val_split=0.1) for rank in range(size)]
    held = [image for part in parts for image in images_of(part.val)]
    assert sorted(held) == sorted(images_of(load("digits", seed=4, val_split=0.1).val))
    counts = torch.cat([part.val.labels for part in parts]).bincount()
    classes = whole.train.labels.bincount()
    assert (counts - 0.1 * classes).abs().max() < 1
    assert int(counts.sum()) == round(0.1 * len(whole.train.labels))
    assert parts[0].val_total == len(held)
    trained = [image for part in parts for image in images_of(part.train)]
    assert len({len(part.train.labels) for part in parts}) == 1
    assert len(trained) == parts[0].train_total <= len(whole.train.labels) - len(held)
    # Digits that look alike exist: how often each is there tells the two parts from each other.
    left = Counter(images_of(whole.train)) - Counter(held)
    assert not Counter(trained) - left
    # Whatever the seed: what is chosen with one is judged on no image that another learned from.
    assert sorted(images_of(load("digits", seed=5, val_split=0.1).val)) == sorted(held)
    other = load("digits", seed=5, val_split=0.1).train
    assert not torch.equal(other.labels, load("digits", seed=4, val_split=0.1).train.labels)
    assert whole.val is None and whole.val_total == 0


def test_seed_reorders_training_images_and_leaves_the_test_set():
    first, again, other = (load("digits", seed=s, test_samples=50) for s in (1, 1, 2))
    assert torch.equal(first.train.images, again.train.images)
    assert not torch.equal(first.train.labels, other.train.labels)
    assert sorted(images_of(first.train)) == sorted(images_of(other.train))
    assert torch.equal(first.test.images, other.test.images)


def test_more_ranks_than_test_images_leaves_an_empty_shard():
    for name in ("synthetic", "digits"):
        part = load(name, image_size=16, test_samples=2, rank=3, size=4)
        assert len(part.test.labels) == 0
        assert is_valid(part)


def test_impossible_counts_are_refused():
    too_many = "4 ranks are more than the 3 training images"
    assert too_many in refuse("synthetic", USAGE, train_samples=3, image_size=8, size=4)
    assert "1438" in refuse("digits", USAGE, train_samples=1800)
    assert "--test-samples 400" in refuse("digits", USAGE, test_samples=400)


def test_digits_are_those_of_scikit_learn_with_a_stratified_fifth_held_out():
    original = load_digits()
    images = np.rint(original.images * 255 / 16).astype(np.uint8)
    known = {images[i].tobytes(): original.target[i] for i in range(len(images))}
    digits = load("digits")
    assert (digits.train_total, digits.test_total) == (1438, 359)
    assert (digits.num_classes, digits.image_size, digits.flip, digits.pad) == (10, 8, False, 1)
    assert is_valid(digits)
    counts = [torch.bincount(part.labels) for part in (digits.train, digits.test)]
    assert ((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.005).all()
    for shard in (digits.train, digits.test):
        for image, label in zip(shard.images, shard.labels, strict=True):
            assert known[image[0].numpy().tobytes()] == label
            assert torch.equal(image[0], image[2])
    large = load("digits", image_size=32)
    assert is_valid(large)
    assert large.pad == 4
    means = [part.train.images.float().mean((1, 2, 3)) for part in (digits, large)]
    assert (means[0] - means[1]).abs().max() < 20


def test_missing_scikit_learn_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert 'pip install "prunex_mpi[digits]"' in refuse("digits", USAGE)


def test_synthetic_classes_can_be_told_apart():
    part = load("synthetic")
    assert (part.train_total, part.test_total, part.pad) == (2048, 512, 0)
    train, test = (shard.images.float().flatten(1) for shard in (part.train, part.test))
    centres = torch.stack([train[part.train.labels == label].mean(0) for label in range(10)])
    distances = torch.cdist(test, centres)
    assert torch.equal(distances.argmin(1), part.test.labels)
    assert not set(images_of(part.train)) & set(images_of(part.test))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two classes, red and blue, of 16x16 images in several formats."""
    for split, number in (("train", 6), ("test", 3)):
        for name, colour in (("blue", (0, 0, 250)), ("red", (250, 0, 0))):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(number):
                suffix = ("png", "jpg", "JPEG")[index % 3]
                image = Image.new("RGB", (16, 16), tuple(max(c - index, 0) for c in colour))
                image.save(tmp_path / split / name / f"{index}.{suffix}")
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".hidden").mkdir()
    return tmp_path


def test_imagefolder_reads_classes_and_colours(folder):
    parts = [load("imagefolder", data_dir=str(folder), rank=rank, size=4) for rank in range(4)]
    assert all(is_valid(part) for part in parts)
    assert (parts[0].num_classes, parts[0].train_total, parts[0].pad) == (2, 12, 2)
    assert parts[0].class_names == ("blue", "red")
    for part in parts:
        for shard in (part.train, part.test):
            for image, label in zip(shard.images, shard.labels, strict=True):
                assert image.float().mean((1, 2)).argmax() == (2, 0)[int(label)]


def test_each_rank_decodes_its_own_files_only(folder, monkeypatch):
    spy = Mock(side_effect=image_files.as_uint8)
    monkeypatch.setattr(image_files, "as_uint8", spy)
    for rank in range(3):
        load("imagefolder", data_dir=str(folder), rank=rank, size=3)
        assert spy.call_count == 6 * (rank + 1)
    assert len({call.args[0] for call in spy.call_args_list}) == 18


def test_a_start_line_tells_what_was_found_and_what_was_left_out(folder):
    (folder / "train/red/notes.txt").unlink()
    whole = load("imagefolder", data_dir=str(folder))
    assert whole.found == f"12 images in {folder}/train, 6 images in {folder}/test, 2 classes"
    assert whole.left_out == ""
    for name in ("train/green", "test/red/deeper", "train/blue/deeper"):
        (folder / name).mkdir()
    Image.new("RGB", (16, 16)).save(folder / "test/red/deeper/1.png")
    for name in ("train/list.csv", "train/red/a.gif", "train/red/b.npy", "train/red/.hidden"):
        (folder / name).write_text("")
    again = load("imagefolder", data_dir=str(folder))
    assert again.found == whole.found
    assert again.left_out == (
        "train/list.csv, train/blue/deeper, train/green and 2 more; test/red/deeper"
    )
    assert torch.equal(again.train.images, whole.train.images)


@pytest.mark.parametrize("name", ["imagefolder", "webdataset"])
def test_what_another_rank_has_read_is_not_read_again(tmp_path, monkeypatch, name):
    folder = write_folder(tmp_path / "images", train=6, test=2)
    if name == "webdataset":
        folder = write_tars(tmp_path / "tars", folder)
    request = Request(dataset=name, data_dir=str(folder))
    shares = [dict(image_files.read_share(request, rank, 3)) for rank in range(3)]
    known = json.loads(json.dumps(shares[0] | shares[1] | shares[2]))
    assert len(known) == sum(map(len, shares)) == len([*folder.glob("*/[!.]*")])
    alone = data.load(request, Part(0, 1))
    spy = Mock(side_effect=image_files.read_names)
    monkeypatch.setattr(image_files, "read_names", spy)
    monkeypatch.setattr(image_files, "read_headers", None)
    same = data.load(request, Part(0, 1, known=known))
    # The folders in which class folders are.
    assert spy.call_count == (2 if name == "imagefolder" else 0)
    assert (same.digest, same.found, same.left_out) == (alone.digest, alone.found, alone.left_out)
    assert torch.equal(same.train.images, alone.train.images)


def test_images_that_ranks_cannot_share_are_told_of():
    part = load("synthetic", train_samples=135, image_size=8, size=2)
    assert part.train_total == 134
    assert part.left_out == "1 of 135 training images, as 2 ranks get equally many"
    assert not load("synthetic", train_samples=134, image_size=8, size=2).left_out


def test_imagefolder_takes_val_for_test_and_grey_images(folder):
    (folder / "test").rename(folder / "val")
    for file in (folder / "val").glob("*/*.png"):
        Image.new("L", (16, 16), 77).save(file)
    part = load("imagefolder", data_dir=str(folder))
    assert (part.test.images == 77).flatten(1).all(1).sum() == 2
    assert part.found == (
        f"12 images in {folder}/train, 6 images in {folder}/val, 2 classes, "
        "the test set is val/, as there is no test/"
    )


def test_imagefolder_crops_the_centre_on_request(folder):
    stripes = np.zeros((20, 60, 3), np.uint8)
    stripes[:, 15:45] = 200
    for file in (folder / "train").glob("*/*.png"):
        Image.fromarray(stripes).save(file)
    assert "is 60x20" in refuse("imagefolder", UNREADABLE, data_dir=str(folder))
    part = load("imagefolder", data_dir=str(folder), image_size=10)
    assert part.train.images.shape == (12, 3, 10, 10)
    assert (part.train.images == 200).flatten(1).all(1).sum() == 4


def test_the_same_share_of_each_class_is_held_out_in_the_order_there_was():
    labels = torch.tensor([0] * 20 + [1] * 10 + [2] * 1)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3))
    kept, held = hold_out(order, labels, 0.2)
    assert labels[held].bincount().tolist() == [4, 2]
    assert labels[kept].bincount().tolist() == [16, 8, 1]
    for part in (kept, held):
        places = [order.tolist().index(i) for i in part.tolist()]
        assert places == sorted(places)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(31))
    # Something of each class stays to train on.
    assert labels[hold_out(order, labels, 0.99)[0]].bincount().tolist() == [1, 1, 1]
    # Of small classes some have one to hold out.
    labels = torch.arange(10).repeat(2)
    assert labels[hold_out(torch.arange(20), labels, 0.2)[1]].tolist() == [1, 3, 6, 8]
    # What classes of one image can't give is not taken from others, but for half an image.
    labels = torch.cat([torch.arange(900), torch.full((100,), 900), torch.tensor([950] * 20)])
    held = hold_out(torch.arange(1020), labels, 0.1)[1]
    assert labels[held].bincount().tolist() == [0] * 900 + [10] + [0] * 49 + [2]
    labels = torch.arange(10).repeat(2)
    order = torch.arange(20)
    with pytest.raises(UserError, match=r"val-split 0\.01"):
        hold_out(order, labels, 0.01)


def test_images_to_test_on_are_not_looked_for_where_none_are_wanted(tmp_path):
    write_folder(tmp_path, train=8, test=4)
    ways = {"data_dir": str(tmp_path), "val_split": 0.25}
    with_test = load("imagefolder", **ways)
    shutil.rmtree(tmp_path / "test")
    refuse("imagefolder", UNREADABLE, **ways)
    request = Request(dataset="imagefolder", data_dir=str(tmp_path), test_samples=None)
    known = dict(image_files.read_share(request, 0, 1))
    assert known and not any("test" in Path(path).parts for path in known)
    found = load("imagefolder", **ways, test_samples=None)
    assert (found.test, found.test_total) == (None, 0)
    assert images_of(found.val) == images_of(with_test.val)
    assert images_of(found.train) == images_of(with_test.train)
