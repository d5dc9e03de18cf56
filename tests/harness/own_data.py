"""Data sets as people make them, for tests of `--dataset package.module:factory`."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from prunex_mpi.data.datasets import load
from prunex_mpi.data.request import Part, Request
from prunex_mpi.data.sources import FIXED_SEED


class Own(Dataset):
    """Images and labels in memory; attributes come on top."""

    def __init__(self, images: Any, labels: Any, /, **attributes: Any) -> None:
        self.images, self.own = images, labels
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.own[index]


def digits_again(data_dir: str, train: bool) -> Own:
    """The images of `--dataset digits`, as grey pictures in its order."""
    whole = load(Request(dataset="digits"), Part(0, 1))
    # The permutation by the seed, undone.
    half = whole.train if train else whole.test
    seed = 0 if train else FIXED_SEED
    order = np.argsort(np.random.default_rng(seed).permutation(len(half.labels)))
    grey = half.images[torch.from_numpy(order), 0].numpy()
    labels = half.labels[torch.from_numpy(order)].tolist()
    names = [str(number) for number in range(10)]
    pictures = [Image.fromarray(image) for image in grey]
    return Own(pictures, labels, targets=labels, classes=names, flip=False)


def tensors(data_dir: str, train: bool) -> TensorDataset:
    """Grey images [1, 8, 8] and labels, nothing else: labels are in the items alone."""
    from sklearn.datasets import load_digits  # takes a second or two

    drawn = load_digits()
    chosen = slice(100) if train else slice(100, 140)
    images = torch.from_numpy(drawn.images[chosen] * 15).to(torch.uint8)[:, None]
    return TensorDataset(images, torch.from_numpy(drawn.target[chosen]))


def from_files(data_dir: str, train: bool) -> Own:
    """Class folders, opened when an item is asked for, as torchvision's ImageFolder does."""

    class Pictures(Own):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return Image.open(self.images[index]), self.own[index]

    paths = sorted((Path(data_dir) / ("train" if train else "test")).glob("*/*"))
    names = sorted({path.parent.name for path in paths})
    labels = [names.index(path.parent.name) for path in paths]
    return Pictures(paths, labels, targets=torch.tensor(labels), classes=names)


# --------------------------------------------------------------------------------------------------
# Bad ones
# --------------------------------------------------------------------------------------------------


def _few(**attributes: Any) -> Own:
    images = [np.full((3, 8, 8), 20 * number, dtype=np.uint8) for number in range(6)]
    return Own(images, [0, 1, 2, 0, 1, 2], **attributes)


def _always(data: Any) -> Callable[[str, bool], Any]:
    """Return a function that makes the same of both halves."""
    return lambda data_dir, train: data


nothing = _always(None)
no_items = _always({1, 2, 3})
no_pairs = _always([{"image": 1, "label": 2}] * 6)
three_values = _always([(1, 2, 3)] * 6)
labels_of_text = _always([(image, "cat") for image in _few().images])
labels_of_floats = _always([(image, torch.tensor(1.0)) for image in _few().images])
labels_of_vectors = _always([(image, torch.tensor([1])) for image in _few().images])
negative = _always(_few(targets=[0, 1, 2, 0, -1, 2]))
negative_items = _always([(image, -1) for image in _few().images])
few_classes = _always(_few(classes=["ant", "bee"]))
floats = _always([(torch.zeros(3, 8, 8), 1)] * 6)
colours_last = _always([(np.zeros((8, 8, 3), dtype=np.uint8), 1)] * 6)
no_image = _always([("path.png", 1)] * 6)
false_targets = _always(_few(targets=[0, 1, 2, 0, 2, 2]))


def _on_rank_1() -> bool:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    return next((os.environ[n] for n in names if n in os.environ), "0") == "1"


def raising(data_dir: str, train: bool) -> Own:
    raise FileNotFoundError(2, "No such file", f"{data_dir}/index\n.csv")


def raising_on_rank_1(data_dir: str, train: bool) -> Own:
    if _on_rank_1():
        raise ValueError("no luck")
    return _few(targets=[0, 1, 2, 0, 1, 2])


def shorter_on_rank_1(data_dir: str, train: bool) -> Own:
    data = _few()
    if _on_rank_1():
        data.images.pop()
    return data


def other_labels_on_rank_1(data_dir: str, train: bool) -> Own:
    data = _few()
    if _on_rank_1():
        data.own.reverse()
    return data


def without_parameters() -> Own:
    return _few()


def iterable(data_dir: str, train: bool) -> IterableDataset:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

        def __len__(self) -> int:
            return 6

    return Stream()


def empty(data_dir: str, train: bool) -> list:
    return [] if not train else _few()


def more_in_test(data_dir: str, train: bool) -> Own:
    return _few(targets=[0, 1, 2, 0, 1, 2 if train else 3])


def other_classes(data_dir: str, train: bool) -> Own:
    return _few(classes=["ant", "bee", "cat"] if train else ["ant", "cat", "dog"])


def sizes(data_dir: str, train: bool) -> Own:
    data = _few()
    data.images[4] = np.zeros((3, 8, 9), dtype=np.uint8)
    return data


def broken_classes(data_dir: str, train: bool) -> Own:
    class Broken(Own):
        @property
        def classes(self) -> list[str]:
            raise KeyError("ant")

    return Broken(_few().images, _few().own)


def damaged(data_dir: str, train: bool) -> Own:
    """Item 4 raises."""

    class Damaged(Own):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            if index == 4:
                raise RuntimeError("broken\non purpose")
            return super().__getitem__(index)

    few = _few()
    return Damaged(few.images, few.own, targets=few.own)
