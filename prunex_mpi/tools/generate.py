"""Continue a text with a language model, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.models.inputs import Tokens


@dataclass(frozen=True)
class Sampling:
    """How many tokens are drawn, from logits divided by `temperature`; 0 takes the likeliest."""

    tokens: int
    temperature: float
    seed: int


@torch.no_grad()
def generate(
    model: nn.Module,
    inputs: Tokens,
    start: Sequence[int],
    sampling: Sampling,
    heartbeat: Heartbeat,
) -> list[int]:
    """Return the tokens that `model`, in evaluation mode, has follow those of `start`.

    It reads as many of the last tokens as its context is long. They are drawn on the CPU, so that a
    seed gives the same ones wherever the logits are the same.
    """
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(sampling.seed)
    tokens = list(start)
    for number in range(sampling.tokens):
        heartbeat.beat(number)
        window = torch.tensor(tokens[-inputs.context :], device=device)
        # Embeddings may be wider than the vocabulary.
        logits = model(window[None])[0, -1, : inputs.vocabulary].double().cpu()
        tokens.append(_drawn(logits, sampling.temperature, draws))
    return tokens[len(start) :]


def _drawn(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=draws))
