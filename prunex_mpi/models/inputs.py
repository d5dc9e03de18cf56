"""What a network reads and makes: images and their classes, or tokens and those that follow.

What runs a network without data goes by such a description: it tries the network, takes its
fingerprint and follows its channels. Export writes this file as a part of load_model.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A description that asks for more is damaged, or meant to take all memory.
MOST_CLASSES, MOST_PIXELS, MOST_CONTEXT = 10**6, 2**13, 2**20
MOST_TOKENS = 2**22
# Logits that a fingerprint holds, evenly spread over the vocabulary.
FINGERPRINT = 1024


@dataclass(frozen=True)
class Images:
    """Images [n, 3, side, side], of which a network makes logits [n, classes].

    `classes` is 0 where it does not matter how many there are.
    """

    side: int
    classes: int = 0

    unit = counted = "image"
    setting = "--image-size"
    # Predictions per image.
    predictions = 1

    def text(self) -> str:
        """Return what a model has to fit."""
        return f"{self.classes} classes of {self.side}x{self.side} images"

    def sizes(self) -> dict[str, int]:
        """Return what a factory of models is called with, for `inputs_from`."""
        return {"num_classes": self.classes, "image_size": self.side}

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the logits of one image."""
        return (1, self.classes)

    def zeros(self, like: Tensor) -> Tensor:
        """Return one image of zeros, of the dtype and device of `like`."""
        return like.detach().new_zeros(1, 3, self.side, self.side)

    def ramp(self, like: Tensor) -> Tensor:
        """Return one image of values from -1 to 1, of the dtype and device of `like`."""
        values = torch.linspace(-1, 1, 3 * self.side**2, dtype=like.dtype)
        return values.view(1, 3, self.side, self.side).to(like.device)

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the same random images on every call, on the CPU."""
        generator = torch.Generator().manual_seed(0)
        shape = count, 3, self.side, self.side
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    def of_any_size(self) -> dict[int, tuple[str, int | None]]:
        """Return (name, greatest size) of the dimensions of a batch that an export leaves open."""
        return {0: ("batch", None)}

    def fingerprint(self, logits: Tensor) -> list[float]:
        """Return the logits of the first image as numbers."""
        return logits[0].tolist()


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens, int64 [n, length], whose logits are [n, length, vocabulary].

    `context` is the greatest length; those at one position are of the token that follows.
    """

    vocabulary: int
    context: int

    unit, counted = "window", "token"
    setting = "--context"

    @property
    def predictions(self) -> int:
        """The number of tokens that a window predicts."""
        return self.context

    @property
    def classes(self) -> int:
        """The number of tokens to choose from."""
        return self.vocabulary

    def text(self) -> str:
        """Return what a model has to fit."""
        return f"windows of {self.context} of {self.vocabulary} tokens"

    def sizes(self) -> dict[str, int]:
        """Return what a factory of models is called with, for `inputs_from`."""
        return {"vocab_size": self.vocabulary, "context": self.context}

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the logits of one window."""
        return (1, self.context, self.vocabulary)

    def zeros(self, like: Tensor) -> Tensor:
        """Return one window of the first token, on the device of `like`."""
        return torch.zeros(1, self.context, dtype=torch.int64, device=like.device)

    def ramp(self, like: Tensor) -> Tensor:
        """Return one window from the first token to the last, on the device of `like`."""
        tokens = torch.linspace(0, self.vocabulary - 1, self.context, dtype=torch.float64)
        return tokens.long().view(1, -1).to(like.device)

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the same random windows on every call, on the CPU; tokens have one dtype."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocabulary, (count, self.context), generator=generator)

    def of_any_size(self) -> dict[int, tuple[str, int | None]]:
        """Return (name, greatest size) of the dimensions of a batch that an export leaves open."""
        return {0: ("batch", None), 1: ("length", self.context)}

    def fingerprint(self, logits: Tensor) -> list[float]:
        """Return numbers from the logits at the last position, which has read all others."""
        last = logits[0, -1]
        return last[:: -(-len(last) // FINGERPRINT)].tolist()


Inputs = Images | Tokens


def inputs_from(sizes: Mapping[str, Any]) -> Inputs:
    """Return the description that has these `sizes`, among other entries.

    Raises KeyError where one is missing and ValueError for a number that can't be one.
    """
    if "vocab_size" in sizes:
        named = {
            "tokens": (sizes["vocab_size"], MOST_TOKENS),
            "tokens of context": (sizes["context"], MOST_CONTEXT),
        }
        kind = Tokens
    else:
        named = {
            "pixels": (sizes["image_size"], MOST_PIXELS),
            "classes": (sizes["num_classes"], MOST_CLASSES),
        }
        kind = Images
    for what, (count, most) in named.items():
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(f"{count} {what} are not from 1 to {most}")
    return kind(*(count for count, _ in named.values()))
