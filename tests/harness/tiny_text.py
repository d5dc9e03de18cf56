"""Transformers on text that are small enough to be trained in a test."""

from torch import nn

from prunex_mpi.models.gpt import Gpt, GptShape


def gpt(vocab_size: int, context: int) -> nn.Module:
    """Return one block of two heads, 16 wide."""
    return Gpt(GptShape(layers=1, heads=2, width=16), vocab_size, context)


def of_few_tokens(vocab_size: int) -> nn.Module:
    """Return a network that reads the first four tokens alone."""
    return nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, vocab_size))


def untied(vocab_size: int, context: int) -> nn.Module:
    """Return the same with an output layer of its own."""
    return Gpt(GptShape(1, 2, 16, frozenset({"untied"})), vocab_size, context)
