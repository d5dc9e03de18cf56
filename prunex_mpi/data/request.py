"""What is asked for of a data set, and which part of it a rank takes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from prunex_mpi.settings.fields import Settings

# What there may be: samples to train on, and those to test on.
TRAIN, TEST = "train", "test"
# What ranks read for each other, by path, as JSON can hold it: of each class folder the names of
# folders and of files, of each tar file what `read_headers` returns.
Known = Mapping[str, Any]
NOTHING_KNOWN: Known = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which samples of which data set, by the names of the settings; of images and of text.

    Training samples: 0 for all, None for none; test samples likewise, and of None nothing is read.
    `data_mode` is memory, stream, auto, which streams where they are many, or once, which
    streams all that are files.
    """

    dataset: str
    data_dir: str = ""
    download: bool = False
    train_samples: int | None = 0
    test_samples: int | None = 0
    val_split: float = 0.0
    seed: int = 0
    image_size: int = 0
    data_mode: str = "memory"
    workers: int = 0
    tokenizer: str = "bytes"
    context: int = 256

    @classmethod
    def of(cls, settings: Settings) -> "Request":
        """Return what a run asks for."""
        named = {field.name: getattr(settings, field.name) for field in fields(cls)}
        return cls(**named | ({} if settings.test_data else {"test_samples": None}))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the data set that are opened: TRAIN, TEST or both."""
        samples = {TRAIN: self.train_samples, TEST: self.test_samples}
        return tuple(part for part, wanted in samples.items() if wanted is not None)


class Classes(NamedTuple):
    """Those that a network knows: how many, and their names, () where they are numbers."""

    count: int
    names: tuple[str, ...]


class Part(NamedTuple):
    """Which part of the data a rank takes: number `rank` of `size`.

    `here` ranks share the memory of this machine. So many `threads` decode. `known` is what other
    ranks have read of class folders or tar files. A network that is only tested has its `classes`
    numbered already.
    """

    rank: int
    size: int
    here: int = 1
    threads: int = 1
    known: Known = NOTHING_KNOWN
    classes: Classes | None = None
