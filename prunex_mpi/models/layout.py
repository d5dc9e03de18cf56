"""One flat vector per variable: where each parameter tensor lies in it.

Every variable of the algorithm (theta, u, v, z_node, z, the gradient, the momentum) is a contiguous
1-D tensor with the same layout, so an update is one pass over memory and a message needs no
packing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError

# The dtypes for which a sum over ranks is known to be right under every MPI: bfloat16 SUM gives
# wrong numbers silently under Open MPI and float16 SUM is an error on some builds.
PARAMETER_DTYPES = (torch.float32, torch.float64)
# An odd number without a pattern.
DIGEST_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Segment:
    """The place of one parameter tensor (a "layer" of the paper) in a flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """The segments of a flat vector in the order of `model.named_parameters()`."""

    segments: tuple[Segment, ...]
    numel: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one view per segment, each of its parameter's shape, without copying."""
        return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.segments]


def build_layout(model: nn.Module) -> Layout:
    """Lay out all trainable parameters of `model`; refuse dtypes that MPI cannot add up.

    Raises UserError when there is no trainable parameter or when their dtypes differ.
    """
    segments = []
    offset = 0
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    dtypes = {p.dtype for _, p in parameters}
    if len(dtypes) != 1 or not dtypes <= set(PARAMETER_DTYPES):
        raise UserError(
            "the model's trainable parameters must all be float32 or all float64, found "
            + (", ".join(sorted(map(str, dtypes))) or "none")
        )
    # What is not trained is broadcast at the start.
    others = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    odd = {t.dtype for t in others} - set(PARAMETER_DTYPES)
    if odd:
        raise UserError(
            f"the model holds {', '.join(sorted(map(str, odd)))}; make it float32 and use --amp"
        )
    for name, parameter in parameters:
        segments.append(Segment(name, tuple(parameter.shape), offset, parameter.numel()))
        offset += parameter.numel()
    return Layout(tuple(segments), offset)


def flatten_(model: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Move the parameters and gradients of `model` into two flat vectors that they become views of.

    Returns (theta, grad): 1-D tensors of `layout.numel` elements with the parameters' dtype and
    device. `theta.grad` is `grad`, so an optimizer over `[theta]` updates the model in one pass.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    grad = torch.zeros_like(theta)
    views = zip(parameters, layout.views(theta), layout.views(grad), strict=True)
    for parameter, value, gradient in views:
        parameter.data = value
        parameter.grad = gradient
    theta.grad = grad
    return theta, grad


def scale_(flat: Tensor, layout: Layout, factors: np.ndarray) -> None:
    """Multiply each segment of `flat` by its factor in place; `factors` is float64 [segments]."""
    if np.all(factors == factors[0]):
        flat.mul_(float(factors[0]))
    else:
        torch._foreach_mul_(layout.views(flat), factors.tolist())


def fill_(flat: Tensor, layout: Layout, values: np.ndarray) -> None:
    """Set each segment of `flat` to its value in place; `values` is float64 [segments]."""
    for view, value in zip(layout.views(flat), values.tolist(), strict=True):
        view.fill_(value)


def bits_digest(flat: Tensor, spare: Tensor) -> int:
    """Return 64 bits that differ when `flat` differs in any bit; `spare`, as long, is overwritten.

    The words and their squares are added up modulo 2^64: differences of rounding, small and of
    either sign, may cancel in one of the sums, but hardly in both.
    """
    words, squares = (t[: t.numel() // 2 * 2].view(torch.int64) for t in (flat, spare))
    if flat.device.type == "cpu":
        array = words.numpy()
        sums = int(array.sum()), int(np.dot(array, array))
    else:
        torch.mul(words, words, out=squares)
        sums = int(words.sum()), int(squares.sum())
    # Where there is an odd number of elements, the last is in no word.
    last = int.from_bytes(bytes(flat[-1:].view(torch.uint8).tolist()), "little")
    return (sums[0] * DIGEST_FACTOR + sums[1] + last) % 2**64


def matrices(layout: Layout) -> tuple[Segment, ...]:
    """Return the segments of two or more dimensions: weights, not biases or BatchNorm."""
    return tuple(segment for segment in layout.segments if len(segment.shape) > 1)


def squared_norms(flat: Tensor, layout: Layout) -> np.ndarray:
    """Return the squared 2-norm of each segment as float64 [segments] on the host."""
    norms: Sequence[Tensor] = torch._foreach_norm(layout.views(flat))
    return torch.stack(list(norms)).double().square().cpu().numpy()
