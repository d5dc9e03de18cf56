"""Decode image files into 8-bit RGB, or refuse what has no right conversion.

What happens to each mode of Pillow:

| mode | what it is | becomes |
|---|---|---|
| 1, L, P, RGB, RGBX | black and white, grey, palette, colours | RGB, exactly |
| CMYK, YCbCr, LAB, HSV | other colours | RGB by Pillow's formulas, without colour profiles |
| LA, La, PA, RGBA, RGBa | with transparency | laid on white, as browsers show them |
| 1, L, P, RGB with a transparent colour | | laid on white |
| I, I;16, F | grey of more than 8 bits | refused: files differ in what is white |

Of several frames the first is taken; the orientation in EXIF is left alone, as torchvision does.
"""

from contextlib import nullcontext
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import open_regular

# No others are tried, whatever the name of a file says: Pillow would hand EPS to Ghostscript.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# Decoding takes 4 to 12 bytes for each. A small file can claim to have many.
MOST_PIXELS = 2**26
# Photographs of several sizes are trained on at this one by most networks and recipes.
PHOTO_SIDE, LARGEST_ICON = 224, 128
WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def as_uint8(source: str | BinaryIO, side: int, *, fit: bool, name: str = "") -> Tensor:
    """Return the image as uint8 [3, side, side]; `fit` scales the short side and crops the centre.

    `name` stands for the file in messages. Raises UserError (UNREADABLE) for broken files, other
    sizes without `fit`, and modes that are refused.
    """
    name = name or str(source)
    return to_side(open_rgb(source, name=name), side, fit=fit, name=name)


def to_side(image: Image.Image, side: int, *, fit: bool, name: str) -> Tensor:
    """Return an RGB image as uint8 [3, side, side], as `as_uint8` does."""
    if fit:
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    if image.size != (side, side):
        message = f"image {name} is {image.width}x{image.height}, not {side}x{side}"
        # The first image of photographs says nothing about the size to train on.
        advised = PHOTO_SIDE if side > LARGEST_ICON else side
        advice = f"give --image-size {advised} to resize and crop all"
        raise UserError(f"{message}: {advice}", UNREADABLE)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def open_rgb(source: str | BinaryIO, *, name: str = "") -> Image.Image:
    """Decode one file as RGB; raise UserError (UNREADABLE) for broken or refused ones."""
    name = name or str(source)
    try:
        with (
            open_regular(source) if isinstance(source, str) else nullcontext(source) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            return load_rgb(image, name)
    except UserError:
        raise
    except Exception as error:  # broken ones raise all kinds of errors in Pillow
        none = f"damaged, or none of {', '.join(FORMATS)}"
        reason = none if isinstance(error, UnidentifiedImageError) else one_line(error)
        message = f"cannot read image {name} ({reason}): repair or remove it"
        raise UserError(message, UNREADABLE) from error


def load_rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode an image that was opened as RGB, unless it has too many pixels (ValueError)."""
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels, more than {MOST_PIXELS:,}")
    image.load()
    return to_rgb(image, name)


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Convert any mode to RGB as the table of this module says."""
    if image.mode.startswith(("I", "F")):
        message = f"image {name} has grey of more than 8 bits (mode {image.mode})"
        raise UserError(f"{message}: convert it to 8 bits per value", UNREADABLE)
    if image.mode not in WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")  # the only way that Pillow has
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")
