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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prunex_mpi.base.errors import USAGE, UserError, one_line
from prunex_mpi.base.imports import import_function
from prunex_mpi.base.record_keys import SPEED
from prunex_mpi.settings.fields import CROSS_ENTROPY, Settings

# A loss of a batch: of outputs [b, classes] and labels [b].
Loss = Callable[[Any, Tensor], Tensor]
TRIED_IMAGES = 2


def one_tensor(outputs: Any) -> Tensor:
    """Return what a model returns while it trains; raise UserError unless it is one tensor."""
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"the model returns {type(outputs).__name__} while it trains; let it return one tensor"
        )
    return outputs


def find_losses(settings: Settings, classes: int, device: torch.device) -> tuple[Loss, float]:
    """Return the loss of a run, and what guessing has of it.

    A function of the user's is tried once, on `device`. Raises UserError (USAGE) where it can't be
    imported or does not return a loss.
    """
    if settings.loss == CROSS_ENTROPY:
        return F.cross_entropy, math.log(classes)
    loss = import_function("loss", settings.loss, "of outputs and labels")
    outputs = torch.zeros(TRIED_IMAGES, classes, device=device, requires_grad=True)
    labels = torch.zeros(TRIED_IMAGES, dtype=torch.int64, device=device)
    try:
        found = loss(outputs, labels)
    # The user's function can raise anything.
    except Exception as error:
        raise UserError(
            f"loss {settings.loss} can't be called with outputs [{TRIED_IMAGES}, {classes}] and "
            f"labels [{TRIED_IMAGES}] on {device} ({one_line(error)})",
            USAGE,
        ) from error
    if not isinstance(found, Tensor) or found.dim() or not found.requires_grad:
        kind = (
            f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        )
        raise UserError(
            f"loss {settings.loss} must return one number that can be differentiated, the mean "
            f"over the batch; it returns {kind}",
            USAGE,
        )
    guess = float(found.detach())
    return loss, guess if math.isfinite(guess) else 0.0


@dataclass(frozen=True)
class Teacher:
    """A trained network in evaluation mode, on the device and in the dtype of the one that learns.

    Its outputs, softened by `temperature`, have `share` of the loss. Where its images are
    normalised differently, they are `scale` times those of the run plus `shift`, [1, 3, 1, 1].
    """

    model: nn.Module
    share: float
    temperature: float
    scale: Tensor | None = None
    shift: Tensor | None = None


def distilled(teacher: Teacher, images: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
    """Return (1 - a) loss + a T^2 KL(p || q), p and q softmax(logits / T) of teacher and learner.

    a is the teacher's share and T the temperature; KL is the mean over the batch. `outputs` are the
    learner's logits of `images` [b, 3, S, S], or of tokens.
    """
    if teacher.scale is not None:
        images = images * teacher.scale + teacher.shift
    with torch.no_grad():
        known = teacher.model(images)
    # Of 16 bits the logarithms of small probabilities would be rounded away.
    exact = torch.promote_types(outputs.dtype, torch.float32)
    wanted = F.log_softmax(known.to(exact) / teacher.temperature, dim=-1)
    softened = F.log_softmax(outputs.to(exact) / teacher.temperature, dim=-1)
    # Of text each position counts as an image does.
    softened, wanted = softened.flatten(0, -2), wanted.flatten(0, -2)
    apart = F.kl_div(softened, wanted, reduction="batchmean", log_target=True)
    return (1 - teacher.share) * loss + teacher.share * teacher.temperature**2 * apart


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
    losses=lambda loss: lambda outputs, labels: loss(one_tensor(outputs), labels),
    tested_by=lambda loss: loss,
    speed=lambda stream, per_second: {},
)


def by_position(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """Return the loss of outputs [b, context, ...] and targets [b, context]."""
    return loss(one_tensor(outputs).flatten(0, 1), targets.flatten())


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
        tested_by=lambda loss: partial(by_position, F.cross_entropy),
        speed=lambda stream, per_second: {SPEED: per_second * stream.batch_size * context},
    )
