"""Images that are decoded while training: the same as in memory, ahead, bounded, and damaged."""

import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from image_folders import damage, write_folder
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data import datasets as data
from prunex_mpi.data import image_files
from prunex_mpi.data.batches import (
    BatchStream,
    ImageFormat,
    channel_moments,
    evaluation_batches,
    part_of,
)
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.decoding import PREFETCHED, Streamed
from prunex_mpi.data.request import Part, Request

LOOK = ImageFormat(torch.zeros(3), torch.ones(3), "cpu")
STEPS = 11


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def load(folder: Path, mode: str, threads: int = 2, rank: int = 0, **ways: object) -> Dataset:
    request = Request(dataset="imagefolder", data_dir=str(folder), data_mode=mode, seed=3, **ways)
    return data.load(request, Part(rank, 2, threads=threads))


def stream_of(dataset: Dataset, batch_size: int = 8) -> BatchStream:
    ways = {"batch_size": batch_size, "seed": 1, "rank": 0, "flip": True, "pad": 1}
    return BatchStream(dataset.train, LOOK, **ways)


def batches(stream: BatchStream, count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    return [stream.next() for _ in range(count)]


def same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_stream_gives_what_memory_gives(folder, workers):
    kept, streamed = load(folder, "memory"), load(folder, "stream", workers)
    assert isinstance(kept.train.images, Tensor)
    assert isinstance(streamed.train.images, Streamed)
    assert streamed.train.images.shape == kept.train.images.shape
    assert streamed.train.images.dtype == kept.train.images.dtype
    # More than three epochs of three batches, each of another order.
    assert same(batches(stream_of(kept)), batches(stream_of(streamed)))
    for most in (len(kept.train), 7):
        moments = (channel_moments(part.train, most) for part in (kept, streamed))
        assert torch.equal(*moments)
    for split in ("train", "test"):
        first, second = (
            list(evaluation_batches(getattr(part, split), batch_size=4, look=LOOK))
            for part in (kept, streamed)
        )
        assert same(first, second)
    some = torch.tensor([5, 0, 5])
    assert torch.equal(kept.train.images[some], streamed.train.images[some])
    halves = (part_of(part.train, slice(3, None)) for part in (kept, streamed))
    first, second = (list(evaluation_batches(half, batch_size=4, look=LOOK)) for half in halves)
    assert same(first, second)
    assert streamed.reader.error is None


def test_a_stream_goes_on_wherever_its_position_is_put(folder):
    whole = batches(stream_of(load(folder, "memory")))
    stream = stream_of(load(folder, "stream"))
    first = batches(stream, 4)
    places = stream.epoch, stream.position, stream.order, stream.generator.get_state()
    batches(stream, 3)
    other = stream_of(load(folder, "stream"))
    for to_go_on in (stream, other):
        to_go_on.epoch, to_go_on.position, to_go_on.order = places[:3]
        to_go_on.generator.set_state(places[3])
        assert same(first + batches(to_go_on, STEPS - 4), whole)
    reshuffled = stream_of(load(folder, "memory"))
    for shuffled in (stream, reshuffled):
        shuffled.reshuffle([9, 9])
    assert same(batches(stream), batches(reshuffled))


def test_a_rank_reads_its_own_files_and_no_more_than_it_soon_needs(folder, monkeypatch):
    spy = Mock(side_effect=image_files.as_uint8)
    monkeypatch.setattr(image_files, "as_uint8", spy)
    read = []
    for rank in range(2):
        dataset = load(folder, "stream", rank=rank)
        assert spy.call_count == 0
        stream = stream_of(dataset, batch_size=2)
        for step in range(1, 6):
            stream.next()
            assert spy.call_count <= 2 * (step + PREFETCHED)
        dataset.reader.pool.shutdown()
        assert spy.call_count == 2 * (5 + PREFETCHED)
        read.append({call.args[0] for call in spy.call_args_list})
        own = {dataset.train.images.files.name(i) for i in dataset.train.images.places.tolist()}
        assert read[rank] <= own
        spy.reset_mock()
    assert not read[0] & read[1]


def test_a_damaged_image_is_told_when_its_batch_is_due(folder):
    with pytest.raises(UserError) as caught:
        dataset = load(folder, "stream")
        order = stream_of(dataset).order
        # In the third batch, which is under way when the first is taken.
        images = dataset.train.images
        victim = damage(Path(images.files.name(int(images.places[order[17]]))))
        stream = stream_of(dataset)
        batches(stream, 2)
        assert dataset.reader.error is None
        images, _ = stream.next()
        assert images[1].abs().max() == 0
        dataset.reader.raise_error()
    assert victim in str(caught.value)
    assert caught.value.exit_code == UNREADABLE
    with pytest.raises(UserError, match=Path(victim).name):
        load(folder, "memory")


def test_auto_streams_what_memory_cannot_hold(folder, caplog, monkeypatch):
    assert isinstance(load(folder, "auto").train.images, Tensor)

    def refuse(*_: object) -> None:
        raise UserError("too large; take less")

    monkeypatch.setattr(data, "_refuse_too_large", refuse)
    monkeypatch.setattr(logging.getLogger("prunex_mpi"), "propagate", True)
    caplog.set_level(logging.INFO)
    assert isinstance(load(folder, "auto").train.images, Streamed)
    assert caplog.messages == ["images are decoded while training: too large"]
    with pytest.raises(UserError, match="too large"):
        load(folder, "memory")


@pytest.mark.parametrize("mode", ["auto", "memory"])
@pytest.mark.parametrize("where", ["machine", "gpu"])
def test_auto_leaves_room_for_the_job(folder, monkeypatch, where, mode):
    """A rank's images may take a part of a limit, and all of it where memory is asked for."""
    share = 0.8 if where == "machine" else 0.4
    needed = 37 * 3 * 8**2 + 8 * 75 if where == "machine" else 30 * 3 * 8**2

    def is_streamed(limit: float) -> bool:
        if where == "machine":
            monkeypatch.setattr(data, "memory_limit", lambda: (int(limit), "this machine has"))
        part = Part(0, 2, room=int(limit) if where == "gpu" else None)
        ways = {"data_dir": str(folder), "data_mode": mode, "seed": 3}
        images = data.load(Request(dataset="imagefolder", **ways), part).train.images
        return isinstance(images, Streamed)

    assert not is_streamed(needed / (share - 0.01))
    if mode == "auto":
        assert is_streamed(needed / (share + 0.01))
    else:
        assert not is_streamed(needed)
        with pytest.raises(UserError, match="lower --train-samples"):
            is_streamed(needed - 1)


def test_what_is_no_file_is_streamed_as_well():
    sizes = {"train_samples": 8, "test_samples": 8, "image_size": 9}
    for name in ("synthetic", "digits"):
        kept, streamed = (
            data.load(Request(dataset=name, data_mode=mode, **sizes), Part(0, 1))
            for mode in ("memory", "stream")
        )
        assert isinstance(kept.train.images, Tensor)
        assert torch.equal(streamed.train.images[:], kept.train.images)
