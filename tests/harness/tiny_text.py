"""Transformers on text that are small enough to be trained in a test."""

import torch.nn.functional as F
from torch import Tensor, nn

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


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that counts what is predicted well for less."""
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def lstm(vocab_size: int) -> nn.Module:
    """Return a network of which no channel can be removed."""
    layers = nn.Embedding(vocab_size, 8), _Outputs(8, 8, batch_first=True)
    return nn.Sequential(*layers, nn.Linear(8, vocab_size))


def without_a_mask(vocab_size: int) -> nn.Module:
    """Return a transformer whose every position reads all others."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    body = nn.TransformerEncoder(layer, 1)
    return nn.Sequential(nn.Embedding(vocab_size, 16), body, nn.Linear(16, vocab_size))


class _Outputs(nn.LSTM):
    """Return no states."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]
