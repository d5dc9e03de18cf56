"""Learn from a network that was trained before, beside the labels (Hinton, Vinyals, Dean 2015)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    [b, 3, S, S] as the learner saw them, `outputs` [b, classes] what it made of them. T^2 keeps the
    size of the gradient whatever T.
    """
    if teacher.scale is not None:
        images = images * teacher.scale + teacher.shift
    # Of 16 bits the logarithms of small probabilities would be rounded away.
    exact = torch.promote_types(outputs.dtype, torch.float32)
    with torch.no_grad():
        wanted = F.log_softmax(teacher.model(images).to(exact) / teacher.temperature, dim=1)
    softened = F.log_softmax(outputs.to(exact) / teacher.temperature, dim=1)
    apart = F.kl_div(softened, wanted, reduction="batchmean", log_target=True)
    return (1 - teacher.share) * loss + teacher.share * teacher.temperature**2 * apart
