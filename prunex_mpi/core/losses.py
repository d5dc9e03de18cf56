"""What training minimises, and what it is measured by: the losses of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prunex_mpi.base.errors import USAGE, UserError, one_line
from prunex_mpi.base.imports import import_function
from prunex_mpi.settings.fields import CROSS_ENTROPY, Settings

# A loss of a batch: of outputs [b, classes] and labels [b], or class shares [b, classes].
Loss = Callable[[Tensor, Tensor], Tensor]
TRIED_IMAGES = 2


def check_single_output(outputs: object, loss: Loss) -> None:
    """Raise UserError where cross-entropy would get more than one tensor of outputs.

    Some models return others while they train (deep supervision), of which a function of the user's
    can make a loss.
    """
    ours = loss.func if isinstance(loss, partial) else loss
    if ours is F.cross_entropy and not isinstance(outputs, Tensor):
        raise UserError(
            f"the model returns {type(outputs).__name__} while it trains, of which cross-entropy "
            "can't be taken; let it return one tensor [b, classes], or give --loss a function that "
            "takes both"
        )


def find_losses(settings: Settings, classes: int, device: torch.device) -> tuple[Loss, Loss]:
    """Return what the test set is measured by, and what training minimises.

    They differ in `--smoothing`. A function of the user's is tried once, on `device`. Raises
    UserError (USAGE) where it can't be imported or does not return a loss.
    """
    if settings.loss == CROSS_ENTROPY:
        smoothed = partial(F.cross_entropy, label_smoothing=settings.smoothing)
        return F.cross_entropy, smoothed if settings.smoothing else F.cross_entropy
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
    return loss, loss


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

    a is the teacher's share and T the temperature; KL is the mean over the batch. `images` are
    [b, 3, S, S], or tokens, as the learner saw them, `outputs` its logits of them. T^2 keeps the
    size of the gradient whatever T.
    """
    if teacher.scale is not None:
        images = images * teacher.scale + teacher.shift
    # Of 16 bits the logarithms of small probabilities would be rounded away.
    exact = torch.promote_types(outputs.dtype, torch.float32)
    with torch.no_grad():
        wanted = F.log_softmax(teacher.model(images).to(exact) / teacher.temperature, dim=-1)
    softened = F.log_softmax(outputs.to(exact) / teacher.temperature, dim=-1)
    # Of text each position counts as an image does.
    softened, wanted = softened.flatten(0, -2), wanted.flatten(0, -2)
    apart = F.kl_div(softened, wanted, reduction="batchmean", log_target=True)
    return (1 - teacher.share) * loss + teacher.share * teacher.temperature**2 * apart
