"""A transformer on text that is small enough to be trained in a test."""

from torch import nn

from prunex_mpi.models.gpt import Gpt, GptShape


def gpt(vocab_size: int, context: int) -> nn.Module:
    """Return one block of two heads, 16 wide."""
    return Gpt(GptShape(layers=1, heads=2, width=16), vocab_size, context)


def untied(vocab_size: int, context: int) -> nn.Module:
    """Return the same with an output layer of its own."""
    return Gpt(GptShape(1, 2, 16, frozenset({"untied"})), vocab_size, context)
