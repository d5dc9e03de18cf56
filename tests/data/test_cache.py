"""Decoded images on a disk: found again, made anew where anything has changed."""

import os
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from picture_files import add, damage, write_folder
from PIL import Image

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.data import cache, sources
from prunex_mpi.data import datasets as data
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.reading import Access

COUNT = 3 * (6 + 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures", train=6, test=2)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return what was decoded since the last call."""
    spy = Mock(side_effect=sources.as_uint8)
    monkeypatch.setattr(sources, "as_uint8", spy)

    def names() -> list[str]:
        found = [str(call.args[0]) for call in spy.call_args_list]
        spy.reset_mock()
        return found

    return names


def load(folder: Path, mode: str = "memory", size: int = 0, **access: object) -> Dataset:
    return data.load(
        "imagefolder",
        data_dir=str(folder),
        access=Access(mode=mode, workers=2, **access),
        train_samples=0,
        test_samples=0,
        image_size=size,
        seed=3,
        part=(0, 1),
    )


def same(first: Dataset, second: Dataset) -> bool:
    pairs = ((first.train, second.train), (first.test, second.test))
    return all(torch.equal(a.images[:], b.images[:]) for a, b in pairs)


def test_what_was_decoded_once_is_found_in_both_modes(
    folder: Path, tmp_path: Path, decoded: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several records in a file, several files.
    monkeypatch.setattr(cache, "FILE_BYTES", 5 * (16 + 3 * 64))
    plain = load(folder)
    assert len(decoded()) == COUNT
    for number, mode in enumerate(("stream", "memory", "stream")):
        kept = load(folder, mode, cache=str(tmp_path / "kept"))
        assert same(plain, kept)
        assert len(decoded()) == (0 if number else COUNT)
        assert same(plain, kept)
        assert decoded() == []
    assert len(list((tmp_path / "kept").glob("*/*.u8"))) == 4 + 2
    # Of another size, elsewhere.
    assert same(load(folder, size=4), load(folder, size=4, cache=str(tmp_path / "kept")))
    assert len(decoded()) == 2 * COUNT


def test_only_so_many_files_are_open_at_a_time(
    folder: Path, tmp_path: Path, decoded: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_files() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
        return sum(link.startswith(str(tmp_path)) and link.endswith(".u8") for link in links)

    # A file for each image.
    monkeypatch.setattr(cache, "FILE_BYTES", 1)
    monkeypatch.setattr(cache, "MOST_OPEN", 3)
    plain = load(folder)
    kept = load(folder, "stream", cache=str(tmp_path / "kept"))
    decoded()
    for expected in (COUNT, 0, 0):
        assert same(plain, kept)
        assert len(decoded()) == expected
        assert open_files() == 6
    assert len(list((tmp_path / "kept").glob("*/*.u8"))) == COUNT


def test_a_file_that_has_changed_is_decoded_again(
    folder: Path, tmp_path: Path, decoded: Callable[[], list[str]]
) -> None:
    kept = str(tmp_path / "kept")
    load(folder, cache=kept)
    changed = folder / "train/bee/002.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(changed)
    decoded()
    assert same(load(folder), load(folder, cache=kept))
    assert decoded().count(str(changed)) == 2
    load(folder, cache=kept)
    assert decoded() == []
    changed.unlink()
    # Every image behind it has another place.
    assert same(load(folder), load(folder, cache=kept))


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_record_that_is_not_whole_is_made_anew(
    folder: Path, tmp_path: Path, decoded: Callable[[], list[str]], harm: str
) -> None:
    kept = str(tmp_path / "kept")
    plain = load(folder, cache=kept)
    decoded()
    for path in tmp_path.glob("kept/*/*.u8"):
        content = bytearray(path.read_bytes())
        # In the pixels of a record.
        content[len(content) // 2 + 50] ^= 1
        path.write_bytes({"cut": content[: len(content) // 2], "flip": content, "empty": b""}[harm])
    assert same(plain, load(folder, cache=kept))
    assert len(decoded()) == {"cut": COUNT // 2, "flip": 2, "empty": COUNT}[harm]
    load(folder, cache=kept)
    assert decoded() == []


def test_damaged_images_are_told_of_and_never_kept(
    folder: Path, tmp_path: Path, decoded: Callable[[], list[str]]
) -> None:
    kept = str(tmp_path / "kept")
    victim = damage(folder / "train/ant/001.jpg")
    for _ in range(2):
        dataset = load(folder, cache=kept, skip_corrupt=True)
        assert dataset.reader.replaced == {victim: str(folder / "train/ant/002.png")}
    with pytest.raises(UserError, match=r"001\.jpg"):
        load(folder, cache=kept)


def test_a_full_disk_is_told_of_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache.log, "propagate", True)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert same(load(folder), load(folder, cache=str(tmp_path / "kept")))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("No space left" in line for line in lines) == 2  # of training and of test images


def test_a_folder_that_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data-cache") as caught:
        load(folder, cache=str(tmp_path / "file/kept"))
    assert caught.value.exit_code == USAGE


def test_projects_that_share_a_cache_get_their_own_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each calls its folder `data`, and its files are as large and as old as the other's."""
    found = []
    for project in ("a", "b"):
        root = tmp_path / project / "data"
        for split in ("train", "test"):
            (root / split / "ant").mkdir(parents=True)
            file = root / split / "ant/1.png"
            Image.new("RGB", (8, 8), {"a": (10, 20, 30), "b": (30, 20, 10)}[project]).save(file)
            os.utime(file, (1, 1))
        monkeypatch.chdir(tmp_path / project)
        found.append(load(Path("data"), "stream", cache=str(tmp_path / "kept")))
        found[-1].train.images[:]
    sizes = {path.stat().st_size for path in tmp_path.glob("*/data/*/*/*.png")}
    assert len(sizes) == 1
    assert [int(part.train.images[:][0, 0, 0, 0]) for part in found] == [10, 30]
    # However the folder is called.
    (tmp_path / "link").symlink_to(tmp_path / "a/data")
    for name in ("link", "b/../a/data"):
        load(tmp_path / name, cache=str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").iterdir())) == 4


def test_a_record_is_compared_with_the_state_of_its_file_each_time(
    folder: Path, tmp_path: Path
) -> None:
    kept, file = str(tmp_path / "kept"), folder / "train/ant/000.png"
    first = load(folder, "stream", cache=kept)
    before = first.train.images[:]
    content, status = file.read_bytes(), file.stat()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(file)
    # Another job writes what the file is for a while.
    assert not torch.equal(load(folder, cache=kept).train.images, before)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(first.train.images[:], before)


def test_pictures_of_a_tar_file_are_told_apart_by_their_place(tmp_path: Path) -> None:
    """A tar file is replaced by one of the same names, size and age."""
    found = []
    for colour, note_at in ((40, 0), (90, 2)):
        members = [("one.ppm", colour), ("one.cls", None)]
        members.insert(note_at, ("note.txt", None))
        for split in ("train", "test"):
            (tmp_path / "t" / split).mkdir(parents=True, exist_ok=True)
            with tarfile.open(tmp_path / "t" / split / "0.tar", "w") as tar:
                for name, value in members:
                    content = BytesIO(b"0")
                    if value is not None:
                        Image.new("RGB", (8, 8), (value,) * 3).save(content, "ppm")
                    add(tar, name, content.getvalue())
            os.utime(tmp_path / "t" / split / "0.tar", (1, 1))
        whole = {"train_samples": 0, "test_samples": 0, "image_size": 0, "seed": 3}
        access = Access(cache=str(tmp_path / "kept"))
        place = {"data_dir": str(tmp_path / "t"), "access": access, "part": (0, 1)}
        found.append(int(data.load("webdataset", **place, **whole).train.images[0, 0, 0, 0]))
    assert found == [40, 90]
