"""Read back what a run delivered, and refuse what is not as the run wrote it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import STATE, SUMMARY, TOKENIZER, FileRecord, read_record
from prunex_mpi.base.imports import check_named
from prunex_mpi.config.cli import read_saved
from prunex_mpi.config.resolve import resumed
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.datasets import Dataset, load
from prunex_mpi.data.decoding import Reader, decoding_threads
from prunex_mpi.data.request import Classes, Part, Request
from prunex_mpi.data.sources import FIXED_SEED
from prunex_mpi.data.text import TextSet, Windows, take_windows
from prunex_mpi.data.text_files import BYTES, CHARS, FILE_NAME, Tokenizer, read_text_data
from prunex_mpi.models import standalone
from prunex_mpi.models.build import build_model, describe
from prunex_mpi.models.dummy_input import keeping_draws, seed_all, transient_buffers
from prunex_mpi.models.inputs import Inputs, inputs_from
from prunex_mpi.run.directory import COMPLETE, read_summary
from prunex_mpi.settings.fields import TEXT, Settings

SHOWN_LENGTH = 120


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended well: its masked network, on the CPU in evaluation mode, and test images.

    The test images, where they are files, are decoded by `reader` when they are looked at; of text
    there are windows, and a `tokenizer`.
    `description` is what `standalone.build` takes; `mean` and `std` are float32 [3], of text [0].
    """

    path: Path
    settings: Settings
    summary: dict[str, Any]
    description: dict[str, Any]
    model: nn.Module
    test: Shard | Windows | None
    mean: Tensor
    std: Tensor
    reader: Reader | None
    tokenizer: Tokenizer | None = None

    def check_readable(self) -> None:
        """Raise UserError where a test image could not be read so far."""
        if self.reader is not None:
            self.reader.raise_error()


def read_finished_run(
    path: Path,
    data_dir: str = "",
    with_data: bool = True,
    given: Collection[str] = (),
    whole: bool = True,
) -> FinishedRun:
    """Return the run in the folder `path`; its data may have moved to `data_dir`.

    Only `with_data` are there test images. Of what the run names as package.module:function, only
    what the user has `given` is imported; not `whole`, another function of its module as well.

    Raises UserError (UNREADABLE) for a run that did not end well, damaged files, a model whose
    source has changed, and missing data; UserError (USAGE) for a model that can't be built.
    """
    saved, _ = read_saved(str(path))
    settings = resumed(saved, {"data_dir": data_dir} if data_dir else {})
    if settings.tokenizer not in (BYTES, CHARS) and (path / TOKENIZER).exists():
        settings = replace(settings, tokenizer=str(path / TOKENIZER))
    config = f"{path}/config.toml"
    check_named("model", settings.model, given, config, path, whole)
    if with_data:
        check_named("dataset", settings.dataset, given, config, path)
    summary = read_summary(path)
    go_on = f"go on with it: python -m prunex_mpi.train --resume --run-dir {path}"
    if not summary:
        raise UserError(f"{path} did not end well, it has no {SUMMARY}; {go_on}", UNREADABLE)
    if summary["status"] not in COMPLETE:
        raise UserError(f"{path} is not complete, it was {summary['status']}; {go_on}", UNREADABLE)
    try:
        delivered = summary["delivered"]
        record = FileRecord(delivered["bytes"], delivered["crc32"])
        mean, std = (torch.tensor(delivered[key], dtype=torch.float32) for key in ("mean", "std"))
        inputs = inputs_from(delivered)
    except (KeyError, ValueError):
        raise UserError(
            f"{path / SUMMARY} does not say what was delivered; put back what the run wrote",
            UNREADABLE,
        ) from None
    model = build_model(settings.model, inputs, settings.stem)
    model.eval()
    _resize_(model, delivered.get("layers", {}), settings.model)
    _fill_(model, _read_state(path / STATE, record), settings.model)
    description = describe(settings.model, inputs, settings.stem)
    if moved := standalone.by_how_much(model, description, delivered["probe"]):
        also = ""
        for name in transient_buffers(model)[:1]:
            also = f", or keep {name} in a persistent buffer and train anew"
        raise UserError(
            f"model {settings.model} does not compute what it did in the run (outputs differ by "
            f"{moved}): put its source back as it was{also}",
            UNREADABLE,
        )
    classes = delivered.get("classes", [])
    data = _load_test(settings, inputs, classes) if with_data else None
    return FinishedRun(
        path=path,
        settings=settings,
        summary=summary,
        reader=data.reader if data else None,
        description=description,
        model=model,
        test=data.test if data else None,
        mean=mean,
        std=std,
        tokenizer=data.text.tokenizer if isinstance(data, TextSet) else None,
    )


def _read_state(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Return the tensors of a file that must be, bit for bit, the one that was recorded."""
    restore = "restore the file that the run wrote, or train again"
    try:
        found = read_record(path)
        if found.size != record.size:
            raise UserError(
                f"{path} has {found.size} bytes of {record.size}: {restore}", UNREADABLE
            )
        if found != record:
            raise UserError(f"the checksum of {path} is wrong: {restore}", UNREADABLE)
        return load_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: {restore}", UNREADABLE) from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:SHOWN_LENGTH]
        raise UserError(f"{path} is damaged ({reason}): {restore}", UNREADABLE) from None


def _resize_(model: nn.Module, layers: dict[str, dict[str, int]], name: str) -> None:
    """Give the model the sizes of a network that became smaller while it was trained."""
    try:
        standalone.resize_(model, layers)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model {name} does not take the sizes of the run ({one_line(error)}): put its source "
            f"and {SUMMARY} back as they were",
            UNREADABLE,
        ) from None


def _fill_(model: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Put the run's weights into the model as it is built now, if they are of the same shapes."""

    def shapes(state: dict[str, Tensor]) -> dict[str, str]:
        kinds = {key: str(t.dtype).removeprefix("torch.") for key, t in state.items()}
        return {key: f"{kinds[key]} {list(t.shape)}" for key, t in state.items()}

    now, then = shapes(model.state_dict()), shapes(tensors)
    for key in {**then, **now}:
        if now.get(key) != then.get(key):
            raise UserError(
                f"model {name} is not the one of the run: {key} is {now.get(key, 'not there')} now "
                f"and was {then.get(key, 'not there')}; put its source back as it was",
                UNREADABLE,
            )
    standalone.fill_(model, tensors)


def load_alike(request: Request, part: Part) -> Dataset:
    """Do as `load`; what a function of the user's draws is the same on all ranks, in all jobs."""
    with keeping_draws():
        seed_all(FIXED_SEED)
        return load(request, part)


def _load_test(settings: Settings, inputs: Inputs, classes: Sequence[str]) -> Dataset | TextSet:
    """Return all test images of the run, or its text, and none that it was trained on."""
    alone = {"train_samples": None, "test_samples": settings.test_samples, "val_split": 0.0}
    request = replace(Request.of(settings), **alone, data_mode="once")
    if request.dataset == TEXT:
        return _load_test_text(request, classes)
    known = Classes(inputs.classes, tuple(classes))
    threads = decoding_threads(1, request.workers)
    data = load_alike(request, Part(0, 1, threads=threads, classes=known))
    try:
        found = inputs_from(data.sizes())
    except ValueError as error:
        raise UserError(f"the data of {request.data_dir}: {error}", UNREADABLE) from None
    if found != inputs:
        raise UserError(
            f"the data have {found.text()}, those of the run had {inputs.text()}: give their "
            "folder by --data-dir",
            UNREADABLE,
        )
    return data


def _load_test_text(request: Request, names: Sequence[str]) -> TextSet:
    """Return the windows to test on of the text of a run, whose vocabulary has these names."""
    text = read_text_data(request, known_tokenizer(tuple(names)))
    if list(text.tokenizer.names) != list(names):
        raise UserError(
            f"--tokenizer {request.tokenizer} is not the file any more that the run was trained "
            "with: put it back",
            UNREADABLE,
        )
    return take_windows(text, request, (0, 1))


def known_tokenizer(names: tuple[str, ...]) -> Tokenizer | None:
    """Return the tokenizer that has these `names`; None for a file, which they do not hold."""
    if names == (BYTES,):
        return Tokenizer(BYTES, 256)
    if names and names[0].startswith(FILE_NAME):
        return None
    return Tokenizer(CHARS, len(names), "".join(names))
