"""CIFAR: read by torchvision, downloaded once."""

import hashlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.datasets import cifar as torchvisions

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data import datasets as data
from prunex_mpi.data import sources
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.request import Part, Request

WHOLE = Part(0, 1)


def load(data_dir: Path, part: Part = WHOLE, **ways: object) -> Dataset:
    return data.load(Request(**{"dataset": "cifar10", "data_dir": str(data_dir), **ways}), part)


def refuse(data_dir: Path, download: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        load(data_dir, download=download)
    assert caught.value.exit_code == UNREADABLE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fake_cifar(
    monkeypatch: pytest.MonkeyPatch,
    name: str = "cifar10",
    error: Exception | None = None,
    slow: float = 0.2,
) -> list[str]:
    """Put a small CIFAR in the place of the real one; return what counts downloads by folder."""
    classes, labels = (10, "labels") if name == "cifar10" else (100, "fine_labels")
    contents = {"meta": {"names": [f"class {number}" for number in range(classes)]}}
    for file, first, count in (("train_1", 0, 12), ("train_2", 12, 8), ("test", 0, 6)):
        numbers = np.arange(first, first + count, dtype=np.uint8)
        pixels = np.tile(numbers[:, None, None, None], (1, 3, 32, 32))
        pixels[:, :, 0, 1] = (7, 8, 9)
        targets = [int(number) % 10 for number in numbers]
        contents[file] = {"data": pixels.reshape(count, 3072), labels: targets}
    contents = {file: pickle.dumps(content) for file, content in contents.items()}
    sums = {file: hashlib.md5(content).hexdigest() for file, content in contents.items()}
    facts = {
        **{"filename": "archive", "base_folder": "files"},
        "train_list": [[file, sums[file]] for file in ("train_1", "train_2")],
        "test_list": [["test", sums["test"]]],
        "meta": {"filename": "meta", "key": "names", "md5": sums["meta"]},
    }
    downloads: list[str] = []

    def download(url: str, root: str, filename: str, md5: str) -> None:
        if error is not None:
            raise error
        downloads.append(str(root))
        for _ in range(5):
            with open(Path(root) / filename, "a") as archive:
                archive.write("more")
            time.sleep(slow / 5)  # long enough for the others to arrive
        (Path(root) / "files").mkdir()
        for file, content in contents.items():
            (Path(root) / "files" / file).write_bytes(content)

    monkeypatch.setattr(sources, name.upper(), type("Small", (CIFAR10,), facts))
    monkeypatch.setattr(torchvisions, "download_and_extract_archive", download)
    return downloads


def test_files_that_were_not_published_are_not_read(tmp_path, monkeypatch):
    fake_cifar(monkeypatch, slow=0)
    load(tmp_path, download=True)
    assert load(tmp_path).test_total == 6
    # Those to test on are not opened where none are wanted.
    (tmp_path / "files/test").write_bytes(b"cos\nsystem\n(U\4true\x85R.")
    assert "no complete cifar10" in refuse(tmp_path)
    assert load(tmp_path, test_samples=None).train_total == 20


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_downloaded_once_by_whoever_comes_first(tmp_path, monkeypatch, name, classes):
    downloads = fake_cifar(monkeypatch, name)

    def context(rank: int) -> Dataset:
        return load(tmp_path / "new", Part(rank, 3), dataset=name, download=True)

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(context, range(3)))
    assert len(downloads) == 1
    for part in parts:
        for shard, count in ((part.train, 6), (part.test, 2)):
            assert shard.images.shape == (count, 3, 32, 32) and shard.images.dtype == torch.uint8
            assert shard.labels.shape == (count,) and int(shard.labels.max()) < 10
        assert part.num_classes == classes
    images = torch.cat([part.train.images for part in parts])
    assert len(images.flatten(1).unique(dim=0)) == 18
    assert (parts[0].flip, parts[0].pad, parts[0].image_size) == (True, 4, 32)
    # Height, width and channel must end where they belong.
    assert parts[0].train.images[0, :, 0, 1].tolist() == [7, 8, 9]
    assert int(parts[0].train.images[0, 0, 5, 5]) % 10 == int(parts[0].train.labels[0])


def test_missing_cifar_names_the_folder_and_the_flag(tmp_path):
    said = refuse(tmp_path)
    assert f"{tmp_path}: correct --data-dir, or train with --download" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("no\nroute"), RuntimeError("corrupted"), None])
def test_failed_download_is_one_line(tmp_path, monkeypatch, error):
    fake_cifar(monkeypatch, error=error)
    folder = tmp_path / "data"
    if error is None:
        folder.write_text("a file where a folder should be")
    assert "network" in refuse(folder, download=True)
