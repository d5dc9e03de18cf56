"""Pictures of all modes become 8-bit RGB rightly, or are refused."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data.images import FORMATS, open_rgb, to_rgb, to_side

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


def test_refused_files_are_named_in_one_line(tmp_path):
    Image.new("F", (2, 2), 0.5).save(tmp_path / "f.tif")
    Image.new("I", (2, 2), 70000).save(tmp_path / "i.tif")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for file in tmp_path.iterdir():
        with pytest.raises(UserError) as caught:
            open_rgb(str(file))
        assert caught.value.exit_code == UNREADABLE
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
