"""Class folders and tar files: the same images in both, and what is wrong with them by name."""

import os
import shutil
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from image_folders import CLASSES, add, write_folder, write_tars
from PIL import Image

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data import datasets as data
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.image_files import read_share
from prunex_mpi.data.request import NOTHING_KNOWN, Classes, Known, Part, Request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", train=6, test=2)


@pytest.fixture
def shards(tmp_path: Path, folder: Path) -> Path:
    return write_tars(tmp_path / "tars", folder)


def load(
    name: str, folder: Path, size: int = 0, known: Known = NOTHING_KNOWN, **ways: object
) -> Dataset:
    request = Request(dataset=name, data_dir=str(folder), image_size=size, seed=3, **ways)
    return data.load(request, Part(1, 2, threads=2, known=known))


def load_test(name: str, folder: Path, names: tuple[str, ...], count: int = 3) -> Dataset:
    """Load what a network that knows these classes is tested on."""
    request = Request(dataset=name, data_dir=str(folder), train_samples=None)
    return data.load(request, Part(0, 1, classes=Classes(count, names)))


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_tar_files_hold_what_folders_hold(folder, shards, mode, size):
    plain = load("imagefolder", folder, size)
    packed = load("webdataset", shards, size, data_mode=mode)
    assert (packed.num_classes, packed.image_size) == (3, size or 8)
    for one, other in ((plain.train, packed.train), (plain.test, packed.test)):
        assert torch.equal(one.images[:], other.images[:])
        assert torch.equal(one.labels, other.labels)
    assert packed.found == (
        f"18 images in 3 tar files in {shards}/train, 6 images in 1 tar file in {shards}/test, "
        "3 classes"
    )


def test_a_damaged_image_is_named(folder, shards):
    path = shards / "train/0000.tar"
    with tarfile.open(path) as tar:
        start = tar.getmember("ant_001.jpg").offset_data
    content = bytearray(path.read_bytes())
    content[start : start + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        for rank in range(2):
            data.load(Request(dataset="webdataset", data_dir=str(shards), seed=3), Part(rank, 2))
    assert f"cannot read image {path}:ant_001.jpg" in str(caught.value)


def flip_header(path: Path) -> None:
    with tarfile.open(path) as tar:
        start = tar.getmembers()[4].offset
    content = bytearray(path.read_bytes())
    content[start + 3] ^= 1
    path.write_bytes(content)


def cut_behind_a_member(path: Path) -> None:
    with tarfile.open(path) as tar:
        start = tar.getmembers()[4].offset
    path.write_bytes(path.read_bytes()[:start])


def append(name: str, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with tarfile.open(path, "a") as tar:
            add(tar, name, content)

    return change


def append_header(kind: bytes = tarfile.REGTYPE, size: int = 0) -> Callable[[Path], None]:
    """Return what adds a header that is formally right, with nothing behind it."""
    member = tarfile.TarInfo("odd")
    member.type = kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]

    def change(path: Path) -> None:
        with tarfile.open(path, "a") as tar:
            tar.fileobj.write(header)
            tar.offset = tar.fileobj.tell()

    return change


def append_size_in_a_record(path: Path) -> None:
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("odd.jpg")
        member.pax_headers = {"size": "-512"}
        tar.fileobj.write(member.tobuf(tarfile.PAX_FORMAT))
        tar.offset = tar.fileobj.tell()


def append_tar(between: bytes) -> Callable[[Path], None]:
    """Return what joins a tar file to another one, as `cat` does."""
    return lambda path: path.write_bytes(path.read_bytes() + between + path.read_bytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip_header, "no header at byte"),
        (cut_behind_a_member, "no block of zeros ends it"),
        (lambda path: path.write_bytes(path.read_bytes()[:3000]), "end of data"),
        (lambda path: path.write_bytes(b"no tar file at all" * 100), "cannot read tar file"),
        (append("alone.jpg", b"x"), "alone in {path} lacks a class (.cls)"),
        (append("alone.cls", b"1"), "alone in {path} lacks an image"),
        (append("odd.cls", b"one"), "invalid literal"),
        (append("odd.cls", b"-1"), "the class of odd is not in 0..2147483647"),
        (append("odd.cls", b"2147483648"), "the class of odd is not in 0..2147483647"),
        (append("odd.cls", b"0" * 33), "the class of odd has 33 bytes"),
        # Refused by newer versions of Python alone.
        (append_header(size=-512), "cannot read tar file"),
        (append_header(size=-1), "cannot read tar file"),
        (append_header(tarfile.GNUTYPE_SPARSE), "is sparse, or has"),
        (append_size_in_a_record, "cannot read tar file"),
        (append_tar(b""), "ends at byte {end:,} and goes on at {length:,}: keep tar files"),
        (append_tar(bytes(2**22)), "and goes on at"),
        (append("ant_001.png", b"x"), "ant_001 has two images"),
        (append("new.1.jpg", b"x"), "new.1.jpg has a dot in its key: rename it"),
        (append("ant_001.seg.PNG", b"x"), "ant_001.seg.PNG has a dot in its key"),
    ],
)
def test_what_is_wrong_with_a_tar_file_is_said(shards, change, words):
    path = shards / "train/0000.tar"
    with tarfile.open(path) as tar:
        tar.getmembers()
        places = {"path": path, "end": tar.offset, "length": path.stat().st_size}
    change(path)
    with pytest.raises(UserError) as caught:
        load("webdataset", shards)
    assert words.format(**places) in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == UNREADABLE


def test_a_fifo_named_tar_is_not_waited_for(shards):
    os.mkfifo(shards / "train/0003.tar")
    with pytest.raises(UserError, match=r"cannot read tar file .*not a regular file"):
        load("webdataset", shards)


def test_folders_without_tar_files_are_refused(shards, folder):
    with pytest.raises(UserError, match=r"no image in .*/train/\*\.tar"):
        load("webdataset", folder)
    append("new.jpg", (folder / "test/ant/001.jpg").read_bytes())(shards / "test/0000.tar")
    append("new.cls", str(len(CLASSES)).encode())(shards / "test/0000.tar")
    with pytest.raises(UserError, match=r"class 3 of .*/test has no image in"):
        load("webdataset", shards)


@pytest.mark.parametrize("name", ["imagefolder", "webdataset"])
def test_a_network_is_tested_where_there_is_nothing_to_train_on(folder, shards, name):
    place = folder if name == "imagefolder" else shards
    before = load(name, place).test
    shutil.rmtree(place / "train")
    with pytest.raises(UserError, match=r"no image in .*/train"):
        load(name, place)
    found = load_test(name, place, CLASSES)
    assert torch.equal(found.test.images[:][1::2], before.images[:])
    assert torch.equal(found.test.labels[1::2], before.labels)
    assert (found.num_classes, found.train_total, len(found.train.labels)) == (3, 0, 0)


def test_classes_to_test_on_go_by_the_names_that_a_network_knows(folder, shards):
    shutil.rmtree(folder / "test/bee")
    found = load_test("imagefolder", folder, ("cat", "bee", "ant"))
    assert (found.num_classes, found.class_names) == (3, ("cat", "bee", "ant"))
    assert sorted(found.test.labels.tolist()) == [0, 0, 2, 2]
    with pytest.raises(UserError, match=r"class 'cat' of .*/test is none that the network knows"):
        load_test("imagefolder", folder, ("ant", "bee", "dog"))
    # Without names only as many folders as classes can be those of the network.
    assert load_test("imagefolder", folder, (), 3).num_classes == 2
    assert load_test("webdataset", shards, (), 7).num_classes == 7
    assert load_test("webdataset", shards, (), 2).num_classes == 3


def test_a_class_of_test_images_alone_is_refused_whatever_its_number(tmp_path):
    image = BytesIO()
    Image.new("RGB", (8, 8)).save(image, "png")
    for split, labels in (("train", (0, 2)), ("test", (0, 1, 2))):
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "0.tar", "w") as tar:
            for label in labels:
                for copy in range(2):
                    add(tar, f"{label}{copy}.png", image.getvalue())
                    add(tar, f"{label}{copy}.cls", str(label).encode())
    with pytest.raises(UserError, match=r"class 1 of .*/test has no image in"):
        load("webdataset", tmp_path)
    (tmp_path / "test/0.tar").write_bytes((tmp_path / "train/0.tar").read_bytes())
    assert load("webdataset", tmp_path).num_classes == 3


def test_numbers_of_classes_that_are_out_of_all_proportion_are_refused(shards):
    image = BytesIO()
    Image.new("RGB", (8, 8)).save(image, "png")
    for split in ("train", "test"):
        append("new.png", image.getvalue())(shards / split / "0000.tar")
        append("new.cls", b"2147483647")(shards / split / "0000.tar")
    with pytest.raises(UserError, match=r"classes up to 2,147,483,647, and there are 19 to train"):
        load("webdataset", shards)


def test_other_images_or_classes_are_told_apart_and_another_place_is_not(tmp_path):
    first, copy = (write_folder(tmp_path / name, 3, 1) for name in ("first", "copy"))
    packed = [write_tars(tmp_path / name, folder) for name, folder in (("a", first), ("b", copy))]
    kinds = ("imagefolder", first, copy), ("webdataset", *packed)
    for name, here, there in kinds:
        assert load(name, here).digest == load(name, there).digest != ""
    before = load("imagefolder", first).digest
    for split in ("train", "test"):
        (first / split / "cat").rename(first / split / "dog")
    assert load("imagefolder", first).digest != before
    (copy / "train/ant/000.png").rename(copy / "train/ant/100.png")
    assert load("imagefolder", copy).digest != before
    other = write_tars(tmp_path / "c", copy)
    assert load("webdataset", other).digest != load("webdataset", packed[0]).digest


def test_a_tar_file_that_has_changed_since_it_was_listed_is_told_of(shards):
    known = dict(read_share(Request(dataset="webdataset", data_dir=str(shards)), 0, 1))
    for path in known:
        Path(path).write_bytes(bytes(Path(path).stat().st_size))
    load("webdataset", shards, 8, known=known, data_mode="once")
    with pytest.raises(UserError, match="the file is not as it was listed"):
        load("webdataset", shards, 8, known=known)
