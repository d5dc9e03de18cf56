"""Data sets of the user's, which a function that `--dataset` names makes.

They are map-style, as torch and torchvision have them: `len(data)`, and `data[i]` is a pair of an
image and its label. The labels of all images are needed at the start: `data.targets` or
`data.labels` has them, or all items are gone through.
"""

import hashlib
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, log, one_line, quote
from prunex_mpi.base.imports import import_function
from prunex_mpi.data.decoding import MOST_LABEL, Files, load_rgb, to_side
from prunex_mpi.data.request import TEST, Request
from prunex_mpi.data.sources import Source

# Where torchvision's data sets hold the labels of all their items.
OF_LABELS = ("targets", "labels")
IMAGES = "a PIL image, or uint8 [3, H, W] or [1, H, W]"


@dataclass(frozen=True)
class UserSplit:
    """The training or test images of a data set, by the `name` that messages call it."""

    name: str
    data: Any
    labels: Tensor

    def title(self, index: int) -> str:
        """Return what messages call an image."""
        return f"{self.name}[{index}]"

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB; raise UserError (UNREADABLE), also where its label is another."""
        image, label = read_item(self.data, index, self.name)
        known = int(self.labels[index])
        if label != known:
            message = f"image {self.title(index)} has the label {label}, which was {known} at the"
            advice = "its targets or labels must hold what its items have"
            raise UserError(f"{message} start: {advice}", UNREADABLE)
        return to_pil_image(image, self.title(index))

    def files(self, image_size: int, side: int) -> Files:
        """Return the images, cropped and scaled where `image_size` asks for it."""

        def decoded(index: int) -> Tensor:
            return to_side(self.image(index), side, fit=image_size > 0, name=self.title(index))

        return Files(self.labels, side, decoded, self.title)


def find_user_images(request: Request) -> Source:
    """Return the images that a function, package.module:function, makes.

    They are cropped and scaled where that is asked for. Raises UserError: USAGE for what is no such
    function or returns no data set, UNREADABLE for what it raises and what is wrong with items and
    labels.
    """
    name, image_size, with_test = request.dataset, request.image_size, TEST in request.parts
    splits = [_make(name, request.data_dir, train) for train in (True, False)[: 1 + with_test]]
    train, test = splits[0], splits[-1]
    classes, class_names = _classes_of(train, test)
    counts = len(train.labels), len(test.labels) if with_test else 0
    side = image_size or min(train.image(0).size)
    # Other labels or names of classes are another data set.
    digest = hashlib.blake2b("\0".join(class_names).encode(errors="surrogateescape"), digest_size=8)
    for split in splits:
        digest.update(f"{len(split.labels)} ".encode() + split.labels.numpy().tobytes())
    images = f"{counts[0]:,} images to train on and {counts[1]:,} to test on"
    return Source(
        train=train.files(image_size, side),
        test=test.files(image_size, side) if with_test else None,
        num_classes=classes,
        # Mirrored images keep their meaning unless the data set says no.
        flip=_attribute(train.name, train.data, "flip") is not False,
        pad=side // 8,
        found=f"{images} in {name}, {classes:,} classes",
        class_names=class_names,
        digest=digest.hexdigest(),
    )


def _make(name: str, data_dir: str, train: bool) -> UserSplit:
    """Call the function `name` for one split and find its labels. Raises UserError."""
    function = import_function("dataset", name, "to make the data set")
    arguments = {"data_dir": data_dir, "train": train}
    shown = f"data_dir={quote(data_dir, 250)}, train={train}"
    with _told(f"dataset {name} failed with {shown}", "repair it or its data"):
        data = function(**arguments)
    try:
        count = len(data)
        if isinstance(data, IterableDataset) or not hasattr(type(data), "__getitem__"):
            raise TypeError(f"{type(data).__name__} can't be indexed")
    # A length can be the user's code.
    except Exception as error:
        message = f"dataset {name} returned no map-style data set for {shown}"
        advice = "return what has len(data) and data[i]"
        raise UserError(f"{message} ({one_line(error)}): {advice}", USAGE) from None
    if not count:
        message = f"dataset {name} has no image for {shown}"
        raise UserError(f"{message}: give it the right --data-dir, or repair it", UNREADABLE)
    title = f"{name} {'train' if train else 'test'}"
    return UserSplit(title, data, _labels(title, data))


def _labels(name: str, data: Any) -> Tensor:
    """Return the labels of all items, int64 [n]."""
    # What transforms labels on their way out gives others than it holds.
    held = OF_LABELS if _attribute(name, data, "target_transform") is None else ()
    for attribute in held:
        found = _as_labels(_attribute(name, data, attribute), len(data))
        if found is not None:
            break
    else:
        log.info(
            "%s: all %d items are gone through for their labels; with an attribute targets, which "
            "holds these, they need not be",
            name,
            len(data),
        )
        found = torch.empty(len(data), dtype=torch.int64)
        for index in range(len(data)):
            found[index] = read_item(data, index, name)[1]
    odd = torch.nonzero((found < 0) | (found > MOST_LABEL)).flatten()
    if len(odd):
        place = int(odd[0])
        _refuse_label(f"{name}[{place}]", int(found[place]))
    return found


def _as_labels(values: Any, count: int) -> Tensor | None:
    """Return labels as int64 [count] where they are so many whole numbers, else None."""
    if isinstance(values, Tensor):
        values = values.cpu().numpy()
    try:
        if len(values) != count:
            return None
        if not isinstance(values, np.ndarray):
            values = np.array([operator.index(value) for value in values], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        return None
    return torch.from_numpy(values.astype(np.int64))


def _refuse_label(name: str, label: object) -> None:
    message = f"image {name} has the label {quote(label)}"
    raise UserError(f"{message}: labels are whole numbers, from 0 on", UNREADABLE)


def read_item(data: Any, index: int, name: str) -> tuple[Any, int]:
    """Return the image, as it is, and the label of item `index` of a split called `name`.

    Raises UserError (UNREADABLE), its cause what the user's code has raised.
    """
    name = f"{name}[{index}]"
    with _told(f"cannot read image {name}", "repair or remove it"):
        item = data[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        message = f"{name} is {found}, not an image and its label"
        raise UserError(f"{message}: return a pair of these", UNREADABLE)
    image, label = item
    try:
        number = operator.index(label)
        if getattr(label, "ndim", 0):
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        _refuse_label(name, label)
    if not 0 <= number <= MOST_LABEL:
        _refuse_label(name, number)
    return image, number


def to_pil_image(image: Any, name: str) -> Image.Image:
    """Return the image of an item as RGB; raise UserError (UNREADABLE) for what is none."""
    if isinstance(image, Image.Image):
        with _told(f"cannot read image {name}", "repair or remove it"):
            return load_rgb(image, name)
    pixels = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if not isinstance(pixels, np.ndarray):
        found = type(image).__name__
    elif pixels.dtype == np.uint8 and pixels.ndim == 3 and len(pixels) in (1, 3) and pixels.size:
        colours = np.broadcast_to(pixels, (3, *pixels.shape[1:]))
        return Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0)))
    else:
        found = f"{pixels.dtype} {list(pixels.shape)}"
    advice = "leave out transforms that make floats, which images become on the device"
    raise UserError(f"image {name} is {found}, not {IMAGES}: {advice}", UNREADABLE)


def _classes_of(train: UserSplit, test: UserSplit) -> tuple[int, tuple[str, ...]]:
    """Return how many classes there are, and their names, () where they have none.

    Raises UserError (UNREADABLE) where test images have other names of classes than training images
    have, and for labels beyond the names, or beyond those of training images.
    """
    names, others = _names(train), _names(test)
    for label, (name, other) in enumerate(zip(names, others, strict=False)):
        if name != other:
            message = f"class {label} is {name!r} in {train.name} and {other!r} in {test.name}"
            raise UserError(f"{message}: give both the same classes", UNREADABLE)
    count = len(names) or int(train.labels.max()) + 1
    for split in (train, test):
        place = int(split.labels.argmax())
        most = int(split.labels[place])
        if most >= count:
            message = f"image {split.title(place)} has the label {most}, {train.name} {count}"
            raise UserError(f"{message} classes: number all from 0 on, or name all", UNREADABLE)
    return count, names


def _names(split: UserSplit) -> tuple[str, ...]:
    """Return the names of the classes, none where its attribute `classes` is no list of names."""
    names = _attribute(split.name, split.data, "classes")
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    return tuple(names) if listed and all(isinstance(name, str) for name in names) else ()


def _attribute(name: str, data: Any, attribute: str) -> Any:
    """Return an attribute of a data set of the user's, None where it has none."""
    with _told(f"cannot read the attribute {attribute} of {name}", "repair or remove it"):
        return getattr(data, attribute, None)


@contextmanager
def _told(what: str, advice: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a UserError (UNREADABLE) of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} ({one_line(error)}): {advice}", UNREADABLE) from error
