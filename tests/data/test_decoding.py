"""Images that are decoded while training: the same as in memory, ahead, bounded, and damaged."""

import io
import logging
import os
import struct
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from image_folders import damage, write_folder
from PIL import Image
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
from prunex_mpi.data.decoding import FORMATS, PREFETCHED, Streamed, open_rgb, to_rgb, to_side
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


def test_auto_streams_where_the_images_of_a_machine_are_many(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("prunex_mpi"), "propagate", True)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(data, "MOST_IN_MEMORY", 2 * 37 * 3 * 8**2)

    def is_streamed(mode: str, here: int) -> bool:
        request = Request(dataset="imagefolder", data_dir=str(folder), data_mode=mode)
        return isinstance(data.load(request, Part(0, 2, here)).train.images, Streamed)

    assert not is_streamed("auto", here=2) and not is_streamed("memory", here=3)
    assert not caplog.messages
    assert is_streamed("auto", here=3)
    (line,) = caplog.messages
    assert line.startswith("images are decoded while training: those of this machine's ranks take")


def test_what_is_no_file_is_streamed_as_well():
    sizes = {"train_samples": 8, "test_samples": 8, "image_size": 9}
    for name in ("synthetic", "digits"):
        kept, streamed = (
            data.load(Request(dataset=name, data_mode=mode, **sizes), Part(0, 1))
            for mode in ("memory", "stream")
        )
        assert isinstance(kept.train.images, Tensor)
        assert torch.equal(streamed.train.images[:], kept.train.images)


# --------------------------------------------------------------------------------------------------
# Modes and formats
# --------------------------------------------------------------------------------------------------

WHITE, GREY, RED = (255, 255, 255), (128, 128, 128), (255, 0, 0)
HALF_RED = (255, 127, 127)  # half of it, on white


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, WHITE),
        ("L", 128, GREY),
        ("P", 128, GREY),
        ("RGB", RED, RED),
        ("RGBX", (*RED, 0), RED),
        ("CMYK", (0, 255, 255, 0), RED),
        ("YCbCr", (76, 85, 255), (254, 0, 0)),
        ("LAB", (255, 128, 128), WHITE),
        ("HSV", (0, 255, 255), RED),
        ("LA", (0, 127), GREY),
        ("LA", (128, 255), GREY),
        ("La", (0, 127), GREY),
        ("PA", (128, 255), GREY),
        ("PA", (128, 0), WHITE),
        ("RGBA", (*RED, 255), RED),
        ("RGBA", (*RED, 128), HALF_RED),
        ("RGBA", (0, 0, 0, 0), WHITE),
        ("RGBa", (128, 0, 0, 128), HALF_RED),
        ("I;16", 32896, None),
        ("I;16B", 32896, None),
        ("I", 300, None),
        ("F", 0.5, None),
    ],
)
def test_every_mode_becomes_the_colour_that_it_shows_or_is_refused(mode, colour, expected):
    image = Image.new("L" if mode == "P" else mode, (2, 2), colour)
    if mode == "P":
        image = image.convert("P")
    elif mode == "PA":
        image.putpalette(bytes(level for level in range(256) for _ in "RGB"))
    if expected is None:
        with pytest.raises(UserError, match=rf"image x .*mode {mode}.*: convert it") as caught:
            to_rgb(image, "x")
        assert caught.value.exit_code == UNREADABLE
        return
    converted = to_rgb(image, "x")
    assert converted.mode == "RGB"
    found = np.array(converted).reshape(-1, 3).astype(int)
    assert np.abs(found - np.array(expected)).max() <= 1


def test_a_transparent_colour_becomes_white(tmp_path):
    levels = np.array([[0, 128]], np.uint8)
    for kind, image in (
        ("L", Image.fromarray(levels)),
        ("P", Image.fromarray(levels).convert("P")),
    ):
        image.save(tmp_path / "x.png", transparency=0)
        assert Image.open(tmp_path / "x.png").mode == kind
        shown = np.array(open_rgb(str(tmp_path / "x.png")))
        assert shown.tolist() == [[list(WHITE), list(GREY)]]


def other_formats() -> list[str]:
    """Return the formats that Pillow writes and an image file must not have."""
    Image.init()
    own = {*FORMATS, "MPO", "DIB"}  # the latter are written as JPEG and BMP are
    return sorted(Image.SAVE.keys() & Image.OPEN.keys() - own)


@pytest.mark.parametrize("kind", other_formats())
def test_no_other_formats_are_tried_whatever_a_name_says(tmp_path, kind):
    try:
        # Not by name: SPIDER would take the ending of the name for its own from then on.
        Image.new("RGB", (16, 16), RED).save(content := io.BytesIO(), kind)
    except (OSError, ValueError):
        pytest.skip("written in another mode alone, or by a library that is not there")
    (tmp_path / "x.jpg").write_bytes(content.getvalue())
    with pytest.raises(UserError, match="damaged, or none of JPEG, PNG, PPM, BMP, TIFF, WEBP"):
        open_rgb(str(tmp_path / "x.jpg"))


def test_images_of_too_many_pixels_are_refused_before_they_are_decoded():
    header = struct.pack(">IIBBBBB", 8193, 8192, 8, 6, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    # Reading further than the header would show that there is nothing.
    for kind, body in ((b"IHDR", header), (b"IDAT", b"")):
        content += struct.pack(">I", len(body)) + kind + body
        content += struct.pack(">I", zlib.crc32(kind + body))
    with pytest.raises(UserError, match=r"cannot read image x .*8193x8192 pixels") as caught:
        open_rgb(io.BytesIO(content), name="x")
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.parametrize(("side", "advised"), [(8, 8), (64, 64), (260, 224), (200, 224)])
def test_images_of_another_size_are_refused_with_a_size_to_give(side, advised):
    image = Image.new("RGB", (side, side + 1))
    with pytest.raises(UserError, match=f"not {side}x{side}: give --image-size {advised} to"):
        to_side(image, side, fit=False, name="x")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    for name in ("fifo.png", "device.png"):
        with pytest.raises(UserError, match="not a regular file"):
            open_rgb(str(tmp_path / name))
