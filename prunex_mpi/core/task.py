"""What kinds of problems differ in while a run goes on; drivers and methods ask the problem's task.

| | classes of images | the next token of a text |
|---|---|---|
| outputs | logits [b, classes] | logits [b, context, vocabulary] |
| targets | labels [b] | tokens [b, context] |
| the loss is the mean over | images | tokens, in nats |
| tests take | the loss of the run | cross-entropy |
| an evaluation comes to | loss, accuracy | loss, perplexity, bits per byte |

What data are read, and how, is told apart in run/problem.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.record_keys import SPEED
from prunex_mpi.core.losses import Loss, cross_entropy

# Samples that are evaluated at a time, unless they are large.
EVALUATION_BATCH = 256


class Stream(Protocol):
    """Endless batches of this rank's part of a data set; `waited` are the seconds of the last."""

    batch_size: int
    steps_per_epoch: int
    waited: float

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""


class Reader(Protocol):
    """Reads samples while a run goes on; `error` is the first that it has met."""

    error: UserError | None


@dataclass(frozen=True)
class Task:
    """What a sample is, how its loss is taken, and what an evaluation comes to.

    `unit` is what data are counted in, `row` how many of them a row of a batch holds. `measures`
    are the keys of what `outcome` returns of a mean loss and a share of right answers, which
    `right` counts; `losses` makes a loss of outputs [n, classes] and labels [n] one of this task's,
    `tested_by` returns what tests take, of a problem's loss. `speed` returns what a record says of
    a stream of batches, and of all ranks' steps per second.
    """

    unit: str
    row: int
    measures: tuple[str, ...]
    outcome: Callable[[float, float], dict[str, float]]
    right: Callable[[Tensor, Tensor], Tensor | int]
    losses: Callable[[Loss], Loss]
    tested_by: Callable[[Loss], Loss]
    speed: Callable[[Any, float], dict[str, float]]


IMAGES = Task(
    unit="images",
    row=1,
    measures=("loss", "accuracy"),
    outcome=lambda loss, right: {"loss": loss, "accuracy": right},
    right=lambda outputs, labels: (outputs.argmax(dim=1) == labels).sum(),
    losses=lambda loss: loss,
    tested_by=lambda loss: loss,
    speed=lambda stream, per_second: {},
)


def by_position(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """Return the loss of outputs [b, context, ...], or several such, and targets [b, context]."""

    def rows(output: Any) -> Any:
        by_context = isinstance(output, Tensor) and output.shape[:2] == targets.shape
        return output.flatten(0, 1) if by_context else output

    several = isinstance(outputs, tuple | list)
    given = tuple(map(rows, outputs)) if several else rows(outputs)
    return loss(given, targets.flatten())


def text_outcome(bytes_per_token: float, loss: float, right: float) -> dict[str, float]:
    """Return what a mean loss in nats per token comes to, as perplexity and bits per byte too."""
    bits = loss / (math.log(2) * bytes_per_token)
    # A float holds no more; what is not finite can't be written.
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def next_token(context: int, bytes_per_token: float) -> Task:
    """Return the task of predicting each token of a window by those before it."""
    return Task(
        unit="tokens",
        row=context,
        measures=("loss", "perplexity", "bits_per_byte"),
        outcome=partial(text_outcome, bytes_per_token),
        right=lambda outputs, targets: 0,
        losses=lambda loss: partial(by_position, loss),
        # Of another loss there are neither a perplexity nor bits.
        tested_by=lambda loss: partial(by_position, cross_entropy),
        speed=lambda stream, per_second: {SPEED: per_second * stream.batch_size * context},
    )
