"""What training minimises, and what it is measured by: the losses of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prunex_mpi.base.errors import USAGE, UserError, one_line
from prunex_mpi.base.imports import import_function
from prunex_mpi.settings.fields import CROSS_ENTROPY, Settings

# A loss of a batch: of outputs [b, classes] and labels [b]. Some
# models return more while they train (deep supervision), of which a function of the user's can make
# a loss: a tuple or list, whose first is the logits.
Loss = Callable[[Any, Tensor], Tensor]
TRIED_IMAGES = 2


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch; raise UserError for more than one output."""
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"the model returns {type(outputs).__name__} while it trains, of which cross-entropy "
            "can't be taken; let it return one tensor [b, classes], or give --loss a function that "
            "takes both"
        )
    return F.cross_entropy(outputs, labels)


def logits_of(outputs: Any, wanted: torch.Size) -> Tensor:
    """Return the logits among what a model returns while it trains: it, or the first of several.

    Raises UserError unless they have the shape `wanted`, which a teacher needs.
    """
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if not isinstance(first, Tensor) or first.shape != wanted:
        found = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise UserError(
            f"--teacher needs logits {list(wanted)}, and while it trains the model returns {found} "
            "first; let it return the logits, or a tuple that begins with them"
        )
    return first


def softened(outputs: Any, temperature: float) -> Any:
    """Return outputs whose logits are divided by `temperature`: the first, and all of its shape."""
    if isinstance(outputs, Tensor):
        return outputs / temperature
    if not isinstance(outputs, tuple | list):
        return outputs
    shape = next((output.shape for output in outputs[:1] if isinstance(output, Tensor)), None)
    logits = [isinstance(output, Tensor) and output.shape == shape for output in outputs]
    pairs = zip(outputs, logits, strict=True)
    return tuple(output / temperature if is_logits else output for output, is_logits in pairs)


def find_losses(settings: Settings, classes: int, device: torch.device) -> tuple[Loss, float]:
    """Return the loss of a run, and what guessing has of it.

    A function of the user's is tried once, on `device`. Raises UserError (USAGE) where it can't be
    imported or does not return a loss.
    """
    if settings.loss == CROSS_ENTROPY:
        return cross_entropy, math.log(classes)
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


def distilled(teacher: Teacher, images: Tensor, outputs: Any, loss: Tensor) -> Tensor:
    """Return (1 - a) loss + a T^2 KL(p || q), p and q softmax(logits / T) of teacher and learner.

    a is the teacher's share and T the temperature; KL is the mean over the batch. `outputs` are the
    learner's logits of `images` [b, 3, S, S], or of tokens, or begin with them, else UserError.
    """
    if teacher.scale is not None:
        images = images * teacher.scale + teacher.shift
    with torch.no_grad():
        known = teacher.model(images)
    logits = logits_of(outputs, known.shape)
    # Of 16 bits the logarithms of small probabilities would be rounded away.
    exact = torch.promote_types(logits.dtype, torch.float32)
    wanted = F.log_softmax(known.to(exact) / teacher.temperature, dim=-1)
    softened = F.log_softmax(logits.to(exact) / teacher.temperature, dim=-1)
    # Of text each position counts as an image does.
    softened, wanted = softened.flatten(0, -2), wanted.flatten(0, -2)
    apart = F.kl_div(softened, wanted, reduction="batchmean", log_target=True)
    return (1 - teacher.share) * loss + teacher.share * teacher.temperature**2 * apart
